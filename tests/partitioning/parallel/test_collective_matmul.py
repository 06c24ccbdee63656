"""Collective matmuls: beside NumPy, beside one device, and what they send."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from partitioning.parallel.collective_matmul import gathered, scattered, through
from tests.parity.comparison import (
  COLLECTIVE_MATMUL,
  MESHES,
  assert_equal,
  reference,
  train,
)

B, D, F, G = 2, 5, 7, 3
SEQUENCE = PartitionSpec(None, "tensor")
EVERYWHERE = PartitionSpec()


def column(x, up, gate):
  """Two products of one activation."""
  return jnp.einsum("btd,fd->btf", x, up), jnp.einsum("btd,gd->btg", x, gate)


def row(x, down):
  """A device's partial sums."""
  return (jnp.einsum("btf,fd->btd", x, down),)


def block(x, up, down):
  """A device's partial sums, of a function that is not linear."""
  return row(jnp.tanh(jnp.einsum("btd,fd->btf", x, up)), down)[0]


def normal(seed, *shape):
  """Random numbers in float64."""
  return np.random.default_rng(seed).normal(size=shape)


def on_ring(devices, function, in_specs, out_specs):
  """Returns the function, compiled for a ring of so many devices."""
  mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",))
  region = jax.shard_map(
    function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )
  return jax.jit(region)


# Devices and tokens of each: both ways, one way (two devices; an odd number of tokens), and alone.
RINGS = [(4, 6), (2, 4), (8, 1), (1, 4)]


@pytest.mark.parametrize(("devices", "tokens"), RINGS)
def test_gathered_and_its_gradients_are_numpys(devices, tokens):
  # Each device has kernels of its own: a column-parallel weight is split along its outputs.
  with jax.enable_x64(True):
    x = normal(0, B, devices * tokens, D)
    up, gate = normal(1, devices * F, D), normal(2, devices * G, D)
    d_up, d_gate = normal(3, B, devices * tokens, devices * F), normal(4, *x.shape[:2], devices * G)

    def both(x, up, gate, d_up, d_gate):
      results, back = jax.vjp(lambda *given: gathered(column, ("tensor",), *given), x, up, gate)
      return results, back((d_up, d_gate))

    outputs, kernel = PartitionSpec(None, None, "tensor"), PartitionSpec("tensor")
    specs = (SEQUENCE, kernel, kernel, outputs, outputs)
    results, gradients = on_ring(devices, both, specs, ((outputs, outputs), specs[:3]))(
      x, up, gate, d_up, d_gate
    )
  for ours, numpys in zip(
    (*results, *gradients),
    (
      *(x @ up.T, x @ gate.T, d_up @ up + d_gate @ gate),
      *(np.einsum("btf,btd->fd", d_up, x), np.einsum("btg,btd->gd", d_gate, x)),
    ),
    strict=True,
  ):
    np.testing.assert_allclose(ours, numpys, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("devices", "tokens"), RINGS)
def test_scattered_and_its_gradients_are_numpys(devices, tokens):
  # A row-parallel weight is split along the contracted dim, and so is the activation.
  with jax.enable_x64(True):
    x, down = normal(0, B, devices * tokens, devices * F), normal(1, devices * F, D)
    d_out = normal(2, B, devices * tokens, D)

    def both(x, down, d_out):
      result, back = jax.vjp(lambda *given: scattered(row, ("tensor",), *given), x, down)
      return result, back(d_out)

    specs = (PartitionSpec(None, None, "tensor"), PartitionSpec("tensor"), SEQUENCE)
    result, gradients = on_ring(devices, both, specs, (SEQUENCE, specs[:2]))(x, down, d_out)
  wanted = x @ down, d_out @ down.T, np.einsum("btf,btd->fd", x, d_out)
  for ours, numpys in zip((result, *gradients), wanted, strict=True):
    np.testing.assert_allclose(ours, numpys, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("devices", "tokens"), RINGS)
def test_through_and_its_gradients_are_numpys(devices, tokens):
  with jax.enable_x64(True):
    x, d_out = normal(0, B, devices * tokens, D), normal(3, B, devices * tokens, D)
    up, down = normal(1, devices * F, D), normal(2, devices * F, D)
    result, gradients = of_block(devices)(x, up, down, d_out)
  hidden = np.tanh(x @ up.T)
  d_up = d_out @ down.T * (1 - hidden**2)
  wanted = (
    *(hidden @ down, d_up @ up),
    *(np.einsum("btf,btd->fd", d_up, x), np.einsum("btf,btd->fd", hidden, d_out)),
  )
  for ours, numpys in zip((result, *gradients), wanted, strict=True):
    np.testing.assert_allclose(ours, numpys, rtol=0, atol=1e-12)


def of_block(devices):
  """Returns `block` and its gradients on a ring, of x, both kernels and the result's gradient."""

  def both(x, up, down, d_out):
    result, back = jax.vjp(lambda *given: through(block, ("tensor",), *given), x, up, down)
    return result, back(d_out)

  kernel = PartitionSpec("tensor")
  specs = (SEQUENCE, kernel, kernel, SEQUENCE)
  return on_ring(devices, both, specs, (SEQUENCE, specs[:3]))


def test_through_has_no_array_of_all_tokens_and_sums_gradients_of_kernels_in_float32():
  x, d_out = (normal(seed, B, 8 * 6, D).astype(jnp.bfloat16) for seed in (0, 3))
  up, down = (normal(seed, 8 * F, D).astype(jnp.bfloat16) for seed in (1, 2))
  function = of_block(8)
  text = str(jax.make_jaxpr(function)(x, up, down, d_out))
  # Halves of six tokens; x alone is ever of more.
  assert {*re.findall(rf"\[{B},(\d+),{F}\]", text)} == {"3"}
  # The sums of sixteen parts are rounded once.
  assert f"f32[{F},{D}] = add" in text
  assert f"bf16[{F},{D}] = add" not in text


def equations(jaxpr):
  """Yields the equations of a jaxpr and of those inside of it."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in equation.params.values():
      if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
        yield from equations(inner)


def test_through_sends_a_sum_when_the_next_part_has_arrived():
  kernel = PartitionSpec("tensor")
  function = on_ring(
    4,
    lambda *given: through(block, ("tensor",), *given),
    (SEQUENCE, kernel, kernel),
    SEQUENCE,
  )
  zeros = [np.zeros(shape, np.float32) for shape in ((B, 4 * 6, D), (4 * F, D), (4 * F, D))]
  made = {}  # of each variable: the equation, and its place among the results
  for equation in equations(jax.make_jaxpr(function)(*zeros).jaxpr):
    made |= {one: (equation, place) for place, one in enumerate(equation.outvars)}
  sent = [one for one, _ in made.values() if one.primitive.name == "ppermute"]
  assert len(sent) == 2 * (3 + 3)  # in two directions, a part thrice and then its sum
  waiting = [
    made[one.invars[0]] for one in sent if made[one.invars[0]][0].primitive.name.endswith("barrier")
  ]
  # Of three sums in each direction the last waits for no part.
  assert len(waiting) == 2 * 2
  for barrier, place in waiting:
    total, part = (made[one][0].primitive.name for one in barrier.invars)
    assert (place, part) == (0, "ppermute")
    assert total in ("dot_general", "add")


@pytest.mark.long
@pytest.mark.parametrize(
  ("mesh", "chunks", "saved"),
  [("fsdp2_tensor4", 2, "full"), ("fsdp2_tensor4", 1, "hidden=save"), ("tensor8", 1, "none")],
)
def test_trains_as_one_device_does(mesh, chunks, saved):
  # 6 and 3 tokens in a chunk: both ways, one way. Of 12: tests/parity/test_strategies.py.
  keys = {"training.loss_chunks": chunks, "training.rematerialization": saved}
  ours = train("lm", "float64", {**MESHES[mesh], **COLLECTIVE_MATMUL, **keys})
  assert "collective-permute" in ours.trained.text
  hidden = ours.job.config.model.feedforward_size // MESHES[mesh]["mesh.tensor"]
  # One ring: hidden activations are never of all tokens.
  whole = re.search(rf"f64\[\d+,24,{hidden}\]", ours.trained.text)
  assert bool(whole) is (saved != "full")
  assert_equal(ours, reference("lm", "float64"), "float64")
