"""Where the optimizer's state is placed: by its parameters' dims, also where it is factored."""

import jax
import optax
from jax.sharding import PartitionSpec

from partitioning import rules
from partitioning.rules import Dim, place_optimizer, place_parameters
from tests.partitioning.tables import LEGEND, RULES, SIZES, TABLE, array, params, specs


def placed(optimizer, *, table=TABLE, sizes=SIZES, overrides=()):
  """Returns placements and failures of an optimizer's state for `params()`."""
  parameters, failures = place_parameters(params(), RULES, LEGEND, TABLE, sizes)
  assert failures == []
  state = jax.eval_shape(optimizer.init, params())
  return place_optimizer(state, parameters, LEGEND, table, sizes, overrides)


def test_optimizer_leaves_follow_their_parameter_and_scalars_are_replicated():
  found, failures = placed(optax.adamw(1e-3))
  assert failures == []
  parameters = specs(params())
  scalars = {name for name, leaf in found.items() if leaf.shape == ()}
  assert {found[name].rule for name in scalars} == {"scalar"}
  assert {found[name].spec for name in scalars} == {PartitionSpec()}
  assert len(found) == 2 * len(parameters) + len(scalars)
  for moment in ("mu", "nu"):
    for name, spec in parameters.items():
      leaf = found[f"optimizer/0/{moment}/{name}"]
      assert (leaf.spec, leaf.rule) == (spec, f"as {name}")


def test_a_table_that_does_not_divide_a_leaf_is_refused_by_the_leafs_name():
  table = {**TABLE, "model": ("fsdp", "data")}
  _, failures = placed(optax.adamw(1e-3), table=table, sizes={**SIZES, "data": 5})
  assert len(failures) == 2 * 4
  assert any(
    str(failure).startswith(
      "optimizer/0/nu/norm/scale: dim D (model) = 12 is not divisible by mesh"
    )
    for failure in failures
  )


FACTORED = optax.adafactor(1e-3, min_dim_size_to_factor=2)


def test_a_factored_statistic_has_the_dims_that_are_left_of_its_parameter():
  """Adafactor's rows leave out a parameter's largest dim, its columns the second largest."""
  found, failures = placed(FACTORED)
  assert failures == []
  rows, columns = (f"optimizer/0/v_{kind}/layers/{{}}/kernel" for kind in ("row", "col"))
  wanted = {
    rows.format("up"): ("LD", (3, 12), (None, "fsdp"), "as layers/up/kernel without F"),
    columns.format("up"): ("LF", (3, 20), (None, "tensor"), "as layers/up/kernel without D"),
    rows.format("key"): ("LKH", (3, 7, 5), (None, None, None), "as layers/key/kernel without D"),
    columns.format("key"): ("LDH", (3, 12, 5), (None, "fsdp", None), "as layers/key/kernel with"),
  }
  for name, (letters, shape, entries, rule) in wanted.items():
    leaf = found[name]
    assert (leaf.letters, leaf.shape, tuple(leaf.spec)) == (letters, shape, entries), name
    assert leaf.rule.startswith(rule)
  assert found[rows.format("key")].notes == (
    "kv_heads=7 is replicated: tensor=4 does not divide it",
  )
  # Where a parameter is not factored, and in its place where it is: arrays of one element.
  assert found["optimizer/0/v/layers/up/kernel"].rule == "one element"
  assert found["optimizer/0/v_row/norm/scale"].rule == "one element"
  assert found["optimizer/0/v/norm/scale"].letters == "D"
  assert found["optimizer/0/count"].rule == "scalar"


def test_dims_of_1_are_not_sharded_and_the_others_are():
  tree = {"up": array(12, 20)}
  parameters, _ = place_parameters(tree, {"up": "DF"}, LEGEND, TABLE, SIZES)
  # As SM3 has them: below a parameter's name, a statistic for each of its dims.
  state = {"mu": {"up": [array(12, 1), array(1, 20)]}}
  found, failures = place_optimizer(state, parameters, LEGEND, TABLE, SIZES)
  assert failures == []
  assert tuple(found["optimizer/mu/up/0"].spec) == ("fsdp", None)
  assert tuple(found["optimizer/mu/up/1"].spec) == (None, "tensor")
  assert found["optimizer/mu/up/1"].rule == "as up without D"


def test_squares_of_a_side_are_split_over_the_axes_of_both_sides():
  tree = {"up": array(3, 12, 20), "query": array(3, 12, 4, 5), "one": array(12, 7)}
  legend = {**LEGEND, "K": Dim("kv_heads", 4), "X": Dim("kv_heads", 7, may_replicate=True)}
  names = {"up": "LDF", "query": "LDKH", "one": "DX"}
  parameters, failures = place_parameters(tree, names, legend, TABLE, SIZES)
  assert failures == []
  squares = {"up": array(3, 12, 12), "query": array(3, 20, 20), "one": array(7, 7)}
  found, failures = place_optimizer({"left": squares}, parameters, legend, TABLE, SIZES)
  assert failures == []
  up, query, one = (found[f"optimizer/left/{name}"] for name in squares)
  assert (up.letters, tuple(up.spec), up.rule) == (
    "LDD",
    (None, "fsdp", "tensor"),
    "squares of D of up",
  )
  assert (query.letters, tuple(query.spec)) == ("", (None, "fsdp", "tensor"))
  assert query.rule == "squares of KH of query"
  assert tuple(one.spec) == (None, None)
  assert one.notes[-1] == "7 is replicated over fsdp, which does not divide it"


def square(*, init=None, overrides=()):
  """Places Adafactor's state of a square matrix, whose two dims are sharded differently."""
  legend = {**LEGEND, "F": Dim("feedforward", 12)}
  tree = {"layers": {"up": {"kernel": array(3, 12, 12)}}}
  parameters, failures = place_parameters(tree, {"layers/up/kernel": "LDF"}, legend, TABLE, SIZES)
  assert failures == []
  state = jax.eval_shape(FACTORED.init, tree)
  return place_optimizer(state, parameters, legend, TABLE, SIZES, overrides, init=init)


def test_dims_of_equal_size_are_distinguished_by_the_optimizer_itself():
  found, failures = square(init=FACTORED.init)
  assert failures == []
  # NumPy's argsort puts the later of two equal dims last: optax takes F for the largest.
  assert found["optimizer/0/v_row/layers/up/kernel"].letters == "LD"
  assert found["optimizer/0/v_col/layers/up/kernel"].letters == "LF"


def test_ambiguous_dims_are_refused_with_the_override_to_write():
  _, failures = square()
  [row] = [str(f) for f in failures if "/v_row/" in f.array]
  name = "optimizer/0/v_row/layers/up/kernel"
  assert row == (
    f"{name}: shape (3, 12), which is as layers/up/kernel without F or as layers/up/kernel "
    "without D: dims of equal size, sharded differently; give it an explicit spec, "
    f'partitioning.overrides=(("{name}", (None, None, )),)'
  )
  overrides = [(failure.array, (None, "fsdp")) for failure in failures]
  found, failures = square(overrides=overrides)
  assert failures == []
  assert tuple(found[name].spec) == (None, "fsdp")
  assert rules.unknown_overrides(overrides, found) == []


def test_a_leaf_that_is_no_part_of_its_parameter_is_refused():
  parameters, _ = place_parameters({"up": array(12, 20)}, {"up": "DF"}, LEGEND, TABLE, SIZES)
  state = {"mu": {"up": array(12, 13)}}
  _, [failure] = place_optimizer(state, parameters, LEGEND, TABLE, SIZES)
  failure = str(failure)
  assert "optimizer/mu/up: shape (12, 13), but up has shape (12, 20), and it is not that" in failure
  assert failure.endswith('partitioning.overrides=(("optimizer/mu/up", (None, None, )),)')


def test_what_belongs_to_no_parameter_is_replicated_if_small_and_refused_if_large():
  found, failures = place_optimizer({"random_key": array(2)}, {}, LEGEND, TABLE, SIZES)
  assert failures == []
  assert found["optimizer/random_key"].rule == "no parameter's"
  state = {"history": array(13, 5)}
  _, [failure] = place_optimizer(state, {}, LEGEND, TABLE, SIZES)
  assert "optimizer/history: shape (13, 5), but it belongs to no parameter and has mo" in str(
    failure
  )


def in_blocks(block):
  """Returns a state whose one array is in blocks: its codes, and a scale for each of them."""

  def init(tree):
    whole = tree["layers"]["up"]["kernel"]
    scales = tuple(n // m for n, m in zip(whole.shape, block, strict=True))
    parts = {"codes": array(*whole.shape), "scales": array(*scales)}
    return {"mu": {"layers": {"up": {"kernel": parts}}}}

  return optax.GradientTransformation(init, None)


def test_scales_of_blocks_are_sharded_as_what_they_scale():
  found, failures = placed(in_blocks((1, 6, 5)))
  assert failures == []
  codes, scales = (found[f"optimizer/mu/layers/up/kernel/{part}"] for part in ("codes", "scales"))
  assert codes.spec == scales.spec == PartitionSpec(None, "fsdp", "tensor")
  assert (scales.shape, scales.letters) == ((3, 2, 4), "")
  assert scales.rule == "as layers/up/kernel in blocks of 1 x 6 x 5"
  assert codes.rule == "as layers/up/kernel"


def test_a_shard_that_would_cut_a_block_is_refused():
  for block, dim, parts in (((1, 12, 5), "D", 1), ((3, 6, 10), "F", 2), ((1, 4, 5), "D", 3)):
    _, failures = placed(in_blocks(block))
    [text] = map(str, failures)
    assert text.startswith("optimizer/mu/layers/up/kernel/scales: shards of ")
    assert f"of dim {dim} = " in text
    assert f"split it over at most {parts} devices" in text
  for wrong in ((1, 6, 5), (3, 12, 20)):  # what is not beside codes is no array of scales
    tree = {"mu": {"layers": {"up": {"kernel": {"scales": array(*wrong)}}}}}
    _, failures = placed(optax.GradientTransformation(lambda _, tree=tree: tree, None))
    assert [str(one).partition(" (")[0] for one in failures] == (
      [] if wrong == (3, 12, 20) else ["optimizer/mu/layers/up/kernel/scales: shape"]
    )
