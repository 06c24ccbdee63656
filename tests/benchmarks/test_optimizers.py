"""The comparison of optimizers: which runs it makes, what it keeps, and its page and picture."""

import math

import pytest
from absl import app

from benchmarks import optimizers
from benchmarks.optimizers import DOCS, Found, Results, Run, Steps, from_adamw, to_adamw
from benchmarks.timing import job_of
from tests.docs.pages import section
from tests.helpers.compiling import FAST
from training import splits

SMALL = {"model.model_size": 8, "data.global_batch_size": 16, "compiler_options": FAST}


@pytest.mark.parametrize(
  ("best", "wanted"),
  [
    (1.0, [1, 0.5, 2, 2**0.5]),  # then between the best and its better neighbour
    (8.0, [1, 0.5, 2, 4, 8, 16]),  # beyond the border
    (0.3, [1, 0.5, 2, 0.25, 0.125, 0.125**0.5]),
  ],
)
def test_learning_rates_are_tried_around_the_prior_and_beyond_the_border(best, wanted):
  losses = {}
  for rate in wanted:
    found = optimizers.next_rate(1.0, losses)
    assert found == pytest.approx(rate)
    losses[found] = abs(math.log2(found / best)) - (found == 2) * 0.1


def test_runs_are_made_once_and_kept(tmp_path):
  made = []

  def make(run):
    made.append(run)
    return {"validation": abs(math.log2(run.learning_rate / 8e-3)) + run.seed, "training": []}

  names = "adamw", "schedule_free_adamw"
  results = Results(tmp_path / "optimizers.json", make)
  found = {name: optimizers.found_of(name, results) for name in names}
  # Of each four trials, the other two seeds of 50 steps, three of 100 and of 200; AdamW's of 25.
  assert len(made) == len({*made}) == 2 * (4 + 2 + 3 + 3) + 3
  assert found["adamw"].losses[100] == {0: 0.0, 1: 1.0, 2: 2.0}
  again = Results(tmp_path / "optimizers.json")
  assert {name: optimizers.found_of(name, again) for name in names} == found
  with pytest.raises(app.UsageError, match=r"muon, 0\.008, 50 steps, seed 0 is not made"):
    optimizers.found_of("muon", again)


def test_a_run_is_one_at_its_learning_rate_and_a_diverged_one_is_infinite(monkeypatch):
  monkeypatch.setattr(optimizers, "MEAN_OF", 2)
  keys = {**SMALL, "optimizer.clip_norm": 0.0}
  losses = optimizers.losses_of(Run("adamw", 1e30, 2, 0), "mlp", **keys)
  assert losses == {"validation": math.inf, "training": []}
  keys |= {"optimizer.name": "adamw", "optimizer.learning_rate": 0.02, "training.steps": 4}
  job = job_of("mlp", keys)
  step, state, plain = job.compile_train_step().function, job.initial_state(), []
  batches = splits.open_data(job).train
  for number in range(4):
    state, metrics = step(state, batches.batch(number, job.batch_shardings))
    plain.append(float(metrics["loss"]))
  made = optimizers.losses_of(Run("adamw", 0.02, 4, 0), "mlp", **keys)
  assert made["training"] == pytest.approx([sum(plain[:2]) / 2, sum(plain[2:]) / 2], rel=1e-4)
  assert 0 < made["validation"] < 3  # log 10 is 2.3


def test_steps_are_interpolated_over_their_logarithm_and_never_beyond_the_budgets():
  losses = {50: 3.0, 200: 2.0}
  assert optimizers.steps_to(2.5, losses).value == pytest.approx(100)
  assert optimizers.steps_to(2.0, losses) == Steps(200)
  assert optimizers.steps_to(1.9, losses) == Steps(200, "more")
  assert optimizers.steps_to(3.1, losses) == Steps(50, "fewer")


def test_ratios_are_of_seeds_to_either_s_loss():
  adamw, faster, slower = (
    Found({}, losses, {}, [])
    for losses in (
      {50: {0: 3.0, 1: 3.2}, 200: {0: 2.0, 1: 2.4}},
      {50: {0: 2.5, 1: 2.8}, 200: {0: 1.5, 1: 2.0}},
      {50: {0: 3.5, 1: 3.6}, 200: {0: 2.5, 1: 2.8}},
    )
  )

  def ratios(function, *arguments):
    return [(pytest.approx(one.value), one.side) for one in function(*arguments)]

  assert ratios(to_adamw, faster, adamw, 200) == [(2.0, ""), (2.0, "")]
  assert ratios(to_adamw, slower, adamw, 200) == [(1.0, "fewer"), (1.0, "fewer")]
  assert ratios(to_adamw, faster, adamw, 50) == [(1.0, "more"), (1.0, "more")]
  assert ratios(from_adamw, faster, adamw, 50) == [(2.0, ""), (2.0, "")]
  assert ratios(from_adamw, slower, adamw, 200) == [(0.5, ""), (0.5, "")]


def test_the_page_and_the_picture_are_those_of_the_runs():
  results = Results(DOCS / "optimizers.json")
  found = {name: optimizers.found_of(name, results) for name in optimizers.SETTINGS}
  page = (DOCS / "optimizers.md").read_text()
  assert optimizers.page_text(found) == section(page, "## Optimizers beside AdamW")
  assert optimizers.picture(found) == (DOCS / optimizers.PICTURE).read_text()
