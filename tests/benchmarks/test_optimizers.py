"""The comparison of optimizers: which runs it makes, what it keeps, and its page and picture."""

import math
from xml.etree import ElementTree

import pytest

from benchmarks import optimizers
from benchmarks.optimizers import Bench, Found, Results, Run, Steps, from_adamw, to_adamw
from configs.keys import table
from runtime.devices import Devices
from tests.helpers.compiling import FAST
from training import setup, splits

NAMES = ("adamw", "schedule_free_adamw")
ONE = Devices("cpu", True, dict.fromkeys(table.section("mesh"), 1))
SMALL = {"model.model_size": 8, "data.global_batch_size": 16, "compiler_options": FAST}


def bowl(best):
  """Returns a function from learning rates to a loss that is least at one."""
  return lambda rate: abs(math.log2(rate / best))


@pytest.mark.parametrize(
  ("best", "wanted"),
  [
    (1.0, [1, 0.5, 2, 2**0.5]),  # then between the best and its better neighbour
    (8.0, [1, 0.5, 2, 4, 8, 16]),  # beyond the border
    (0.3, [1, 0.5, 2, 0.25, 0.125, 0.125**0.5]),
  ],
)
def test_learning_rates_are_tried_around_the_prior_and_beyond_the_border(best, wanted):
  losses, loss = {}, bowl(best)
  for rate in wanted:
    found = optimizers.next_rate(1.0, losses)
    assert found == pytest.approx(rate)
    losses[found] = loss(found) - (found == 2) * 0.1


@pytest.fixture
def toy(monkeypatch):
  """Sets one trial of two steps, and budgets of two and four steps with two seeds."""
  for name, value in {"TRIAL": 2, "TRIALS": 1, "MOST_TRIALS": 1, "BUDGETS": (2, 4)}.items():
    monkeypatch.setattr(optimizers, name, value)
  monkeypatch.setattr(optimizers, "SEEDS", (0, 1))
  monkeypatch.setattr(optimizers, "MEAN_OF", 2)
  monkeypatch.setattr(optimizers, "FEWEST", 1)


def test_runs_are_made_once_kept_and_written(toy, tmp_path, monkeypatch):
  bench = Bench(ONE, "mlp", **SMALL)
  results = Results(tmp_path / "optimizers.json")
  optimizers.make_all(bench, NAMES, results)
  # Of each: the trial; then the other seed of two steps, and two of four; AdamW's of one step.
  assert len(results.runs) == 2 * (1 + 1 + 2) + 2
  again = Results(tmp_path / "optimizers.json")
  assert again.runs == results.runs
  monkeypatch.setattr(Bench, "make", None)
  optimizers.make_all(bench, NAMES, again)
  for name in NAMES:
    found = optimizers.found_of(name, again)
    seeds = found.losses[4]
    assert seeds[0] != seeds[1]
    assert all(0 < loss < 3 for loss in seeds.values())  # log 10 is 2.3
    assert [len(curve) for curve in found.curves[4]] == [2, 2]
  written = tmp_path / "optimizers.md"
  written.write_text("# Optimizers\n\n## Optimizers beside AdamW\n\nstale\n\n## SOAP\n")
  optimizers.write(NAMES, again, tmp_path)
  page = written.read_text()
  assert page.startswith("# Optimizers\n")
  assert page.endswith("\n\n## SOAP\n")
  assert "| `schedule_free_adamw` |" in page
  assert "**Not all is measured yet**: the time of a step (" in page
  assert optimizers.left(["adamw", "muon"], again).startswith("trials of `muon`, the time of")
  ElementTree.fromstring((tmp_path / optimizers.PICTURE).read_text())


def test_a_run_is_one_at_its_learning_rate_and_a_diverged_one_is_infinite(toy):
  bench = Bench(ONE, "mlp", **SMALL, **{"optimizer.clip_norm": 0.0})
  losses = bench.make(Run("adamw", 1e30, 4, 0))
  assert losses == {"validation": math.inf, "training": []}
  job = setup.prepare(optimizers.config_of("mlp", "adamw", 0.02, 4, bench.overrides), ONE)
  step, state, plain = job.compile_train_step().function, job.initial_state(), []
  batches = splits.open_data(job).train
  for number in range(4):
    state, metrics = step(state, batches.batch(number, job.batch_shardings))
    plain.append(float(metrics["loss"]))
  made = bench.make(Run("adamw", 0.02, 4, 0))["training"]
  assert made == pytest.approx([sum(plain[:2]) / 2, sum(plain[2:]) / 2], rel=1e-4)


# ---- What follows from the losses ----


def found(losses, times=()):
  """Returns what was found of an optimizer, of budget -> seed -> loss."""
  return Found({0.5: 3.0, 1.0: math.inf}, 0.5, losses, {50: [[3.0, 2.5, 2.4]]}, times)


def test_steps_are_interpolated_over_their_logarithm_and_never_beyond_the_budgets():
  losses = {50: 3.0, 200: 2.0}
  assert optimizers.steps_to(2.5, losses).value == pytest.approx(100)
  assert optimizers.steps_to(2.0, losses) == Steps(200)
  assert optimizers.steps_to(1.9, losses) == Steps(200, "more")
  assert optimizers.steps_to(3.1, losses) == Steps(50, "fewer")


def test_ratios_are_of_seeds_to_either_s_loss():
  adamw = found({50: {0: 3.0, 1: 3.2}, 200: {0: 2.0, 1: 2.4}})
  faster = found({50: {0: 2.5, 1: 2.8}, 200: {0: 1.5, 1: 2.0}})
  slower = found({50: {0: 3.5, 1: 3.6}, 200: {0: 2.5, 1: 2.8}})

  def ratios(function, *arguments):
    return [(pytest.approx(one.value), one.side) for one in function(*arguments)]

  assert ratios(to_adamw, faster, adamw, 200) == [(2.0, ""), (2.0, "")]
  assert ratios(to_adamw, slower, adamw, 200) == [(1.0, "fewer"), (1.0, "fewer")]
  assert ratios(to_adamw, faster, adamw, 50) == [(1.0, "more"), (1.0, "more")]
  assert ratios(from_adamw, faster, adamw, 50) == [(2.0, ""), (2.0, "")]
  assert ratios(from_adamw, slower, adamw, 200) == [(0.5, ""), (0.5, "")]
  assert ratios(from_adamw, adamw, adamw, 200) == [(1.0, ""), (1.0, "")]


def test_the_page_and_the_picture_say_what_was_found():
  of_adamw = {50: {0: 3.0, 1: 3.2}, 200: {0: 2.0, 1: 2.4}}
  results = {
    "adamw": found(of_adamw, [1.0, 1.0]),
    "muon": found({50: {0: 2.5, 1: 2.8}, 200: {0: 1.5, 1: 2.0}}, [1.1, 1.3]),
  }
  page = optimizers.page_text(results, 50, (200, 50), 8)
  assert "| `adamw` | 0.5 | 3.100 (3.000 to 3.200) | 2.200 (2.000 to 2.400) |" in page
  assert "| `muon` | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) | 1.20 (1.10 to 1.30) |" in page
  assert "| `muon` | **0.5: 3.000**, 1: diverged |" in page
  svg = ElementTree.fromstring(optimizers.picture(results, 10))
  space = "{http://www.w3.org/2000/svg}"
  assert {"adamw", "muon"} < {text.text for text in svg.iter(f"{space}text")}
  assert optimizers.picture(results, 10) == optimizers.picture(results, 10)
