"""Runs with ramps: resumed anywhere they equal an uninterrupted one to the bit."""

import pathlib
import shutil

import jax
import numpy as np
import pytest

from input_pipeline.batches import TrainingBatches
from input_pipeline.row_source import array_source
from tests.helpers.jobs import make_job
from tests.training import runs
from training.checkpointing import integrity, reading
from training.loop import TrainSteps

BATCH_RAMP = {"data.batch_size_ramp": ((0, 2), (4, 4), (10, 8))}
STEPS = 13
KEYS = {**BATCH_RAMP, "training.steps": STEPS, "checkpoint.every_steps": 1}
QUIET = {"evaluation.every_steps": 0, "training.replica_check_every_steps": 0}


def cut_after(workdir: pathlib.Path, step: int, folder: pathlib.Path) -> pathlib.Path:
  """Returns a copy of a run as a kill after a step leaves it."""
  shutil.copytree(workdir, folder)
  for one in runs.saved(folder):
    if one > step:
      shutil.rmtree(folder / integrity.FOLDER / str(one))
  return folder


def assert_resumes(prepared, rows, whole, folder, step):
  """Resumes a run after a step, and compares what it then has with the uninterrupted one."""
  resumed = cut_after(whole, step, folder / str(step))
  runs.train(resumed, rows, prepared=prepared, held_out=rows)
  assert runs.numbers(resumed) == runs.numbers(whole)
  ours, theirs = (
    runs.arrays(one, prepared.config.training.steps, prepared) for one in (resumed, whole)
  )
  for one, two in zip(ours, theirs, strict=True):
    assert one.tobytes() == two.tobytes(), step


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Returns the workdir of an uninterrupted run."""
  workdir = tmp_path_factory.mktemp("whole")
  runs.train(workdir, runs.source(), prepared=runs.job(**KEYS, **QUIET))
  return workdir


def test_the_loss_of_a_step_is_that_of_the_next_rows(whole):
  prepared, rows = runs.job(**KEYS, **QUIET), runs.source()
  order = TrainingBatches(rows, global_batch_size=1, seed=0)
  state = reading.read_arrays(
    reading.check(whole / integrity.FOLDER / "11", integrity.FULL), vars(prepared.placed_state)
  )
  first = 4 * 2 + 6 * 4 + 1 * 8  # rows that 11 steps have taken
  ids = np.concatenate([order.row_ids(first + n) for n in range(8)])
  batch = jax.device_put(rows.read(ids), prepared.batch_shardings)
  sums = prepared.compile_eval_step().function(state["params"], batch)
  [line] = [line for line in runs.numbers(whole) if line["step"] == 12]
  assert line["loss"] == pytest.approx(float(sums["loss"] / sums["weight"]), rel=1e-5)


def changed(prepared, **overrides):
  """Returns the job with another config."""
  return runs.job(**{**KEYS, **QUIET, **overrides})


def test_only_stages_that_no_step_has_entered_may_change(tmp_path, whole):
  prepared, rows = runs.job(**KEYS, **QUIET), runs.source()
  later = {"data.batch_size_ramp": ((0, 2), (4, 4), (7, 6), (10, 8))}
  key = "data.batch_size_ramp"
  with pytest.raises(
    ValueError, match=r"data\.batch_size_ramp: up to step 8, .* \(4, 4\)\) and is"
  ):
    runs.train(cut_after(whole, 8, tmp_path / "8"), rows, prepared=changed(prepared, **later))
  folder = cut_after(whole, 7, tmp_path / "7")
  with pytest.raises(ValueError, match=f"--accept-changes={key}"):
    runs.train(folder, rows, prepared=changed(prepared, **later))
  end = runs.train(folder, rows, prepared=changed(prepared, **later), accept=[key])
  assert int(end.state.step) == STEPS


def test_a_step_before_those_that_were_compiled_is_compiled_when_it_is_needed():
  job = runs.job(**KEYS, **QUIET)
  steps = TrainSteps(job.compile_train_step, job.batches, job.mesh)
  assert not steps.has(0)
  function = steps.after(0)
  assert steps.has(3)
  assert not steps.has(4)
  assert steps.after(3) is function


def test_a_stage_whose_layout_fails_is_refused_with_its_sizes():
  ramp = {"data.sequence_length_ramp": ((0, 3), (5, 12)), "mesh.tensor": 2}
  with pytest.raises(
    ValueError, match=r"(?s)steps 1 to 5: 64 rows of 3 tokens: .* = 3 is not divisible"
  ):
    make_job("single", "lm", **ramp, **{"partitioning.sequence_parallel": True})


# ---- Both ramps, of a decoder ----

BOTH = {
  "data.batch_size_ramp": ((0, 4), (3, 8)),
  "data.sequence_length_ramp": ((0, 6), (5, 12)),
  "data.global_batch_size": 8,
  "model.layers": 1,
  "model.separate_documents": True,
  "model.dropout_rate": 0.2,
  "training.steps": 7,
  "training.gradient_accumulation_steps": 2,
  "optimizer.warmup_steps": 0,
  "checkpoint.every_steps": 1,
  "checkpoint.keep": 100,
  "metrics.every_steps": 1,
  "metrics.tensorboard": False,
}


def texts():
  """Returns rows of random tokens."""
  random = np.random.default_rng(0)
  stream = random.integers(0, 61, (64, 13), dtype=np.int32)
  weights = np.ones((64, 12), np.float32)
  segments = np.cumsum(random.random((64, 12)) < 0.2, axis=1, dtype=np.int32)
  arrays = {"tokens": stream[:, :-1], "targets": stream[:, 1:]}
  return array_source("texts", {**arrays, "weights": weights, "segments": segments})


@pytest.mark.long
def test_a_decoder_with_both_ramps_resumes_to_the_bit_and_on_another_mesh(tmp_path, capsys):
  rows = texts()
  prepared = runs.quick(make_job("single", "lm", **BOTH, **QUIET, **{"mesh.data": 2}))
  runs.train(tmp_path / "whole", rows, prepared=prepared, held_out=rows)
  said = capsys.readouterr().out
  for shape in ("8 rows of 6", "16 rows of 6", "8 rows of 12"):
    assert f"compiled the train step for {shape} tokens in" in said
  for step in (2, 3, 5):
    assert_resumes(prepared, rows, tmp_path / "whole", tmp_path, step)
  other = make_job("single", "lm", **BOTH, **QUIET, **{"mesh.fsdp": 2, "mesh.tensor": 2})
  moved = cut_after(tmp_path / "whole", 3, tmp_path / "moved")
  runs.train(moved, rows, prepared=other, held_out=rows)
  ours, wanted = (
    {line["step"]: line["loss"] for line in runs.numbers(one) if "loss" in line}
    for one in (moved, tmp_path / "whole")
  )
  assert ours.keys() == wanted.keys() == {*range(1, 8)}
  assert ours == pytest.approx(wanted, rel=1e-5)
  # The length of steps that are done stays.
  longer = {**BOTH, **QUIET, "mesh.data": 2, "data.sequence_length_ramp": ((0, 6), (3, 12))}
  folder = cut_after(tmp_path / "whole", 4, tmp_path / "longer")
  with pytest.raises(
    ValueError, match=r"data\.sequence_length_ramp: up to step 4, .* was \(\(0, 6\),\)"
  ):
    runs.train(folder, rows, prepared=make_job("single", "lm", **longer), held_out=rows)
