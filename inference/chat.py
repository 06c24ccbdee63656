"""Conversations with a model that was trained on a chat template.

A reply ends with the end of the assistant's turn: what the template writes behind a message of the
assistant, a token of `generation_config.json` (`eos_token_id`), or the end of the document.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict

from inference.cached_sampler import CachedSampler
from inference.request import Request, check, drawable, tokenizer_of
from inference.text_stream import Pace, Row, as_bytes
from input_pipeline.text import chat_template, tokenizer, tokenizer_files
from input_pipeline.text.conversations import ASSISTANT, Conversation
from training.setup import Job

Message = dict[str, Any]

_PROBE = "Yes"  # what the assistant says in the conversation that shows how its turns end
_SHARE = 4  # by default, a quarter of a row is kept for the reply


@dataclasses.dataclass(frozen=True)
class Ends:
  """What ends the assistant's turn."""

  tokens: frozenset[int]
  texts: tuple[str, ...]


def ends(template: chat_template.ChatTemplate, encoder: tokenizer.Tokenizer) -> Ends:
  """Returns what ends the assistant's turn.

  Raises:
    ValueError: the template cannot render a question and its answer.
  """
  tokens = {encoder.end, *_of_generation(encoder)}
  asked = [{"role": "user", "content": "?"}]
  answered = Conversation([*asked, {"role": ASSISTANT, "content": _PROBE}])
  text = template.render(answered)
  behind = text.rindex(_PROBE) + len(_PROBE) if _PROBE in text else len(text)
  ids, offsets = encoder.encode_template(text)
  special = set(encoder.special.values())
  later = [i for i, start in zip(ids.tolist(), offsets[:, 0], strict=True) if start >= behind]
  first = later[0] if later else None
  if first in special:
    return Ends(frozenset({*tokens, first}), ())
  rest = text[behind:].strip() or text[behind:]
  return Ends(frozenset(tokens), (rest,) if rest else ())


def _of_generation(encoder: tokenizer.Tokenizer) -> Sequence[int]:
  """Returns the tokens that end a text by the generation_config.json beside a tokenizer."""
  if (path := encoder.files.get(tokenizer_files.GENERATION_FILE)) is None:
    return ()
  found = tokenizer_files.read_object(path).get("eos_token_id")
  found = found if isinstance(found, list) else [found]
  return [id_ for id_ in found if type(id_) is int and 0 <= id_ < encoder.size]


class Chat:
  """A conversation with a model.

  Attributes:
    messages: so far, of all roles.
    dropped: how many of the first messages no longer fit a row; the system's stays.
    pace: of the last reply.
    ends: what ends the assistant's turn.
  """

  def __init__(
    self, job: Job, params: Any, settings: Request, variables: Any = None, system: str = ""
  ):
    """Compiles the programs.

    Args:
      job: whose model and mesh are used.
      params: the parameters, placed as the job's.
      settings: temperature, top_k, top_p, seed, stop; max_new_tokens 0 for as many as fit a row.
      variables: the model's other variables, where it has any.
      system: the content of the system message; "" for none.

    Raises:
      ValueError: as `prepare`.
    """
    self._template, self.ends = prepare(job.config, settings, system)
    self._sampler = CachedSampler(job)
    self._params, self._variables, self._settings = params, variables, settings
    self._length = job.config.data.sequence_length
    self._coder, self._known = self._sampler.tokenizer, drawable(job.config)
    self.messages: list[Message] = _system(system)
    self.dropped = 0
    self.pace = Pace()

  def reply(
    self, text: str, write: Callable[[str], None], cut: Callable[[], bool] | None = None
  ) -> str:
    """Returns the model's reply to a message of the user, and keeps both.

    Args:
      text: the message.
      write: called with the reply as it is generated, in complete characters.
      cut: called before each token; True ends the reply.

    Raises:
      ValueError: the message alone does not fit a row, or the template refuses it. Then nothing
        is kept.
    """
    messages, dropped, tokens = self._fitted([*self.messages, {"role": "user", "content": text}])
    stops = [as_bytes(stop) for stop in (*self.ends.texts, *self._settings.stop)]
    row = Row(self._coder.decode(tokens[-8:]), stops, self._coder, self.ends.tokens)
    held = Held((*self.ends.texts, *self._settings.stop), write)
    most = self._settings.max_new_tokens or self._length
    drawing = self._sampler.draw(self._params, self._variables, tokens, self._settings)
    self.pace = Pace()
    for number, token in enumerate(drawing, 1):
      self.pace.tick()
      held.add(row.add(token))
      if row.done or number >= most or (cut is not None and cut()):
        break
    if not row.done:
      held.add(row.end())
    found = held.close()
    self.messages, self.dropped = [*messages, {"role": ASSISTANT, "content": found}], dropped
    return found

  def _fitted(self, messages: list[Message]) -> tuple[list[Message], int, list[int]]:
    """Returns the messages that fit a row, how many were dropped, and their tokens."""
    kept, dropped = list(messages), self.dropped
    reserved = self._settings.max_new_tokens or max(1, self._length // _SHARE)
    first = int(kept[0]["role"] == "system")
    while True:
      text = self._template.render(Conversation(kept), prompt=True)
      tokens = self._coder.encode_template(text)[0].tolist()
      if len(tokens) + reserved <= self._length:
        break
      later = [n for n in range(first + 1, len(kept)) if kept[n]["role"] == "user"]
      if not later:
        raise ValueError(
          f"with what the chat template writes the message is {len(tokens):,} tokens long, and "
          f"with {reserved:,} for the reply longer than data.sequence_length={self._length:,}; "
          f"shorten one of the two (--max_new_tokens)"
        )
      dropped += later[0] - first
      del kept[first : later[0]]
    if max(tokens) >= self._known:
      raise ValueError(f"it has token {max(tokens)}; the model knows those below {self._known}")
    return kept, dropped, tokens


def prepare(
  config: ConfigDict, settings: Request, system: str = ""
) -> tuple[chat_template.ChatTemplate, Ends]:
  """Returns the chat template of a finalized config, and what ends the assistant's turn.

  Args:
    config: finalized.
    settings: of the draws.
    system: the content of the system message; "" for none.

  Raises:
    ValueError: there is no template, or it refuses the system message; the model does not generate,
      or a setting is wrong.
  """
  encoder = tokenizer_of(config)
  checked = dataclasses.replace(
    settings, prompts=((encoder.start,),), max_new_tokens=max(1, settings.max_new_tokens)
  )
  if settings.max_new_tokens < 0:
    raise ValueError(f"max_new_tokens={settings.max_new_tokens}: at least 1, or 0 for no limit")
  check(config, checked)
  try:
    template = chat_template.load(config.data.get("chat_template") or "", encoder)
  except ValueError as error:
    raise ValueError(f"--chat: {error}") from error
  template.render(Conversation([*_system(system), {"role": "user", "content": "?"}]), prompt=True)
  return template, ends(template, encoder)


def _system(text: str) -> list[Message]:
  return [{"role": "system", "content": text}] if text else []


class Held:
  """Writes a text as it comes, but for what may be the beginning of a text that ends it."""

  def __init__(self, stops: Sequence[str], write: Callable[[str], None]):
    """Takes the texts, which are not written, and what writes."""
    self._stops, self._write = tuple(stops), write
    self._text, self._written = "", 0

  def add(self, text: str) -> None:
    """Takes the next part."""
    self._text += text
    safe = len(self._text)
    for stop in self._stops:
      if (found := self._text.find(stop, max(0, self._written - len(stop)))) >= 0:
        safe = min(safe, found)
      for size in range(1, len(stop)):
        if self._text.endswith(stop[:size]):
          safe = min(safe, len(self._text) - size)
    self._show(safe)

  def close(self) -> str:
    """Writes the rest, and returns the text without what ended it."""
    found = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
    self._text = self._text[: min(found, default=len(self._text))]
    self._show(len(self._text))
    return self._text

  def _show(self, until: int) -> None:
    if until > self._written:
      self._write(self._text[self._written : until])
      self._written = until
