"""Routers beside loops over tokens in NumPy, and beside the classes of `transformers`."""

import dataclasses
import json
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import experts as routing
from models.experts import Router
from tests.models.write_families import PYTHONS

EXPERTS, TOKENS = 12, 50
route = jax.jit(routing.route, static_argnums=1)
smallest_margin = jax.jit(routing.smallest_margin, static_argnums=1)
# As the families have them, with fewer experts.
ROUTERS = {
  "mixtral": Router(EXPERTS, 2),
  "qwen3_moe": Router(EXPERTS, 3, normalize=False),
  "olmoe": Router(EXPERTS, 4),
  "deepseek_v2_greedy": Router(EXPERTS, 3, normalize=False, scale=1.7),
  "deepseek_v2": Router(EXPERTS, 3, normalize=False, scale=2.5, groups=4, top_groups=2),
  "deepseek_v3": Router(
    EXPERTS, 4, "sigmoid", True, 2.5, groups=3, top_groups=2, group_score="top2", bias_corrects=True
  ),
  "deepseek_v3_plain": Router(
    EXPERTS, 4, "sigmoid", False, groups=1, group_score="top2", bias_corrects=True
  ),
  "gpt_oss": Router(EXPERTS, 4, "softmax_of_chosen"),
}
MARGIN = 1e-6


@pytest.fixture(autouse=True)
def _float64():
  with jax.enable_x64(True):
    yield


def drawn(name):
  """Returns (logits, bias or None) of a router's test, in float64; choices are not close."""
  random = np.random.default_rng(sum(map(ord, name)))
  logits = 2 * random.standard_normal((TOKENS, EXPERTS))
  # Large enough to change choices, and to make some corrected scores negative.
  bias = None
  if ROUTERS[name].bias_corrects:
    bias = jnp.asarray(random.standard_normal(EXPERTS) / 2)
  assert smallest_margin(jnp.asarray(logits), ROUTERS[name], bias) > MARGIN, "inconclusive"
  return logits, bias


def softmax(x):
  exponentials = np.exp(x - x.max())
  return exponentials / exponentials.sum()


def numpy_route(logits, router, bias):
  """Returns (gates, experts, probabilities) of tokens, one after another."""
  gates, experts, probabilities = [], [], []
  for row in logits:
    sigmoid = 1 / (1 + np.exp(-row))
    scores = {"softmax": softmax(row), "sigmoid": sigmoid, "softmax_of_chosen": row}[router.scores]
    choice = scores + (0 if bias is None else bias)
    size = router.experts // router.groups
    groups = {
      group: np.sort(choice[group * size : (group + 1) * size])[::-1]
      for group in range(router.groups)
    }
    of_group = {"max": lambda one: one[0], "top2": lambda one: one[0] + one[1]}
    order = sorted(groups, key=lambda group: -of_group[router.group_score](groups[group]))
    allowed = [e for e in range(router.experts) if e // size in order[: router.top_groups]]
    mine = sorted(allowed, key=lambda e: -choice[e])[: router.top_k]
    gate = softmax(row[mine]) if router.scores == "softmax_of_chosen" else scores[mine]
    if router.normalize and router.scores != "softmax_of_chosen":
      gate = gate / (gate.sum() + (1e-20 if router.scores == "sigmoid" else 0))
    gates.append(gate * router.scale)
    experts.append(mine)
    probabilities.append(sigmoid / sigmoid.sum() if router.scores == "sigmoid" else softmax(row))
  return np.array(gates), np.array(experts), np.array(probabilities)


@pytest.mark.parametrize("name", ROUTERS)
def test_gates_experts_and_probabilities_are_numpys(name):
  logits, bias = drawn(name)
  found = route(jnp.asarray(logits).reshape(5, 10, EXPERTS), ROUTERS[name], bias)
  gates, experts, probabilities = numpy_route(logits, ROUTERS[name], bias)
  np.testing.assert_array_equal(found.experts.reshape(TOKENS, -1), experts)
  np.testing.assert_allclose(found.gates.reshape(gates.shape), gates, rtol=1e-14)
  np.testing.assert_allclose(found.probabilities.reshape(probabilities.shape), probabilities)
  assert found.experts.dtype == jnp.int32


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_gradients_are_those_of_numpys_differences(name):
  logits, bias = drawn(name)
  router = ROUTERS[name]
  weights = np.random.default_rng(3).standard_normal((TOKENS, router.top_k))
  more = np.random.default_rng(4).standard_normal((TOKENS, EXPERTS))

  def total(logits, bias):
    found = route(logits, router, bias)
    return jnp.sum(found.gates * weights) + jnp.sum(found.probabilities * more)

  by = (0, 1) if router.bias_corrects else (0,)
  grads = jax.jit(jax.grad(total, by))(jnp.asarray(logits), bias)
  step = 1e-6
  for expert in range(EXPERTS):
    sums = []
    for sign in (1, -1):
      moved = logits.copy()
      moved[:, expert] += sign * step
      gates, _, probabilities = numpy_route(moved, router, bias)
      sums.append((gates * weights).sum(1) + (probabilities * more).sum(1))
    np.testing.assert_allclose(grads[0][:, expert], (sums[0] - sums[1]) / (2 * step), atol=1e-7)
  assert not any(np.any(of_bias) for of_bias in grads[1:])


def test_of_equal_scores_the_lower_index_is_chosen():
  found = route(jnp.zeros((1, 6)), Router(6, 2))
  np.testing.assert_array_equal(found.experts, [[0, 1]])
  np.testing.assert_array_equal(found.gates, [[0.5, 0.5]])


@pytest.mark.parametrize(("name", "size"), [("mixtral", 200.0), ("deepseek_v3", 40.0)])
def test_extreme_logits_give_finite_gates_and_gradients(name, size):
  logits = jnp.array([[-size] * EXPERTS, [size, -size] * 6], jnp.float32)
  bias = jnp.zeros(EXPERTS) if ROUTERS[name].bias_corrects else None

  def total(logits):
    found = route(logits, ROUTERS[name], bias)
    return jnp.sum(found.gates) + jnp.sum(found.probabilities**2), found

  grad, found = jax.jit(jax.grad(total, has_aux=True))(logits)
  assert all(np.isfinite(one).all() for one in (grad, found.gates))
  np.testing.assert_allclose(found.probabilities.sum(-1), 1.0, rtol=1e-6)


def test_the_margin_counts_groups_and_the_bias():
  logits = jnp.log(jnp.array([[0.4, 0.1, 0.3, 0.2]]))
  groups = Router(4, 1, groups=2, top_groups=1)
  assert smallest_margin(logits, groups) == pytest.approx(0.1)  # 0.4 to 0.3; within, 0.4 to 0.1
  assert smallest_margin(logits, dataclasses.replace(groups, top_k=2)) == pytest.approx(0.1)
  two = dataclasses.replace(groups, group_score="top2")
  assert smallest_margin(logits, two) == pytest.approx(0.0, abs=1e-12)
  corrected = dataclasses.replace(groups, bias_corrects=True)
  bias = jnp.array([0.25, 0.35, 0.0, 0.0])
  assert smallest_margin(logits, corrected, bias) == pytest.approx(0.2)  # 0.65 to 0.45


@pytest.mark.transformers
def test_the_librarys_routers_choose_the_same(tmp_path):
  arrays = {}
  for name in ROUTERS:
    logits, bias = drawn(name)
    arrays[f"{name}/logits"] = logits
    if bias is not None:
      arrays[f"{name}/bias"] = bias
  np.savez(tmp_path / "given.npz", **arrays)
  routers = {name: dataclasses.asdict(router) for name, router in ROUTERS.items()}
  (tmp_path / "routers.json").write_text(json.dumps(routers))
  script = pathlib.Path(__file__).parent / "their_routers.py"
  subprocess.run([PYTHONS["5"], script, tmp_path], check=True)
  with np.load(tmp_path / "written.npz") as found:
    for name, router in ROUTERS.items():
      logits, bias = drawn(name)
      ours = route(jnp.asarray(logits), router, bias)
      gates, experts = found[f"{name}/gates"], found[f"{name}/experts"]
      order = np.argsort(experts, axis=-1)  # theirs are in no order
      mine = np.argsort(ours.experts, axis=-1)
      wanted = np.take_along_axis(experts, order, -1)
      np.testing.assert_array_equal(np.take_along_axis(ours.experts, mine, -1), wanted, name)
      np.testing.assert_allclose(
        np.take_along_axis(ours.gates, mine, -1),
        np.take_along_axis(gates, order, -1),
        rtol=1e-13,
        err_msg=name,
      )
