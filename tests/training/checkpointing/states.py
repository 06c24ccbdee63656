"""States to save: of small jobs, and one whose every value tells the step."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from training.checkpointing import reading
from training.checkpointing.checkpointer import Checkpointer
from training.setup import Job
from training.state import State

CONFIG = {"seed": 0, "mesh": {"data": 8}}
RECORD = {"versions": {"jax": "1"}}


def tree_of(state) -> dict:
  """Returns what is saved of a job's state, abstract or not."""
  return {"step": state.step, "params": state.params, "optimizer": state.optimizer}


def abstract(job: Job) -> dict:
  """Returns the job's tree as ShapeDtypeStructs with shardings."""
  return tree_of(
    jax.tree.map(
      lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
      job.state,
      job.state_shardings,
    )
  )


def moved(folder, step: int, state: State, job: Job) -> State:
  """Saves a state after a step, and returns it as restored for a job on another mesh."""
  with Checkpointer(folder) as checkpointer:
    checkpointer.save(step, tree_of(state), config=CONFIG, record=RECORD)
  with Checkpointer(folder, read_only=True) as checkpointer:
    _, tree = checkpointer.restore(abstract(job))
  return State(**tree)


def random_tree(job: Job, step: int) -> dict:
  """Returns a tree of random bits: every leaf of it, so that adamw's moments are not zeros."""
  rng = np.random.default_rng(step)

  def draw(leaf):
    if leaf.dtype == np.int32:
      return jax.device_put(np.int32(step), leaf.sharding)
    return jax.device_put(rng.standard_normal(leaf.shape).astype(leaf.dtype), leaf.sharding)

  return jax.tree.map(draw, abstract(job))


def counting_tree(step: int) -> dict:
  """Returns a small tree over eight devices, every value of which is `step` more than at 0.

  The shards of its kernels are over a kilobyte: smaller ones would lie in the index itself.
  """
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
  kernel = np.arange(24 * 130, dtype=np.float32).reshape(24, 130) + step
  return {
    "step": jax.device_put(np.int32(step), whole),
    "params": {
      "up": {"kernel": jax.device_put(kernel, split)},
      "bias": jax.device_put(np.arange(7, dtype=np.float32) + step, whole),
    },
    "optimizer": (jax.device_put(kernel + 1, split), [jax.device_put(np.int32(step), whole)]),
  }


def counting_target() -> dict:
  """Returns the abstract tree of `counting_tree`."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), counting_tree(0)
  )


def restored_parameters(folder, step=None, target=None, **settings):
  """Returns (step, parameters) of a checkpoint, by default for `counting_target`."""
  abstract = {"params": target or counting_target()["params"]}
  found, tree = reading.restore_branches(folder, lambda _: abstract, step, **settings)
  return found.step, tree["params"]


def assert_bit_equal(ours, theirs) -> None:
  """Compares two trees by their bytes."""
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
  ):
    assert a.dtype == b.dtype, path
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def save_counting(checkpointer, *steps: int) -> None:
  """Saves counting trees and waits."""
  for step in steps:
    checkpointer.save(step, counting_tree(step), config=CONFIG, record=RECORD)
  checkpointer.wait()


def contents(folder) -> dict:
  """Returns path -> bytes and time of change, of everything in a folder."""
  return {
    str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
    for path in sorted(folder.rglob("*"))
  }
