"""Letters -> PartitionSpec for one array, and everything that can be wrong with them."""

import pytest
from jax.sharding import PartitionSpec

from partitioning.rules import (
  Dim,
  indivisible,
  partition_spec,
  resolve,
  spec_axes,
  spec_entries,
)

LEGEND = {
  "B": Dim("batch", None),
  "D": Dim("model", 12),
  "F": Dim("feedforward", 20),
  "N": Dim("heads", 28),
  "K": Dim("kv_heads", 7, may_replicate=True),
}
TABLE = {
  "batch": ("data", "fsdp"),
  "model": ("fsdp",),
  "feedforward": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
}
SIZES = {"data": 3, "fsdp": 2, "stage": 1, "tensor": 4}


@pytest.mark.parametrize(
  ("letters", "shape", "sizes", "spec"),
  [
    ("DF", (12, 20), {}, ("fsdp", "tensor")),
    ("BF", (18, 20), {}, (("data", "fsdp"), "tensor")),
    ("BF", (6, 20), {"data": 1, "tensor": 1}, ("fsdp", None)),  # without axes of size 1
    ("", (), {}, ()),
  ],
)
def test_letters_become_a_spec(letters, shape, sizes, spec):
  found = resolve(letters, shape, LEGEND, TABLE, {**SIZES, **sizes})
  assert tuple(found.spec) == spec
  assert found.failures == found.notes == ()


def test_a_dim_without_axes_is_replicated():
  found = resolve("DF", (12, 20), LEGEND, {**TABLE, "model": ()}, SIZES)
  assert tuple(found.spec) == (None, "tensor")
  assert found.failures == ()


@pytest.mark.parametrize(
  ("letters", "shape", "changed", "said"),
  [
    ("DF", (12, 20, 5), {}, "dims DF have rank 2, its shape is (12, 20, 5)"),
    ("DF", (20, 20), {}, "dim D (model) has size 20, its legend says 12"),
    ("DX", (12, 20), {}, "dim X is not in the legend (B batch, D model, F feedforward, N he"),
    ("NH", (28, 3), {}, "dim H (head) is not in the axis table"),
    (
      *("DF", (12, 20), {"feedforward": ("tensr",)}),
      "dim F (feedforward) takes unknown mesh axis 'tensr'; the axes are data, fsdp, stage, tensor",
    ),
    # An axis that is used twice is refused on every mesh.
    ("FN", (20, 28), {"tensor": 1}, "mesh axis tensor splits both dim N and dim F"),
    (
      *("F", (20,), {"feedforward": ("tensor",) * 2, "tensor": 2}),
      "mesh axis tensor splits both dim F and dim F",
    ),
    (
      *("F", (20,), {"tensor": 16}),
      "dim F (feedforward) = 20 is not divisible by mesh axis tensor=16; make feedforward 16 or "
      "32, or set mesh.tensor=4",
    ),
    (
      *("B", (20,), {}),
      "dim B (batch) = 20 is not divisible by mesh axis data=3 x fsdp=2; make batch 18 or 24",
    ),
  ],
)
def test_what_is_wrong_is_a_failure_with_the_numbers(letters, shape, changed, said):
  legend, table = {**LEGEND, "H": Dim("head", 3)}, dict(TABLE)
  table |= {name: axes for name, axes in changed.items() if name in table}
  sizes = {axis: changed.get(axis, size) for axis, size in SIZES.items()}
  [failure] = resolve(letters, shape, legend, table, sizes).failures
  assert said in str(failure)


@pytest.mark.parametrize(
  ("size", "fix"),
  [
    (36, "make heads 32 or 40, or set mesh.tensor=4"),  # and not 6
    (3, "make heads 8, or set mesh.tensor=1"),
  ],
)
def test_what_is_offered_divides_the_dim_and_the_devices(size, fix):
  assert str(indivisible("N", "heads", size, ("tensor",), {"tensor": 8})).endswith(fix)


def test_only_a_dim_whose_legend_allows_it_is_replicated_with_a_note():
  found = resolve("DK", (12, 7), LEGEND, TABLE, SIZES)
  assert tuple(found.spec) == ("fsdp", None)
  assert found.failures == ()
  assert found.notes == ("kv_heads=7 is replicated: tensor=4 does not divide it",)
  strict = {**LEGEND, "K": Dim("kv_heads", 7)}
  [failure] = resolve("DK", (12, 7), strict, TABLE, SIZES).failures
  assert "kv_heads) = 7 is not divisible" in str(failure)


def test_a_dim_that_may_replicate_is_split_if_possible():
  legend = {**LEGEND, "K": Dim("kv_heads", 8, may_replicate=True)}
  found = resolve("DK", (12, 8), legend, TABLE, SIZES)
  assert tuple(found.spec) == ("fsdp", "tensor")
  assert found.notes == ()


def test_arrays_that_fail_alike_have_the_same_cause():
  table = {**TABLE, "feedforward": ("tensor",)}
  [one] = resolve("DF", (12, 18), {**LEGEND, "F": Dim("feedforward", 18)}, table, SIZES).failures
  [two] = resolve("F", (18,), {**LEGEND, "F": Dim("feedforward", 18)}, table, SIZES).failures
  [other] = resolve("F", (19,), {**LEGEND, "F": Dim("feedforward", 19)}, table, SIZES).failures
  assert one.cause == two.cause != other.cause
  assert str(one.of("up/kernel")) == f"up/kernel: {one}"
  assert one.of("up/kernel") != one.of("down/kernel")


def test_all_failures_of_one_array_come_together():
  text = "\n".join(map(str, resolve("DXB", (13, 20, 5), LEGEND, TABLE, SIZES).failures))
  for part in (
    "model) has size 13, its legend says 12",
    "model) = 13 is not divisible by mesh axis fsdp=2",
    "dim X is not in the legend",
    "mesh axis fsdp splits both dim B and dim D",
    "batch) = 5 is not divisible by mesh axis data=3 x fsdp=2",
  ):
    assert part in text


def test_the_axes_of_a_spec():
  assert spec_axes(PartitionSpec(("data", "fsdp"), None, "tensor")) == {"data", "fsdp", "tensor"}
  assert spec_axes(PartitionSpec()) == set()


def test_spec_entries_write_every_dim_as_a_tuple_and_partition_spec_takes_them_back():
  spec = PartitionSpec("data", None, ("fsdp", "tensor"), ())
  assert spec_entries(spec) == (("data",), (), ("fsdp", "tensor"), ())
  assert spec_entries(spec, 6) == (("data",), (), ("fsdp", "tensor"), (), (), ())
  assert spec_entries(PartitionSpec(), 1) == ((),)
  assert spec_entries(PartitionSpec("data"), 0) == (("data",),)
  # As jax itself writes a spec: a bare name for one axis, None for none.
  assert tuple(partition_spec(spec_entries(spec, 5))) == (
    "data",
    None,
    ("fsdp", "tensor"),
    None,
    None,
  )
  assert spec_axes(spec) == {"data", "fsdp", "tensor"}
