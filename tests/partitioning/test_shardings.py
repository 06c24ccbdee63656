"""The layout as people read it, with numbers worked out by hand; and what lies otherwise."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from partitioning import rules
from partitioning.mesh import make_mesh
from partitioning.rules import LayoutError
from tests.partitioning.placements import ALONE, BOTH, COUNT, HALF, SIZES, UP, WHOLE, placement

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
  assert rules.shard_shape(array.shape, array.spec, SIZES) == shard
  assert rules.bytes_per_device(array, SIZES) == size
  assert rules.copies(array, SIZES) == copies


def test_the_numbers_are_those_of_the_real_arrays():
  mesh = make_mesh(SIZES)
  for array in (UP, BOTH, HALF, WHOLE, COUNT):
    with jax.enable_x64(True):
      zeros = jnp.zeros(array.shape, array.dtype)
    real = jax.device_put(zeros, NamedSharding(mesh, array.spec))
    pieces = real.addressable_shards
    assert {piece.data.nbytes for piece in pieces} == {rules.bytes_per_device(array, SIZES)}
    first = [piece for piece in pieces if all(not part.start for part in piece.index)]
    assert len(first) == rules.copies(array, SIZES)


def test_replicated_bytes_are_of_fully_replicated_arrays():
  assert rules.replicated_bytes([UP, BOTH, HALF, WHOLE, COUNT], SIZES) == 96 + 4
  assert rules.replicated_bytes([UP, HALF], SIZES) == 0
  assert rules.replicated_bytes([WHOLE, COUNT], ALONE) == 0  # one device repeats nothing


@pytest.mark.parametrize(
  ("entries", "rank", "text"),
  [
    ((None, "fsdp"), 3, "(-, fsdp, -)"),
    ((("tensor", "fsdp"), None), 2, "(tensor+fsdp, -)"),
    ((), 0, "()"),
  ],
)
def test_a_spec_in_words(entries, rank, text):
  assert rules.spec_text(PartitionSpec(*entries), rank) == text


# ---- Tables ----


# ---- What was placed ----


@pytest.fixture
def placed():
  """Arrays that lie as their placements say, the placements, and their mesh."""
  mesh = make_mesh(SIZES)
  tree = {"up": {"kernel": jnp.zeros(UP.shape)}, "scale": jnp.zeros(12)}
  placements = {"up/kernel": UP, "scale": placement("scale", (12,), "fsdp")}
  return jax.device_put(tree, rules.shardings(tree, placements, mesh)), placements, mesh


def test_what_is_sharded_as_its_spec_says_passes(placed):
  tree, placements, mesh = placed
  rules.check_placed(tree, placements, mesh)
  assert tree["up"]["kernel"].addressable_shards[0].data.shape == (3, 6, 5)


def test_specs_that_are_written_otherwise_and_mean_the_same_pass(placed):
  mesh = placed[2]
  sharding = NamedSharding(mesh, PartitionSpec("fsdp", None))
  tree = {"out": jax.device_put(jnp.zeros((12, 7)), sharding)}
  assert sharding.spec != PartitionSpec("fsdp")
  for entries in (("fsdp",), ("fsdp", None), (("fsdp",), None), (("fsdp", "data"),)):
    rules.check_placed(tree, {"out": placement("out", (12, 7), *entries)}, mesh)


def test_every_leaf_that_is_sharded_differently_is_named(placed):
  tree, placements, mesh = placed
  wrong = NamedSharding(mesh, PartitionSpec(None, "tensor", "fsdp"))
  tree["up"]["kernel"] = jax.device_put(tree["up"]["kernel"], wrong)
  with pytest.raises(LayoutError) as refusal:
    rules.check_placed(tree, placements, mesh)
  [failure] = refusal.value.failures
  assert failure.startswith("up/kernel: is sharded as ")
  assert "'tensor', 'fsdp')" in failure.partition("its spec says")[0]
  assert "'fsdp', 'tensor')" in failure.partition("its spec says")[2]
  tree["scale"] = jnp.zeros(12)  # on one device only
  with pytest.raises(LayoutError, match="2 failures") as refusal:
    rules.check_placed(tree, placements, mesh)
  assert "scale: is sharded as SingleDeviceSharding" in str(refusal.value)


def test_leaves_are_found_by_their_prefix(placed):
  tree, placements, mesh = placed
  renamed = {f"optimizer/mu/{name}": p for name, p in placements.items()}
  rules.check_placed({"mu": tree}, renamed, mesh, "optimizer/")
  specs = rules.shardings({"mu": tree}, renamed, mesh, "optimizer/")
  assert specs["mu"]["scale"] == NamedSharding(mesh, PartitionSpec("fsdp"))
