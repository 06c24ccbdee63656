"""Whole matrices of sharded kernels: how they are grouped, shared, and brought back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from partitioning.mesh import make_mesh
from partitioning.parallel import whole_matrices
from partitioning.parallel.whole_matrices import Matrix, grouped, on_whole_matrices

SIZES = {"data": 2, "fsdp": 2, "stage": 1, "expert": 1, "context": 1, "tensor": 2}
# Name -> shape, rows, columns, sharding: of 3 layers, widths 4 and 6, and 10 as 2 heads of 5 or so.
KERNELS = {
  "in": ((3, 4, 2, 5), (1,), (2, 3), (None, "fsdp", "tensor")),
  "out": ((3, 2, 5, 4), (1, 2), (3,), (None, "tensor", None, "fsdp")),  # its transpose, with "in"
  "inside a head": ((3, 4, 3, 2), (1,), (2, 3), (None, None, None, "tensor")),
  "two axes": ((2, 8, 6), (1,), (2,), (None, ("tensor", "data"), "fsdp")),
  "each head": ((3, 4, 2, 5), (1,), (3,), (None, "fsdp", "tensor")),
  "one layer": ((6, 4), (0,), (1,), ()),
  "square": ((2, 4, 4), (1,), (2,), (None, "tensor")),
  "square, transposed": ((2, 4, 4), (1,), (2,), (None, None, "tensor")),
}
MATRICES = {name: Matrix(rows, columns) for name, (_, rows, columns, _) in KERNELS.items()}
SPECS = {name: PartitionSpec(*spec) for name, (*_, spec) in KERNELS.items()}
SHAPES = {name: shape for name, (shape, *_) in KERNELS.items()}


def cube(x):
  """Returns X X^T X of each matrix: a function of whole matrices that commutes with transposes."""
  assert x.shape[1] <= x.shape[2]
  return jnp.einsum("mij,mkj,mkl->mil", x, x, x)


def by_hand(x, matrix):
  """Returns X X^T X of each matrix by NumPy, one by one."""
  stack = [dim for dim in range(x.ndim) if dim not in (*matrix.rows, *matrix.columns)]
  order = [*stack, *matrix.rows, *matrix.columns]
  moved = x.transpose(order)
  many, rows = (int(np.prod([x.shape[dim] for dim in dims])) for dims in (stack, matrix.rows))
  flat = moved.reshape(many, rows, -1)
  cubes = np.stack([one @ one.T @ one for one in flat])
  return cubes.reshape(moved.shape).transpose(np.argsort(order))


def test_every_sharding_gives_what_numpy_does_with_each_matrix(monkeypatch):
  # So that "two axes" and "square", of which a device has several, are done in rounds.
  monkeypatch.setattr(whole_matrices, "ROUND_ELEMENTS", 1)
  random = np.random.default_rng(0)
  arrays = {n: random.standard_normal(shape).astype(np.float32) for n, shape in SHAPES.items()}
  mesh = make_mesh(SIZES, jax.devices(), {})
  placed = {name: NamedSharding(mesh, SPECS[name]) for name in arrays}

  def function(arrays):
    return on_whole_matrices(cube, arrays, MATRICES, SPECS, SIZES)

  with jax.set_mesh(mesh):
    found = jax.jit(function, out_shardings=placed)(jax.device_put(arrays, placed))
  alone = jax.jit(lambda x: on_whole_matrices(cube, x, MATRICES, SPECS, {}))(arrays)
  for name, x in arrays.items():
    wanted = by_hand(x, MATRICES[name])
    np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(alone[name], wanted, rtol=1e-4, atol=1e-4, err_msg=name)


def test_kernels_of_one_shape_and_sharding_are_one_group_also_transposed():
  found = {group.names: group for group in grouped(SHAPES, MATRICES, SPECS, SIZES)}
  assert ("in", "out") in found
  assert ("square", "square, transposed") in found
  group = found["in", "out"]
  assert (group.shape, group.count, group.transposed) == ((4, 10), 6, (False, True))
  # Six matrices: four devices exchange them, and with replicas along `data` each has one.
  assert (group.exchanged, group.shared, group.each) == (("fsdp", "tensor"), ("data",), 1)
  heads = found["each head",]  # of the two heads, a device has one, of three layers
  assert (heads.shape, heads.count, heads.exchanged) == ((4, 5), 3, ("fsdp",))
  assert (heads.shared, heads.each) == (("data",), 1)


def test_large_matrices_are_done_a_few_at_a_time():
  for count, elements, rounds in ((12, 2**26, 12), (12, 2**24, 6), (7, 2**24, 7), (96, 2**16, 1)):
    [group] = grouped(
      {"x": (count, 256, elements // 256)}, {"x": Matrix((1,), (2,))}, {"x": PartitionSpec()}, {}
    )
    assert (group.each, group.rounds) == (count, rounds)


@pytest.mark.parametrize(
  ("count", "axes", "shared", "each"),
  [
    (16, {"data": 8}, ("data",), 2),
    (3, {"data": 8}, ("data",), 1),
    (1, {"data": 8}, (), 1),  # nothing to share
    (2, {"data": 4, "context": 2}, ("context",), 1),  # more than two would send more for nothing
    (5, {"data": 2, "context": 2}, ("data", "context"), 2),
    (4, {"data": 2, "fsdp": 4}, (), 1),  # those that exchange have one each already
    (5, {"data": 2, "fsdp": 4}, ("data",), 1),
  ],
)
def test_replicas_share_the_work_where_a_device_then_has_less(count, axes, shared, each):
  spec = PartitionSpec(None, "fsdp" if "fsdp" in axes else None)
  [group] = grouped({"x": (count, 4, 8)}, {"x": Matrix((1,), (2,))}, {"x": spec}, axes)
  assert (group.shared, group.each) == (shared, each)
