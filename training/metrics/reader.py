"""Numbers from the devices: metrics, read late and checked; JAX_DEBUG_NANS; a probe of speed."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.rules import named_leaves
from processes.coordination import Group
from training.bad_steps import BadStepError, TrainingStoppedError, not_finite
from training.state import State

_NAMED = 4  # so many arrays are named in a message
SIZE, MATMULS = 2048, 32  # matrices of 8 MiB; about a millisecond on an accelerator of 2023
_PROBES = 3
# A probe leaves the accelerators idle for milliseconds: not more often than that.
_PROBE_SECONDS = 1.0


class MetricsReader:
  """Reads the metrics of steps from the device, `late` steps after they were dispatched."""

  def __init__(self, *, late: int, check: Callable[[Mapping[str, float]], str] = not_finite):
    """Sets how many steps may be in flight while one is read, and what finds them bad."""
    self._late, self._check = late, check
    self._pending: list[tuple[int, Any]] = []

  def read(self, step: int, metrics: Any, *, drain: bool) -> list[tuple[int, dict[str, float]]]:
    """Takes a step's metrics and returns those now due, as (step, values).

    Args:
      step: its number, counted from 1.
      metrics: scalars on the device.
      drain: return all that are left.

    Raises:
      BadStepError: `check` has found a step bad. The steps in flight are dropped.
    """
    self._pending.append((step, metrics))
    return self._read(0 if drain else self._late)

  def rest(self) -> list[tuple[int, dict[str, float]]]:
    """Returns what has not been returned yet; raises as `read`."""
    return self._read(0)

  def _read(self, keep: int) -> list[tuple[int, dict[str, float]]]:
    due = []
    while len(self._pending) > keep:
      number, scalars = self._pending.pop(0)
      values = {name: float(value) for name, value in jax.device_get(scalars).items()}
      if why := self._check(values):
        self._pending.clear()
        raise BadStepError(number, why)
      due.append((number, values))
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
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise TrainingStoppedError(
          f"step {step}: {variable} has found {', '.join(bad[:_NAMED])}{more}; training stops. "
          f"`replay --step={step}` with this run's --config and --workdir finds its cause"
        )

  def _counts(self, given: Mapping[str, jax.Array]) -> dict[str, dict[str, jax.Array]]:
    floating = {name: x for name, x in given.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    return {
      variable: {name: jnp.sum(check(x), dtype=jnp.int32) for name, x in floating.items()}
      for variable, check in self._checks.items()
    }


# ------------------------------ a probe of speed ------------------------------


def straggler_detection(
  group: Group, slow_ratio: float, *, simulated: bool
) -> contextlib.AbstractContextManager:
  """Returns the straggler detection of a run, with a probe where devices are accelerators.

  A single process is compared with nothing: it gets None.

  Simulated devices share their processors with everything else on the machine: a probe of them
  varies by a factor of 50 on a busy machine, while the CPU time that a process lost does not; see
  processes/stragglers.py.

  Args:
    group: the processes of the run.
    slow_ratio: `processes.slow_ratio`.
    simulated: whether the devices are simulated.
  """
  if group.alone or not slow_ratio:
    return contextlib.nullcontext()
  from processes.stragglers import Pace  # which a single process does not need

  if simulated:
    return Pace(group, slow_ratio=slow_ratio)
  return Pace(group, slow_ratio=slow_ratio, probe=DeviceProbe(), window_seconds=_PROBE_SECONDS)


class DeviceProbe:
  """A fixed computation on every accelerator of this process at once, without a collective.

  It probes their speed, independent of the train step.
  """

  def __init__(self, *, size: int = SIZE):
    """Compiles it; matrices of `size` x `size` in bfloat16 are multiplied."""
    devices = jax.local_devices()
    sharding = NamedSharding(Mesh(np.asarray(devices), ("device",)), PartitionSpec("device"))
    ones = np.full((len(devices), size, size), 1 / size, jnp.bfloat16)
    self._matrices = jax.device_put(ones, sharding)

    def matmuls(matrices_DNN: jax.Array) -> jax.Array:
      return jax.lax.fori_loop(0, MATMULS, lambda _, product: product @ matrices_DNN, matrices_DNN)

    self._matmuls = jax.jit(matmuls, out_shardings=sharding).lower(self._matrices).compile()

  def __call__(self) -> float:
    """Returns the seconds that the slowest device took, in the best of three tries.

    It waits for work in flight; the devices are idle for a moment afterwards.
    """
    jax.block_until_ready(self._matmuls(self._matrices))
    return min(self._once() for _ in range(_PROBES))

  def _once(self) -> float:
    began = time.monotonic()
    jax.block_until_ready(self._matmuls(self._matrices))
    return time.monotonic() - began
