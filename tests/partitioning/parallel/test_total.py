"""The gradient of a sum over devices, and the behaviour of JAX that it follows from."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from partitioning.parallel.collectives import total

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
