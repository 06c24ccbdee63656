"""Prompts in turn, and conversations with a model that was trained on a chat template.

Both keep a cache from one text to the next: what begins as the last one is read from there on.

A reply ends with the end of the assistant's turn: what the template writes behind a message of the
assistant, a token of `generation_config.json` (`eos_token_id`), or the end of the document.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from inference.request import Request, TextSpec, as_bytes, check
from inference.sampler import Pace, Row, TokenSampler, TrainedModel
from input_pipeline.text import chat_template
from input_pipeline.text.conversations import ASSISTANT, Conversation

Message = dict[str, Any]
Cut = Callable[[], bool]

PIECE = 64  # tokens of a prompt that are read at a time
_SHARE = 4  # by default, a quarter of a row is kept for the reply


class CachedSampler(TokenSampler):
  """A sampler that keeps its cache, with the programs compiled once."""

  def __init__(self, model: TrainedModel):
    # A piece is written as a whole, also where only its first tokens count.
    super().__init__(model.job, rows=1, slots=model.spec.sequence_length + PIECE)
    self._given = model.given
    self._known: list[int] = []  # the tokens in the cache
    self.pace = Pace()
    self._piece, self._cache = self._program(PIECE), self.empty_cache()

  def draw(self, tokens: list[int], request: Request) -> Iterator[int]:
    """Yields what follows the tokens, one by one, for as long as a row has place.

    Args:
      tokens: of the whole conversation so far.
      request: the settings of the draws.
    """
    settings = self._put(self._settings(request))
    # The last one is always read: its logits are needed.
    pairs = zip(self._known, tokens[:-1], strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    lengths_B = np.full(self.rows, common, np.int32)
    lengths_B = jax.device_put(lengths_B, self._cache["lengths"].sharding)
    self._cache = {**self._cache, "lengths": lengths_B}
    del self._known[common:]
    while len(self._known) < len(tokens):
      piece = tokens[len(self._known) :][:PIECE]
      drawn = self._run(self._piece, PIECE, piece, settings)
    while True:
      yield drawn
      if len(self._known) + 1 > self.spec.sequence_length:
        return
      drawn = self._run(self.decode, 1, [drawn], settings)

  def _run(self, program: Callable, width: int, piece: list[int], settings: Any) -> int:
    """Reads tokens into the cache; returns the one drawn behind them."""
    tokens_BT = np.zeros((self.rows, width), np.int32)
    tokens_BT[:, : len(piece)] = piece  # the rows that only fill the batch repeat the first
    counts_B = np.full(self.rows, len(piece), np.int32)
    tokens_BT, counts_B = self._put((tokens_BT, counts_B))
    params, variables = self._given
    given = params, tokens_BT, counts_B, self._cache, settings, variables
    drawn_B1, _, self._cache = program(*given)
    self._known += piece
    return int(np.asarray(drawn_B1)[0, 0])

  def draw_row(
    self,
    tokens: list[int],
    request: Request,
    row: Row,
    write: Callable[[str], None],
    cut: Cut | None,
  ) -> None:
    """Draws a row behind tokens to its end, after max_new_tokens, or where it is full.

    Args:
      tokens: of the whole conversation so far.
      request: the settings of the draws.
      row: of what is drawn.
      write: called with text as it is generated, in complete characters.
      cut: called after each token; True ends the row.
    """
    self.pace = Pace()
    for number, token in enumerate(self.draw(tokens, request), 1):
      self.pace.tick()
      if text := row.add(token):
        write(text)
      if row.done or number >= request.max_new_tokens or (cut is not None and cut()):
        break
    if not row.done and (text := row.end()):
      write(text)


# ------------------------------ prompts typed at a terminal ------------------------------


class Continuation:
  """Continues prompts of any length that fits a row.

  Attributes:
    settings: of the draws; others need no compilation.
    sampler: whose `pace` is that of the last prompt.
  """

  def __init__(self, model: TrainedModel, settings: Request):
    """Compiles the programs.

    Args:
      model: the model.
      settings: of the draws; its prompts are not used. A text ends after max_new_tokens, or where
        the row is full.

    Raises:
      ValueError: the model does not generate, or a setting is wrong.
    """
    check(model.spec, dataclasses.replace(settings, prompts=("",), max_new_tokens=1))
    self.sampler = CachedSampler(model)
    self.settings, self._count = settings, 0

  def tokens(self, prompt: str) -> list[int]:
    """Returns the tokens of a prompt.

    Raises:
      ValueError: it is no text of the tokenizer, or leaves no place in a row.
    """
    check(
      self.sampler.spec, dataclasses.replace(self.settings, prompts=(prompt,), max_new_tokens=1)
    )
    return self.sampler.spec.encoded([prompt])[0].tolist()

  def __call__(self, prompt: str, write: Callable[[str], None], cut: Cut | None = None) -> bytes:
    """Returns what the model generates behind a prompt.

    The first one is continued as `Sampler` does it with the same settings, each later one by the
    next seed: so the same prompt is continued in another way.

    Args:
      prompt: a text; "" begins a document.
      write: called with text as it is generated, in complete characters.
      cut: called after each token; True ends the text.

    Raises:
      ValueError: as `tokens`.
    """
    tokens = self.tokens(prompt)
    seed = (self.settings.seed + self._count) % 2**32
    request = dataclasses.replace(self.settings, seed=seed)
    self._count += 1
    stops = [as_bytes(stop) for stop in request.stop]
    row = Row(as_bytes(prompt), stops, self.sampler.spec.tokenizer)
    self.sampler.draw_row(tokens, request, row, write, cut)
    return bytes(row.drawn)


# ------------------------------ conversations ------------------------------


class Chat:
  """A conversation with a model.

  Attributes:
    messages: so far, of all roles.
    dropped: how many of the first messages no longer fit a row; the system's stays.
    ends: what ends the assistant's turn.
    sampler: whose `pace` is that of the last reply.
  """

  def __init__(self, model: TrainedModel, settings: Request, system: str = ""):
    """Compiles the programs.

    Args:
      model: the model.
      settings: temperature, top_k, top_p, seed, stop; max_new_tokens 0 for as many as fit a row.
      system: the content of the system message; "" for none.

    Raises:
      ValueError: as `prepare`.
    """
    self._template, self.ends = prepare(model.spec, settings, system)
    self.sampler, self._spec, self._settings = CachedSampler(model), model.spec, settings
    self.messages: list[Message] = _system(system)
    self.dropped = 0

  def reply(self, text: str, write: Callable[[str], None], cut: Cut | None = None) -> str:
    """Returns the model's reply to a message of the user, and keeps both.

    Args:
      text: the message.
      write: called with the reply as it is generated, in complete characters.
      cut: called after each token; True ends the reply.

    Raises:
      ValueError: the message alone does not fit a row, or the template refuses it. Then nothing
        is kept.
    """
    messages, dropped, tokens = self._fitted([*self.messages, {"role": "user", "content": text}])
    texts, coder = (*self.ends.texts, *self._settings.stop), self._spec.tokenizer
    stops, before = [as_bytes(one) for one in texts], coder.decode(tokens[-8:])
    row = Row(before, stops, coder, self.ends.tokens, hidden=True)
    most = self._settings.max_new_tokens or self._spec.sequence_length
    request = dataclasses.replace(self._settings, max_new_tokens=most)
    self.sampler.draw_row(tokens, request, row, write, cut)
    found = row.drawn.decode(errors="replace")
    self.messages, self.dropped = [*messages, {"role": ASSISTANT, "content": found}], dropped
    return found

  def _fitted(self, messages: list[Message]) -> tuple[list[Message], int, list[int]]:
    """Returns the messages that fit a row, how many were dropped, and their tokens."""
    kept, dropped, length = list(messages), self.dropped, self._spec.sequence_length
    reserved = self._settings.max_new_tokens or max(1, length // _SHARE)
    first = int(kept[0]["role"] == "system")
    while True:
      text = self._template.render(Conversation(kept), prompt=True)
      tokens = self._spec.tokenizer.encode_template(text)[0].tolist()
      if len(tokens) + reserved <= length:
        break
      later = [n for n in range(first + 1, len(kept)) if kept[n]["role"] == "user"]
      if not later:
        raise ValueError(
          f"with what the chat template writes the message is {len(tokens):,} tokens long, and "
          f"with {reserved:,} for the reply longer than data.sequence_length={length:,}; "
          f"shorten one of the two (--max_new_tokens)"
        )
      dropped += later[0] - first
      del kept[first : later[0]]
    if max(tokens) >= (known := self._spec.drawable):
      raise ValueError(f"it has token {max(tokens)}; the model knows those below {known}")
    return kept, dropped, tokens


def prepare(
  spec: TextSpec, settings: Request, system: str = ""
) -> tuple[chat_template.ChatTemplate, chat_template.TurnEnds]:
  """Returns a model's chat template, and what ends the assistant's turn.

  Args:
    spec: of the model.
    settings: of the draws.
    system: the content of the system message; "" for none.

  Raises:
    ValueError: there is no template, or it refuses the system message; the model does not generate,
      or a setting is wrong.
  """
  if settings.max_new_tokens < 0:
    raise ValueError(f"max_new_tokens={settings.max_new_tokens}: at least 1, or 0 for no limit")
  prompts, most = ((spec.tokenizer.start,),), max(1, settings.max_new_tokens)
  check(spec, dataclasses.replace(settings, prompts=prompts, max_new_tokens=most))
  try:
    template = chat_template.load(spec.chat_template, spec.tokenizer)
  except ValueError as error:
    raise ValueError(f"--chat: {error}") from error
  template.render(Conversation([*_system(system), {"role": "user", "content": "?"}]), prompt=True)
  return template, chat_template.turn_ends(template, spec.tokenizer)


def _system(text: str) -> list[Message]:
  return [{"role": "system", "content": text}] if text else []
