"""The two names of JAX that are not public, in one place.

The coordination service's key-value store carries text with a timeout and without a collective.
JAX has no public name for it: `multihost_utils.sync_global_devices` has no timeout and carries
nothing. And `jax.distributed.initialize` finds out by itself, on Cloud TPU, Slurm, Open MPI and
Kubernetes, who the processes are, but does not show it before it connects; where processes are
missing it then ends this one by SIGABRT (jax#22436), without naming them. So it is asked first.
"""

from typing import Any

from jax._src import distributed
from jax._src.clusters import ClusterEnv


def client() -> Any:
  """Returns the client of the coordination service; None where there is none."""
  return distributed.global_state.client


def detect(timeout_seconds: int) -> tuple[str | None, int | None, int | None]:
  """Returns (coordinator's host:port, number of processes, index of this one) of a cluster.

  Args:
    timeout_seconds: how long the coordinator's host may take to show up.

  Returns:
    None, None, None where no cluster is detected.
  """
  address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
    None, None, None, [], None, timeout_seconds
  )
  return address, count, index
