"""Continuations of many prompts, in batches of prompts of about the same length."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from inference import scoring
from inference.request import Request
from inference.sampler import Sampler
from training.setup import Job


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What is to be continued.

  Attributes:
    tokens: at least one.
    max_new_tokens: the most tokens drawn; they and the prompt fit a row.
    until: texts; what is drawn ends before the first of them.
    temperature: 0 takes the likeliest token; this and the next two as of `Request`.
    top_k: 0 is off.
    top_p: 1 is off.
    truncated: how many tokens were cut off on the left.
  """

  tokens: tuple[int, ...]
  max_new_tokens: int
  until: tuple[str, ...] = ()
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  truncated: int = 0

  @classmethod
  def fitting(cls, tokens: np.ndarray, length: int, max_new_tokens: int, **more: Any) -> "Prompt":
    """Returns a prompt cut on the left so that it and what is drawn fit a row of `length` tokens.

    Raises:
      ValueError: no token of it would be left.
    """
    fits = length - max_new_tokens
    if fits < 1:
      raise ValueError(
        f"max_new_tokens={max_new_tokens} leaves no place for a prompt in a row of "
        f"data.sequence_length={length}; raise that, or generate fewer tokens"
      )
    cut = max(0, len(tokens) - fits)
    return cls(tuple(tokens[cut:].tolist()), max_new_tokens, truncated=cut, **more)


class BatchGenerator:
  """Continues prompts with a job's model; programs are compiled when sizes are first used."""

  def __init__(self, job: Job, params: Any, variables: Any = None):
    """Compiles nothing yet; arguments as of `Scorer`."""
    self._job, self._params, self._variables = job, params, variables
    self._samplers: dict[tuple[int, int, int], Sampler] = {}

  def __call__(
    self, prompts: Sequence[Prompt], before: Callable[[int, int], bool] | None = None
  ) -> list[str] | None:
    """Returns the text drawn after each prompt; None if it was stopped.

    All processes call it with the same prompts.

    Args:
      prompts: the prompts.
      before: called before each batch with its number, from 0, and their count; False stops.
    """
    texts, rows = [""] * len(prompts), min(self._job.config.data.global_batch_size, len(prompts))
    batches = list(self._batches(prompts, rows))
    for number, (width, chosen) in enumerate(batches):
      if before is not None and not before(number, len(batches)):
        return None
      one = prompts[chosen[0]]
      request = Request(
        tuple(prompts[row].tokens for row in chosen),
        max_new_tokens=one.max_new_tokens,
        temperature=one.temperature,
        top_k=one.top_k,
        top_p=one.top_p,
        seed=number,  # draws depend on it and on the place in the batch
        stop=one.until,
      )
      drawn = self._sampler(request, width, rows)(self._params, request, variables=self._variables)
      for row, found in zip(chosen, drawn, strict=True):
        texts[row] = before_first(found.decode(errors="replace"), one.until)
    return texts

  def _sampler(self, request: Request, width: int, rows: int) -> Sampler:
    sizes = width, request.max_new_tokens, rows
    if sizes not in self._samplers:
      self._samplers[sizes] = Sampler(self._job, request, width, rows)
    return self._samplers[sizes]

  def _batches(self, prompts: Sequence[Prompt], size: int) -> Iterator[tuple[int, list[int]]]:
    """Yields (width of the prompts, their numbers) of batches that differ in nothing else."""
    groups: dict[tuple, list[int]] = {}
    length = self._job.config.data.sequence_length
    for row, prompt in enumerate(prompts):
      width = next(w for w in scoring.doubled(length) if w >= len(prompt.tokens))
      alike = dataclasses.replace(prompt, tokens=(), truncated=0)
      group = min(width, length - prompt.max_new_tokens), *dataclasses.astuple(alike)
      groups.setdefault(group, []).append(row)
    for (width, *_), rows in sorted(groups.items()):
      for start in range(0, len(rows), size):
        yield width, rows[start : start + size]


def before_first(text: str, until: Sequence[str]) -> str:
  """Returns a text without the first of these and what follows."""
  for stop in until:
    text = text.partition(stop)[0]
  return text
