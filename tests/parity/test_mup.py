"""muP with AdamW: on meshes as on one device in float64, resumed, and nothing more is sent."""

import pytest

from tests.helpers.jobs import make_job
from tests.parity.budgets import budget
from tests.parity.updates import TrainSteps, assert_equal

KEYS = {
  "model.base_width": 10,
  "optimizer.epsilon": 1e-2,  # so that a gradient of rounding errors alone does not count
  "optimizer.groups": ({"parameters": "*/up/*", "learning_rate": 0.01},),
}
RUNS = TrainSteps(KEYS, steps=3)


@pytest.mark.long
def test_a_mesh_trains_as_one_device_and_a_run_resumes_on_it(tmp_path):
  assert_equal(RUNS.trained("dp2_fsdp2_tp2"), RUNS.trained("single"))
  assert_equal(RUNS.resumed(tmp_path, "single", "dp2_fsdp2_tp2"), RUNS.trained("single"))


@pytest.mark.long
def test_nothing_more_is_sent():
  job, _, step = RUNS.compiled("dp2_fsdp2_tp2")
  assert step.sent() == budget(job, 8)


def test_moments_are_placed_as_their_parameters():
  job = make_job("dp2_fsdp2_tp2", "lm", **{"model.base_width": 10})
  placed = job.placements["optimizer"]
  moments = {name.partition("/mu/")[2]: p for name, p in placed.items() if "/mu/" in name}
  wanted = {name: p.spec for name, p in job.placements["parameters"].items()}
  assert {name: p.spec for name, p in moments.items()} == wanted
