"""The verb `forecast`: its budgets, its runs, what it refuses and says."""

import json
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import threadpoolctl

from commands import flags, forecast, forecast_target
from commands.forecast_target import Target
from planning import ladder, scaling_laws
from reports import forecast_report

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ("configs/single:lm", "model.layers=4", "model.kv_heads=8", "data.global_batch_size=8")


@pytest.fixture
def parsed(parse):
  """Returns a function that parses the command line of a forecast."""
  return lambda *words: parse("forecast", *CONFIG, *words)


@pytest.mark.parametrize(
  ("text", "price", "unit", "amount"),
  [
    ("$2,000 on v6e-64", "v6e=2.7", "money", 2000),
    ("€3k on v5p-128", "4.2", "money", 3000),
    ("500 chip-hours on h100:8", None, "chip-hours", 500),
    ("1.5e3 gpu hours on h100:8", None, "chip-hours", 1500),
    ("20B tokens on v6e-64", None, "tokens", 20e9),
    ("900000 tokens", None, "tokens", 9e5),
  ],
)
def test_budgets(parsed, text, price, unit, amount):
  parsed(f"--budget={text}", *([f"--price={price}"] if price else []))
  found = forecast_target.read_budget()
  assert (found.unit, found.amount) == (unit, amount)
  if unit == "money":
    assert found.seconds == 3600 * amount / found.price / found.chips
    assert found.chips == 64  # v5p's 128 are TensorCores


@pytest.mark.parametrize(
  ("words", "why"),
  [
    ((), "forecast: what is to be spent? Give --budget='$2000 on v6e-64'"),
    (("--budget=lots",), "--budget='lots' is none of '$2000 on v6e-64'"),
    (("--budget=2000 on v6e-64",), "is none of"),
    (("--budget=$2000 tokens on v6e-64",), "is none of"),
    (("--budget=0 tokens",), "is none of"),
    (("--budget=$2.0.0 on v6e-64",), "is none of"),
    (("--budget=$2000",), "on what? For example, $2000 on v6e-64"),
    (("--budget=$2000 on v6e-64",), "what does an hour of a chip cost? Give --price=v6e=2.7"),
    (("--budget=$2000 on v6e-65",), "there is no slice of 65 chips"),
    (("--budget=1e6 tokens", "--price=2"), "--price goes with a topology"),
    (("--budget=1e6 tokens", "--flops=1e11,x"), "--flops: 'x' is no number above 0"),
    (
      ("--budget=1e6 tokens", "--flops=1e6"),
      "0 pairs of a width and its tokens have at least 100 steps, and a scaling law needs",
    ),
    (("--budget=1e6 tokens", "--axes=model.layers=1,2"), "model.layers follows from --widths"),
    (("--budget=1e6 tokens", "training.tokens=5"), "training.tokens: each run of a ladder"),
    (("--budget=1e6 tokens", "--widths=32,64"), "at least three sizes"),
  ],
)
def test_what_cannot_be_meant_is_refused(parsed, words, why):
  parsed(*words)
  with pytest.raises(ValueError, match=re.escape(why)):
    forecast._ladder(forecast_target.read_budget())


def test_runs_are_named_by_what_differs_and_keep_what_the_command_line_sets(parsed):
  parsed(
    *(
      "--budget=1e6 tokens",
      "--widths=32,48,64",
      "--flops=1e11,2e11,4e11",
      "evaluation.final_steps=9",
    ),
    "--axes=seed=0,1;optimizer.beta_2=0.99",
  )
  found = forecast._ladder(forecast_target.read_budget())
  assert len(found.entries) == 18
  first = found.entries[0]
  assert first.name == "model_size-32_steps-465_seed-0"
  assert first.setting["optimizer.beta_2"] == "0.99"
  assert first.setting["evaluation.every_steps"] == "0"
  assert "evaluation.final_steps" not in first.setting  # the command line's holds
  assert found.unique_tokens > 1e6


LAW = scaling_laws.Law(E=0.6, A=60.0, alpha=0.33, B=150.0, beta=0.33)


def parts_of(targets, fit, measured, budget):
  """Returns what forecast.json has."""
  observed = ladder.observations(measured, 1e7)
  return {
    **{"command": "python main.py forecast <it>", "title": "single_lm", "budget": budget},
    "currency": "$",
    **{"unique_tokens": 1e7, "nats_per_bit": 0.7},
    "runs": [forecast._as_json(one, fit, 1e7) for one in measured],
    **forecast._fit_as_json(fit, observed),
    **forecast._best_values(measured, targets),
    "targets": [one.as_json() for one in targets],
  }


def test_text_and_page_say_interval_error_repetition_and_extrapolation(parsed, monkeypatch):
  monkeypatch.setattr(scaling_laws, "STARTS", 4)
  parsed("--budget=1e6 tokens")
  sizes = [
    ladder.Size(width, 2, 12 * width * width, {"model.model_size": str(width)})
    for width in (32, 48, 64, 96)
  ]
  rungs, _ = ladder.rungs(sizes, [9e10, 2e11, 5e11], 512)
  measured = [
    ladder.Measured(
      f"run{n}",
      rung,
      {},
      0,
      LAW.loss(rung.size.parameters, rung.tokens) * (1 + 0.002 * (-1) ** n),
    )
    for n, rung in enumerate(rungs)
  ]
  fit = scaling_laws.fit_law(ladder.observations(measured, 1e7), draws=20)
  near = forecast_target._predicted(fit, "the config's model", sizes[-1], 4e6, 1e7)
  far = forecast_target._predicted(fit, "far", sizes[-1], 1e9, 1e7)
  with threadpoolctl.threadpool_limits(1):
    parts = parts_of([near, far], fit, measured, "4e6 tokens")
  json.dumps(parts, allow_nan=False)
  said = forecast_report.text(parts)
  assert "the largest runs, predicted from the others:" in said
  last_rung = [rung for rung in rungs if rung.compute == 5e11]
  assert len(last_rung) == 4 <= len(rungs) - scaling_laws.LEAST_SETTINGS
  assert said.count(" the interval\n") == len(last_rung)
  assert "ALL TOO" not in said
  held_out = [{**one, "error": -0.013} for one in parts["held_out"]]
  assert "ALL TOO LOW, by 1.3 % on average" in forecast_report.text({**parts, "held_out": held_out})
  held_out[0]["error"] = 0.001
  assert "ALL TOO" not in forecast_report.text({**parts, "held_out": held_out})
  loss = parts["targets"][0]["bits_per_byte"]
  assert loss["low"] < loss["value"] < loss["high"]
  assert f"bits per byte {loss['value']:.3f} ({loss['low']:.3f} to" in said
  assert f"loss {0.7 * loss['value']:.3f} (" in said
  assert "EXTRAPOLATED" in said.partition("far, for")[2]
  assert "EXTRAPOLATED" not in said.partition("far, for")[0]
  assert "the data are seen 100 times, which is worth" in said
  assert re.search(r"train it: python \S+ configs/single:lm .* training.steps=\d+", said)
  page = forecast_report.html(parts)
  assert "&lt;it&gt;" in page
  assert page.count('class="lead bad"') == 1
  assert "<svg" in page
  assert "run0" in page


def test_time_buys_the_best_size_at_the_speed_that_a_search_finds(parsed, monkeypatch):
  """The law's optimum of FLOPs in closed form: C alpha A / N^alpha = C beta B / D^beta."""
  parsed("--budget=$100 on v6e-64", "--price=1")
  fit = scaling_laws.Fit(
    LAW, (LAW,) * 10, (scaling_laws.Observation(1e5, 1e6, 2.0),), np.array([0.01, -0.01]), 5
  )
  family = ladder.Family(flags.CONFIG.value)
  speed = 0.2  # of the peak, whatever the size

  def searched(target, budget, axes=()):
    del axes

    class Best:
      seconds_per_token = 6 * target.size.parameters / (speed * budget.peak)

    return type("Found", (), {"best": Best, "topology": "v6e:8x8"})

  def planned(target, budget):
    steps, tokens = 1000, target.prediction.tokens
    step = tokens / steps * searched(target, budget).best.seconds_per_token
    plan = {"step_seconds": {"low": step, "expected": step, "high": step}, "steps": steps}
    plan |= {"token_budget": tokens, "fits": True, "nodes": 16, "state_bytes": 1e6}
    plan |= {"node_host_bandwidth": 1e11}
    return forecast_target._with_plan(target, budget, plan)

  monkeypatch.setattr(forecast_target, "_searched", searched)
  monkeypatch.setattr(forecast_target, "_planned", planned)
  budget = forecast_target.read_budget()
  best, cheap = forecast_target.of_budget(fit, family, budget, math.inf)
  flops = speed * budget.peak * budget.seconds
  wanted = (LAW.A / LAW.B) ** (1 / 0.66) * math.sqrt(flops / 6)
  assert best.parameters.value == pytest.approx(wanted, rel=1e-3)
  assert best.size.parameters == pytest.approx(wanted, rel=0.15)
  assert 6 * best.size.parameters * best.prediction.tokens == pytest.approx(flops, rel=0.05)
  assert best.planned["seconds"] == pytest.approx(budget.seconds, rel=0.03)
  assert best.planned["cost"] == pytest.approx(100, rel=0.03)
  assert cheap.size.parameters < best.size.parameters
  assert cheap.prediction.tokens > best.prediction.tokens
  assert cheap.served == best.prediction.tokens


def test_a_target_that_fits_nowhere_is_said_to():
  size = ladder.Size(64, 2, 10_000, {})
  prediction = scaling_laws.Prediction(1e4, 1e6, 1e6, scaling_laws.Interval(2.0, 1.9, 2.1), 3.0)
  target = Target("compute-optimal", size, prediction, math.inf)
  found = type("Found", (), {"topology": "v6e:1x1", "nearest": [({"mesh.fsdp": 8}, "v6e:2x4", 9)]})
  refused = forecast_target._refused(target, found)
  assert not refused.fits
  assert refused.planned["refused"] == (
    "no setting fits on v6e:1x1; these would: --config.mesh.fsdp=8 on v6e:2x4"
  )


@pytest.mark.long
def test_a_ladder_is_trained_once_and_forecasts(tmp_path):
  folder = tmp_path / "forecast"
  words = [*CONFIG, "optimizer.learning_rate=0.002", "data.sequence_length=32"]
  words += ["evaluation.final_steps=4", "metrics.report=False", "metrics.tensorboard=False"]
  words += [
    "--widths=16,32,48",
    "--flops=1.2e10,1.8e10,2.4e10",
    "--budget=100000 tokens",
    "--parallel=2",
  ]
  command = [sys.executable, "main.py", "forecast", *words, f"--workdir={folder}"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  found = json.loads((folder / "forecast.json").read_text())
  assert len(found["runs"]) == 9
  assert found["targets"][0]["width"] == 128
  assert (folder / "forecast.html").exists()
  files = [*folder.glob("model_size*/metrics.jsonl"), folder / "coordcheck.json"]
  before = [file.stat().st_mtime_ns for file in files]
  again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert again.returncode == 0, again.stdout + again.stderr
  assert [file.stat().st_mtime_ns for file in files] == before
  assert json.loads((folder / "forecast.json").read_text())["targets"] == found["targets"]
