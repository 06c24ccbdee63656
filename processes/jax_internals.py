"""The names of JAX and Orbax that are not public, in one place.

The coordination service's key-value store carries text with a timeout and without a collective.
JAX has no public name for it: `multihost_utils.sync_global_devices` has no timeout and carries
nothing. And `jax.distributed.initialize` detects the processes on Cloud TPU, Slurm, Open MPI and
Kubernetes, but does not return them before it connects; if processes are missing it then ends this
one by SIGABRT (jax#22436), without naming them. So its detection is called first.

Orbax keeps the first such client, and counts the operations that its barriers are named by, for the
life of a process. One that joins again, with a process that begins to count, has to begin, too.
"""

import itertools
from typing import Any

from etils import epy

with epy.lazy_imports():
  from jax._src import clusters, distributed
  from orbax.checkpoint._src.futures import signaling_client, synchronization


def client() -> Any:
  """Returns the client of the coordination service; None if there is none."""
  return distributed.global_state.client


def forget_client() -> None:
  """Makes Orbax take the next client, and count its operations anew."""
  signaling_client.get_signaling_client.cache_clear()
  operations = synchronization.OperationIdGenerator
  operations._operation_id_counter = itertools.count()
  operations._operation_id = next(operations._operation_id_counter)


def detect(timeout_seconds: int) -> tuple[str | None, int | None, int | None]:
  """Returns (coordinator's host:port, number of processes, index of this one) of a cluster.

  Args:
    timeout_seconds: how long the coordinator's host may take to appear.

  Returns:
    None, None, None if no cluster is detected.
  """
  address, count, index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
    None, None, None, [], None, timeout_seconds
  )
  return address, count, index
