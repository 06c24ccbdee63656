"""The layout as people read it, with numbers worked out by hand; and what lies otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from partitioning import shardings
from partitioning.dims import Dim
from partitioning.mesh import AXES, make_mesh
from partitioning.rules import LayoutError, Placement
from reports import layout_text

SIZES = {axis: {"fsdp": 2, "tensor": 4}.get(axis, 1) for axis in AXES}
ALONE = dict.fromkeys(AXES, 1)


def placement(name, shape, *entries, dtype="float32", letters="", rule="a rule", notes=()):
  """Returns where one array lies."""
  spec = PartitionSpec(*entries)
  return Placement(name, shape, np.dtype(dtype), letters, rule, spec, notes)


UP = placement("up/kernel", (3, 12, 20), None, "fsdp", "tensor", letters="LDF", rule="(up|gate).*")
BOTH = placement("table", (24, 5), ("tensor", "fsdp"))
HALF = placement("out/kernel", (12, 7), "fsdp", None, dtype="bfloat16")
WHOLE = placement("norm/scale", (12,), dtype="float64")
COUNT = placement("count", (), dtype="int32", rule="scalar")


# ---- Numbers ----


@pytest.mark.parametrize(
  ("array", "shard", "size", "copies"),
  [
    (UP, (3, 6, 5), 3 * 6 * 5 * 4, 1),
    (BOTH, (3, 5), 3 * 5 * 4, 1),
    (HALF, (6, 7), 6 * 7 * 2, 4),
    (WHOLE, (12,), 12 * 8, 8),
    (COUNT, (), 4, 8),
  ],
)
def test_what_one_device_holds(array, shard, size, copies):
  assert shardings.shard_shape(array.shape, array.spec, SIZES) == shard
  assert shardings.bytes_per_device(array, SIZES) == size
  assert shardings.copies(array, SIZES) == copies


def test_dims_that_a_spec_leaves_out_are_whole():
  assert shardings.shard_shape((12, 20, 7), PartitionSpec("fsdp"), SIZES) == (6, 20, 7)


def test_the_numbers_are_those_of_the_real_arrays():
  mesh = make_mesh(SIZES)
  for array in (UP, BOTH, HALF, WHOLE, COUNT):
    with jax.enable_x64(True):
      zeros = jnp.zeros(array.shape, array.dtype)
    real = jax.device_put(zeros, NamedSharding(mesh, array.spec))
    pieces = real.addressable_shards
    assert {piece.data.nbytes for piece in pieces} == {shardings.bytes_per_device(array, SIZES)}
    first = [piece for piece in pieces if all(not part.start for part in piece.index)]
    assert len(first) == shardings.copies(array, SIZES)


def test_replicated_bytes_are_of_arrays_that_every_device_holds_whole():
  assert shardings.replicated_bytes([UP, BOTH, HALF, WHOLE, COUNT], SIZES) == 96 + 4
  assert shardings.replicated_bytes([UP, HALF], SIZES) == 0
  assert shardings.replicated_bytes([WHOLE, COUNT], ALONE) == 0  # one device repeats nothing


@pytest.mark.parametrize(
  ("entries", "rank", "text"),
  [
    ((None, "fsdp"), 3, "(-, fsdp, -)"),
    ((("tensor", "fsdp"), None), 2, "(tensor+fsdp, -)"),
    ((), 0, "()"),
  ],
)
def test_a_spec_in_words(entries, rank, text):
  assert shardings.spec_text(PartitionSpec(*entries), rank) == text


def test_sizes_in_words():
  assert shardings.shape_text((3, 20)) == "[3, 20]"
  assert shardings.size_text(3 * 2**19) == "1.5 MiB"


# ---- Tables ----


def row(text, name):
  """Returns the words of the one row with this array."""
  [found] = [line.split() for line in text.splitlines() if name in line.split()]
  return " ".join(found)


def test_the_table_has_a_row_per_array_with_its_rule_spec_shard_bytes_and_copies():
  text = layout_text.table_text({"parameters": [UP, HALF], "optimizer": [COUNT]}, SIZES)
  head = "array shape dtype dims rule spec shard bytes/device replicas"
  assert row(text, "array") == head
  assert row(text, "up/kernel") == (
    "up/kernel [3, 12, 20] float32 LDF (up|gate).* (-, fsdp, tensor) [3, 6, 5] 360 Bytes 1"
  )
  assert row(text, "out/kernel") == (
    "out/kernel [12, 7] bfloat16 - a rule (fsdp, -) [6, 7] 84 Bytes 4"
  )
  assert row(text, "count") == "count [] int32 - scalar () [] 4 Bytes 8"
  assert row(text, "parameters") == "parameters 444 Bytes"
  assert row(text, "optimizer") == "optimizer 4 Bytes"


def test_the_short_table_leaves_out_the_rules_and_the_optimizers_leaves():
  text = layout_text.table_text({"parameters": [UP], "optimizer": [COUNT]}, SIZES, whole=False)
  assert row(text, "up/kernel") == ("up/kernel [3, 12, 20] (-, fsdp, tensor) [3, 6, 5] 360 Bytes 1")
  assert row(text, "optimizer") == "optimizer 4 Bytes"
  assert "count" not in text


def test_the_table_is_never_cut_and_its_notes_stand_below():
  name = "/".join(["a_name"] * 60)
  long = placement(name, (4,), notes=("kv_heads=7 stays whole: tensor=4 does not divide it",))
  text = layout_text.table_text({"parameters": [long]}, SIZES)
  assert row(text, name).startswith(name)
  assert text.endswith(f"note: {name}: kv_heads=7 stays whole: tensor=4 does not divide it")


def test_patterns_are_shown_as_they_are_written():
  array = placement("b", (4,), rule="[ab]|[/c]:smile:")
  assert "[ab]|[/c]:smile:" in row(layout_text.table_text({"parameters": [array]}, SIZES), "b")


def test_the_legend_in_words():
  legend = {"B": Dim("batch", None), "K": Dim("kv_heads", 7, may_replicate=True)}
  title, batch, heads = layout_text.legend_text(legend).splitlines()
  assert title == "legend: letter, dim, size"
  assert batch.split() == ["B", "batch", "differs"]
  assert heads.split()[:3] == ["K", "kv_heads", "7"]
  assert "may replicate where its axes do not divide it" in heads


def test_two_layouts_side_by_side_mark_what_differs_and_nothing_else():
  ours = {p.name: p for p in (UP, HALF, WHOLE)}
  other = placement("up/kernel", (3, 12, 20), None, "fsdp", None)
  theirs = {p.name: p for p in (other, HALF, WHOLE, COUNT)}
  text = layout_text.against_text(ours, theirs, (SIZES, SIZES), ("fsdp_tp", "fsdp"))
  assert row(text, "array") == "array shape fsdp_tp bytes/device fsdp bytes/device"
  assert row(text, "up/kernel") == (
    "* up/kernel [3, 12, 20] (-, fsdp, tensor) 360 Bytes (-, fsdp, -) 1.4 KiB"
  )
  assert row(text, "out/kernel") == "out/kernel [12, 7] (fsdp, -) 84 Bytes (fsdp, -) 84 Bytes"
  assert row(text, "norm/scale").startswith("norm/scale")
  assert row(text, "count") == "* count [] not there 0 Bytes () 4 Bytes"
  assert row(text, "all") == f"all 540 Bytes {(3 * 6 * 20 * 4 + 84 + 96 + 4) / 1024:.1f} KiB"


def test_two_layouts_on_meshes_of_two_sizes_differ_by_their_bytes():
  sizes = ({**ALONE, "fsdp": 2}, {**ALONE, "fsdp": 4})
  text = layout_text.against_text(
    {"out/kernel": HALF}, {"out/kernel": HALF}, sizes, ("fsdp2", "fsdp4")
  )
  assert row(text, "out/kernel") == "* out/kernel [12, 7] (fsdp, -) 84 Bytes (fsdp, -) 42 Bytes"


def test_two_models_side_by_side_show_both_shapes():
  wide = placement("up/kernel", (3, 12, 40), None, "fsdp", "tensor")
  text = layout_text.against_text(
    {"up/kernel": UP}, {"up/kernel": wide}, (SIZES, SIZES), ("a", "b")
  )
  assert "[3, 12, 20] | [3, 12, 40]" in row(text, "up/kernel")


# ---- What was placed ----


@pytest.fixture
def placed():
  """Arrays that lie as their placements say, the placements, and their mesh."""
  mesh = make_mesh(SIZES)
  tree = {"up": {"kernel": jnp.zeros(UP.shape)}, "scale": jnp.zeros(12)}
  placements = {"up/kernel": UP, "scale": placement("scale", (12,), "fsdp")}
  return jax.device_put(tree, shardings.shardings(tree, placements, mesh)), placements, mesh


def test_what_lies_as_its_spec_says_passes(placed):
  tree, placements, mesh = placed
  shardings.check_placed(tree, placements, mesh)
  assert tree["up"]["kernel"].addressable_shards[0].data.shape == (3, 6, 5)


def test_specs_that_are_written_otherwise_and_mean_the_same_pass(placed):
  mesh = placed[2]
  sharding = NamedSharding(mesh, PartitionSpec("fsdp", None))
  tree = {"out": jax.device_put(jnp.zeros((12, 7)), sharding)}
  assert sharding.spec != PartitionSpec("fsdp")
  for entries in (("fsdp",), ("fsdp", None), (("fsdp",), None), (("fsdp", "data"),)):
    shardings.check_placed(tree, {"out": placement("out", (12, 7), *entries)}, mesh)


def test_every_leaf_that_lies_otherwise_is_named(placed):
  tree, placements, mesh = placed
  wrong = NamedSharding(mesh, PartitionSpec(None, "tensor", "fsdp"))
  tree["up"]["kernel"] = jax.device_put(tree["up"]["kernel"], wrong)
  with pytest.raises(LayoutError) as refusal:
    shardings.check_placed(tree, placements, mesh)
  [failure] = refusal.value.failures
  assert failure.startswith("up/kernel: lies as ")
  assert "'tensor', 'fsdp')" in failure.partition("its spec says")[0]
  assert "'fsdp', 'tensor')" in failure.partition("its spec says")[2]
  tree["scale"] = jnp.zeros(12)  # on one device only
  with pytest.raises(LayoutError, match="2 failures") as refusal:
    shardings.check_placed(tree, placements, mesh)
  assert "scale: lies as SingleDeviceSharding" in str(refusal.value)


def test_a_leaf_on_a_part_of_the_mesh_is_named(placed):
  _, placements, mesh = placed
  half = make_mesh({**ALONE, "fsdp": 2, "tensor": 2}, jax.devices()[:4])
  leaf = jax.device_put(jnp.zeros(12), NamedSharding(half, PartitionSpec("fsdp")))
  with pytest.raises(LayoutError, match="scale: lies as"):
    shardings.check_placed({"scale": leaf}, placements, mesh)


def test_leaves_are_found_by_their_prefix(placed):
  tree, placements, mesh = placed
  renamed = {f"optimizer/mu/{name}": p for name, p in placements.items()}
  shardings.check_placed({"mu": tree}, renamed, mesh, "optimizer/")
  specs = shardings.shardings({"mu": tree}, renamed, mesh, "optimizer/")
  assert specs["mu"]["scale"] == NamedSharding(mesh, PartitionSpec("fsdp"))
