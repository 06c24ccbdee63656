"""Optimizers whose state is not of the parameters' shapes, on meshes beside one device, resumed."""

import jax
import numpy as np
import pytest

from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job
from tests.parity.updates import TrainSteps, assert_equal

KEYS = {
  "optimizer.name": "adafactor",
  "optimizer.arguments": "min_dim_size_to_factor=4,momentum=0.9,dtype_momentum=float64",
  "optimizer.weight_decay": 0.0,
}
RUNS = TrainSteps(KEYS, steps=3)


@pytest.mark.parametrize("strategy", ["dp8", "fsdp8", "dp4_tp2"])
def test_factored_state_is_sharded_as_what_is_left_of_its_parameter(strategy):
  job = make_job(strategy, "lm", **KEYS)
  rows = job.placements["optimizer"]["optimizer/0/v_row/layers/mlp/up/kernel"]
  columns = job.placements["optimizer"]["optimizer/0/v_col/layers/mlp/up/kernel"]
  axes = {"dp8": (None, None), "fsdp8": ("fsdp", None), "dp4_tp2": (None, "tensor")}[strategy]
  assert (rows.letters, tuple(rows.spec)) == ("LD", (None, axes[0]))  # F, the largest, is gone
  assert (columns.letters, tuple(columns.spec)) == ("LF", (None, axes[1]))


# dp8 is not among them: under dp4_tp2 batches are split over `data` too.
@pytest.mark.parametrize("strategy", ["fsdp8", pytest.param("dp4_tp2", marks=pytest.mark.long)])
def test_adafactor_trains_as_on_one_device(strategy):
  assert_equal(RUNS.trained(strategy), RUNS.trained("single"))
  with jax.enable_x64(True):
    begun = named_leaves(jax.device_get(RUNS.first("single").params), "params/")
  assert any(not np.array_equal(RUNS.trained("single")[name], x) for name, x in begun.items())


def test_adafactor_is_saved_and_resumes_on_another_mesh(tmp_path):
  assert_equal(RUNS.resumed(tmp_path, "fsdp8", "dp4_tp2"), RUNS.trained("single"))
