"""Saving and restoring: bits, layouts, which steps are kept, what is refused."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tests.helpers.jobs import make_job
from tests.training.checkpointing.states import (
  CONFIG,
  RECORD,
  abstract,
  assert_bit_equal,
  contents,
  counting_target,
  counting_tree,
  random_tree,
  restored_parameters,
  save_counting,
)
from training.checkpointing import checkpointer as store
from training.checkpointing import reading
from training.checkpointing.checkpointer import Checkpointer, Retention

# ------------------------------ retention ------------------------------

STEPS = range(10, 80, 10)


def noted(best, values, over=None):
  """Returns the rules of a run that keeps one step and the best, with metrics by step."""
  retention = Retention(1, 0, best)
  for step, value in values.items():
    retention.note(step, {best: value, "other": 0.0}, over and over[step])
  return retention


def test_the_newest_and_every_nth():
  assert Retention(2, 0, "").kept(STEPS) == {60, 70}
  assert Retention(1, 30, "").kept(STEPS) == {30, 60, 70}
  assert Retention(9, 0, "").kept([20, 10]) == {10, 20}


def test_the_best_by_a_loss_is_the_lowest_and_by_an_accuracy_the_highest():
  values = {10: 0.5, 20: 0.1, 30: 0.9}
  assert noted("eval_loss", values).kept(STEPS) == {20, 70}
  assert noted("eval_accuracy", values).kept(STEPS) == {30, 70}


def test_of_equal_steps_the_newest_is_the_best():
  assert noted("eval_loss", {10: 0.5, 20: 0.5}).kept(STEPS) == {20, 70}


def test_a_step_without_a_finite_metric_is_not_ranked():
  retention = noted("eval_loss", {10: math.nan, 20: math.inf, 30: 2.0})
  retention.note(40, None)
  assert retention.kept(STEPS) == {30, 70}
  retention.note(30, None)  # saved again, without an evaluation
  assert retention.kept(STEPS) == {70}


def test_metrics_over_other_examples_are_not_compared():
  over = {10: {"split": "a"}, 20: {"split": "a"}, 30: {"split": "b"}}
  retention = noted("eval_loss", {10: 3.0, 20: 2.0, 30: 9.0}, over=over)
  assert retention.kept(STEPS) == {20, 30, 70}


# ------------------------------ saving and restoring ------------------------------


@pytest.fixture(scope="module")
def dp8():
  """Returns the small decoder on eight devices, parameters whole on each."""
  return make_job("dp8", "lm")


@pytest.fixture(scope="module")
def written(dp8, tmp_path_factory):
  """Returns a folder with step 7 of the dp8 job, and the tree in it."""
  folder, tree = tmp_path_factory.mktemp("written") / "checkpoints", random_tree(dp8, 7)
  with Checkpointer(folder) as checkpointer:
    checkpointer.save(7, tree, config=CONFIG, record=RECORD)
  return folder, tree


@pytest.mark.parametrize("strategy", ["fsdp8", "single"])
def test_another_layout_restores_every_leaf_bit_equal_where_it_belongs(strategy, written):
  folder, tree = written
  target = abstract(make_job(strategy, "lm"))
  with Checkpointer(folder, read_only=True) as checkpointer:
    step, restored = checkpointer.restore(target)
  assert step == 7
  assert_bit_equal(restored, tree)
  for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
    assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def test_saved_sharded_it_restores_on_one_device(dp8, tmp_path):
  tree = random_tree(make_job("dp2_fsdp2_tp2", "lm"), 3)
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(3, tree, config=CONFIG, record=RECORD)
    assert_bit_equal(checkpointer.restore(abstract(dp8))[1], tree)


def test_a_large_array_of_one_device_is_read_in_parts(tmp_path, monkeypatch):
  assert store.CHUNK_BYTES == 2**25
  monkeypatch.setattr(store, "CHUNK_BYTES", 2**15)
  array = jax.device_put(
    np.arange(24_000, dtype=np.float32).reshape(60, 400), SingleDeviceSharding(jax.devices()[0])
  )
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, {"x": array}, config={}, record={})
  stored = reading.stored_arrays(checkpointer.folder / "1")["x"]
  assert np.prod(stored.storage.chunk_shape) * 4 <= 2**15 < array.nbytes


def test_the_state_may_be_donated_at_once(tmp_path):
  add = jax.jit(lambda tree: jax.tree.map(lambda x: x + x.dtype.type(1), tree), donate_argnums=0)
  tree = counting_tree(1)
  with Checkpointer(tmp_path, keep=3) as checkpointer:
    for step in (1, 2, 3):
      blocked = checkpointer.save(step, tree, config=CONFIG, record=RECORD)
      assert blocked > 0
      tree = add(tree)
    for step in (1, 2, 3):
      assert_bit_equal(checkpointer.restore(counting_target(), step=step)[1], counting_tree(step))


def test_config_record_and_metrics_travel_along(tmp_path):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    checkpointer.save(1, counting_tree(1), config={"seed": 1}, record=RECORD)
    checkpointer.save(
      2, counting_tree(2), config={"seed": 2}, record=RECORD, metrics={"eval_loss": 0.1}
    )
    checkpointer.wait()
    assert checkpointer.verified(1).config == {"seed": 1}
    assert checkpointer.verified().config == {"seed": 2}
    assert checkpointer.verified().record == {**RECORD, "metrics": {"eval_loss": 0.1}}
    with pytest.raises(ValueError, match=r"has no step 5; it has 1, 2"):
      checkpointer.verified(5)


# ------------------------------ what is kept ------------------------------


def test_the_newest_every_nth_and_the_best_are_kept(tmp_path):
  losses = {10: 3.0, 20: 1.0, 40: 2.0, 50: float("nan")}
  few, many = {"data": "held out", "examples": 16}, {"data": "held out", "examples": 32}

  def save(steps):
    with Checkpointer(tmp_path, keep=2, keep_every_steps=30, keep_best="eval_loss") as checkpointer:
      for step in steps:
        metrics = {"eval_loss": losses[step]} if step in losses else None
        keys = {"metrics": metrics, "metrics_over": many if step == 40 else few}
        checkpointer.save(step, counting_tree(step), config=CONFIG, record=RECORD, **keys)
    return checkpointer.steps()

  assert save((10, 20, 30, 40)) == [20, 30, 40]
  # The metric is known after a new start; 40 is the best of those over its examples.
  assert save((50, 60, 70, 80)) == [20, 30, 40, 60, 70, 80]


def test_an_unknown_metric_and_numbers_below_their_least_are_refused(tmp_path):
  with (
    Checkpointer(tmp_path, keep_best="eval_los") as checkpointer,
    pytest.raises(ValueError, match=r"keep_best='eval_los': the metrics are eval_loss"),
  ):
    checkpointer.save(1, counting_tree(1), config=CONFIG, record=RECORD, metrics={"eval_loss": 1.0})
  with pytest.raises(ValueError, match=r"checkpoint.keep=0: at least 1"):
    Checkpointer(tmp_path, keep=0)


# ------------------------------ what is removed ------------------------------


def test_newer_steps_are_removed_and_may_be_saved_again(tmp_path):
  with Checkpointer(tmp_path, keep=9) as checkpointer:
    save_counting(checkpointer, 10, 20, 30)
    # The save of 40 is still under way.
    checkpointer.save(40, counting_tree(40), config=CONFIG, record=RECORD)
    checkpointer.remove_after(10)
    assert checkpointer.steps() == [10]
    assert [path.name for path in tmp_path.iterdir()] == ["10"]
    assert checkpointer.restore(counting_target())[0] == 10
    checkpointer.save(20, counting_tree(21), config=CONFIG, record=RECORD)
    checkpointer.remove_after(20)  # there is nothing newer
    assert_bit_equal(checkpointer.restore(counting_target(), step=10)[1], counting_tree(10))
    assert checkpointer.steps() == [10, 20]
    checkpointer.remove_after(0)
    assert checkpointer.steps() == []
    save_counting(checkpointer, 1)


def test_reading_only_removes_nothing(tmp_path):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    save_counting(checkpointer, 1, 2)
  with (
    Checkpointer(tmp_path, read_only=True) as checkpointer,
    pytest.raises(ValueError, match="reading only; nothing is removed"),
  ):
    checkpointer.remove_after(1)
  assert checkpointer.steps() == [1, 2]


# ------------------------------ what is refused ------------------------------


def test_every_array_that_differs_is_named_with_both_sides(tmp_path):
  target = counting_target()
  one = target["params"]["bias"].sharding
  target["params"]["bias"] = jax.ShapeDtypeStruct((7,), np.float16, sharding=one)
  target["params"]["down"] = jax.ShapeDtypeStruct((2, 3), np.float32, sharding=one)
  target["optimizer"] = (jax.ShapeDtypeStruct((24, 140), np.float32, sharding=one), [])
  with Checkpointer(tmp_path) as checkpointer:
    save_counting(checkpointer, 4)
    with pytest.raises(ValueError, match="does not fit") as refusal:
      checkpointer.restore(target)
  assert str(refusal.value).splitlines()[1:] == [
    "  optimizer/0: float32[24, 130] in the checkpoint, float32[24, 140] here",
    "  optimizer/1/0: int32[] in the checkpoint, absent here",
    "  params/bias: float32[7] in the checkpoint, float16[7] here",
    "  params/down: absent in the checkpoint, float32[2, 3] here",
  ]
  assert checkpointer.steps() == [4]  # nothing was put aside


def test_a_step_at_or_below_the_newest_is_not_lost_silently(tmp_path):
  with Checkpointer(tmp_path) as checkpointer:
    save_counting(checkpointer, 5)
    for step in (4, 5):
      with pytest.raises(ValueError, match=rf"step {step} is not saved: .* the steps 5,"):
        checkpointer.save(step, counting_tree(step), config=CONFIG, record=RECORD)


# ------------------------------ reading only ------------------------------


def test_reading_only_never_changes_a_byte(tmp_path):
  folder = tmp_path / "checkpoints"
  with Checkpointer(folder, keep=3) as checkpointer:
    save_counting(checkpointer, 1, 2, 3)
  (folder / "3" / "commit_success.txt").unlink()
  (folder / "4.saving.orbax-checkpoint-tmp").mkdir()
  before, said = contents(tmp_path), []
  with Checkpointer(folder, read_only=True, warn=said.append) as checkpointer:
    step, tree = checkpointer.restore(counting_target())
    checkpointer.verified()
    checkpointer.check()
  parameters = restored_parameters(folder, warn=said.append)
  assert step == parameters[0] == 2
  assert_bit_equal(tree, counting_tree(2))
  assert_bit_equal(parameters[1], counting_tree(2)["params"])
  assert len(said) == 2
  wanted = "commit_success.txt: missing); nothing is changed, and step 2 is used"
  assert all(wanted in line for line in said)
  assert contents(tmp_path) == before


def test_reading_only_makes_no_folder(tmp_path):
  with pytest.raises(ValueError, match=r"absent is not a folder"):
    Checkpointer(tmp_path / "absent", read_only=True)
  assert not list(tmp_path.iterdir())


FILES = {"tokenizer.json": b'{"version": "1.0"}', "chat_template.jinja": b"{{ messages }}"}


def test_each_step_has_a_copy_of_the_tokenizer(tmp_path):
  with Checkpointer(tmp_path, keep=2, tokenizer=FILES) as checkpointer:
    save_counting(checkpointer, 1, 2, 3)  # 1 is removed again
    assert checkpointer.steps() == [2, 3]
    assert checkpointer.restore(counting_target())[0] == 3
  for step in (2, 3):
    folder = tmp_path / str(step) / "tokenizer"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
  assert {path.name for path in tmp_path.iterdir()} == {"2", "3"}
  (tmp_path / "3" / "tokenizer" / "tokenizer.json").write_bytes(b'{"version": "1.1"}')
  (tmp_path / "2" / "tokenizer" / "notes.txt").write_text("somebody's")
  said = []
  with Checkpointer(tmp_path, keep=1, warn=said.append, tokenizer=FILES) as checkpointer:
    save_counting(checkpointer, 4, 5)
    assert checkpointer.steps() == [2, 5]
  assert (tmp_path / "2" / "tokenizer" / "notes.txt").exists()
  assert any("holds more than was saved there" in line for line in said)
