"""Where a checkpoint is, and its parameters alone."""

import re

import pytest

from tests.training.checkpointing.states import (
  assert_bit_equal,
  counting_target,
  counting_tree,
  restored_parameters,
  save_counting,
)
from training.checkpointing.checkpointer import Checkpointer
from training.checkpointing.reading import (
  parse_location,
  restore_branches,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Returns a workdir with the steps 10 and 20; its name is a number."""
  workdir = tmp_path_factory.mktemp("runs") / "7"
  with Checkpointer(workdir / "checkpoints", keep=2) as checkpointer:
    save_counting(checkpointer, 10, 20)
  return workdir


@pytest.mark.parametrize(
  ("text", "step"),
  [("", None), ("checkpoints", None), ("10", 10), ("checkpoints/20", 20), ("checkpoints/", None)],
)
def test_a_location_is_a_workdir_or_its_checkpoints_and_may_name_a_step(text, step, run):
  assert parse_location(f"{run}/{text}") == (run / "checkpoints", step)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("30", "checkpoints has no step 30; it has 10, 20"),
    ("checkpoints/5", "checkpoints has no step 5; it has 10, 20"),
    ("nothing", "nothing is not a folder; give the workdir of a run"),
    ("..", "has no checkpoints; give the workdir of a run"),
  ],
)
def test_a_wrong_location_is_refused_with_the_fix(text, message, run):
  with pytest.raises(ValueError, match=re.escape(message)):
    parse_location(f"{run}/{text}")


def test_parameters_alone_are_restored_whatever_the_optimizer(run):
  folder, _ = parse_location(str(run))
  for wanted, step in ((20, None), (10, 10)):
    found, params = restored_parameters(folder, step)
    assert found == wanted
    assert_bit_equal(params, counting_tree(wanted)["params"])
  with pytest.raises(ValueError, match=r"has no step 15; it has 10, 20"):
    restored_parameters(folder, 15)


def test_variables_that_a_checkpoint_lacks_are_refused(run):
  folder, _ = parse_location(str(run))
  target = counting_target()
  target = {"params": target["params"], "variables": {"mean": target["params"]["bias"]}}
  with pytest.raises(ValueError, match=r"20 does not fit \(1 array differs\)") as refusal:
    restore_branches(folder, lambda _: target)
  assert "variables/mean: absent in the checkpoint, float32[7] here" in str(refusal.value)
