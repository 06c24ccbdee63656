"""Groups of matrices: which kernels are exchanged together, and how many a device gets."""

import pytest
from jax.sharding import PartitionSpec

from partitioning.parallel.matrix_groups import (
  COLUMNS,
  MATRIX,
  ROWS,
  Matrix,
  grouped,
)
from tests.partitioning.parallel.kernels import MATRICES, SHAPES, SIZES, SPECS


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


def test_squares_have_as_many_shards_as_their_kernel():
  """Filled up where the axes of the kernel's other side do not divide theirs."""
  sizes = {"fsdp": 4, "tensor": 2}
  specs = {"x": PartitionSpec(None, "fsdp", "tensor")}
  [group] = grouped({"x": (3, 12, 10)}, {"x": Matrix((1,), (2,))}, specs, sizes)
  assert group.transposed == (True,)  # 10 x 12
  assert group.parts(MATRIX, sizes) == (((10, ("tensor",)),), ((12, ("fsdp",)),))
  assert group.parts(ROWS, sizes) == (((10, ("tensor",)),), ((12, ("fsdp",)),))
  assert group.parts(COLUMNS, sizes) == (((12, ("tensor",)),), ((12, ("fsdp",)),))
  assert [group.elements(kind, sizes) for kind in (MATRIX, ROWS, COLUMNS)] == [120, 120, 144]


def test_matrices_of_the_other_orientation_are_a_group_of_their_own_unless_transposed():
  groups = grouped(SHAPES, MATRICES, SPECS, SIZES, transpose=False)
  assert {("in",), ("out",)} < {group.names for group in groups}
  assert not any(any(group.transposed) for group in groups)
