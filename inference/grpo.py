"""Batches of GRPO: answers that the model draws to the prompts of a step, and their rewards.

A batch is a function of (seed, step, parameters): the prompts follow from the step, the draws from
seed and step, and rewards are the user's functions of prompt and answer. So a run that resumes from
a checkpoint draws the same answers again. The loss takes log p of each token as the sampler gave
it; before the first update on a batch the trainer's own is compared with that.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from inference.request import text_spec
from inference.rollouts import Answers, RolloutSampler
from input_pipeline.source import Source
from input_pipeline.text.prompts import Prompt
from models import grpo
from models.losses import Batch
from processes.watchdog import DRAWING, STARTING, Watchdog
from training import reference
from training.bad_steps import TrainingStoppedError
from training.metrics.console import say_wrapped
from training.restore import Start
from training.rewards import Rewards
from training.setup import Job
from training.splits import Data
from training.state import State

# Added to the standard deviation of a group's rewards: equal rewards, but for rounding, tell
# nothing apart. As in TRL.
EPSILON = 1e-4
# Draws of evaluations, which are the same after each step, are those of no step's answers.
_OF_EVALUATION = 2**31


def advantages(values: np.ndarray, kind: str) -> np.ndarray:
  """Returns how far each reward is above its group's mean, 0 where it is NaN.

  Args:
    values: float64 [groups, answers], NaN where a reward failed: it is no part of its group.
    kind: `grpo.advantage`.
  """
  there = ~np.isnan(values)
  count = np.maximum(there.sum(axis=1, keepdims=True), 1)
  mean = np.where(there, values, 0).sum(axis=1, keepdims=True) / count
  centered = np.where(there, values - mean, 0)
  if kind == "centered":
    return centered
  return centered / (np.sqrt((centered**2).sum(axis=1, keepdims=True) / count) + EPSILON)


def token_weights(drawn: np.ndarray, there: np.ndarray, kind: str, new_tokens: int) -> np.ndarray:
  """Returns how the tokens of answers weigh, float64 [B, T], where each answer weighs 1.

  Args:
    drawn: bool [B, T], the tokens of answers.
    there: bool [B], the answers that have a reward.
    kind: `grpo.mean`.
    new_tokens: the most of an answer.
  """
  counts = drawn.sum(axis=1, keepdims=True)
  if kind == "tokens":
    counts = max(1, counts[there].sum()) / max(1, there.sum())
  return drawn / (new_tokens if kind == "constant" else counts)


def rows_of(prompts: Sequence[Prompt], answers: Answers, length: int) -> dict[str, np.ndarray]:
  """Returns rows of prompts with their answers behind: `tokens`, `targets`, `sampled`, `drawn`.

  Args:
    prompts: of the rows.
    answers: drawn for them.
    length: T, of a row; a prompt and its answer have at most as many tokens.
  """
  shape, wide = (len(prompts), length), answers.log_probabilities.dtype
  found = {"tokens": np.zeros(shape, np.int32), "targets": np.zeros(shape, np.int32)}
  found |= {"sampled": np.zeros(shape, wide), "drawn": np.zeros(shape, bool)}
  for row, (prompt, count) in enumerate(zip(prompts, answers.lengths.tolist(), strict=True)):
    tokens = np.concatenate([prompt.tokens, answers.tokens[row, :count]])
    last, first = len(tokens) - 1, len(prompt.tokens) - 1  # the slot that predicts the first one
    found["tokens"][row, :last], found["targets"][row, :last] = tokens[:-1], tokens[1:]
    found["sampled"][row, first:last] = answers.log_probabilities[row, :count]
    found["drawn"][row, first:last] = True
  return found


@dataclasses.dataclass(frozen=True)
class _Scored:
  """Rows with answers, and what they are worth: float64 [B], NaN where a reward failed."""

  rows: dict[str, np.ndarray]
  values: np.ndarray
  metrics: dict[str, float]


def checked(job: Job, data: Data) -> Callable[[Start | None, Watchdog], "Rollouts"]:
  """Checks the prompts, executes the files of the rewards, and returns what makes `Rollouts`.

  Args:
    job: the run.
    data: its prompts.

  Raises:
    ValueError: a prompt leaves no place for an answer, or as `Rewards`.
  """
  keys = job.config.grpo
  for source in (data.train.source, data.evaluation.source):
    _check_lengths(source, job.config.data.sequence_length, keys.new_tokens)
  limits = {"seconds": keys.reward_seconds, "memory_mib": keys.reward_memory_mib}
  rewards = Rewards(keys.rewards, **limits, processes=keys.reward_processes)
  return functools.partial(Rollouts, job, data, rewards)


def _check_lengths(source: Source, length: int, new_tokens: int) -> None:
  """Raises ValueError with the first prompt that is too long."""
  if long := [one for one in source.prompts if len(one.tokens) + new_tokens > length]:
    raise ValueError(
      f"{source.name}: {len(long):,} of {len(source):,} prompts are longer than "
      f"{length - new_tokens} tokens, the first at {long[0].place} ({len(long[0].tokens):,}): with "
      f"grpo.new_tokens={new_tokens} a row of data.sequence_length={length} is full; raise that, "
      f"draw fewer tokens, or leave these prompts out"
    )


class Rollouts:
  """Draws the answers of a run's steps and evaluations."""

  def __init__(self, job: Job, data: Data, rewards: Rewards, start: Start | None, watch: Watchdog):
    """Compiles, and finds the parameters of the reference.

    Args:
      job: the run.
      data: its prompts, `checked`.
      rewards: of the answers, used on the first process alone.
      start: of the run; None where answers are evaluated alone.
      watch: is notified of what is computed.

    Raises:
      ValueError: the parameters that the run has started from are no longer found.
    """
    self._job, self._data, self._rewards, self._watch = job, data, rewards, watch
    self._keys, self._spec = job.config.grpo, text_spec(job.config)
    self._made: tuple[int, Batch] = (-1, {})  # the step that its answers were drawn in, and these
    keys, adapters = self._keys, job.config.lora.rank > 0
    self._reference = None
    if start is not None and keys.kl and not adapters:
      self._reference = reference.first_parameters(start, watch)
    watch.at("compiling the sampler", STARTING)
    prompts = [*data.train.source.prompts, *data.evaluation.source.prompts]
    templated = any(prompt.templated for prompt in prompts)
    self._sampler = RolloutSampler(
      job,
      prompt_tokens=max(len(prompt.tokens) for prompt in prompts),
      new_tokens=keys.new_tokens,
      rows=job.config.data.global_batch_size,
      temperature=keys.temperature,
      stop_tokens=self._turn_ends() if templated else (),
    )
    self._log_p = self._compile_log_p(base=False)
    self._base_log_p = self._log_p
    if keys.kl and adapters:
      self._base_log_p = self._compile_log_p(base=True)

  def _turn_ends(self) -> tuple[int, ...]:
    """Returns the tokens that end the assistant's turn."""
    from input_pipeline.text import chat_template  # of conversations alone

    template = chat_template.load(self._spec.chat_template, self._spec.tokenizer)
    return tuple(sorted(chat_template.turn_ends(template, self._spec.tokenizer).tokens))

  def _compile_log_p(self, *, base: bool) -> Any:
    job, placed = self._job, self._job.state_shardings

    def log_p(params: Any, batch: Batch, variables: Any) -> Any:
      return grpo.log_probabilities(job.program.module(params, variables), batch, base=base)

    return job.compile(
      log_p,
      *(job.state.params, job.batch, job.state.variables),
      in_shardings=(placed.params, job.batch_shardings, placed.variables),
      out_shardings=NamedSharding(job.mesh, PartitionSpec()),
    ).function

  # ------------------------------ batches ------------------------------

  def between(self, step: int) -> bool:
    """Returns whether after so many steps new answers are drawn: a run saves and stops there."""
    return step % self._keys.updates == 0

  def batch(self, state: State, step: int, position: Any) -> tuple[Batch, dict[str, float]]:
    """Returns the batch of the step after the first `step`, and metrics of its answers.

    Args:
      state: after these.
      step: their number.
      position: of the run's rows.

    Raises:
      TrainingStoppedError: sampler and trainer differ, or every reward has failed.
    """
    if not self.between(step) and self._made[0] == step - step % self._keys.updates:
      return self._made[1], {}
    assert self.between(step), step
    self._watch.at(f"step {step + 1}: drawing answers", DRAWING)
    ids = self._data.train.row_ids(step, position)
    given = self._data.train.source, ids, self._keys.answers, step
    scored = self._scored(state.params, state.variables, *given)
    batch = self._placed(scored, self._keys.answers)
    most = self._compared(state, batch, scored.rows, step)
    if self._keys.kl:
      params = state.params if self._reference is None else self._reference
      found = self._in_text_order(self._base_log_p, params, state.variables, batch)
      batch |= self._put({"reference": np.where(scored.rows["drawn"], found, 0)})
    self._made = step, batch
    metrics = {"sampler_difference": most, **scored.metrics}
    del metrics["reward"]  # the step has it
    return batch, metrics

  def evaluation_batch(self, params: Any, variables: Any, ids: np.ndarray, index: int) -> Batch:
    """Returns a batch of the evaluation split: an answer to each prompt; arguments as of `batch`.

    Args:
      params: placed as the job's.
      variables: the model's other variables.
      ids: of the prompts; -1 of padding.
      index: number of the batch.
    """
    source, there = self._data.evaluation.source, ids >= 0
    scored = self._scored(params, variables, source, np.where(there, ids, 0), 1, index, there)
    return self._placed(scored, 1)

  def _scored(
    self,
    params: Any,
    variables: Any,
    source: Source,
    ids: np.ndarray,
    group: int,
    step: int,
    there: np.ndarray | None = None,
  ) -> _Scored:
    """Returns answers to prompts and their rewards; those that are not `there` have none."""
    prompts = [source.prompts[number] for number in ids.tolist()]
    seed, of_evaluation = self._job.config.seed, there is not None
    answers = self._sampler(
      *(params, variables, [prompt.tokens for prompt in prompts]),
      seed=seed,
      step=step + _OF_EVALUATION * of_evaluation,
    )
    values, metrics = np.full(len(prompts), np.nan), {}
    rows = np.arange(len(prompts)) if there is None else np.flatnonzero(there)
    firsts = rows[::group]
    values[rows], metrics = self._rewarded(
      [prompts[row] for row in firsts],
      [[self._text(answers, row + k) for k in range(group)] for row in firsts],
    )
    if np.isnan(values).all():
      where = f"evaluation batch {step + 1}" if of_evaluation else f"step {step + 1}"
      raise TrainingStoppedError(
        f"{where}: the reward of every answer has failed, so that there is nothing to learn from; "
        f"the first failure is printed above"
      )
    counts = answers.lengths[rows]
    metrics |= {"answer_tokens": float(counts.mean())}
    metrics |= {"answers_cut": float(1 - answers.ended[rows].mean())}
    metrics |= {"answer_tokens_per_second": self._sampler.sampler.pace.rate}
    length = self._job.config.data.sequence_length
    return _Scored(rows_of(prompts, answers, length), values, metrics)

  def _text(self, answers: Answers, row: int) -> str:
    """Returns an answer without the token that has ended it."""
    count = answers.lengths[row] - answers.ended[row]
    return self._spec.tokenizer.decode(answers.tokens[row, :count].tolist()).decode(
      errors="replace"
    )

  def _rewarded(
    self, prompts: Sequence[Prompt], answers: Sequence[Sequence[str]]
  ) -> tuple[np.ndarray, dict[str, float]]:
    """Returns rewards, float64 [B], and their metrics, as the first process has them."""
    self._watch.at("waiting for rewards", DRAWING)
    found = "null"
    if self._watch.group.first:
      texts, records = [one.text for one in prompts], [one.record for one in prompts]
      scores = self._rewards.score(texts, answers, records)
      if scores.failures:
        say_wrapped(f"WARNING: {scores.text()}; the first: {scores.first}")
      found = json.dumps([scores.values.ravel().tolist(), scores.metrics()])
    values, metrics = json.loads(self._job.consensus.from_first(found))
    values = np.array(values, np.float64)
    of_group = values.reshape(len(prompts), -1)
    equal = np.nanmax(np.nan_to_num(of_group), axis=1) == np.nanmin(np.nan_to_num(of_group), axis=1)
    return values, {**metrics, "groups_of_equal_rewards": float(equal.mean())}

  def _placed(self, scored: _Scored, group: int) -> Batch:
    """Returns the batch of a step, without the reference, on the devices."""
    keys, values, rows = self._keys, scored.values, dict(scored.rows)
    drawn, there = rows.pop("drawn"), ~np.isnan(values)
    weights = token_weights(drawn, there, keys.mean, keys.new_tokens)
    of_groups = advantages(values.reshape(-1, group), keys.advantage)
    return self._put(
      {
        **rows,
        "weights": there.astype(np.float32),
        "token_weights": weights,
        "reference": np.zeros_like(rows["sampled"]),
        "advantages": of_groups.ravel(),
        "rewards": np.where(there, values, 0),
      }
    )

  def _put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    shardings, like = self._job.batch_shardings, self._job.batch
    return {
      name: jax.make_array_from_callback(
        array.shape, shardings[name], array.astype(like[name].dtype).__getitem__
      )
      for name, array in arrays.items()
    }

  # ------------------------------ sampler and trainer ------------------------------

  def _in_text_order(self, log_p: Any, params: Any, variables: Any, batch: Batch) -> np.ndarray:
    """Returns log p of each target by whole rows, [B, T]."""
    log_p_BT, places_BT = jax.device_get(log_p(params, batch, variables))
    found = np.zeros_like(log_p_BT)
    np.put_along_axis(found, places_BT, log_p_BT, axis=1)
    return found

  def _compared(
    self, state: State, batch: Batch, rows: Mapping[str, np.ndarray], step: int
  ) -> float:
    """Returns the largest difference of log p of what was drawn, between sampler and trainer.

    Raises:
      TrainingStoppedError: it is beyond the bound; with the first token.
    """
    trained = self._in_text_order(self._log_p, state.params, state.variables, batch)
    difference = np.where(rows["drawn"], np.abs(trained - rows["sampled"]), 0)
    beyond = ~(difference <= self._keys.ratio_bound)  # also where one of them is NaN
    if beyond.any():
      row, place = np.argwhere(beyond)[0].tolist()
      token = int(rows["targets"][row, place])
      raise TrainingStoppedError(
        f"step {step + 1}: sampler and trainer do not agree on {beyond.sum():,} of "
        f"{rows['drawn'].sum():,} drawn tokens: the first is token {token} "
        f"({self._shown(token)}) of row {row}, place {place + 1}: log p "
        f"{rows['sampled'][row, place]:.9g} when it was drawn, {trained[row, place]:.9g} by the "
        f"whole row; they may differ by grpo.ratio_bound={self._keys.ratio_bound:g} (the largest "
        f"difference is {difference.max():.3g}). The step is refused: its gradient would be of "
        f"another policy"
      )
    return float(difference.max())

  def _shown(self, token: int) -> str:
    known = token < self._spec.tokenizer.size
    return repr(self._spec.tokenizer.token_bytes(token))[1:] if known else "stands for nothing"

  def close(self) -> None:
    """Ends the processes that compute rewards."""
    with contextlib.suppress(OSError):
      self._rewards.close()
