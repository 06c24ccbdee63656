"""Letters -> PartitionSpec for one array, and everything that can be wrong with them."""

import pytest
from jax.sharding import PartitionSpec

from partitioning.rules import (
  Dim,
  axes_size,
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


def test_letters_become_a_spec():
  found = resolve("DF", (12, 20), LEGEND, TABLE, SIZES)
  assert tuple(found.spec) == ("fsdp", "tensor")
  assert found.failures == found.notes == ()


def test_a_dim_on_two_axes_is_split_by_both():
  assert axes_size(("data", "fsdp"), SIZES) == 6
  assert tuple(resolve("BF", (18, 20), LEGEND, TABLE, SIZES).spec) == (("data", "fsdp"), "tensor")


def test_axes_of_size_one_are_left_out_of_the_spec():
  sizes = {**SIZES, "data": 1, "tensor": 1}
  assert tuple(resolve("BF", (6, 20), LEGEND, TABLE, sizes).spec) == ("fsdp", None)
  assert tuple(resolve("", (), LEGEND, TABLE, sizes).spec) == ()


def test_a_dim_without_axes_is_replicated():
  found = resolve("DF", (12, 20), LEGEND, {**TABLE, "model": ()}, SIZES)
  assert tuple(found.spec) == (None, "tensor")
  assert found.failures == ()


@pytest.mark.parametrize(
  ("letters", "shape", "said"),
  [
    ("DF", (12, 20, 5), ["dims DF have rank 2", "its shape is (12, 20, 5)"]),
    ("DF", (12,), ["dims DF have rank 2", "its shape is (12,)"]),
    ("DF", (20, 12), ["dim D (model) has size 20, its legend says 12", "dim F (feedforward)"]),
    ("DX", (12, 20), ["dim X is not in the legend", "D model, F feedforward"]),
    ("DD", (12, 12), ["mesh axis fsdp splits both dim D and dim D"]),
    ("FN", (20, 28), ["mesh axis tensor splits both dim N and dim F"]),
  ],
)
def test_wrong_letters_are_a_failure_with_the_numbers(letters, shape, said):
  text = "\n".join(map(str, resolve(letters, shape, LEGEND, TABLE, SIZES).failures))
  for part in said:
    assert part in text


def test_a_dim_without_an_entry_in_the_table_is_a_failure_and_not_replicated():
  table = {name: axes for name, axes in TABLE.items() if name != "feedforward"}
  [failure] = resolve("DF", (12, 20), LEGEND, table, SIZES).failures
  assert "dim F (feedforward) is not in the axis table" in str(failure)


def test_an_axis_that_the_mesh_has_not_is_a_failure():
  table = {**TABLE, "feedforward": ("tensr",)}
  [failure] = resolve("DF", (12, 20), LEGEND, table, SIZES).failures
  assert str(failure) == (
    "dim F (feedforward) takes unknown mesh axis 'tensr'; the axes are data, fsdp, stage, tensor"
  )


def test_an_axis_used_twice_does_not_wait_for_the_mesh_on_which_it_fails():
  sizes = {**SIZES, "tensor": 1}
  [failure] = resolve("FN", (20, 28), LEGEND, TABLE, sizes).failures
  assert str(failure) == "mesh axis tensor splits both dim N and dim F"


def test_an_axis_twice_in_one_dim_is_a_failure():
  table = {**TABLE, "feedforward": ("tensor", "tensor")}
  legend = {**LEGEND, "F": Dim("feedforward", 80)}
  [failure] = resolve("DF", (12, 80), legend, table, SIZES).failures
  assert str(failure) == "mesh axis tensor splits both dim F and dim F"


def test_an_indivisible_dim_names_the_nearest_sizes_and_the_smaller_axis():
  legend = {**LEGEND, "F": Dim("feedforward", 1003)}
  [failure] = resolve("DF", (12, 1003), legend, TABLE, {**SIZES, "tensor": 16}).failures
  assert str(failure) == (
    "dim F (feedforward) = 1003 is not divisible by mesh axis tensor=16; "
    "make feedforward 992 or 1008, or set mesh.tensor=1"
  )


def test_the_smaller_axis_that_is_offered_divides_the_dim_and_the_devices():
  message = str(indivisible("F", "feedforward", 36, ("tensor",), {"tensor": 8}))
  assert message.endswith("make feedforward 32 or 40, or set mesh.tensor=4")  # and not 6


def test_a_dim_smaller_than_its_axis_is_only_offered_a_larger_size():
  message = str(indivisible("N", "heads", 3, ("tensor",), {"tensor": 8}))
  assert message.endswith("make heads 8, or set mesh.tensor=1")


def test_an_indivisible_dim_on_two_axes_names_both():
  [failure] = resolve("B", (20,), LEGEND, TABLE, SIZES).failures
  assert str(failure) == (
    "dim B (batch) = 20 is not divisible by mesh axis data=3 x fsdp=2; make batch 18 or 24"
  )


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
