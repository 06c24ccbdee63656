"""Whole matrices of sharded kernels: what is computed of them, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from partitioning.mesh import make_mesh
from partitioning.parallel import matrix_groups
from partitioning.parallel.matrix_groups import COLUMNS, MATRIX, ROWS, grouped
from partitioning.parallel.whole_matrices import in_rounds, on_whole_matrices, square_spec
from tests.partitioning.parallel.kernels import MATRICES, SHAPES, SIZES, SPECS


def cube(x):
  """Returns X X^T X of each matrix: a function of whole matrices that commutes with transposes."""
  assert x.shape[1] <= x.shape[2]
  return jnp.einsum("mij,mkj,mkl->mil", x, x, x)


def apart(x, matrix):
  """Returns an array's matrices [matrices, rows, columns]."""
  stack = [dim for dim in range(x.ndim) if dim not in (*matrix.rows, *matrix.columns)]
  rows, columns = (
    int(np.prod([x.shape[dim] for dim in dims])) for dims in (matrix.rows, matrix.columns)
  )
  return x.transpose([*stack, *matrix.rows, *matrix.columns]).reshape(-1, rows, columns)


def test_every_sharding_gives_what_numpy_does_with_each_matrix(monkeypatch):
  # So that "two axes", of which a device has several, is done in rounds.
  monkeypatch.setattr(matrix_groups, "ROUND_ELEMENTS", 1)
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
    matrices = apart(x, MATRICES[name])
    for ours in (found, alone):
      cubes = apart(np.asarray(ours[name]), MATRICES[name])
      wanted = matrices @ matrices.mT @ matrices
      np.testing.assert_allclose(cubes, wanted, rtol=1e-4, atol=1e-4, err_msg=name)


def test_squares_of_both_sides_are_exchanged_with_their_matrices(monkeypatch):
  """Those of "two axes" are of 6, over four devices: they are filled up, and cut again."""
  monkeypatch.setattr(matrix_groups, "ROUND_ELEMENTS", 1)
  random, kinds = np.random.default_rng(0), (ROWS, COLUMNS)
  arrays = {kind: {} for kind in (MATRIX, *kinds)}
  for name, shape in SHAPES.items():
    arrays[MATRIX][name] = random.standard_normal(shape).astype(np.float32)
    matrix = MATRICES[name]
    stack = [n for dim, n in enumerate(shape) if dim not in (*matrix.rows, *matrix.columns)]
    for kind, size in zip(kinds, apart(arrays[MATRIX][name], matrix).shape[1:], strict=True):
      arrays[kind][name] = random.standard_normal((*stack, size, size)).astype(np.float32)
  groups = grouped(SHAPES, MATRICES, SPECS, SIZES, transpose=False)
  assert any(group.shape == (8, 6) and group.rounds > 1 for group in groups)
  assert square_spec(MATRICES["out"], SPECS["out"], 1) == PartitionSpec(None, "tensor", "fsdp")

  def one_round(exchange, stacks, factor):
    x, left, right = (exchange.whole(stacks[kind], kind) for kind in (MATRIX, *kinds))
    product = factor * jnp.einsum("mij,mjk,mkl->mil", left, x, right)
    squares = exchange.back(left + jnp.einsum("mij,mkj->mik", x, x), ROWS)
    return {MATRIX: exchange.back(product), ROWS: squares}

  def function(arrays):
    given = {kind: (kind, leaves) for kind, leaves in arrays.items()}
    rest = (groups, MATRICES, SPECS, SIZES, [jnp.float32(3)])
    return in_rounds(one_round, given, [MATRIX, ROWS], *rest)

  with jax.set_mesh(make_mesh(SIZES, jax.devices(), {})):
    found = jax.jit(function)(arrays)
  for name, matrix in MATRICES.items():
    x = apart(arrays[MATRIX][name], matrix)
    left, right = (
      arrays[kind][name].reshape(-1, *[n] * 2) for kind, n in zip(kinds, x.shape[1:], strict=True)
    )
    ours = apart(np.asarray(found[MATRIX][name]), matrix)
    np.testing.assert_allclose(ours, 3 * left @ x @ right, rtol=1e-4, atol=1e-4, err_msg=name)
    ours = np.asarray(found[ROWS][name]).reshape(left.shape)
    np.testing.assert_allclose(ours, left + x @ x.mT, rtol=1e-4, atol=1e-4, err_msg=name)
