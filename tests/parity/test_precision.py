"""What is computed in float32 when the compute dtype is bfloat16: the rows of docs/memory.md.

A program is read as it is traced, since XLA for CPUs computes some of it in float32 whatever the
program says. Each choice is undone once, and must then be missed.
"""

import importlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models import layers, positions
from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job
from tests.parity.test_bfloat16 import equations

# Functions that lose what makes them work if their argument is rounded to 8 bits, and sums.
# `logistic`, of the activation, and `div`, of dropout, are elementwise like a matmul's result.
WIDE = {
  *("exp", "log", "rsqrt", "sqrt", "cos", "sin", "tanh"),
  *("reduce_max", "argmax", "reduce_sum", "cumsum", "scatter-add", "scatter_add"),
}
# What the heads of a group give to the keys and values that they share.
GROUPS = 2
EVERYTHING = {
  "model.query_key_norm": True,
  "model.attention_soft_cap": 2.0,
  "model.logits_soft_cap": 3.0,
  "model.biases": "all",
  "training.z_loss": 1e-4,
}


def narrow(**overrides):
  """Returns the names of those functions in a train step that have a bfloat16 argument."""
  keys = {**EVERYTHING, "training.compute_dtype": "bfloat16", **overrides}
  job = make_job("single", "lm", **keys)
  with job.tracing(), jax.numpy_dtype_promotion("standard"):
    program = jax.make_jaxpr(job.program.train_step)(job.state, job.batch)
  return {
    one.primitive.name
    for one in equations(program.jaxpr)
    if one.primitive.name in WIDE
    and one.invars[0].aval.dtype == jnp.bfloat16
    and one.invars[0].aval.size
    > GROUPS * one.outvars[0].aval.size * (one.primitive.name == "reduce_sum")
  }


RING = {"mesh.context": 2, "model.context_attention": "ring"}


@pytest.mark.parametrize("mesh", [{}, RING])
def test_sums_softmax_norms_angles_and_logits_are_in_float32(mesh):
  assert narrow(**mesh) == set()


@pytest.mark.parametrize(
  ("module", "missed"),
  [
    ("models.layers", {"rsqrt", "reduce_sum"}),  # norms, and the gradients of scales and biases
    ("models.attention", {"exp", "reduce_max", "tanh"}),  # the softmax of the scores, soft-capped
    ("models.positions", {"cos", "sin"}),  # angles of positions
    ("models.transformer", {"tanh"}),  # the soft cap of the logits
  ],
)
def test_each_choice_is_missed(module, missed, monkeypatch):
  monkeypatch.setattr(importlib.import_module(module), "wide_dtype", jnp.dtype)
  assert missed <= narrow()


def test_the_loss_is_missed(monkeypatch):
  # The logits are cast before it, too.
  for module in ("models.losses", "models.transformer"):
    monkeypatch.setattr(importlib.import_module(module), "wide_dtype", jnp.dtype)
  assert {"exp", "log"} <= narrow()


def rounded_once(function, monkeypatch, module):
  """Returns the error of bfloat16 results, in units of half a place; as is, and undone.

  Args:
    function: returns results, and float64 ones with the size that an error is measured by.
    monkeypatch: pytest's.
    module: that computes in float32 or wider.
  """
  errors = []
  for undone in (False, True):
    if undone:
      monkeypatch.setattr(module, "wide_dtype", jnp.dtype)
    found, wanted, size = function()
    assert found.dtype == jnp.bfloat16
    errors.append(np.max(np.abs(np.asarray(found, np.float64) - wanted) / size) * 2**8)
  return errors


def drawn(*shape):
  """Returns normal numbers in bfloat16."""
  return np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)


def test_a_rotation_is_rounded_once(monkeypatch):
  x, angles = drawn(2, 64, 3, 32), np.random.default_rng(1).uniform(0, 100, (1, 64, 16))
  table = np.stack([np.cos(angles), np.sin(angles)])
  first, second = np.split(x.astype(np.float64), 2, axis=-1)
  cos, sin = table[:, :, :, None]
  wanted = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

  def function():
    found = positions.apply_rope(jnp.asarray(x), jnp.asarray(table, jnp.float32))
    return found, wanted, np.abs(wanted)

  good, bad = rounded_once(function, monkeypatch, positions)
  assert good < 1.01 < 4 < bad


@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_is_rounded_once(centred, monkeypatch):
  x, scale, bias = drawn(64, 200), drawn(200), np.zeros(200, ml_dtypes.bfloat16)
  wide = x.astype(np.float64) - (x.astype(np.float64).mean(-1, keepdims=True) if centred else 0)
  wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True)) * scale.astype(np.float64)

  def function():
    with jax.numpy_rank_promotion("allow"):
      found = (
        layers.layer_norm(*map(jnp.asarray, (x, scale, bias)), epsilon=0.0)
        if centred
        else layers.rms_norm(jnp.asarray(x), jnp.asarray(scale), epsilon=0.0)
      )
    return found, wanted, np.abs(wanted)

  good, bad = rounded_once(function, monkeypatch, layers)
  assert good < 1.01 < 2 < bad


def test_parameters_moments_gradients_and_the_update_are_float32():
  job = make_job("dp4_tp2", "lm", **{"training.compute_dtype": "bfloat16"})
  with job.tracing():
    after, metrics, gradients = jax.eval_shape(job.program.step_and_gradients, job.state, job.batch)
  leaves = [*named_leaves(after.params).values(), *jax.tree.leaves(gradients)]
  leaves += [leaf for leaf in jax.tree.leaves(after.optimizer) if leaf.ndim]
  assert {leaf.dtype for leaf in [*leaves, *metrics.values()]} == {jnp.dtype("float32")}
