"""What is computed in float32 when the compute dtype is bfloat16: the rows of docs/memory.md.

A program is read as it is traced, since XLA for CPUs computes some of it in float32 whatever the
program says. Each choice is undone once, and must then be missed.
"""

import importlib

import jax
import jax.numpy as jnp
import pytest

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


def narrow(whole=False, **overrides):
  """Returns the names of those functions that have a bfloat16 argument: of a loss, or a step."""
  keys = {**EVERYTHING, "training.compute_dtype": "bfloat16", **overrides}
  job = make_job("single", "lm", **keys)
  with job.tracing(), jax.numpy_dtype_promotion("standard"):
    if whole:
      program = jax.make_jaxpr(job.program.train_step)(job.state, job.batch)
    else:
      given = job.state.params, job.batch, jax.random.key(0)
      program = jax.make_jaxpr(job.program.sums)(*given)
  return {
    one.primitive.name
    for one in equations(program.jaxpr)
    if one.primitive.name in WIDE
    and one.invars[0].aval.dtype == jnp.bfloat16
    and one.invars[0].aval.size
    > GROUPS * one.outvars[0].aval.size * (one.primitive.name == "reduce_sum")
  }


@pytest.mark.parametrize("mesh", [{}, {"mesh.context": 2, "model.context_attention": "ring"}])
def test_sums_softmax_norms_angles_and_logits_are_in_float32(mesh):
  assert narrow(whole=True, **mesh) == set()


@pytest.mark.parametrize(
  ("modules", "missed"),
  [
    (["layers"], {"rsqrt", "reduce_sum"}),  # norms, and the gradients of scales and biases
    (["attention"], {"exp", "reduce_max", "tanh"}),  # the softmax of the scores, soft-capped
    (["positions"], {"cos", "sin"}),  # angles of positions
    (["transformer", "losses"], {"tanh", "exp", "log"}),  # logits, soft-capped, and the loss
  ],
)
def test_each_choice_is_missed(modules, missed, monkeypatch):
  for name in modules:
    monkeypatch.setattr(importlib.import_module(f"models.{name}"), "wide_dtype", jnp.dtype)
  assert missed <= narrow(whole=modules == ["layers"])


def test_parameters_moments_gradients_and_the_update_are_float32():
  job = make_job("dp4_tp2", "lm", **{"training.compute_dtype": "bfloat16"})
  with job.tracing():
    after, metrics, gradients = jax.eval_shape(job.program.step_and_gradients, job.state, job.batch)
  leaves = [*named_leaves(after.params).values(), *jax.tree.leaves(gradients)]
  leaves += [leaf for leaf in jax.tree.leaves(after.optimizer) if leaf.ndim]
  assert {leaf.dtype for leaf in [*leaves, *metrics.values()]} == {jnp.dtype("float32")}
