"""A speed probe of this process's accelerators, independent of the train step."""

import contextlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from processes.coordination import Group
from training.setup import Job

SIZE, MATMULS = 2048, 32  # matrices of 8 MiB; about a millisecond on an accelerator of 2023
_TRIES = 3
# A probe leaves the accelerators idle for milliseconds: not more often than that.
_BETWEEN_SECONDS = 1.0


def measured(job: Job, group: Group) -> contextlib.AbstractContextManager:
  """Returns the straggler detection of a run, with a probe where devices are accelerators.

  A single process is compared with nothing: it gets None.

  Simulated devices share their processors with everything else on the machine: a probe of them
  varies by a factor of 50 on a busy machine, while the CPU time that a process lost does not; see
  processes/stragglers.py.
  """
  slow_ratio = job.config.processes.slow_ratio
  if group.alone or not slow_ratio:
    return contextlib.nullcontext()
  from processes.stragglers import Pace  # which a single process does not need

  if job.devices.simulated:
    return Pace(group, slow_ratio=slow_ratio)
  return Pace(group, slow_ratio=slow_ratio, probe=DeviceProbe(), window_seconds=_BETWEEN_SECONDS)


class DeviceProbe:
  """A fixed computation on every device of this process at once, without a collective."""

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
    return min(self._once() for _ in range(_TRIES))

  def _once(self) -> float:
    began = time.monotonic()
    jax.block_until_ready(self._matmuls(self._matrices))
    return time.monotonic() - began
