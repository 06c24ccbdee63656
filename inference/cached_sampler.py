"""A sampler that keeps its cache from one text to the next: of conversations, prompts in turn."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from inference.request import Request, tokenizer_of
from inference.sampler import Sampler
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
    return self._model.empty_cache(self.job.config, self.rows, slots)

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
