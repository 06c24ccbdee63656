"""A sampler that keeps its cache from one text to the next: of conversations, prompts in turn.

Prompts are continued one after another, with the programs compiled once.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from inference.request import Request, check, drawable, encoded, tokenizer_of
from inference.sampler import Sampler
from inference.text_stream import Pace, Row, as_bytes
from training.setup import Job

PIECE = 64  # tokens of a prompt that are read at a time


class CachedSampler(Sampler):
  """A sampler that keeps its cache: a prompt that begins as the last one is read from there on."""

  def __init__(self, job: Job):
    length = job.config.data.sequence_length
    start = tokenizer_of(job.config).start
    super().__init__(job, Request(((start,),), max_new_tokens=length - 1))
    self._known: list[int] = []  # the tokens in the cache
    self._cache = self._new()

  def _empty_cache(self) -> Any:
    # A piece is written as a whole, also where only its first tokens count.
    slots = self.job.config.data.sequence_length + PIECE
    return self._model.empty_cache(self._spec, self.rows, slots)

  def _compile(self) -> tuple[Callable, Callable, float]:
    read, one = self._reading(PIECE), self._reading(1)
    return read.function, one.function, read.seconds + one.seconds

  def _reading(self, width: int) -> Any:
    job, cache = self.job, jax.eval_shape(self._empty_cache)
    whole, cache_lies = self._replicated(), self._cache_shardings(cache)
    tokens_BT = np.zeros((self.rows, width), np.int32)
    variables = [job.state.variables] if job.state.variables else []
    placed = job.state_shardings
    return job.compile(
      self._read,
      job.state.params,
      tokens_BT,
      tokens_BT[:, 0],
      cache,
      self._settings(Request(())),
      *variables,
      activations=self._table,
      in_shardings=(
        *(placed.params, whole, whole, cache_lies, whole),
        *([placed.variables] if variables else []),
      ),
      donate_argnums=3,
      out_shardings=(whole, cache_lies),
    )

  def _new(self) -> Any:
    shardings = self._cache_shardings(jax.eval_shape(self._empty_cache))
    return self.job.compile(self._empty_cache, out_shardings=shardings).function()

  def _read(self, params, tokens_BT, counts_B, cache, settings, variables=None) -> Any:
    model = self.job.program.module(params, variables)
    return self._next(model, tokens_BT, counts_B, cache, settings)

  def draw(self, params: Any, variables: Any, tokens: list[int], request: Request) -> Iterator[int]:
    """Yields what follows the tokens, one by one, for as long as a row has place.

    Args:
      params: the parameters, placed as the job's.
      variables: the model's other variables, where it has any.
      tokens: of the whole conversation so far.
      request: the settings of the draws.
    """
    more = [variables] if variables else []
    settings = self._put(self._settings(request))
    pairs = enumerate(zip(self._known, tokens, strict=False))
    common = next((i for i, (one, other) in pairs if one != other), None)
    common = min(len(self._known), len(tokens)) if common is None else common
    common = min(common, len(tokens) - 1)  # the last is always read: its logits are needed
    lengths_B = np.full(self.rows, common, np.int32)
    lengths_B = jax.device_put(lengths_B, self._cache.lengths.sharding)
    self._cache = dataclasses.replace(self._cache, lengths=lengths_B)
    del self._known[common:]
    while len(self._known) < len(tokens):
      piece = tokens[len(self._known) :][:PIECE]
      drawn = self._run(self.prefill, PIECE, params, piece, settings, more)
    while True:
      yield drawn
      if len(self._known) + 1 > self.job.config.data.sequence_length:
        return
      drawn = self._run(self.decode, 1, params, [drawn], settings, more)

  def _run(self, program, width, params, piece: list[int], settings, more) -> int:
    """Reads tokens into the cache; returns the one drawn behind them."""
    tokens_BT = np.zeros((self.rows, width), np.int32)
    tokens_BT[:, : len(piece)] = piece  # the rows that only fill the batch repeat the first
    counts_B = np.full(self.rows, len(piece), np.int32)
    tokens_BT, counts_B = self._put((tokens_BT, counts_B))
    drawn_B, self._cache = program(params, tokens_BT, counts_B, self._cache, settings, *more)
    self._known += piece
    return int(np.asarray(drawn_B)[0])


# ------------------------------ prompts typed at a terminal ------------------------------


class Continuation:
  """Continues prompts of any length that fits a row.

  Attributes:
    settings: of the draws; others need no compilation.
    pace: of the last prompt.
  """

  def __init__(self, job: Job, params: Any, settings: Request, variables: Any = None):
    """Compiles the programs.

    Args:
      job: whose model and mesh are used.
      params: the parameters, placed as the job's.
      settings: of the draws; its prompts are not used. A text ends after max_new_tokens, or where
        the row is full.
      variables: the model's other variables, where it has any.

    Raises:
      ValueError: the model does not generate, or a setting is wrong.
    """
    check(job.config, dataclasses.replace(settings, prompts=("",), max_new_tokens=1))
    self._sampler = CachedSampler(job)
    self._params, self._variables, self.settings = params, variables, settings
    self._count = 0
    self.pace = Pace()

  def tokens(self, prompt: str) -> list[int]:
    """Returns the tokens of a prompt.

    Raises:
      ValueError: it is no text of the tokenizer, or leaves no place in a row.
    """
    config = self._sampler.job.config
    [tokens] = encoded(config, Request((prompt,)))
    length = config.data.sequence_length
    if len(tokens) >= length:
      raise ValueError(
        f"the prompt is {len(tokens):,} tokens long, and with at least one more it is to fit "
        f"data.sequence_length={length:,}; shorten it"
      )
    if (largest := int(tokens.max())) >= (known := drawable(config)):
      raise ValueError(f"the prompt has token {largest}; the model knows those below {known}")
    return tokens.tolist()

  def __call__(
    self, prompt: str, write: Callable[[str], None], cut: Callable[[], bool] | None = None
  ) -> bytes:
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
    tokens, coder = self.tokens(prompt), self._sampler.tokenizer
    seed = (self.settings.seed + self._count) % 2**32
    request = dataclasses.replace(self.settings, seed=seed)
    self._count += 1
    row = Row(as_bytes(prompt), [as_bytes(stop) for stop in request.stop], coder)
    self.pace = Pace()
    drawing = self._sampler.draw(self._params, self._variables, tokens, request)
    for number, token in enumerate(drawing, 1):
      self.pace.tick()
      if text := row.add(token):
        write(text)
      if row.done or number >= request.max_new_tokens or (cut is not None and cut()):
        break
    if not row.done and (text := row.end()):
      write(text)
    return bytes(row.drawn)
