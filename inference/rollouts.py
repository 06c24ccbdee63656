"""Answers sampled for training: token ids, and the log-probabilities by which they were drawn.

What is drawn from is softmax(logits / temperature) over the model's whole vocabulary, which the
trainer can compute again: no top-k, no top-p, no renormalization over the tokenizer's ids. An id
that the tokenizer does not have ends an answer.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from inference.request import Request
from inference.sampler import TokenSampler, doubled
from training.setup import Job


@dataclasses.dataclass(frozen=True)
class Answers:
  """What was drawn behind each prompt.

  Attributes:
    tokens: int32 [rows, new_tokens], 0 behind the length.
    lengths: int32 [rows], with the token that ended the row, if one did.
    ended: bool [rows]; False where `new_tokens` were drawn without an end.
    log_probabilities: float32 (float64 where JAX has it) [rows, new_tokens], 0 behind the length.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  ended: np.ndarray
  log_probabilities: np.ndarray


class RolloutSampler:
  """Samples an answer to each of a batch of prompts.

  Attributes:
    sampler: whose `pace` is that of the last batch.
  """

  def __init__(
    self,
    job: Job,
    *,
    prompt_tokens: int,
    new_tokens: int,
    rows: int,
    temperature: float,
    stop_tokens: tuple[int, ...] = (),
    together: int = 0,
  ):
    """Compiles decode.

    Args:
      job: whose model and mesh are used.
      prompt_tokens: the most of a prompt.
      new_tokens: the most of an answer.
      rows: answers of a batch.
      temperature: divides the logits, above 0.
      stop_tokens: that end an answer besides the tokenizer's end.
      together: rows that decode at the same time; those that end take the next prompts. 0: all.
    """
    self.sampler = TokenSampler(
      job,
      rows=min(rows, together or rows),
      slots=prompt_tokens + new_tokens,
      widths=doubled(prompt_tokens),
      choices=job.config.model.vocabulary_size,
    )
    self._rows, self._new, self._request = rows, new_tokens, Request((), temperature=temperature)
    self._known = self.sampler.spec.tokenizer.size
    self._stops = {self.sampler.spec.tokenizer.end, *stop_tokens}

  def __call__(
    self,
    params: Any,
    variables: Any,
    prompts: Sequence[np.ndarray],
    *,
    seed: int,
    step: int,
  ) -> Answers:
    """Returns an answer to each prompt: a function of (seed, step, its row) and the parameters.

    Args:
      params: placed as the job's.
      variables: the model's other variables, where it has any; else None.
      prompts: token ids of each row; for a group of answers, a prompt is repeated.
      seed: of the run.
      step: of the batch.
    """
    [mixed] = np.random.SeedSequence([seed, step]).generate_state(1)
    request = dataclasses.replace(self._request, seed=int(mixed))
    drawn: list[list[int]] = [[] for _ in range(self._rows)]
    probable: list[list[float]] = [[] for _ in range(self._rows)]

    def take(row: int, token: int, log_probability: float) -> bool:
      drawn[row].append(token)
      probable[row].append(log_probability)
      return len(drawn[row]) < self._new and not self._ends(token)

    self.sampler.run((params, variables or {}), prompts, request, take)
    wide = np.float64 if jax.config.jax_enable_x64 else np.float32
    return Answers(
      self._padded(drawn, np.int32),
      np.array([*map(len, drawn)], np.int32),
      np.array([self._ends(tokens[-1]) for tokens in drawn]),
      self._padded(probable, wide),
    )

  def _ends(self, token: int) -> bool:
    return token in self._stops or token >= self._known

  def _padded(self, rows: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    found = np.zeros((len(rows), self._new), dtype)
    for row, values in enumerate(rows):
      found[row, : len(values)] = values
    return found
