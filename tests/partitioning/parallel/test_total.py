"""Collectives: the gradient of a sum, the behaviour of JAX that it follows from, and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from partitioning.constraints import activation_layout
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from partitioning.parallel import collectives
from partitioning.parallel.collectives import all_gather, total
from runtime.collectives import collectives as found

SIZES = {**dict.fromkeys(AXES, 1), "data": 2, "tensor": 4}
X = np.arange(1.0, 17.0, dtype=np.float32)


def gradient(function):
  """Returns the gradient of the sum of what each device's part of X is made into, times 3."""

  def loss(x):
    return (
      3 * jax.shard_map(function, in_specs=P("tensor"), out_specs=P(), check_vma=False)(x).sum()
    )

  with jax.set_mesh(make_mesh(SIZES)):
    return jax.jit(jax.grad(loss))(X)


@jax.custom_vjp
def seen(x):
  """Sums over the axis; its gradient is what shard_map hands in for the replicated result."""
  return jax.lax.psum(x, "tensor")


seen.defvjp(lambda x: (seen(x), None), lambda _, gradient: (gradient,))


def test_the_gradient_of_total_is_that_of_a_sum():
  np.testing.assert_array_equal(gradient(lambda x: total(x, ("tensor",))), np.full_like(X, 3))
  np.testing.assert_array_equal(gradient(lambda x: jax.lax.psum(x, "tensor")), np.full_like(X, 3))


def test_shard_map_divides_the_gradient_of_a_replicated_result_by_the_devices():
  # Over all 8 devices, and the transpose adds up over the 2 of `data`, which split nothing of X.
  found = gradient(seen)
  assert jnp.array_equal(found, np.full_like(X, 3 / 4)), (
    f"jax {jax.__version__}: shard_map without check_vma hands in the gradient {found[0]} for a "
    f"result that 4 devices hold, and {3 / 4} was expected: the transpose of shard_map has "
    f"changed; `total` in partitioning must multiply by another number (see its docstring)"
  )


@pytest.mark.parametrize(
  ("shape", "dim", "shards", "padding"),
  [
    ((14336, 4096), 1, 64, None),  # 112 = 2^4 x 7 tiles
    ((128_256, 4096), 1, 64, (0, 768)),  # 1,002 = 6 x 167 tiles: 1,008
    ((4096, 11_008), 0, 64, (1, 256)),  # 86 = 2 x 43: 88
    ((4096, 11_008), 0, 8, None),
    ((4096, 32, 128), 0, 64, None),
    ((64, 3712), 0, 64, (1, 128)),  # 29: 30
    ((64, 3700), 0, 64, (1, 140)),
    ((28_672, 8192), 1, 512, (0, 4096)),  # 224 = 2^5 x 7: 256, not 3^5
    ((28_672, 8192), 1, 2048, (0, 4096)),
    ((14_336, 4096), 1, 256, (0, 2048)),  # 112 = 2^4 x 7: 128
    ((8192,), 0, 64, None),
  ],
)
def test_what_sparse_cores_cannot_cut_is_padded(shape, dim, shards, padding):
  assert collectives._padding(shape, dim, shards) == padding


@pytest.mark.parametrize("dim", [0, 1])
def test_padding_changes_no_number_and_no_gradient(dim):
  # 193 tiles, on 8 devices: 194 = 2 x 97.
  shape = (8, 24_700) if dim == 0 else (24_700, 8)
  assert collectives._padding(shape, dim, 8) == (1 - dim, 194 * 128 - 24_700)
  x = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)
  spec = P(None, "tensor") if dim else P("tensor")

  def on_eight(function, in_specs, out_specs):
    mesh = make_mesh({**SIZES, "data": 1, "tensor": 8})
    return jax.jit(
      jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )

  def padded(x):
    return collectives._padded_scatter(x[0], ("tensor",), dim)

  found = on_eight(padded, P("tensor"), spec)(x)
  np.testing.assert_allclose(found, x.sum(axis=0), rtol=1e-5, atol=1e-5)

  def both_ways(shard, x):
    whole, back = jax.vjp(lambda shard: all_gather(shard, ("tensor",), dim), shard)
    return whole, *back(x[0])

  whole, gradient = on_eight(both_ways, (spec, P("tensor")), (P(), spec))(x[0], x)
  np.testing.assert_array_equal(whole, x[0])
  np.testing.assert_allclose(gradient, x.sum(axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("shape", "dim", "shards", "narrow"),
  [
    ((14_336, 4096), 1, 256, True),  # 16 numbers each, of rows of 128
    ((14_336, 4096), 1, 32, False),
    ((14_336, 4096), 0, 256, False),
    ((32, 128, 4096), 2, 256, True),
    ((8, 128, 1024), 2, 16, True),
    ((7, 128, 1024), 2, 16, False),  # too small to matter
    ((2**21,), 0, 2**15, False),
  ],
)
def test_shards_of_less_than_a_row_of_a_tile_are_narrow(shape, dim, shards, narrow):
  assert collectives._narrow(shape, dim, shards) is narrow


@pytest.mark.parametrize("shape", [(2, 16), (29 * 128, 8)])  # the second one is padded
def test_a_scatter_over_slices_is_the_sum_of_all_devices_parts(shape):
  x = np.random.default_rng(0).standard_normal((8, *shape)).astype(np.float32)
  mesh = make_mesh({**dict.fromkeys(AXES, 1), "fsdp": 8}, slices={"fsdp": 2})

  def scatter(x):
    return collectives._padded_scatter(x[0], ("fsdp",), 1)

  region = jax.shard_map(
    scatter, mesh=mesh, in_specs=P("fsdp"), out_specs=P(None, "fsdp"), check_vma=False
  )
  with activation_layout({}, {}, slices={"fsdp": 2}):
    lowered = jax.jit(region).lower(x)
  np.testing.assert_allclose(lowered.compile()(x), x.sum(0), rtol=1e-5, atol=1e-5)
  groups = [one.groups for one in found(lowered.compile().as_text(), mesh)]
  assert sorted(map(len, groups)) == [2, 4]  # slices of four; then two of each place in them
