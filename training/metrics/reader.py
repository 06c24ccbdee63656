"""Numbers from the devices: metrics, read late and checked; JAX_DEBUG_NANS."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.rules import named_leaves
from runtime.printable import few
from training.bad_steps import BadStepError, TrainingStoppedError, not_finite
from training.state import State

_NAMED = 4  # so many arrays are named in a message


class Read(NamedTuple):
  """Metrics of a step.

  Attributes:
    step: its number, counted from 1.
    values: of its metrics.
    at: when the device had computed them, on the clock of `time.monotonic`.
  """

  step: int
  values: dict[str, float]
  at: float


class MetricsReader:
  """Reads the metrics of steps from the device, `late` steps after they were dispatched."""

  def __init__(self, *, late: int, check: Callable[[Mapping[str, float]], str] = not_finite):
    """Sets how many steps may be in flight while one is read, and what finds them bad."""
    self._late, self._check = late, check
    self._pending: list[tuple[int, Any]] = []

  def read(self, step: int, metrics: Any, *, drain: bool) -> list[Read]:
    """Takes a step's metrics and returns those now due.

    Args:
      step: its number, counted from 1.
      metrics: scalars on the device.
      drain: return all that are left.

    Raises:
      BadStepError: `check` has found a step bad. The steps in flight are dropped.
    """
    self._pending.append((step, metrics))
    return self._read(0 if drain else self._late)

  def rest(self) -> list[Read]:
    """Returns what has not been returned yet; raises as `read`."""
    return self._read(0)

  def _read(self, keep: int) -> list[Read]:
    due = []
    while len(self._pending) > keep:
      number, scalars = self._pending.pop(0)
      values = {name: float(value) for name, value in jax.device_get(scalars).items()}
      if why := self._check(values):
        self._pending.clear()
        raise BadStepError(number, why)
      due.append(Read(number, values, time.monotonic()))
    return due


@contextlib.contextmanager
def without_debug_checks() -> Iterator[None]:
  """Turns JAX's own checks for NaN and infinite numbers off.

  Of a program that is compiled ahead of time they see only the first call, whose bad number then
  ends the process with an internal error of JAX.
  """
  with jax.debug_nans(False), jax.debug_infs(False):
    yield


class DebugNans:
  """Checks each step's results where JAX_DEBUG_NANS or JAX_DEBUG_INFS is set."""

  def __init__(self, compile_on: Callable[..., Any], mesh: Mesh):
    """Reads the variables, which `without_debug_checks` then hides; compiles nothing yet.

    Args:
      compile_on: compiles a function for abstract arguments on the mesh (`Job.compile`).
      mesh: of the job.
    """
    self._compile, self._everywhere = compile_on, NamedSharding(mesh, PartitionSpec())
    self._compiled = None
    checks = {
      "JAX_DEBUG_NANS": (jax.config.jax_debug_nans, jnp.isnan),
      "JAX_DEBUG_INFS": (jax.config.jax_debug_infs, jnp.isinf),
    }
    self._checks = {variable: check for variable, (on, check) in checks.items() if on}

  def after_step(self, step: int, state: State, metrics: Mapping[str, jax.Array]) -> None:
    """Checks metrics and parameters after a step; the host then waits for each step.

    Raises:
      TrainingStoppedError: with the arrays that have a bad number, and how to find its cause.
    """
    if not self._checks:
      return
    given = {**metrics, **named_leaves(state.params)}
    if self._compiled is None:
      found = self._compile(self._counts, given, out_shardings=self._everywhere)
      self._compiled = found.function
    for variable, counts in jax.device_get(self._compiled(given)).items():
      bad = [
        f"{name} ({count:,} of {given[name].size:,} elements)"
        for name, count in counts.items()
        if count
      ]
      if bad:
        raise TrainingStoppedError(
          f"step {step}: {variable} has found {few(bad, _NAMED)}; training stops. "
          f"`replay --step={step}` with this run's --config and --workdir finds its cause"
        )

  def _counts(self, given: Mapping[str, jax.Array]) -> dict[str, dict[str, jax.Array]]:
    floating = {name: x for name, x in given.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    return {
      variable: {name: jnp.sum(check(x), dtype=jnp.int32) for name, x in floating.items()}
      for variable, check in self._checks.items()
    }
