"""Digests of copies: each bit counts, and the device whose copy differs is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from tests.helpers.flips import altered
from training import replica_check

SIZES = {axis: {"data": 2, "tensor": 4}.get(axis, 1) for axis in AXES}
DTYPES = ("float32", "bfloat16", "float64", "int8", "bool")


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(SIZES)


# ---- Digests ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_every_dtype_counts(dtype):
  with jax.enable_x64(True):
    values = np.asarray(jnp.asarray([[1, 0, 5], [0, 1, 7]], dtype))
    one_bit = []
    size = 1 if dtype == "bool" else 8 * values.dtype.itemsize  # a bool has one
    for byte in range(values.nbytes):
      for bit in range(min(size, 8)):
        flipped = values.copy()
        flipped.reshape(-1).view(np.uint8)[byte] ^= np.uint8(1 << bit)
        one_bit.append(flipped)
    digest = jax.jit(lambda stacked: jax.vmap(lambda x: replica_check.digests([x])[0])(stacked))
    found = np.asarray(digest(np.stack([values, *one_bit])))
  assert len(one_bit) >= 6
  assert found.dtype == np.uint32
  assert not (found[1:] == found[0]).any()
  assert len(set(found.tolist())) == len(found)


def test_bits_are_read_and_not_values():
  nans = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
  digest = jax.jit(lambda x: replica_check.digests([x])[0])
  found = {
    int(digest(np.array([1, x], np.float32))) for x in [*nans, np.float32(0), -np.float32(0)]
  }
  assert len(found) == 6


def test_place_and_array_count():
  one, other = np.float32([[1, 2, 3]]), np.float32([[4, 5, 6]])
  digest = jax.jit(replica_check.digests)
  seen = [(one, other), (other, one), (one[:, ::-1], other), (one, other[:, [0, 2, 1]])]
  found = {tuple(int(x) for x in digest(pair)) for pair in seen}
  assert len(found) == len(seen)
  assert len({int(x) for x in digest((one, one, one))}) == 3


# ---- Who holds copies ----


def test_holders_are_the_devices_whose_parts_are_the_same(mesh):
  def numbers(*entries):
    found = replica_check.holders(NamedSharding(mesh, PartitionSpec(*entries)), (8, 16))
    return [[d.id for d in devices] for devices in found]

  assert numbers() == [list(range(8))]
  assert numbers("data") == [[0, 1, 2, 3], [4, 5, 6, 7]]
  assert numbers(None, "tensor") == [[0, 4], [1, 5], [2, 6], [3, 7]]
  assert numbers("tensor", "data") == []
  assert numbers(("data", "tensor")) == []


# ---- Which copy differs ----

SPECS = {
  "whole": ((6, 5), "float32", PartitionSpec()),
  "apart": ((2, 4), "float32", PartitionSpec("data", "tensor")),
  "pairs": ((4, 8), "bfloat16", PartitionSpec(None, "tensor")),
  "fours": ((2, 3), "int32", PartitionSpec("data")),
  "count": ((), "int32", PartitionSpec()),
}


@pytest.fixture(scope="module")
def compiled(mesh):
  """Returns the arrays, and a function from arrays to what differs."""
  arrays = {
    name: jax.device_put(jnp.ones(shape, dtype), NamedSharding(mesh, spec))
    for name, (shape, dtype, spec) in SPECS.items()
  }
  abstract = {
    name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in arrays.items()
  }
  held = replica_check.Copies(abstract, mesh)
  assert list(held.leaves) == [name for name in SPECS if name != "apart"]
  program = replica_check.digest_program(held.leaves, mesh)
  programs = [
    jax.jit(program, out_shardings=NamedSharding(mesh, spec))
    for spec in (PartitionSpec(AXES), PartitionSpec())
  ]

  def differences(given):
    found = [np.asarray(jitted([given[name] for name in held.leaves])) for jitted in programs]
    np.testing.assert_array_equal(*found)  # gathered or not
    return held.differences(found[0])

  return arrays, differences


@pytest.mark.parametrize(
  ("name", "device", "right"),
  [
    ("whole", 5, {0, 1, 2, 3, 4, 6, 7}),
    ("fours", 6, {4, 5, 7}),
  ],
)
def test_the_one_that_is_not_as_the_others_is_named(compiled, name, device, right):
  arrays, differences = compiled
  [found] = differences({**arrays, name: altered(arrays[name], device, (1, 6))})
  assert found.name == name
  assert [d.id for d in found.wrong] == [device]
  assert {d.id for d in found.right} == right


def test_two_against_two_are_undecided_and_two_against_one_and_one_are_not(compiled):
  arrays, differences = compiled
  assert differences(arrays) == []
  once = altered(arrays["fours"], 4, (0, 0))
  [found] = differences({**arrays, "fours": altered(once, 7, (0, 0))})
  assert ([d.id for d in found.wrong], found.right) == ([4, 5, 6, 7], ())
  [found] = differences({**arrays, "fours": altered(once, 7, (0, 1))})
  assert ([d.id for d in found.wrong], [d.id for d in found.right]) == ([4, 7], [5, 6])
