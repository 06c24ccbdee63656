"""Evaluations: how much they take, what checkpoints are compared by, and numbers that are bad."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest
from etils import epath
from jax.sharding import SingleDeviceSharding

from input_pipeline.batches import EvaluationBatches
from input_pipeline.mixture import combine
from input_pipeline.row_source import array_source
from input_pipeline.source import Part
from processes.preemption import StopRequest
from tests.training import runs
from tests.training.runs import BATCH, STEPS, saved, source, train
from training.bad_steps import TrainingStoppedError
from training.checkpointing import integrity
from training.checkpointing.checkpointer import Checkpointer
from training.evaluation import Evaluator, _Taken

PARTS = {"evaluation.every_steps": 5, "evaluation.steps": 2}


def records(workdir):
  """Returns step -> the record of its checkpoint."""
  with Checkpointer(epath.Path(workdir) / integrity.FOLDER, read_only=True) as checkpoints:
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


def test_a_step_whose_interrupted_evaluation_turns_out_bad_is_left(tmp_path):
  spoiled, stop = source({9: HUGE}), StopRequest()
  keys = {**PLAIN, **runs.ROLL_BACK}

  def read(indices):  # the stop comes while the evaluation waits for its first batch
    stop.request("SIGTERM")
    return source().read(indices)

  held_out = dataclasses.replace(source(), read=read)
  assert train(tmp_path / "run", spoiled, held_out=held_out, stop=stop, **keys).stopped
  assert saved(tmp_path / "run")[-1] == 10, "nobody knows yet that it is bad"
  train(tmp_path / "run", spoiled, **keys)
  [line] = runs.rollbacks(tmp_path / "run")
  assert (line["rolled_back"], line["step"]) == (10, 5)
  train(tmp_path / "told", source(), **keys, **{"data.skip_batches": (9,)})
  runs.assert_same(tmp_path / "run", tmp_path / "told", runs.job(**PLAIN))


def test_an_interrupted_last_evaluation_is_made_up(tmp_path, both):
  stop, read = StopRequest(), source().read
  keys = {**PARTS, "checkpoint.keep_best": "eval_loss", "evaluation.final_steps": 0}
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


# ------------------------------ a sample of the split ------------------------------

ROWS, SAMPLED = 4096, 16  # rows of a split, and batches of a sample


def evaluator(split):
  """Returns an evaluator of a split whose rows say their loss."""
  device = SingleDeviceSharding(jax.devices()[0])
  job = types.SimpleNamespace(
    config=types.SimpleNamespace(task="causal_lm"),
    batch_shardings=dict.fromkeys(split.fields, device),
  )

  def step(params, batch):
    del params
    losses, weights = (np.asarray(batch[key], np.float64) for key in ("losses", "weights"))
    return {"loss": (losses * weights).sum(), "weight": weights.sum()}

  watch = types.SimpleNamespace(at=lambda *_, **__: None)
  lockstep = types.SimpleNamespace(enter=lambda: True, stopping=False)
  batches = EvaluationBatches(split, global_batch_size=2 * BATCH)
  return Evaluator(job, batches, step, watch, lockstep)


def split_of(losses, weights=None):
  weights = np.ones(len(losses)) if weights is None else weights
  arrays = {"losses": losses.astype(np.float32), "weights": weights.astype(np.float32)}
  return array_source("rows", arrays)


def test_a_sample_of_a_split_that_grows_harder_agrees_with_the_whole():
  random = np.random.default_rng(1)
  losses = np.linspace(1, 3, ROWS) + random.normal(0, 0.1, ROWS)
  weights = random.integers(1, 20, ROWS)  # as of conversations, of which a share is trained on
  evaluate = evaluator(split_of(losses, weights))
  whole, sample = evaluate(None), evaluate(None, steps=SAMPLED)
  assert whole.metrics["eval_loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-6)
  assert (whole.errors, whole.line()["eval_share"]) == ({}, 1.0)
  assert not [key for key in whole.line() if "stderr" in key]
  error = sample.errors["eval_loss"]
  taken = SAMPLED * 2 * BATCH
  assert 0.5 < error / (np.std(losses) / math.sqrt(taken)) < 2
  assert abs(sample.metrics["eval_loss"] - whole.metrics["eval_loss"]) < 3 * error
  first = np.average(losses[:taken], weights=weights[:taken])
  assert abs(first - whole.metrics["eval_loss"]) > 20 * error, "the first rows are no sample"
  line = sample.line()
  assert line["eval_loss_stderr"] == error
  assert line["eval_bits_per_byte_stderr"] == pytest.approx(error / math.log(2), rel=1e-12)
  assert (line["eval_examples"], line["eval_share"]) == (taken, taken / ROWS)
  assert sample.text(7).startswith(
    f"evaluation after step 7 (256 of 4,096 examples, drawn at random): eval_loss "
    f"{line['eval_loss']:.4f} ± {error:.4f}  eval_bits_per_byte "
  )
  assert whole.text(7) == (
    f"evaluation after step 7 (the whole split): eval_loss {whole.metrics['eval_loss']:.4f}  "
    f"eval_bits_per_byte {whole.metrics['eval_bits_per_byte']:.4f}"
  )


def test_the_standard_error_is_that_of_means_drawn_without_replacement():
  losses = np.random.default_rng(2).normal(2, 1, ROWS)
  evaluate = evaluator(split_of(losses))
  rows = [evaluate.batches.row_ids(i) for i in range(SAMPLED)]
  means = losses.astype(np.float32)[np.array(rows)].mean(axis=1, dtype=np.float64)
  left = 1 - SAMPLED * 2 * BATCH / ROWS
  expected = math.sqrt(left * means.var(ddof=1) / SAMPLED)
  assert evaluate(None, steps=SAMPLED).errors["eval_loss"] == pytest.approx(expected, rel=1e-9)
  # And it is how far samples of half of a split are off: other rows take the places drawn.
  random, small, found = np.random.default_rng(3), np.arange(16 * 2 * BATCH) / 100, []
  for _ in range(100):
    sample = evaluator(split_of(random.permutation(small)))(None, steps=8)
    found.append((sample.metrics["eval_loss"] - small.mean(), sample.errors["eval_loss"]))
  off, errors = np.array(found).T
  assert np.mean(errors**2) / np.mean(off**2) == pytest.approx(1, abs=0.3)


def test_a_split_no_larger_than_the_sample_is_taken_whole_and_one_batch_has_no_error():
  losses = np.arange(5 * BATCH) / 10  # two batches and a half
  evaluate = evaluator(split_of(losses))
  for steps in (3, 8):
    found = evaluate(None, steps=steps)
    assert found.metrics["eval_loss"] == pytest.approx(losses.mean(), rel=1e-6)
    assert (found.errors, found.examples) == ({}, len(losses))
    assert "(the whole split)" in found.text(1)
  assert evaluate(None, steps=1).errors == {}
  assert evaluate(None, steps=2).errors["eval_loss"] > 0


def test_a_sample_of_a_mixture_weighs_each_source_by_its_rows():
  sizes = {"web": 40 * BATCH, "code": 4 * BATCH, "books": BATCH}
  parts = {
    name: split_of(np.full(rows, 1.0 + number)) for number, (name, rows) in enumerate(sizes.items())
  }
  evaluate = evaluator(combine("mixture", parts))
  expected = sum((1 + number) * rows for number, rows in enumerate(sizes.values()))
  expected /= sum(sizes.values())
  sample = evaluate(None, steps=2)
  for found in (evaluate(None), sample):
    assert found.metrics["eval_loss"] == pytest.approx(expected, rel=1e-12)
    by_source = [found.metrics[f"eval_loss/{name}"] for name in sizes]
    assert by_source == pytest.approx([1, 2, 3])
  assert sample.errors == pytest.approx(dict.fromkeys(sample.metrics, 0), abs=1e-7)
  assert "eval_loss_stderr/web" in sample.line()
  # With noise in one source the others' estimates stay certain.
  noisy = split_of(np.random.default_rng(4).normal(1, 1, sizes["web"]))
  errors = evaluator(combine("mixture", {**parts, "web": noisy}))(None, steps=2).errors
  assert errors["eval_loss/web"] > errors["eval_loss"] > 0.1
  assert errors["eval_loss/code"] < 1e-7


def test_bits_per_byte_of_a_mixture_count_the_bytes_of_each_source():
  parts = (Part("a", 4, 40, bytes_per_token=2.0), Part("b", 4, 40, bytes_per_token=5.0))
  job = types.SimpleNamespace(config=types.SimpleNamespace(task="causal_lm"))
  batches = types.SimpleNamespace(source=types.SimpleNamespace(parts=parts, bytes_per_token=9.0))
  found = Evaluator(job, batches, None, None, None)._metrics(
    {"a": _Taken(4, {"loss": 30.0, "weight": 10.0}), "b": _Taken(4, {"loss": 90.0, "weight": 20.0})}
  )
  bits = {name: value * math.log(2) for name, value in found.items() if "bits" in name}
  assert bits == pytest.approx(
    {
      "eval_bits_per_byte": 120 / (10 * 2 + 20 * 5),
      "eval_bits_per_byte/a": 30 / (10 * 2),
      "eval_bits_per_byte/b": 90 / (20 * 5),
    }
  )
