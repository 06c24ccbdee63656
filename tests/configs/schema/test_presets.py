"""Keys of a decoder that do not go together, one message each."""

import pytest

from configs.schema import model_checks, validate
from models import spec
from partitioning.mesh_sizes import resolve_sizes
from tests.configs.loading import finalized


def refusal(argument, sizes, overrides):
  """Returns the lines with which `check` refuses."""
  with pytest.raises(ValueError, match="the config is refused") as error:
    validate.check(finalized(argument, **overrides), resolve_sizes(sizes, None))
  return str(error.value).splitlines()[1:]


PRESET = "model=mistral_7b,data=python_source"


def scaled(kind, **numbers):
  """Returns the overrides of a kind of rotary scaling."""
  return {"model.rotary_scaling": (kind, numbers)}


def windows(types, **keys):
  """Returns the overrides of layer types."""
  keys = {"layer_types": types, "window": 8, **keys}
  return {f"model.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(
  ("argument", "sizes", "overrides", "said"),
  [
    (
      PRESET,
      {},
      {"data.sequence_length": 1024},
      "model.window=4096 is beyond data.sequence_length=1024: no token would see less than all; "
      "make data.sequence_length 4096 or more, or set model.window=0",
    ),
    (PRESET, {}, {"model.norm": "laier"}, "model.norm='laier': one of rms, layer; did you mean"),
    (PRESET, {}, {"model.biases": "some"}, "model.biases='some': one of none, qkv, atten"),
    ("lm", {}, {"model.rotary_size": 18}, "model.rotary_size=18 is beyond model.head_size=16"),
    ("lm", {}, {"model.rotary_size": 3}, "model.rotary_size=3 is odd; rotary positions turn pairs"),
    (
      "lm",
      {},
      {"model.rotary_size": 8, "model.positions": "learned"},
      "model.positions='learned' turns nothing",
    ),
    ("lm", {}, {"model.pre_norms": False}, "layers without any norm do not train"),
    ("lm", {}, {"model.query_key_norm_across_heads": True}, "of model.query_key_norm=True"),
    ("lm", {}, {"model.activation": "relu2"}, "'relu2': one of silu, gelu, gelu_erf, gelu_sigmoid"),
    ("lm", {}, {"model.logits_divisor": 0.0}, "model.logits_divisor=0.0: above 0, and finite"),
    ("lm", {}, {"model.biases": "query,ou"}, "separated by commas; did you mean 'out'?"),
    (
      "lm",
      {},
      {"model.biases": "gate", "model.gated": False},
      "model.gated=False there is no gate",
    ),
    (PRESET, {}, {"model.attention_soft_cap": -1.0}, "attention_soft_cap=-1.0: at least 0"),
    ("lm", {}, {"model.global_every": 2}, "are about layers that see a window; set model.window"),
    (
      "lm",
      {},
      {"model.positions": "learned", "model.rotary_scaling": (8.0, 1.0, 4.0, 8192.0)},
      "model.positions='learned' turns nothing",
    ),
    ("lm", {}, {"model.rotary_scaling": (8.0, 4.0, 1.0, 64.0)}, "above 0 and low below high"),
    (
      "lm",
      {},
      {"model.local_rotary_scaling": ("linear", {"factor": 2.0})},
      "scales model.local_rotary_base=0.0; set that, to model.rotary_base=10000.0",
    ),
    (
      "lm",
      {},
      {"model.window": 4, "model.local_rotary_base": 9.0, "model.local_rotary_scaling": ("pi", {})},
      "model.local_rotary_scaling=('pi', {}): one of linear, dynamic",
    ),
    (
      "lm",
      {},
      windows(("full", "slidin")),
      "'slidin' is none of full, sliding, full_unrota",
    ),
    ("lm", {}, windows(("full", "sliding") * 2), "has 4 types for model.layers=3"),
    ("lm", {}, windows(("full",)), "model.window=8: no layer is of the type sliding"),
    ("lm", {}, windows(("sliding",), window=0), "model.window=0: the type sliding needs a window"),
    (
      "lm",
      {},
      windows(("full_unrotated",), window=0),
      "model.positions='rotary', all are unrotated",
    ),
    ("lm", {}, windows(("sliding",), global_every=2), "both say which layers see a window"),
    ("lm", {}, scaled("yarm", factor=2.0), "one of linear, dynamic, llama3, yarn, longrope; did y"),
    (
      "lm",
      {},
      {"model.rotary_scaling": ("linear", 2.0)},
      "numbers by name, such as ('linear', {'f",
    ),
    ("lm", {}, scaled("yarn", factor=2.0), "it lacks 'original_length'"),
    ("lm", {}, scaled("linear", factor=0), "'factor': a number above 0"),
    (
      "lm",
      {},
      scaled("linear", factor=2.0, faktor=1),
      "linear has no 'faktor'; it has 'factor'; d",
    ),
    (
      "lm",
      {},
      scaled("longrope", original_length=8, short_factors=(1,) * 8, long_factors=(1,) * 8),
      "it lacks 'factor' or 'attention_factor'",
    ),
    (
      "lm",
      {},
      scaled("longrope", factor=2, original_length=8, short_factors=(1, 2), long_factors=(1,) * 8),
      "'short_factors': 8 numbers above 0, one for each pair that is rotated",
    ),
    (
      "lm",
      {},
      scaled("yarn", factor=2.0, original_length=8, beta_fast=2.0, truncate=1),
      "'truncate': True or False",
    ),
    (
      "lm",
      {},
      scaled("yarn", factor=2.0, original_length=8, beta_fast=1.0),
      "'beta_slow': below 'beta_fast'",
    ),
    (
      "lm",
      {"context": 4},
      {"data.sequence_length": 12, "model.context_attention": "ring"},
      "data.sequence_length=12 is not divisible by 2 x mesh.context = 8: in a ring each device has "
      "an early and a late piece; make it 8 or 16, or set model.context_attention=gather",
    ),
    (
      "model=gpt2_124m",
      {},
      {"data.sequence_length": 2048},
      "data.sequence_length=2048 is beyond model.max_positions=1024; make data.sequence_length",
    ),
    ("lm", {}, {"model.max_positions": 64}, "model.max_positions=64: model.positions='rotary'"),
    ("lm", {"context": 2}, {"model.context_attention": "rings"}, "one of auto, ring, gather; did"),
  ],
)
def test_one_message_says_what_is_wrong(argument, sizes, overrides, said):
  [line] = refusal(argument, sizes, overrides)
  assert said in line


def test_a_ring_takes_what_its_pieces_divide_and_gathering_what_the_axis_divides():
  for kind, length in (("ring", 16), ("gather", 12), ("auto", 12)):
    keys = {"data.sequence_length": length, "model.context_attention": kind}
    validate.check(finalized("lm", **keys), resolve_sizes({"context": 4}, None))


def test_the_names_of_biases_are_those_of_the_dims_table():
  assert (*spec.BIASES,) == model_checks.BIASES
  assert model_checks.LINEARS == spec.LINEARS
