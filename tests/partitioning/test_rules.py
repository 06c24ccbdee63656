"""Names -> dims -> PartitionSpecs, and a verdict that holds everything that is wrong."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from partitioning import rules
from partitioning.dims import Dim
from partitioning.rules import LayoutError, place_optimizer, place_parameters
from partitioning.verdict import judge

LEGEND = {
  "L": Dim("layers", 3),
  "D": Dim("model", 12),
  "F": Dim("feedforward", 20),
  "K": Dim("kv_heads", 7, may_replicate=True),
  "H": Dim("head", 5),
}
TABLE = {
  "layers": (),
  "model": ("fsdp",),
  "feedforward": ("tensor",),
  "kv_heads": ("tensor",),
  "head": (),
}
SIZES = {"data": 1, "fsdp": 2, "stage": 1, "expert": 1, "context": 1, "tensor": 4}
RULES = {"layers/(up|gate)/kernel": "LDF", "layers/key/kernel": "LDKH", "norm/scale": "D"}


def array(*shape):
  """Returns an abstract float32 array."""
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def params(**more):
  """Returns a tree of parameters that the rules place without a failure."""
  layers = {"up": {"kernel": array(3, 12, 20)}, "gate": {"kernel": array(3, 12, 20)}}
  layers["key"] = {"kernel": array(3, 12, 7, 5)}
  return {"layers": layers, "norm": {"scale": array(12)}, **more}


def specs(tree, *, names=RULES, legend=LEGEND, table=TABLE, sizes=SIZES, overrides=()):
  """Returns name -> PartitionSpec of parameters, as the verdict lays them out.

  An activation takes every axis, so that none is unused.
  """
  tables = {"parameters": table, "optimizer": table, "activations": table}
  layout = judge(
    tree,
    {},
    {"all": array(math.prod(sizes.values()))},
    lambda: None,
    names=names,
    batch_letters={"all": "B"},
    legend={**legend, "B": Dim("batch", None)},
    tables={title: {**table, "batch": tuple(sizes)} for title, table in tables.items()},
    sizes=sizes,
    overrides=overrides,
  )
  return {name: found.spec for name, found in layout.placements["parameters"].items()}


def refusal(tree, **changes):
  """Returns the message with which a layout is refused."""
  with pytest.raises(LayoutError) as error:
    specs(tree, **changes)
  return str(error.value)


# ---- Parameters ----


def test_partition_specs_by_name():
  assert specs(params()) == {
    "layers/gate/kernel": PartitionSpec(None, "fsdp", "tensor"),
    "layers/key/kernel": PartitionSpec(None, "fsdp", None, None),
    "layers/up/kernel": PartitionSpec(None, "fsdp", "tensor"),
    "norm/scale": PartitionSpec("fsdp"),
  }


def test_partition_specs_of_real_arrays_and_without_a_mesh():
  tree = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params())
  found = specs(tree, sizes=dict.fromkeys(SIZES, 1))
  assert all(entry is None for spec in found.values() for entry in spec)


def test_a_placement_keeps_its_rule_its_letters_and_its_notes():
  placements, failures = place_parameters(params(), RULES, LEGEND, TABLE, SIZES)
  assert failures == []
  key = placements["layers/key/kernel"]
  assert (key.rule, key.letters, key.shape) == ("layers/key/kernel", "LDKH", (3, 12, 7, 5))
  assert key.notes == ("kv_heads=7 stays whole: tensor=4 does not divide it",)
  assert placements["layers/up/kernel"].rule == "layers/(up|gate)/kernel"
  assert placements["layers/up/kernel"].notes == ()


def test_an_unmatched_parameter_is_refused_and_not_replicated():
  message = refusal(params(bias=array(12)))
  assert message.startswith("the layout is refused (1 failure):")
  assert "bias: no rule matches this parameter of shape (12,); add one to its table" in message


def test_a_rule_must_match_the_whole_name():
  message = refusal(params(), names={**RULES, "norm": "D", "orm/scale": "D"})
  assert "rule 'norm': matches no parameter" in message
  assert "rule 'orm/scale': matches no parameter" in message


def test_a_doubly_matched_parameter_is_refused_with_both_rules():
  message = refusal(params(), names={**RULES, "norm/.*": "D"})
  assert "norm/scale: 2 rules match, 'norm/scale' and 'norm/.*'; a name may have one" in message


def test_a_dead_rule_is_refused():
  message = refusal(params(), names={**RULES, "layers/down/kernel": "LFD"})
  assert "rule 'layers/down/kernel': matches no parameter; remove it, or correct" in message


@pytest.mark.parametrize(
  ("letters", "said"),
  [
    ("DL", "norm/scale: dims DL have rank 2, its shape is (12,)"),
    ("F", "norm/scale: dim F (feedforward) has size 12, its legend says 20"),
    ("X", "norm/scale: dim X is not in the legend (L layers, D model"),
  ],
)
def test_wrong_letters_are_refused_by_the_parameters_name(letters, said):
  assert said in refusal(params(), names={**RULES, "norm/scale": letters})


def test_an_axis_used_twice_is_refused_also_while_its_size_is_1():
  table = {**TABLE, "head": ("fsdp",)}
  for size in (1, 2):
    message = refusal(params(), table=table, sizes={**SIZES, "fsdp": size})
    assert "layers/key/kernel: mesh axis fsdp is taken by dim H and by dim D" in message


def test_an_axis_that_no_mesh_has_is_refused():
  table = {**TABLE, "model": ("fsd",)}
  _, failures = place_parameters(params(), RULES, LEGEND, table, SIZES)
  message = "\n".join(map(str, failures))
  assert "norm/scale: dim D (model) takes unknown mesh axis 'fsd'; the axes are data" in message
  message = refusal(params(), table=table)  # which says so once of each table
  assert message.startswith("the layout is refused (3 failures):")
  assert "partitioning.parameters.model: unknown mesh axis 'fsd'; the axes are data" in message


def test_an_indivisible_dim_is_refused_with_the_ways_out():
  message = refusal(params(), sizes={**SIZES, "tensor": 8})
  for name in ("up", "gate"):
    assert (
      f"layers/{name}/kernel: dim F (feedforward) = 20 is not divisible by mesh axis tensor=8; "
      "make feedforward 16 or 24, or set mesh.tensor=4"
    ) in message
  assert "key/kernel" not in message  # kv_heads may stay whole


def test_only_a_dim_that_may_replicate_does():
  strict = {**LEGEND, "K": Dim("kv_heads", 7)}
  message = refusal(params(), legend=strict)
  assert "layers/key/kernel: dim K (kv_heads) = 7 is not divisible by mesh axis" in message


def test_all_failures_come_in_one_message():
  message = refusal(
    params(bias=array(12), odd=array(13)),
    names={**RULES, "norm/.*": "D", "odd": "D", "dead": "D"},
    sizes={**SIZES, "tensor": 8},
    overrides=(("nothing", ("fsdp",)),),
  )
  assert message.startswith("the layout is refused (8 failures):")
  for part in (
    "bias: no rule",
    "norm/scale: 2 rules match",
    "layers/up/kernel: dim F",
    "layers/gate/kernel: dim F",
    "odd: dim D (model) has size 13",
    "odd: dim D (model) = 13 is not divisible",
    "rule 'dead'",
    "partitioning.overrides: 'nothing'",
  ):
    assert f"\n  {part}" in message


# ---- Overrides ----


def test_an_override_is_applied_after_matching():
  entries = (None, ("fsdp", "tensor"))  # the last dim is whole
  overrides = (("layers/up/kernel", entries),)
  legend = {**LEGEND, "D": Dim("model", 24)}
  tree = {"layers": {"up": {"kernel": array(3, 24, 20)}}}
  names = {"layers/up/kernel": "LDF"}
  found, failures = place_parameters(tree, names, legend, TABLE, SIZES, overrides)
  assert failures == []
  assert tuple(found["layers/up/kernel"].spec) == (None, ("fsdp", "tensor"))
  assert found["layers/up/kernel"].rule == "override"
  bare = place_parameters(tree, {}, legend, TABLE, SIZES, overrides)[1]
  assert "no rule matches" in str(bare[0])


def test_an_override_leaves_out_axes_of_size_1():
  found = specs(params(), overrides=(("norm/scale", (("data", "fsdp"),)),))
  assert found["norm/scale"] == PartitionSpec("fsdp")


@pytest.mark.parametrize(
  ("name", "entries", "said"),
  [
    ("norm/scale", ("fsd",), "norm/scale: override: unknown mesh axis 'fsd'"),
    ("layers/up/kernel", ("fsdp", "fsdp"), "override: mesh axis fsdp stands twice"),
    ("layers/up/kernel", (("fsdp", "fsdp"),), "override: mesh axis fsdp stands twice"),
    ("norm/scale", (None, "fsdp"), "norm/scale: override: 2 entries for shape (12,)"),
    ("norm/scale", (3,), "norm/scale: override: 3 is no mesh axis, tuple of them or None"),
    (
      "layers/key/kernel",
      (None, None, "tensor"),
      "layers/key/kernel: override: dim K (its size) = 7 is not divisible by mesh axis tensor=4; "
      "make its size 4 or 8, or set mesh.tensor=1",
    ),
    (
      "norm/scal",
      ("fsdp",),
      "partitioning.overrides: 'norm/scal' is no parameter and no optimizer leaf",
    ),
  ],
)
def test_a_wrong_override_is_refused(name, entries, said):
  assert said in refusal(params(), overrides=((name, entries),))


@pytest.mark.parametrize(
  ("letters", "said"),
  [("DF", "dims DF have rank 2"), ("LDH", "dim H (head) has size 20, its legend says 5")],
)
def test_an_override_does_not_hide_wrong_letters(letters, said):
  tree = {"layers": {"up": params()["layers"]["up"]}}
  names = {"layers/up/kernel": letters}
  message = refusal(tree, names=names, overrides=(("layers/up/kernel", (None, None, "tensor")),))
  assert f"layers/up/kernel: {said}" in message


def test_an_override_given_twice_is_refused():
  message = refusal(params(), overrides=(("norm/scale", ()), ("norm/scale", ("fsdp",))))
  assert "partitioning.overrides: 'norm/scale' is given twice; keep one of them" in message


# ---- Optimizer state ----


def placed(optimizer, *, table=TABLE, sizes=SIZES, overrides=()):
  """Returns placements and failures of an optimizer's state for `params()`."""
  parameters, failures = place_parameters(params(), RULES, LEGEND, TABLE, sizes)
  assert failures == []
  state = jax.eval_shape(optimizer.init, params())
  return place_optimizer(state, parameters, LEGEND, table, sizes, overrides)


def test_optimizer_leaves_follow_their_parameter_and_scalars_are_whole():
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


def test_another_table_gives_zero_1_specs():
  table = {**TABLE, "model": ("fsdp", "data")}
  sizes = {**SIZES, "data": 3}
  found, failures = placed(optax.sgd(1e-3, momentum=0.9), table=table, sizes=sizes)
  assert failures == []
  parameters = specs(params(), sizes=sizes)
  assert parameters["norm/scale"] == PartitionSpec("fsdp")
  assert found["optimizer/0/trace/norm/scale"].spec == PartitionSpec(("fsdp", "data"))
  up = found["optimizer/0/trace/layers/up/kernel"].spec
  assert tuple(up) == (None, ("fsdp", "data"), "tensor")


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
  assert found[rows.format("key")].notes == ("kv_heads=7 stays whole: tensor=4 does not divide it",)
  # Where a parameter is not factored, and in its place where it is: arrays of one element.
  assert found["optimizer/0/v/layers/up/kernel"].rule == "one element"
  assert found["optimizer/0/v_row/norm/scale"].rule == "one element"
  assert found["optimizer/0/v/norm/scale"].letters == "D"
  assert found["optimizer/0/count"].rule == "scalar"


def test_a_statistic_of_an_overridden_parameter_is_sharded_as_it_is():
  overrides = (("layers/up/kernel", (None, "tensor", "fsdp")),)
  parameters, _ = place_parameters(params(), RULES, LEGEND, TABLE, SIZES, overrides)
  state = jax.eval_shape(FACTORED.init, params())
  found, failures = place_optimizer(state, parameters, LEGEND, TABLE, SIZES)
  assert failures == []
  assert tuple(found["optimizer/0/v_row/layers/up/kernel"].spec) == (None, "tensor")
  assert tuple(found["optimizer/0/v_col/layers/up/kernel"].spec) == (None, "fsdp")


def test_dims_set_to_1_are_whole_and_the_others_sharded():
  tree = {"up": array(12, 20)}
  parameters, _ = place_parameters(tree, {"up": "DF"}, LEGEND, TABLE, SIZES)
  # As SM3 has them: below a parameter's name, a statistic for each of its dims.
  state = {"mu": {"up": [array(12, 1), array(1, 20)]}}
  found, failures = place_optimizer(state, parameters, LEGEND, TABLE, SIZES)
  assert failures == []
  assert tuple(found["optimizer/mu/up/0"].spec) == ("fsdp", None)
  assert tuple(found["optimizer/mu/up/1"].spec) == (None, "tensor")
  assert found["optimizer/mu/up/1"].rule == "as up without D"


def square(*, init=None, overrides=()):
  """Places Adafactor's state of a square matrix, whose two dims are sharded differently."""
  legend = {**LEGEND, "F": Dim("feedforward", 12)}
  tree = {"layers": {"up": {"kernel": array(3, 12, 12)}}}
  parameters, failures = place_parameters(tree, {"layers/up/kernel": "LDF"}, legend, TABLE, SIZES)
  assert failures == []
  state = jax.eval_shape(FACTORED.init, tree)
  return place_optimizer(state, parameters, legend, TABLE, SIZES, overrides, init=init)


def test_dims_of_equal_size_are_told_apart_by_the_optimizer_itself():
  found, failures = square(init=FACTORED.init)
  assert failures == []
  # NumPy's argsort puts the later of two equal dims last: optax takes F for the largest.
  assert found["optimizer/0/v_row/layers/up/kernel"].letters == "LD"
  assert found["optimizer/0/v_col/layers/up/kernel"].letters == "LF"


def test_dims_that_cannot_be_told_apart_are_refused_with_the_override_to_write():
  _, failures = square()
  [row] = [str(f) for f in failures if "/v_row/" in f.array]
  name = "optimizer/0/v_row/layers/up/kernel"
  assert row == (
    f"{name}: shape (3, 12), which is as layers/up/kernel without F or as layers/up/kernel "
    "without D: dims of equal size, sharded differently; give it a spec of its own, "
    f'partitioning.overrides=(("{name}", (None, None, )),)'
  )
  overrides = [(failure.array, (None, "fsdp")) for failure in failures]
  found, failures = square(overrides=overrides)
  assert failures == []
  assert tuple(found[name].spec) == (None, "fsdp")
  assert rules.unknown_overrides(overrides, found) == []


def test_a_leaf_that_is_no_part_of_its_parameter_is_refused():
  parameters, _ = place_parameters({"up": array(12, 20)}, {"up": "DF"}, LEGEND, TABLE, SIZES)
  state = {"mu": {"up": array(12, 12)}}
  _, [failure] = place_optimizer(state, parameters, LEGEND, TABLE, SIZES)
  failure = str(failure)
  assert "optimizer/mu/up: shape (12, 12), but up has shape (12, 20), and it is not that" in failure
  assert failure.endswith('partitioning.overrides=(("optimizer/mu/up", (None, None, )),)')


def test_what_belongs_to_no_parameter_is_replicated_if_small_and_refused_if_large():
  found, failures = place_optimizer({"random_key": array(2)}, {}, LEGEND, TABLE, SIZES)
  assert failures == []
  assert found["optimizer/random_key"].rule == "of no parameter"
  state = {"history": array(13, 5)}
  _, [failure] = place_optimizer(state, {}, LEGEND, TABLE, SIZES)
  assert "optimizer/history: shape (13, 5), but it belongs to no parameter and has mo" in str(
    failure
  )


def test_an_owner_is_found_by_structure_and_not_by_the_end_of_a_name():
  tree = {"scale": array(12), "up": {"kernel": array(20)}}
  names = {"scale": "D", "up/kernel": "F"}
  parameters, _ = place_parameters(tree, names, LEGEND, TABLE, SIZES)
  masked = {"mu": {"up": {"kernel": array(20)}}}  # of the others there is nothing
  state = [{"scale": array(12), "count": array()}, masked, {"nu": tree}]
  found, failures = place_optimizer(state, parameters, LEGEND, TABLE, SIZES)
  assert failures == []
  assert found["optimizer/0/scale"].rule == "of no parameter"  # a field that is called like one
  assert found["optimizer/1/mu/up/kernel"].rule == "as up/kernel"
  assert found["optimizer/2/nu/scale"].rule == "as scale"


def test_the_longest_name_owns_the_leaf():
  tree = {"kernel": array(12), "up": {"kernel": array(20)}}
  names = {"kernel": "D", "up/kernel": "F"}
  parameters, _ = place_parameters(tree, names, LEGEND, TABLE, SIZES)
  found, failures = place_optimizer({"mu": tree}, parameters, LEGEND, TABLE, SIZES)
  assert failures == []
  assert found["optimizer/mu/up/kernel"].rule == "as up/kernel"
  assert found["optimizer/mu/kernel"].rule == "as kernel"


# ---- Tables and axes ----


def test_a_table_of_unknown_axes_and_dims_is_refused():
  table = {**TABLE, "head": ("tensor", "tensr"), "vocabulary": ()}
  dim, axis = map(str, rules.check_table("partitioning.parameters", table, LEGEND, SIZES))
  assert dim == (
    "partitioning.parameters.vocabulary: the model has no dim of this name; "
    "its dims are feedforward, head, kv_heads, layers, model"
  )
  assert axis.startswith("partitioning.parameters.head: unknown mesh axis 'tensr'; the axes are")
  assert rules.check_table("partitioning.parameters", TABLE, LEGEND, SIZES) == []


def test_an_axis_larger_than_1_that_nothing_uses_is_a_failure():
  placements, _ = place_parameters(params(), RULES, LEGEND, TABLE, SIZES)
  used = rules.used_axes(placements.values())
  assert used == {"fsdp", "tensor"}
  assert rules.unused_axes(SIZES, used) == []
  [failure] = map(str, rules.unused_axes({**SIZES, "expert": 3}, used))
  assert failure.startswith("mesh.expert=3: no parameter, activation or schedule of this model")
  assert failure.endswith("would only repeat work; set mesh.expert=1")


def test_names_are_the_path_with_slashes():
  names = rules.named_leaves({"a": [array(2), {"b": array(3)}], "c": {}}, "state/")
  assert {name: leaf.shape for name, leaf in names.items()} == {
    "state/a/0": (2,),
    "state/a/1/b": (3,),
  }
