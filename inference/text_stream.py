"""Streaming text: tokens drawn one at a time, shown in complete characters."""

import codecs
import sys
from collections.abc import Sequence
from typing import TextIO

from input_pipeline.text.tokenizer import ByteTokenizer, Tokenizer

# Shown as what they are instead of acted on: a model's bytes may be a terminal's commands.
_CONTROLS = {
  code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def as_bytes(text: str | bytes) -> bytes:
  """Returns UTF-8; bytes that Python smuggled through a command line as surrogates come back."""
  return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


class Row:
  """What has been drawn for one prompt, and its text.

  Attributes:
    drawn: the bytes, up to the end of a stop text.
    done: True once the document or a stop text has ended the row.
  """

  def __init__(self, prompt: bytes, stop: Sequence[bytes], tokenizer: Tokenizer | None = None):
    """Starts behind a prompt, which may end within a character; by default, tokens are bytes."""
    self.drawn = bytearray()
    self.done = False
    self._begun = bool(prompt)
    self._stop = tuple(stop)
    self._tokenizer = tokenizer or ByteTokenizer()
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
    self._decoder.decode(prompt)

  def add(self, token: int) -> str:
    """Takes the next token and returns the text that is complete by now, often empty."""
    if token == self._tokenizer.end:
      return self.end()
    # Only in front of a text is a token that begins a word without its space.
    new = self._tokenizer.token_bytes(token) if self._begun else self._tokenizer.decode([token])
    self._begun = True
    before = len(self.drawn)
    self.drawn += new
    if (end := self._stopped(before)) is None:
      return self._decoder.decode(new)
    del self.drawn[end:]
    return self._decoder.decode(bytes(self.drawn[before:])) + self.end()

  def _stopped(self, before: int) -> int | None:
    """Returns where the first stop text ends that bytes from `before` on complete."""
    ends = []
    for stop in self._stop:
      found = self.drawn.find(stop, max(0, before - len(stop) + 1))
      if found >= 0:
        ends.append(found + len(stop))
    return min(ends, default=None)

  def end(self) -> str:
    """Ends the row; returns a replacement character where it ends within one."""
    self.done = True
    return self._decoder.decode(b"", final=True)


class Printer:
  r"""Prints prompts and what follows them, as it comes; the `write` of a `Sampler`.

  One prompt's text appears byte by byte; of several, complete lines, each after its number.
  Control characters are shown as `\x1b`.
  """

  def __init__(self, prompts: Sequence[str | bytes], stream: TextIO | None = None):
    """Prints the prompts to `stream` (by default stdout), several as far as their last line."""
    self._stream = stream or sys.stdout
    self._lines = [""] * len(prompts)
    for number, prompt in enumerate(prompts):
      decoder = codecs.getincrementaldecoder("utf-8")("replace")  # leaves the torn end to `Row`
      self(number, decoder.decode(as_bytes(prompt)))

  def __call__(self, number: int, text: str) -> None:
    """Prints the text of one prompt, its number counted from 0."""
    if len(self._lines) > 1:
      whole, newline, self._lines[number] = (self._lines[number] + text).rpartition("\n")
      lines = whole.split("\n") if newline else []
      text = "".join(f"[{number + 1}] {line}\n" for line in lines)
    text = text.translate(_CONTROLS)
    encoding = self._stream.encoding or "utf-8"
    self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    self._stream.flush()

  def close(self) -> None:
    """Ends the last line of each."""
    if len(self._lines) == 1:
      self(0, "\n")
    for number, line in enumerate(self._lines):
      if len(self._lines) > 1 and line:
        self(number, "\n")
