"""Groups with an outer optimizer beside NumPy and one device, their bytes, resume and refusals."""

import functools
import shutil

import jax
import numpy as np
import pytest

from partitioning.rules import named_leaves
from runtime import collectives
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.training import runs
from training import outer, parity, replay
from training.checkpointing import integrity
from training.specs import OuterSpec
from training.state import State

GROUPS, STEPS = 2, 4
INNER = {
  "training.steps": STEPS,
  "training.parameter_dtype": "float64",
  "training.matmul_precision": "highest",
  "optimizer.learning_rate": 0.01,
  "optimizer.warmup_steps": 0,
}
MESH = {"mesh_dcn.data": GROUPS, "mesh.fsdp": 2, "mesh.tensor": 2}


def keys(every, rate, momentum):
  """Returns the keys of an outer optimizer."""
  names = ("every_steps", "learning_rate", "momentum")
  given = zip(names, (every, rate, momentum), strict=True)
  return {f"optimizer.outer_{name}": value for name, value in given}


@functools.cache
def one_device():
  """Returns the job of a group on one device, its compiled step, and the batches of all groups."""
  job = make_job("single", "lm", **INNER, **{"data.global_batch_size": 8})
  return job, job.compile_train_step().function


def by_numpy(every, rate, momentum, batches):
  """Returns parameters and mean losses: each group on one device, the rest in NumPy."""
  job, step = one_device()
  host = jax.device_get(first_state(job))
  optimizers, anchor = [host.optimizer] * GROUPS, host.params
  replicas, speed = [anchor] * GROUPS, jax.tree.map(np.zeros_like, anchor)
  losses = []
  for number, batch in enumerate(batches):
    found = []
    for group in range(GROUPS):
      state = State(np.int32(number), replicas[group], optimizers[group])
      part = {name: np.split(x, GROUPS)[group] for name, x in batch.items()}
      state, metrics = step(jax.device_put(state, job.state_shardings), place(job, part))
      replicas[group], optimizers[group] = jax.device_get((state.params, state.optimizer))
      found.append(float(metrics["loss"]))
    losses.append(np.mean(found))
    if (number + 1) % every == 0:
      change = jax.tree.map(lambda old, *new: old - sum(new) / GROUPS, anchor, *replicas)
      speed = jax.tree.map(lambda v, c: momentum * v + c, speed, change)
      anchor = jax.tree.map(
        lambda old, v, c: old - rate * (c + momentum * v), anchor, speed, change
      )
      replicas = [anchor] * GROUPS
  return named_leaves(anchor), losses


def test_without_momentum_groups_meet_at_their_mean():
  spec = OuterSpec(groups=GROUPS, every_steps=1, learning_rate=1.0, momentum=0.0)
  x, replicas = np.float32([1, 2]), np.float32([[3, 2], [5, 8]])
  anchor, found, momentum = outer.meet(spec, {"x": x}, {"x": replicas}, {})
  np.testing.assert_array_equal(anchor["x"], [4, 5])
  np.testing.assert_array_equal(found["x"], [[4, 5], [4, 5]])
  assert momentum == {}


def test_groups_take_steps_of_one_device_and_meet_as_numpy_says():
  every, rate, momentum = 2, 0.7, 0.9
  with jax.enable_x64(True):
    job = make_job("single", "lm", **INNER, **MESH, **keys(every, rate, momentum))
    batches = [host_batch(job, seed) for seed in range(STEPS)]
    wanted, losses = by_numpy(every, rate, momentum, batches)
    step, state, found = job.compile_train_step().function, first_state(job), []
    for number, batch in enumerate(batches):
      before = jax.device_get(state.params)
      state, metrics = step(state, place(job, batch))
      job.check_placed(state)
      found.append(float(metrics["loss"]))
      stood = all(
        map(np.array_equal, *map(jax.tree.leaves, (before, jax.device_get(state.params))))
      )
      assert stood == ((number + 1) % every > 0)
    np.testing.assert_allclose(found, losses, rtol=1e-12)
    for name, x in named_leaves(jax.device_get(state.params)).items():
      assert np.linalg.norm(x - wanted[name]) <= 1e-12 * np.linalg.norm(wanted[name]), name


def over_groups(job):
  """Returns (arrays, bytes) of what a step sends between groups."""
  text = job.compile_train_step().function.as_text()
  found = [one for one in collectives.collectives(text, job.mesh) if "data" in one.axes]
  assert {(one.kind, one.axes) for one in found} == {("all-reduce", ("data",))}
  return sum(one.arrays for one in found), sum(one.bytes for one in found)


def test_between_meetings_groups_exchange_two_numbers(monkeypatch):
  """The loss and the norm; the parameters' change is exchanged where they meet alone."""
  given = ("single", "mlp")
  more = {**MESH, "training.steps": STEPS, **keys(2, 0.7, 0.9)}
  job = make_job(*given, **more)
  sizes = [p.size for p in jax.tree.leaves(job.state.params)]
  arrays, size = over_groups(job)
  assert arrays == 2 + len(sizes)
  assert 8 + sum(sizes) < size <= 8 + 4 * sum(sizes)  # of shards, in float32
  monkeypatch.setattr(outer, "meet", lambda spec, *given: given)
  assert over_groups(make_job(*given, **more)) == (2, 8)


def test_a_run_resumes_in_the_middle_of_a_phase_to_the_bit(tmp_path):
  small = {"mesh.data": 1, "mesh_dcn.data": 2, "training.steps": 8, "checkpoint.every_steps": 3}
  prepared = runs.quick(make_job("single", "mlp", **{**runs.KEYS, **small, **keys(4, 0.7, 0.9)}))
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  runs.train(whole, runs.source(), prepared=prepared)
  assert runs.saved(whole) == [3, 6, 8]
  shutil.copytree(whole, cut)
  for step in (6, 8):
    shutil.rmtree(cut / integrity.FOLDER / str(step))
  runs.train(cut, runs.source(), prepared=prepared)
  assert runs.numbers(cut) == runs.numbers(whole)
  for one, two in zip(*(runs.arrays(x, 8, prepared) for x in (cut, whole)), strict=True):
    assert one.tobytes() == two.tobytes()
  other = make_job(
    "single", "mlp", **{**runs.KEYS, **small, "mesh_dcn.data": 4, **keys(4, 0.7, 0.9)}
  )
  with pytest.raises(ValueError, match=r"mesh_dcn.data: 2 in the checkpoint, now 4"):
    runs.train(whole, runs.source(), prepared=other)


@pytest.mark.parametrize(
  ("more", "message"),
  [
    ({"mesh_dcn.data": 1}, "there is one; set mesh_dcn.data"),
    ({"mesh.data": 2}, "set mesh.data=1 and mesh.fsdp=2"),
    ({"training.steps": 10}, "the last 2 steps have changed; .* such as 8 or 12"),
    ({"partitioning.optimizer.model": ("fsdp", "data")}, "leave data out"),
    ({"optimizer.name": "muon"}, "with muon: it may exchange matrices"),
    ({"training.elastic": True}, "takes its parameters with it"),
    ({"mesh.stage": 2}, "a schedule of stages is for all rows"),
    ({"training.matmul_dtype": "float8"}, "and training.matmul_dtype=.float8. has one scale"),
    ({"optimizer.outer_every_steps": 0}, "outer_momentum=0.5 is about optimizer.outer_every"),
  ],
)
def test_what_does_not_go_with_groups_is_refused(more, message):
  given = {**MESH, "training.steps": 8, **keys(4, 0.7, 0.5), **more}
  with pytest.raises(ValueError, match=message):
    make_job("single", "lm", **given)


def test_what_is_about_steps_of_all_devices_is_refused():
  job = make_job("single", "mlp", **MESH, **{"training.steps": 8}, **keys(4, 0.7, 0.9))
  with pytest.raises(ValueError, match=r"--set optimizer\.outer_every_steps=0"):
    parity.prove(job.config.copy_and_resolve_references(), "cpu")
  with pytest.raises(ValueError, match="groups have parameters of their own"):
    replay.check("lm", job.devices.sizes, 4)
