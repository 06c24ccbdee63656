"""Kernels that are stacks of matrices, and how they are sharded."""

from jax.sharding import PartitionSpec

from partitioning.parallel.whole_matrices import Matrix

SIZES = {"data": 2, "fsdp": 2, "stage": 1, "expert": 1, "context": 1, "tensor": 2}
# Name -> shape, rows, columns, sharding: of 3 layers, widths 4 and 6, and 10 as 2 heads of 5 or so.
KERNELS = {
  "in": ((3, 4, 2, 5), (1,), (2, 3), (None, "fsdp", "tensor")),
  "out": ((3, 2, 5, 4), (1, 2), (3,), (None, "tensor", None, "fsdp")),  # its transpose, with "in"
  "inside a head": ((3, 4, 3, 2), (1,), (2, 3), (None, None, None, "tensor")),
  "two axes": ((9, 8, 6), (1,), (2,), (None, ("tensor", "data"), "fsdp")),
  "each head": ((3, 4, 2, 5), (1,), (3,), (None, "fsdp", "tensor")),
  "one layer": ((6, 4), (0,), (1,), ()),
  "square": ((2, 4, 4), (1,), (2,), (None, "tensor")),
  "square, transposed": ((2, 4, 4), (1,), (2,), (None, None, "tensor")),
}
MATRICES = {name: Matrix(rows, columns) for name, (_, rows, columns, _) in KERNELS.items()}
SPECS = {name: PartitionSpec(*spec) for name, (*_, spec) in KERNELS.items()}
SHAPES = {name: shape for name, (shape, *_) in KERNELS.items()}
