"""Evaluations: how much they take, what checkpoints are compared by, and numbers that are bad."""

import dataclasses
import math
import types

import pytest
from etils import epath

from checkpointing import restore
from checkpointing.checkpointer import Checkpointer
from input_pipeline.mixture import Part
from processes.preemption import StopRequest
from tests.training import runs
from tests.training.runs import BATCH, STEPS, saved, source, train
from training.bad_steps import TrainingStoppedError
from training.evaluation import Evaluator

PARTS = {"evaluation.every_steps": 5, "evaluation.steps": 2}


def records(workdir):
  """Returns step -> the record of its checkpoint."""
  with Checkpointer(epath.Path(workdir) / restore.FOLDER, read_only=True) as checkpoints:
    return {step: checkpoints.verified(step).record for step in checkpoints.steps()}


def evaluations(workdir):
  """Returns step -> the line of its evaluation."""
  return {line["step"]: line for line in runs.lines(workdir) if "eval_loss" in line}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
  """Returns the workdirs of two runs that differ in how much the last evaluation takes."""
  found = [tmp_path_factory.mktemp(name) for name in ("whole", "limited")]
  for workdir, steps in zip(found, (0, 2), strict=True):
    keys = {**PARTS, "checkpoint.keep_best": "eval_loss", "evaluation.final_steps": steps}
    train(workdir, source(), **keys)
  return found


def test_the_last_evaluation_is_of_the_whole_split_or_limited(both):
  whole, limited = map(evaluations, both)
  rows = len(source())
  assert rows > 2 * BATCH
  parts = dict.fromkeys((5, 10, 15), 2 * BATCH)
  assert {step: line["eval_examples"] for step, line in whole.items()} == {**parts, STEPS: rows}
  assert {step: line["eval_examples"] for step, line in limited.items()} == {
    **parts,
    STEPS: 2 * BATCH,
  }
  assert whole[STEPS]["eval_loss"] != limited[STEPS]["eval_loss"]
  assert [whole[step] for step in parts] == [limited[step] for step in parts]


def test_checkpoints_are_compared_by_the_same_examples_also_the_last(both):
  whole, limited = map(records, both)
  for found in (whole, limited):
    over = [found[step]["metrics_over"] for step in (5, 10, 15, STEPS)]
    assert over == [{"data": source().fingerprint, "examples": 2 * BATCH}] * 4
  # The run that evaluates all in the end compares by what the other's last evaluation took.
  line = evaluations(both[1])[STEPS]
  for found in (whole, limited):
    assert found[STEPS]["metrics"]["eval_loss"] == line["eval_loss"]


# ------------------------------ numbers that are not finite ------------------------------

# Large steps without clipping: a row that is far too large makes a loss and a gradient
# norm that are finite, and parameters that are too large for the next forward pass.
PLAIN = {
  "optimizer.name": "sgd",
  "optimizer.learning_rate": 0.1,
  "optimizer.clip_norm": 0.0,
  "optimizer.warmup_steps": 0,
}
HUGE = 1e16


@pytest.mark.long
def test_a_bad_evaluation_is_a_bad_step(tmp_path):
  spoiled = source({9: HUGE})  # the batch of step 10, after which an evaluation is due
  with pytest.raises(TrainingStoppedError, match=r"step 10: eval_loss is (nan|inf).*on_bad_step"):
    train(tmp_path / "run", spoiled, **PLAIN)
  assert saved(tmp_path / "run") == [5]
  assert not evaluations(tmp_path / "run")
  last = [line for line in runs.lines(tmp_path / "run") if "loss" in line][-1]
  assert last["step"] == 10, "the step itself has finite numbers"
  assert math.isfinite(last["loss"] + last["grad_norm"])
  train(tmp_path / "run", spoiled, **PLAIN, **runs.ROLL_BACK)
  [line] = runs.rollbacks(tmp_path / "run")
  assert (line["rolled_back"], line["step"]) == (10, 5)
  assert line["why"].startswith("eval_loss is ")
  train(tmp_path / "told", source(), **PLAIN, **{"data.skip_batches": (9,)})
  runs.assert_same(tmp_path / "run", tmp_path / "told", runs.job(**PLAIN))


def test_a_bad_last_evaluation_is_a_bad_step(tmp_path):
  train(tmp_path / "run", source({STEPS - 1: HUGE}), **PLAIN, **runs.ROLL_BACK)
  [line] = runs.rollbacks(tmp_path / "run")
  assert (line["rolled_back"], line["step"]) == (STEPS, 15)
  train(tmp_path / "told", source(), **PLAIN, **{"data.skip_batches": (STEPS - 1,)})
  runs.assert_same(tmp_path / "run", tmp_path / "told", runs.job(**PLAIN))


@pytest.mark.parametrize(("every", "step"), [(5, 5), (0, 0)])
def test_a_step_whose_interrupted_evaluation_turns_out_bad_is_left(tmp_path, every, step):
  spoiled, stop = source({9: HUGE}), StopRequest()
  keys = {**PLAIN, **runs.ROLL_BACK, "checkpoint.every_steps": every}

  def read(indices):  # the stop comes while the evaluation waits for its first batch
    stop.request("SIGTERM")
    return source().read(indices)

  held_out = dataclasses.replace(source(), read=read)
  assert train(tmp_path / "run", spoiled, held_out=held_out, stop=stop, **keys).stopped
  assert saved(tmp_path / "run")[-1] == 10, "nobody knows yet that it is bad"
  train(tmp_path / "run", spoiled, **keys)
  [line] = runs.rollbacks(tmp_path / "run")
  assert (line["rolled_back"], line["step"]) == (10, step)
  train(tmp_path / "told", source(), **keys, **{"data.skip_batches": (9,)})
  runs.assert_same(tmp_path / "run", tmp_path / "told", runs.job(**PLAIN))


def test_an_interrupted_last_evaluation_is_made_up(tmp_path, both):
  stop, read = StopRequest(), source().read
  keys = {**PARTS, "checkpoint.keep_best": "eval_loss"}
  times = []

  def stopping(indices):  # in the third batch of the last evaluation
    times.append(len(indices))
    if len(times) == 3 * 2 + 3:
      stop.request("SIGTERM")
    return read(indices)

  held_out = dataclasses.replace(source(), read=stopping)
  assert train(tmp_path, source(), held_out=held_out, stop=stop, **keys).stopped
  assert len(times) < 3 * 2 + len(source()) // BATCH, "it has stopped before the end of the split"
  assert saved(tmp_path)[-1] == STEPS
  assert list(evaluations(tmp_path)) == [5, 10, 15]
  assert not train(tmp_path, source(), **keys).stopped
  assert evaluations(tmp_path) == evaluations(both[0])


def test_bits_per_byte_of_a_mixture_count_the_bytes_of_each_source():
  parts = (Part("a", 4, 40, bytes_per_token=2.0), Part("b", 4, 40, bytes_per_token=5.0))
  job = types.SimpleNamespace(config=types.SimpleNamespace(task="causal_lm"))
  batches = types.SimpleNamespace(source=types.SimpleNamespace(parts=parts, bytes_per_token=9.0))
  found = Evaluator(job, batches, None, None, None)._metrics(
    {"a": {"loss": 30.0, "weight": 10.0}, "b": {"loss": 90.0, "weight": 20.0}}
  )
  bits = {name: value * math.log(2) for name, value in found.items() if "bits" in name}
  assert bits == pytest.approx(
    {
      "eval_bits_per_byte": 120 / (10 * 2 + 20 * 5),
      "eval_bits_per_byte/a": 30 / (10 * 2),
      "eval_bits_per_byte/b": 90 / (20 * 5),
    }
  )
