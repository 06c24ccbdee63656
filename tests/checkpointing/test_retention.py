"""Which steps are kept: the newest, every n-th, and the best by a metric."""

import math

import pytest

from checkpointing.retention import Retention

STEPS = range(10, 80, 10)


def noted(best, values, lower_is_better=None, over=None):
  """Returns the rules of a run that keeps one step and the best, with metrics by step."""
  retention = Retention(1, 0, best, lower_is_better)
  for step, value in values.items():
    retention.note(step, {best: value, "other": 0.0}, over and over[step])
  return retention


def test_the_newest_and_every_nth():
  assert Retention(2, 0, "", None).kept(STEPS) == {60, 70}
  assert Retention(1, 30, "", None).kept(STEPS) == {30, 60, 70}
  assert Retention(9, 0, "", None).kept([20, 10]) == {10, 20}


def test_the_best_by_a_loss_is_the_lowest_and_by_an_accuracy_the_highest():
  values = {10: 0.5, 20: 0.1, 30: 0.9}
  assert noted("eval_loss", values).kept(STEPS) == {20, 70}
  assert noted("eval_accuracy", values).kept(STEPS) == {30, 70}
  assert noted("eval_loss", values, lower_is_better=False).kept(STEPS) == {30, 70}


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


def test_a_missing_metric_names_those_that_there_are():
  with pytest.raises(ValueError, match=r"keep_best='eval_los': the metrics are eval_loss, other"):
    Retention(1, 0, "eval_los", None).note(10, {"eval_loss": 1.0, "other": 2.0})


def test_numbers_below_the_least_are_refused():
  with pytest.raises(ValueError, match=r"checkpoint\.keep=0: at least 1"):
    Retention(0, 0, "", None)
