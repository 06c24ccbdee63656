"""Names -> dims -> PartitionSpecs, and a verdict that holds everything that is wrong."""

import pytest
from jax.sharding import PartitionSpec

from partitioning import rules
from partitioning.rules import Dim, LayoutError, place_parameters
from tests.partitioning.tables import LEGEND, RULES, SIZES, TABLE, array, params, specs


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


def test_a_placement_keeps_its_rule_its_letters_and_its_notes():
  placements, failures = place_parameters(params(), RULES, LEGEND, TABLE, SIZES)
  assert failures == []
  key = placements["layers/key/kernel"]
  assert (key.rule, key.letters, key.shape) == ("layers/key/kernel", "LDKH", (3, 12, 7, 5))
  assert key.notes == ("kv_heads=7 is replicated: tensor=4 does not divide it",)
  assert placements["layers/up/kernel"].rule == "layers/(up|gate)/kernel"
  assert placements["layers/up/kernel"].notes == ()


def test_a_rule_must_match_the_full_name():
  message = refusal(params(), names={**RULES, "norm": "D", "orm/scale": "D"})
  assert "rule 'norm': matches no parameter" in message
  assert "rule 'orm/scale': matches no parameter" in message


def test_a_doubly_matched_parameter_is_refused_with_both_rules():
  message = refusal(params(), names={**RULES, "norm/.*": "D"})
  assert "norm/scale: 2 rules match, 'norm/scale' and 'norm/.*'; exactly one must" in message


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
    ("bias", (), "bias: no rule matches this parameter of shape (12,); add one to its table"),
    ("norm/scale", ("fsd",), "norm/scale: override: unknown mesh axis 'fsd'"),
    ("layers/up/kernel", ("fsdp", "fsdp"), "override: mesh axis fsdp is used twice"),
    ("layers/up/kernel", (("fsdp", "fsdp"),), "override: mesh axis fsdp is used twice"),
    ("norm/scale", (None, "fsdp"), "norm/scale: override: 2 entries for shape (12,)"),
    ("norm/scale", (3,), "norm/scale: override: 3 is not a mesh axis, a tuple of them or None"),
    (
      "layers/key/kernel",
      (None, None, "tensor"),
      "layers/key/kernel: override: dim K (its size) = 7 is not divisible by mesh axis tensor=4; "
      "make its size 4 or 8, or set mesh.tensor=1",
    ),
    (
      "norm/scal",
      ("fsdp",),
      "partitioning.overrides: 'norm/scal' is neither a parameter nor an optimizer leaf",
    ),
  ],
)
def test_a_wrong_override_is_refused(name, entries, said):
  tree = params(bias=array(12)) if name == "bias" else params()
  assert said in refusal(tree, overrides=((name, entries),))


@pytest.mark.parametrize(
  ("letters", "said"),
  [("DF", "dims DF have rank 2"), ("LDH", "dim H (head) has size 20, its legend says 5")],
)
def test_an_override_does_not_hide_wrong_letters(letters, said):
  tree = {"layers": {"up": params()["layers"]["up"]}}
  names = {"layers/up/kernel": letters}
  message = refusal(tree, names=names, overrides=(("layers/up/kernel", (None, None, "tensor")),))
  assert f"layers/up/kernel: {said}" in message


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
