"""With which smaller meshes an elastic run goes on, and what it computes there."""

import dataclasses

import jax
import numpy as np
import pytest

from partitioning.rules import Placement, named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job
from training import elastic, setup

ROWS = {"mesh.data": 4, "mesh.tensor": 1, "data.global_batch_size": 24, "training.elastic": True}


def smaller_job(job: setup.Job, data: int) -> setup.Job:
  """Returns the job on a mesh with fewer data replicas."""
  sizes = {**job.devices.sizes, "data": data}
  return setup.prepare(job.config, dataclasses.replace(job.devices, sizes=sizes))


def held_by(job: setup.Job) -> list[Placement]:
  return [*job.placements["parameters"].values(), *job.placements["optimizer"].values()]


@pytest.mark.parametrize(
  ("changed", "expected"),
  [
    # No device has more than 24 / 4 rows at once: 24 / 3 in two parts, 24 / 2 in two, 24 in four.
    ({}, {4: 1, 3: 2, 2: 2, 1: 4}),
    ({"training.gradient_accumulation_steps": 2}, {4: 2, 3: 4, 2: 4, 1: 8}),
    ({"data.global_batch_size": 40}, {4: 1, 3: None, 2: 2, 1: 4}),
    # With dropout another number of microbatches would draw otherwise.
    ({"model.dropout_rate": 0.1}, {4: 1, 3: 1, 2: 1, 1: 1}),
    # Every stage of a ramp is divided.
    ({"data.batch_size_ramp": ((0, 8), (2, 24))}, {4: 1, 3: None, 2: 2, 1: 4}),
  ],
)
def test_a_smaller_mesh_has_more_microbatches_and_no_more_rows_at_once(changed, expected):
  job = make_job("dp8", "lm", **{**ROWS, **changed})

  run = elastic.Elastic.of(job.config, job.batches)
  for data, count in expected.items():
    sizes = {**job.devices.sizes, "data": data}
    if count is None:
      with pytest.raises(ValueError, match=f"the {data} parts of a batch on data={data}"):
        run.microbatches(sizes)
    else:
      assert run.microbatches(sizes) == count, data


@pytest.mark.parametrize(
  ("mesh", "processes", "expected"),
  [
    ({}, 4, [1, 2, 3]),
    ({"data.global_batch_size": 16}, 4, [1, 2]),
    ({"mesh.tensor": 2, "data.global_batch_size": 16}, 8, [2, 4]),
    ({"mesh.tensor": 2}, 2, [1]),
    # Whole slices are left out.
    ({"mesh.data": 2, "mesh_dcn.data": 2}, 4, [2]),
    # The optimizer's state is split over data, in whose 40 there are no three parts.
    ({"partitioning.optimizer.model": ("data",)}, 4, [1, 2]),
    ({"mesh.data": 2, "mesh.tensor": 4}, 1, []),
  ],
)
def test_it_goes_on_with_whole_replicas_that_divide_batch_and_arrays(mesh, processes, expected):
  job = make_job("dp8", "lm", **{**ROWS, **mesh})
  found = elastic.Elastic.of(job.config, job.batches).smaller(held_by(job), processes)
  assert found == expected


def test_a_step_is_that_of_the_whole_mesh():
  changed = {"training.parameter_dtype": "float64", "model.layers": 1}
  with jax.enable_x64(True):
    whole = make_job("dp8", "lm", **ROWS, **changed)
    batch = host_batch(whole)
    found = {}
    for data in (4, 3):
      job = smaller_job(whole, data)
      assert job.config is whole.config
      placed = jax.device_put(batch, job.batch_shardings)
      state, metrics = job.compile_train_step().function(first_state(job), placed)
      found[data] = jax.device_get({**named_leaves(state.params), "loss": metrics["loss"]})
  for name, value in found[4].items():
    error = np.linalg.norm(found[3][name] - value) / np.linalg.norm(value)
    assert error <= 1e-12, (name, error)


@pytest.mark.parametrize(
  ("changed", "said"),
  [
    ({"mesh.data": 1, "mesh.fsdp": 4}, "there is no data replica to go on without"),
    ({"mesh.data": -1}, "mesh.data=-1: whether devices are missing is told by the size"),
  ],
)
def test_a_mesh_without_replicas_to_spare_is_refused(changed, said):
  with pytest.raises(ValueError, match=said):
    make_job("dp8", "lm", **{**ROWS, **changed})


def test_processes_that_have_no_whole_replicas_are_refused(monkeypatch):
  job = make_job("dp8", "lm", **{**ROWS, "mesh.data": 2, "mesh.context": 3})
  run = elastic.Elastic.of(job.config, job.batches)
  monkeypatch.setattr(elastic, "of_processes", lambda: 3)
  said = "none of 1 to 2 processes .* 2 data replicas, of 3 devices each, .*=24 .* as 2 processes"
  with pytest.raises(ValueError, match=said):
    run.offer(held_by(job), job.devices.sizes)
  monkeypatch.setattr(elastic, "of_processes", lambda: 2)
  run.offer(held_by(job), job.devices.sizes)
