"""A ladder: the sizes of a family, which runs it has, and what a law is fitted to."""

import math

import pytest

from configs import single
from planning import ladder


@pytest.fixture(scope="module")
def family():
  config = single.get_config("lm")
  config.update_from_flattened_dict({"model.layers": 4, "model.kv_heads": 8})
  return ladder.Family(config)


def test_widths_layers_and_heads_are_in_proportion_and_parameters_those_that_multiply(family):
  size = family.of_width(64)
  assert (size.width, size.layers) == (64, 2)
  wanted = {"model.heads": "4", "model.kv_heads": "4", "model.head_size": "16"}
  wanted |= {"model.feedforward_size": "192", "model.base_width": "128", "model.layers": "2"}
  assert wanted.items() <= size.setting.items()
  attention, mlp, norms = 4 * 64 * 64, 3 * 64 * 192, 2 * 64
  assert size.parameters == 2 * (attention + mlp + norms) + 64 + 64 * 256  # without the embeddings
  assert family.of_width(32).layers == 2  # not 1: a single layer is another kind of model
  assert family.of_width(128).layers == 4
  assert family.of_width(128).setting["optimizer.learning_rate"] == "0.008"


def test_the_nearest_size_is_found_far_from_the_config_and_its_width_divides_well(family):
  for wanted in (5e4, 2e6, 3e8, 7e9):
    size = family.nearest(wanted)
    assert abs(math.log(size.parameters / wanted)) < (0.4 if wanted < 1e6 else 0.25)
  assert size.width % 128 == 0


def test_rungs_spend_the_same_compute_at_each_size_and_too_few_steps_are_left_out(family):
  sizes = [family.of_width(width) for width in (32, 64, 128)]
  found, left_out = ladder.rungs(sizes, [1e11, 4e11], tokens_per_step=512)
  assert left_out == 1  # width 128 at 1e11: 40 steps
  assert [one.size.width for one in found] == [32, 64, 32, 64, 128]
  for one in found:
    assert one.tokens == one.steps * 512
    assert 6 * one.size.parameters * one.tokens == pytest.approx(one.compute, rel=0.01)
  usual, _ = ladder.rungs(sizes, [], tokens_per_step=512)
  largest = usual[-1]
  assert largest.tokens / largest.size.parameters == pytest.approx(20, rel=0.01)


def test_a_law_is_fitted_to_the_best_learning_rate_of_each_size(family):
  rung = ladder.Rung(family.of_width(64), 1e11, 100, 51_200)
  runs = [
    ladder.Measured(f"{rate}{seed}", rung, {ladder.LEARNING_RATE: rate}, seed, loss)
    for rate, losses in {"0.001": (2.2, 2.3), "0.004": (2.0, 2.1), "0.03": (1.9, 7.0)}.items()
    for seed, loss in enumerate(losses)
  ]
  found = ladder.observations(runs, 1e6)
  assert [one.loss for one in found] == [2.0, 2.1]
  assert {one.learning_rate for one in found} == {0.004}
  assert found[0].unique_tokens == 1e6


def test_widths_that_are_too_few_or_cannot_be_are_refused(family):
  with pytest.raises(ValueError, match=r"at least three sizes; widths of this model are multiples"):
    family.widths(["32", "64"])
  with pytest.raises(ValueError, match="100 is not a multiple of 16"):
    family.widths(["32", "64", "100"])
  with pytest.raises(ValueError, match="--widths=16: a scaling law needs at least three"):
    family.widths([], most=1 / 16)
  assert family.widths([]) == [32, 48, 64, 96, 128]
  assert family.widths([], most=1 / 2) == [16, 32, 48, 64]
