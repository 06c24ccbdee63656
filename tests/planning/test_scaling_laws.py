"""Fits of scaling laws: published points and their coefficients, known laws, what is refused."""

import csv
import math
import pathlib
import re

import numpy as np
import pytest

from planning import scaling_laws
from planning.scaling_laws import Observation

PUBLISHED = pathlib.Path(__file__).with_name("published_losses")
LAW = scaling_laws.Law(E=0.9, A=20.0, alpha=0.35, B=300.0, beta=0.4)  # bits per byte


def published(name):
  """Returns the rows of a file, whose first lines name the source."""
  lines = (PUBLISHED / name).read_text().splitlines()
  rows = csv.DictReader(line for line in lines if not line.startswith("#"))
  return [{key: float(value) for key, value in row.items()} for row in rows]


def ladder(*, noise=0.0, seeds=1, unique_tokens=np.inf, random=None):
  """Returns runs of LAW, four sizes of three numbers of tokens each, with random losses."""
  random = random or np.random.default_rng(0)
  return [
    Observation(
      parameters=3e4 * 4**size,
      tokens=2e6 * 4**size * 3**length,
      loss=LAW.loss(3e4 * 4**size, 2e6 * 4**size * 3**length, unique_tokens)
      * np.exp(noise * random.normal()),
      seed=seed,
      unique_tokens=unique_tokens,
    )
    for size in range(4)
    for length in range(3)
    for seed in range(seeds)
  ]


# ------------------------------ published points ------------------------------


@pytest.fixture(scope="module")
def chinchilla():
  """Returns the runs of Chinchilla, without the five that arXiv:2404.10102 leaves out."""
  runs = [
    Observation(row["parameters"], row["flops"] / 6 / row["parameters"], row["loss"])
    for row in published("chinchilla.csv")
  ]
  return sorted(runs, key=lambda run: run.loss)[:-5]


def test_chinchillas_points_have_the_published_coefficients_and_standard_errors(chinchilla):
  """Those of arXiv:2404.10102, table 1, and of the notebook beside it (4,000 draws)."""
  assert len(chinchilla) == 240
  fit = scaling_laws.fit_law(chinchilla, draws=60)
  stated = {  # best fit, standard error, 95 % interval
    "A": (477.84, 124.5, (285.2, 743.6)),
    "B": (2143.86, 1293.3, (1042.4, 5810.3)),
    "E": (1.81724, 0.0257, (1.769, 1.871)),
    "alpha": (0.347313, 0.0154, (0.317, 0.373)),
    "beta": (0.367183, 0.0206, (0.331, 0.415)),
  }
  for name, (best, error, (low, high)) in stated.items():
    found = fit.coefficients[name]
    assert found.value == pytest.approx(best, rel=1e-3), name
    spread = np.std([getattr(draw, name) for draw in fit.draws])
    assert 0.7 < spread / error < 1.4, name
    assert low < found.low < found.value < found.high < high, name
  # The budget of Chinchilla, which was given 20 tokens for each parameter.
  best = scaling_laws.optimal_size(fit, 5.76e23)
  exponent = 1 / (fit.law.alpha + fit.law.beta)
  ratio = (fit.law.alpha * fit.law.A / fit.law.beta / fit.law.B) ** exponent
  closed = ratio * (5.76e23 / 6) ** (fit.law.beta * exponent)
  assert best.parameters.value == pytest.approx(closed, rel=1e-5)
  assert best.tokens.low < 20 * math.sqrt(5.76e23 / 120) < best.tokens.high
  assert best.prediction.times_largest == pytest.approx(5.76e23 / fit.largest_compute)
  assert not best.prediction.extrapolated
  assert scaling_laws.predict(fit, 1e13, 1e13).extrapolated


def test_another_implementation_fits_the_same_law_by_least_squares(chinchilla, monkeypatch):
  """Of these points below 1e21 FLOPs: github.com/Open-Athena/scaling-law-analysis, exp0."""
  monkeypatch.setattr(scaling_laws, "HUBER", 10.0)
  runs = [run for run in chinchilla if run.compute < 1e21]
  assert len(runs) == 217
  law = scaling_laws.fit_law(runs, draws=1).law
  found = (law.E, law.A / 1e6**law.alpha, law.B / 1e9**law.beta, law.alpha, law.beta)
  np.testing.assert_allclose(found, (1.8926, 4.0146, 1.0571, 0.3522, 0.4430), rtol=2e-3)


def test_the_law_of_runs_of_one_epoch_predicts_published_runs_of_several():
  """Those of arXiv:2305.16264; with the coefficients that its authors fit to C4 (untied)."""
  runs = [Observation(**row) for row in published("repeated.csv")]
  once = [run for run in runs if run.tokens <= run.unique_tokens * 1.01]
  law = scaling_laws.fit_law(once, draws=40)
  for name, stated in (("E", 1.878), ("alpha", 0.3348), ("beta", 0.3829)):
    assert law.coefficients[name].low < stated < law.coefficients[name].high, name

  def error(low, high, unique_tokens):
    those = [run for run in runs if low < run.tokens / run.unique_tokens <= high]
    assert len(those) > 15
    return np.median(
      [
        abs(math.log(law.law.loss(run.parameters, run.tokens, unique_tokens(run)) / run.loss))
        for run in those
      ]
    )

  assert error(1.01, 2, lambda run: run.unique_tokens) < 0.004
  assert error(2, 4.7, lambda run: run.unique_tokens) < 0.005
  assert error(4.7, 8, lambda run: run.unique_tokens) < 0.01
  assert error(4.7, 8, lambda _: np.inf) > 0.014


def test_the_best_learning_rate_and_batch_size_are_the_published_ones():
  """Those of Step Law (arXiv:2503.04715), up to a step of the rates and sizes that were tried."""
  runs = [Observation(**row) for row in published("step_law.csv")]
  rate = scaling_laws.fit_best(runs, "learning_rate")
  size = scaling_laws.fit_best(runs, "batch_size")
  assert len(rate.best) == len(size.best) == 17
  step = math.log(math.sqrt(2))
  for parameters, tokens in ((2.5e8, 1e10), (4e8, 4e10), (1e9, 1e11)):
    stated = 1.79 * parameters**-0.713 * tokens**0.307, 0.58 * tokens**0.571
    for law, value in zip((rate, size), stated, strict=True):
      found = law.at(parameters, tokens)
      assert abs(math.log(found.value / value)) < step
      assert found.high < 1.5 * found.low
  assert rate.exponents["tokens"].low < 0.307 < rate.exponents["tokens"].high


# ------------------------------ known laws ------------------------------


def test_the_coefficients_of_losses_without_noise_are_recovered():
  """Also where most of the tokens are repeated."""
  for unique_tokens in (np.inf, 1e7):
    fit = scaling_laws.fit_law(ladder(unique_tokens=unique_tokens), draws=2)
    found = [fit.coefficients[name].value for name in ("E", "A", "alpha", "B", "beta")]
    np.testing.assert_allclose(found, (0.9, 20, 0.35, 300, 0.4), rtol=0.02)


def test_intervals_hold_the_loss_of_larger_runs_about_as_often_as_they_say():
  """With noise of half a percent, and up to 64 times the compute of the largest run."""
  random = np.random.default_rng(1)
  held, halves, noises = [], [], []
  for _ in range(6):
    fit = scaling_laws.fit_law(ladder(noise=0.005, random=random), draws=20)
    noises.append(fit.noise)
    for factor in (0.03, 0.3, 1, 8):
      parameters, tokens = 2e6 * factor, 1e9 * factor
      loss = scaling_laws.predict(fit, parameters, tokens).loss
      log_error = math.log(LAW.loss(parameters, tokens) / loss.value) + 0.005 * random.normal()
      width = math.log((loss.high if log_error > 0 else loss.low) / loss.value)
      held.append(log_error / width < 1)
      halves.append(log_error / width < 0.5)
  assert np.mean(held) > 0.8
  assert np.mean(halves) < 0.9
  assert np.mean(noises) == pytest.approx(0.005, rel=0.15)


def test_settings_are_drawn_with_replacement_and_then_seeds_of_each():
  runs = ladder(seeds=3)
  draws = [
    scaling_laws._weights(runs, np.random.default_rng(seed)).reshape(12, 3) for seed in range(20)
  ]
  assert all(draw.sum() == 36 for draw in draws)
  assert all({*draw.sum(axis=1)} <= {*range(0, 37, 3)} for draw in draws)
  # Of 12 settings a third is left out by most draws, and of three seeds one by most settings.
  assert 0.25 < np.mean([draw.sum(axis=1) == 0 for draw in draws]) < 0.45
  drawn = np.concatenate([draw[draw.sum(axis=1) == 3] for draw in draws])
  assert 0.6 < np.mean(drawn.max(axis=1) > 1) < 0.95


def test_the_largest_runs_are_predicted_from_the_others_with_all_their_seeds():
  runs = ladder(noise=0.003, seeds=3)
  first, second = scaling_laws.held_out(runs, settings=2, draws=20)
  assert first.prediction.times_largest == pytest.approx(9)  # of the third largest
  assert second.prediction.times_largest == pytest.approx(3)
  assert first.seeds == 3
  assert abs(first.error) < 0.02
  assert first.inside
  worse = [*runs[:-3], *(Observation(run.parameters, run.tokens, 2.0) for run in runs[-3:])]
  [found] = scaling_laws.held_out(worse, draws=20)
  assert not found.inside
  assert found.measured == 2.0


@pytest.mark.parametrize("unique_tokens", [np.inf, 2e9])
def test_no_other_model_reaches_the_loss_of_the_one_for_serving_with_fewer_flops(unique_tokens):
  fit = scaling_laws.fit_law(ladder(), draws=2)
  budget, served = 1e18, 2e10
  alone = scaling_laws.optimal_size(fit, budget, unique_tokens=unique_tokens)
  best = scaling_laws.optimal_size(fit, budget, served_tokens=served, unique_tokens=unique_tokens)
  assert best.parameters.value < 0.8 * alone.parameters.value
  assert best.training_flops == budget
  # All models of this loss, by the law alone.
  loss = best.prediction.loss.value
  sizes = best.parameters.value * np.exp(np.linspace(-0.5, 0.5, 201))
  tokens = np.exp(np.linspace(math.log(1e8), math.log(1e12), 40_001))
  losses = fit.law.loss(sizes[:, None], tokens[None], unique_tokens)
  enough = tokens[np.argmax(losses <= loss, axis=1)]
  flops = np.where(losses[:, -1] <= loss, 6 * sizes * enough + 2 * sizes * served, np.inf)
  assert sizes[np.argmin(flops)] == pytest.approx(best.parameters.value, rel=0.05)
  total = best.training_flops + best.serving_flops
  assert total == pytest.approx(flops.min(), rel=1e-3)
  # And of the same training, none has a lower loss than the compute-optimal one.
  same = fit.law.loss(sizes, budget / 6 / sizes, unique_tokens)
  assert alone.prediction.loss.value <= same.min() * (1 + 1e-9)


def test_tokens_that_whole_batches_round_belong_to_one_size():
  runs = [
    Observation(
      parameters, round(1e6 / size) * size, 1 + math.log(size / 3e4) ** 2, batch_size=size
    )
    for parameters in (1e5, 4e5)
    for size in (8e3, 1.6e4, 3.2e4, 6.4e4, 1.28e5)
  ]
  assert len({run.tokens for run in runs}) == 3
  found = scaling_laws.best_values(runs, "batch_size")
  assert [(one.parameters, one.at_edge) for one in found] == [(1e5, False), (4e5, False)]
  assert found[0].value == pytest.approx(3e4, rel=0.02)


def test_a_best_value_at_the_edge_is_left_out_and_a_known_power_law_is_found():
  def run(parameters, tokens, rate):
    best = 0.3 * parameters**-0.5 * tokens**0.1
    return Observation(parameters, tokens, 1 + 0.1 * math.log(rate / best) ** 2, learning_rate=rate)

  sizes = [(1e5, 1e7), (4e5, 1e7), (1e6, 1e8), (3e6, 2e8), (1e9, 1e7)]
  runs = [run(*size, 2.0**-power) for size in sizes for power in range(5, 14)]
  law = scaling_laws.fit_best(runs, "learning_rate")
  [edge] = law.left_out
  assert (edge.parameters, edge.value) == (1e9, pytest.approx(2.0**-13))
  assert law.exponents["parameters"].value == pytest.approx(-0.5, abs=0.02)
  assert law.exponents["tokens"].value == pytest.approx(0.1, abs=0.02)
  assert law.at(1e7, 1e9).value == pytest.approx(0.3 * 1e7**-0.5 * 1e9**0.1, rel=0.05)
  with pytest.raises(
    ValueError, match=r"3 sizes have a best value.* a power law needs 4: sweep it"
  ):
    scaling_laws.fit_best([one for one in runs if one.parameters != 1e5], "learning_rate")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda runs: runs[:5], "5 settings, at least 8; 2 sizes of model, at least 3"),
    (lambda runs: [*runs, Observation(1e5, 1e6, np.nan)], "100000 parameters, 1e+06 tokens: loss"),
  ],
)
def test_runs_that_fix_no_law_are_refused(change, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    scaling_laws.fit_law(change(ladder()))
