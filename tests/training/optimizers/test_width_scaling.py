"""muP's learning rates: each parameter's update next to NumPy's at the rate of its kind."""

import functools

import numpy as np
import pytest

from configs import base
from configs.schema import finalize
from models.mup import Growth, Kind
from partitioning.parallel.matrix_groups import Matrix
from partitioning.rules import named_leaves
from tests.helpers.jobs import SMALL
from tests.training.test_optimizer import CONSTANT, updates_of
from training.optimizers import build, groups
from training.optimizers.build import make_optimizer
from training.specs import resolve
from training.step import make_program

RATE, RATIO = 2e-3, 4  # the recipe's learning rate; the model's width over the base width
BASE = {"model.base_width": 10}
HIDDEN = ("layer_2/kernel", "layer_3/kernel")
STEPS = 2
LION = {"optimizer.name": "lion", "optimizer.learning_rate": RATE}


@functools.cache
def shapes(recipe):
  return make_program(resolve(config_of("adamw", recipe))).params


def config_of(name, recipe="mlp", /, **overrides):
  config = base.get_config(recipe)
  keys = {**SMALL[recipe], **CONSTANT, "optimizer.name": name, **overrides}
  config.update_from_flattened_dict(keys)
  return finalize.finalize(config, "cpu")


def nested(recipe, seed):
  """Returns random arrays in the shape of a recipe's parameters."""
  random = np.random.default_rng(seed)

  def drawn(tree):
    if isinstance(tree, dict):
      return {key: drawn(value) for key, value in tree.items()}
    return random.standard_normal(tree.shape).astype(np.float32)

  return drawn(shapes(recipe))


def updates(name, recipe="mlp", /, **overrides):
  """Returns, by parameter: its value, its gradients, and the updates of the steps."""
  config = config_of(name, recipe, **overrides)
  params, steps = nested(recipe, 0), [nested(recipe, 1 + i) for i in range(STEPS)]
  found = updates_of(make_optimizer(resolve(config).optimizer, params), params, steps)
  trees = [named_leaves(tree) for tree in (params, *steps, *found)]
  return {
    name: (trees[0][name], [t[name] for t in trees[1:-STEPS]], [t[name] for t in trees[-STEPS:]])
    for name in trees[0]
  }


def adamw(value, gradients, rate, epsilon, taken, b1=0.9, b2=0.95):
  """Returns AdamW's updates; a step takes `taken` of the value off it."""
  first = second = 0.0
  for count, gradient in enumerate(gradients, start=1):
    first = b1 * first + (1 - b1) * gradient
    second = b2 * second + (1 - b2) * gradient**2
    step = (first / (1 - b1**count)) / (np.sqrt(second / (1 - b2**count)) + epsilon)
    yield -rate * step - taken * value


def kind_of(name):
  if name in HIDDEN:
    return "hidden"
  return {"layer_4/kernel": "output", "layer_4/bias": "finite"}.get(name, "input")


@pytest.mark.parametrize("independent", [False, True])
def test_adamw_s_rate_of_hidden_matrices_falls_and_what_decays_does_not(independent):
  keys = {"optimizer.epsilon": 0.1, "optimizer.weight_decay": 0.3}
  keys["optimizer.independent_weight_decay"] = independent
  for name, (value, gradients, found) in updates("adamw", **BASE, **keys).items():
    rate = RATE / RATIO if name in HIDDEN else RATE
    epsilon = 0.1 if name == "layer_4/bias" else 0.1 / RATIO
    taken = 0.0 if name.endswith("bias") else 0.3 if independent else 0.3 * RATE
    for ours, wanted in zip(found, adamw(value, gradients, rate, epsilon, taken), strict=True):
      np.testing.assert_allclose(ours, wanted, rtol=2e-4, atol=1e-7, err_msg=name)


def test_sgd_s_rates_grow_with_the_side_that_is_a_width():
  factors = {"hidden": 1, "input": RATIO, "output": RATIO, "finite": 1}
  for name, (_, gradients, found) in updates("sgd", **BASE).items():
    for ours, gradient in zip(found, gradients, strict=True):
      wanted = -RATE * factors[kind_of(name)] * gradient
      np.testing.assert_allclose(ours, wanted, rtol=1e-5, err_msg=name)


def test_a_group_s_learning_rate_is_that_of_the_base_model():
  group = {"parameters": "layer_2/*", "learning_rate": 0.5}
  keys = {"optimizer.groups": (group,), "optimizer.weight_decay": 0.0, **LION}
  found = updates("lion", **BASE, **keys)
  rates = {name: np.max(np.abs(one[2][0])) for name, one in found.items()}
  assert rates["layer_2/kernel"] == pytest.approx(0.5 / RATIO)
  assert rates["layer_2/bias"] == pytest.approx(0.5)
  assert rates["layer_3/kernel"] == pytest.approx(RATE / RATIO)
  assert rates["layer_3/bias"] == pytest.approx(RATE)


@pytest.mark.parametrize("arguments", ["", pytest.param("per_head=True", marks=pytest.mark.long)])
def test_muon_s_matrices_have_the_square_root_and_its_adamw_is_as_without(arguments):
  keys = {"optimizer.weight_decay": 0.0, "optimizer.arguments": arguments}
  plain, ours = (updates("muon", "lm", **keys, **more) for more in ({}, BASE))
  for name in plain:
    ratio = ours[name][2][0] / plain[name][2][0]
    attention = "attention/" in name and arguments
    hidden = "/kernel" in name and name.startswith("layers/")
    wanted = (RATIO if attention else RATIO**0.5) if hidden else 1
    np.testing.assert_allclose(ratio, 1 / wanted, rtol=1e-3, err_msg=name)


def test_the_groups_that_devices_share_are_those_without_mup():
  def found(**more):
    config = config_of("muon", "lm", **more)
    return [group for _, group in build.matrix_groups(resolve(config).optimizer, shapes("lm"), {})]

  assert [str(group) for group in found(**BASE)] == [str(group) for group in found()]
  assert found()


@pytest.mark.parametrize("ratio", [2, 4, 16])
def test_an_orthogonal_update_changes_activations_as_much_at_every_width(ratio):
  """Its spectral norm times sqrt(inputs / outputs), of arXiv:2310.17813, condition 1."""
  for rows, columns in ((8, 8), (8, 24), (24, 8)):
    shape, growth = (rows * ratio, columns * ratio), Growth(Kind.HIDDEN, ratio, ratio)
    factor = groups.orthogonal(Matrix((0,), (1,)), shape, (ratio, ratio), growth)
    norm = factor * max(shape) ** 0.5
    at_base = max(rows, columns) ** 0.5
    assert norm * (shape[0] / shape[1]) ** 0.5 == pytest.approx(at_base * (rows / columns) ** 0.5)


def test_nothing_is_scaled_at_the_base_width():
  for name in ("adamw", "sgd", "muon", "schedule_free_adamw"):
    spec = resolve(config_of(name, "lm", **{"model.base_width": 40})).optimizer
    [(same, params)] = groups.parts_by_width(spec, shapes("lm"))
    assert same is spec
    assert params is shapes("lm")


@pytest.mark.parametrize(
  ("name", "said"),
  [
    ("adafactor", "of optimizer.name=adafactor: its updates are a share of the parameter's size"),
    ("contrib.muon", "of optimizer.name=contrib.muon: take optimizer.name=muon; it has for adamw,"),
    ("soap", "of optimizer.name=soap: its first updates act on activations as Muon's"),
    ("rprop", "of optimizer.name=rprop; it has for adamw, muon,"),
  ],
)
def test_optimizers_without_a_rule_are_refused_at_the_base_width_too(name, said):
  for width in (10, 40):
    config = config_of(name, **{"model.base_width": width, "optimizer.weight_decay": 0.0})
    with pytest.raises(ValueError, match="muP has no rule") as error:
      make_optimizer(resolve(config).optimizer, shapes("mlp"))
    assert said in str(error.value)
    assert str(error.value).startswith(f"model.base_width={width}: ")
