"""Whole runs with pipeline stages: bad steps, what evaluates and samples after them, and resuming.

One device computes in one process what the stages do; it says what each loss has to be.
"""

import math

import numpy as np
import pytest

from inference.request import Request
from inference.sampler import Sampler
from input_pipeline.batches import TrainingBatches
from input_pipeline.row_source import array_source
from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job, zipf
from tests.training import runs
from tests.training.runs import ROLL_BACK
from training import base_parameters

pytestmark = pytest.mark.long

BAD = 7  # a batch; step 8 is the first that takes it
BATCHES = runs.STEPS + 10
STAGES = {"mesh.stage": 2, "mesh.data": 2, "training.microbatches": 2}


def job(**keys):
  """Returns the small decoder, on one device unless the keys say otherwise."""
  given = {**runs.KEYS, "evaluation.every_steps": 10, "optimizer.warmup_steps": 3, **keys}
  return runs.quick(make_job("single", "lm", **given))


def source(poisoned=False):
  """Returns rows of tokens.

  Args:
    poisoned: whether a token of the bad batch's second microbatch has infinite weight.
  """
  random = np.random.default_rng(0)
  shape = runs.BATCH * BATCHES, 12
  arrays = {
    "tokens": zipf(random, 61, shape),
    "targets": zipf(random, 61, shape),
    "weights": np.ones(shape, np.float32),
    "segments": np.zeros(shape, np.int32),
  }
  if poisoned:
    order = TrainingBatches(array_source("rows", arrays), global_batch_size=runs.BATCH, seed=0)
    arrays["weights"][order.row_ids(BAD)[3], 5] = math.inf
  return array_source("rows", arrays)


def train(workdir, rows, prepared):
  """Trains on rows, and evaluates on those that are not poisoned."""
  return runs.train(workdir, rows, prepared=prepared, held_out=source())


@pytest.fixture(scope="module")
def told(tmp_path_factory):
  """Returns the workdir of a run with stages that was told to skip the bad batch."""
  workdir = tmp_path_factory.mktemp("told")
  train(workdir, source(), job(**STAGES, **{"data.skip_batches": (BAD,)}))
  return workdir


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
  """Returns the workdir of a run with stages that met it, and what the training returned."""
  workdir = tmp_path_factory.mktemp("rolled_back")
  end = train(workdir, source(poisoned=True), job(**STAGES, **ROLL_BACK))
  return workdir, end


def test_all_stages_go_back_and_skip_the_batch_to_the_bit(rolled_back, told):
  workdir, end = rolled_back
  [line] = runs.rollbacks(workdir)
  assert (line["rolled_back"], line["step"]) == (BAD + 1, 5)
  assert line["skipped_rows"] == [[BAD * runs.BATCH, (BAD + 1) * runs.BATCH]]
  runs.assert_same(workdir, told, job(**STAGES))  # parameters and moments of both stages
  kernel = named_leaves(end.state.params)["layers/mlp/up/kernel"]
  assert kernel.sharding.spec[0] == "stage"
  evaluated = [line["step"] for line in runs.numbers(workdir) if "eval_loss" in line]
  assert evaluated == [10, runs.STEPS]


def test_it_samples_after_it_as_one_device_does(rolled_back):
  request = Request((bytes([3, 5, 7]), bytes([44])), max_new_tokens=6, temperature=0.0)
  texts = []
  for prepared in (job(**STAGES), job()):
    _, params, _ = base_parameters.model_state(prepared, str(rolled_back[0]))
    texts.append(Sampler(prepared, request)(params, request))
  assert texts[0] == texts[1]
  assert any(texts[0])
