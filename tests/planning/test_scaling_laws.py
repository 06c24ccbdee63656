"""Fits of scaling laws: known coefficients are recovered, bad input is refused."""

import numpy as np
import pytest

from planning import scaling_laws

LAW = scaling_laws.Law(E=0.9, A=20.0, alpha=0.35, B=300.0, beta=0.4)  # bits per byte


def ladder(*, noise=0.0, seeds=1, unique_tokens=np.inf, random=None):
  """Returns 12 small runs of LAW (four sizes, three numbers of tokens each), with random losses."""
  random = random or np.random.default_rng(0)
  return [
    scaling_laws.Observation(
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


def test_the_coefficients_of_losses_without_noise_are_recovered():
  """Also where most of the tokens are repeated."""
  for unique_tokens in (np.inf, 1e7):
    fit = scaling_laws.fit_law(ladder(unique_tokens=unique_tokens), draws=2)
    found = [fit.coefficients[name].value for name in ("E", "A", "alpha", "B", "beta")]
    np.testing.assert_allclose(found, (0.9, 20, 0.35, 300, 0.4), rtol=0.02)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda runs: runs[:5], "5 settings, at least 6; 2 sizes of model, at least 3"),
    (lambda runs: [*runs, scaling_laws.Observation(1e5, 1e6, np.nan)], "1e\\+06 tokens: loss nan"),
  ],
)
def test_runs_that_fix_no_law_are_refused(change, message):
  """With what is lacking."""
  with pytest.raises(ValueError, match=message):
    scaling_laws.fit_law(change(ladder()))
