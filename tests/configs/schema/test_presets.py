"""Keys of a decoder that do not go together, one message each."""

import pytest

from configs.schema import validate
from partitioning.mesh import resolve_sizes
from tests.configs.loading import finalized


def refusal(argument, sizes, overrides):
  """Returns the lines with which `check` refuses."""
  with pytest.raises(ValueError, match="the config is refused") as error:
    validate.check(finalized(argument, **overrides), resolve_sizes(sizes, None))
  return str(error.value).splitlines()[1:]


PRESET = "model=mistral_7b,data=python_source"


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
    (PRESET, {}, {"model.biases": "some"}, "model.biases='some': one of none, qkv, all"),
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
