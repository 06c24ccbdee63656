"""Gradients in bfloat16 beside those in float32, tensor by tensor, of tokens as text has them.

In text a few tokens are most of it (Zipf's law), so that the sums over the tokens that name a row
of a table have thousands of terms, as those over a bias have. Tokens drawn uniformly hide what
such a sum loses in a narrow dtype.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from partitioning.parallel import vocabulary
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, make_job, place, zipf
from tests.parity.comparison import SEQUENCE_PARALLEL
from tests.parity.expert_cases import EXPERTS
from tests.parity.latents import LATENTS
from tests.parity.variants import ADAPTERS, FAMILIES, LEARNED
from training.optimizers import muon

ROWS, LENGTH = 128, 32  # 4,096 tokens, most of them on one device
# Rounding each product to 8 bits leaves 0.3 to 1.2 %, about the same on every mesh.
BOUND = 0.02
VARIANT = {**FAMILIES, "training.loss_chunks": 12}
SPLIT = {"mesh.fsdp": 2, "mesh.tensor": 2, **SEQUENCE_PARALLEL}


def gradients(dtype, overrides):
  """Returns the gradients of the first step, in float64."""
  sizes = {"data.global_batch_size": ROWS, "data.sequence_length": LENGTH}
  precise = {"training.matmul_precision": "highest", "training.compute_dtype": dtype}
  job = make_job("single", "lm", **{**sizes, **precise, **overrides})
  stream = zipf(np.random.default_rng(0), job.config.model.vocabulary_size, (ROWS, LENGTH + 1))
  weights = np.ones((ROWS, LENGTH), np.float32)
  batch = {"tokens": stream[:, :-1], "targets": stream[:, 1:], "weights": weights}
  if "segments" in job.batch:  # 0 ends a document
    batch["segments"] = np.cumsum(stream[:, :-1] == 0, axis=1, dtype=np.int32)
  compiled = job.compile(
    job.program.step_and_gradients,
    job.state,
    job.batch,
    in_shardings=(job.state_shardings, job.batch_shardings),
  ).function
  _, _, found = compiled(first_state(job), place(job, batch))
  return {name: np.asarray(value, np.float64) for name, value in named_leaves(found).items()}


def test_each_gradient_is_that_of_float32():
  wanted, found = gradients("float32", VARIANT), gradients("bfloat16", {**VARIANT, **SPLIT})
  everything = np.sqrt(sum(np.sum(value**2) for value in wanted.values()))
  far = {}
  for name, value in wanted.items():
    size, distance = np.linalg.norm(value), np.linalg.norm(found[name] - value)
    if size < 1e-5 * everything:
      # Without rotary positions a key bias moves all scores of a query alike: its gradient is
      # mathematically zero, and nothing but rounding on both sides.
      assert name == "layers/attention/key/bias", name
      far[name] = distance / everything
    else:
      far[name] = distance / size
  assert {name: x for name, x in far.items() if not x < BOUND} == {}


def test_the_gradient_of_a_lookup_is_a_sum_in_the_dtype_of_the_parameters():
  # Against NumPy; a sum in bfloat16 is more than half wrong here.
  random = np.random.default_rng(0)
  ids = zipf(random, 61, (16_384,))
  pulled = jnp.asarray(random.standard_normal((16_384, 5)) + 1, jnp.bfloat16)
  table = jnp.asarray(random.standard_normal((61, 5)), jnp.bfloat16)

  def rows(table, dtype):
    return vocabulary.table_rows(table, ids, jnp.dtype(dtype))

  wanted = np.zeros((61, 5))
  np.add.at(wanted, ids, np.asarray(pulled, np.float64))
  found, far = {}, {}
  for dtype in ("float32", "bfloat16"):
    found[dtype], back = jax.vjp(functools.partial(rows, dtype=dtype), table)
    [gradient] = back(pulled)
    assert gradient.dtype == table.dtype
    far[dtype] = np.linalg.norm(np.asarray(gradient, np.float64) - wanted) / np.linalg.norm(wanted)
  np.testing.assert_array_equal(found["float32"], np.asarray(table)[ids])
  assert far["float32"] < 2**-8  # one rounding
  assert far["bfloat16"] > 0.5


@pytest.mark.parametrize(
  ("recipe", "changes"),
  [
    ("mlp", {}),
    ("lm", {**FAMILIES, **SPLIT, "training.loss_chunks": 3}),
    ("lm", {**LEARNED, "mesh.context": 2, "model.context_attention": "ring"}),
    ("lm", {**LEARNED, "mesh.data": 2, "model.separate_documents": True}),
  ],
)
def test_no_sum_over_many_terms_is_in_bfloat16(recipe, changes):
  # XLA for CPUs keeps some of these sums in float32 whatever the program says.
  narrow = [
    (one.primitive.name, one.invars[0].aval.shape, one.outvars[0].aval.shape)
    for one in equations(backward(recipe, changes))
    if one.primitive.name in ("reduce_sum", "scatter-add", "scatter_add", "cumsum")
    and one.invars[0].aval.dtype == jnp.bfloat16
  ]
  # What the query heads of a group give to the keys and values that they share.
  groups = 2
  many = [
    (name, before, after)
    for name, before, after in narrow
    if name != "reduce_sum" or math.prod(before) > groups * math.prod(after)
  ]
  assert many == []


@pytest.mark.parametrize(
  ("recipe", "changes"),
  [
    ("lm", {**FAMILIES, "model.residual_multiplier": 0.22, "model.embedding_multiplier": 12.7}),
    ("lm", {**LATENTS, "model.dropout_rate": 0.1, "training.z_loss": 1e-3}),
    ("lm", {**EXPERTS, "model.activation": "gelu_sigmoid", "model.logits_divisor": 7.3}),
    ("lm", {**ADAPTERS, "lora.dropout": 0.3}),
    ("lm", {"model.base_width": 24, "training.attention_kernel": "blockwise"}),
    ("lm", {"training.attention_kernel": "splash", "data.sequence_length": 128}),
    ("vit", {"model.dropout_rate": 0.1}),
  ],
)
def test_no_constant_is_rounded_to_bfloat16(recipe, changes):
  # What it should be, the program no longer says; those below are exact in bfloat16.
  of_jax_s_gelu = {0.044677734375, 0.796875}  # 0.044715, sqrt(2 / pi)
  found = narrow_constants(backward(recipe, changes, jax.random.key(0)))
  assert found - of_jax_s_gelu <= {0.5, 1.0, 2.0, 3.0}


def test_the_coefficients_of_newton_schulz_are_not_rounded_to_bfloat16():
  x = jax.ShapeDtypeStruct((1, 8, 16), jnp.bfloat16)
  assert narrow_constants(jax.make_jaxpr(lambda x: muon.newton_schulz(x, 2))(x).jaxpr) == set()


def narrow_constants(program):
  """Returns the factors and divisors in bfloat16 that a program names."""
  return {
    float(operand.val)
    for one in equations(program)
    if one.primitive.name in ("mul", "div")
    for operand in one.invars
    if isinstance(operand, Literal) and operand.aval.dtype == jnp.bfloat16
  }


def test_the_chunks_of_the_loss_add_up_the_residuals_gradient_in_float32():
  # The sum over chunks is what a scan carries backwards.
  residual = (16, 12, 40)
  for one in equations(backward("lm", {"training.loss_chunks": 3})):
    if one.primitive.name == "scan" and one.params["length"] == 3:
      # What comes out of a scan without a leading dim of its length was carried.
      dtypes = {array.aval.dtype for array in one.outvars if array.aval.shape == residual}
      kernels = {array.aval.shape for array in one.outvars if array.aval.shape[-1:] == (40,)}
      if dtypes:
        assert dtypes == {jnp.dtype("float32")}
        # Of the unembedding each chunk has its part of the gradient, and nothing is summed.
        assert kernels == {residual, (3, 24, 40)}
        return
  pytest.fail("no scan over the chunks carries a gradient of the residual")


@pytest.mark.parametrize(
  ("mesh", "reductions"),
  [({"mesh.fsdp": 8}, {"reduce_scatter"}), ({"mesh.data": 4, "mesh.tensor": 2}, {"psum"})],
)
@pytest.mark.parametrize("reduced", ["compute", "float32"])
def test_gradients_of_kernels_are_reduced_in_the_dtype_that_is_asked_for(mesh, reductions, reduced):
  keys = {**mesh, "training.gradient_reduction_dtype": reduced}
  wanted, found = jnp.dtype("bfloat16" if reduced == "compute" else reduced), []
  for one in equations(backward("lm", keys)):
    for array in one.invars:
      # Of a layer's kernels: gate, up and down, as `tensor` splits them.
      if one.primitive.name in reductions and sorted(array.aval.shape) in ([40, 56], [28, 40]):
        found.append(array.aval.dtype)
    if one.primitive.name == "all_gather":  # what is gathered stays narrow
      assert one.invars[0].aval.dtype == jnp.bfloat16
  assert found == 3 * [wanted]


def backward(recipe, changes, key=None):
  """Returns the program of a small job's gradients in bfloat16, as it is traced."""
  job = make_job("single", recipe, **{"training.compute_dtype": "bfloat16", **changes})
  with job.tracing():
    gradient = jax.grad(lambda params, batch: job.program.sums(params, batch, key)["loss"])
    return jax.make_jaxpr(gradient)(job.state.params, job.batch).jaxpr


def equations(program):
  """Yields all equations of a program, those of its functions too."""
  for equation in program.eqns:
    yield equation
    for value in jax.tree.leaves(equation.params, is_leaf=is_program):
      if is_program(value):
        yield from equations(getattr(value, "jaxpr", value))


def is_program(value):
  """Tells whether a parameter of an equation is a program."""
  return hasattr(value, "eqns") or hasattr(value, "jaxpr")
