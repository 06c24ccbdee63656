"""Rotary positions in the two notations of config.json."""

import pytest

from interop import hf_config
from tests.interop.test_hf_config import problems, read

LLAMA_3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
WANTED = (500.0, (8.0, 1.0, 4.0, 16.0))
OLD = {"rope_theta": 500.0, "rope_scaling": LLAMA_3}
NEW = {"rope_parameters": {**LLAMA_3, "rope_theta": 500.0}}


@pytest.mark.parametrize(
  "keys",
  [OLD, NEW, {**OLD, **NEW}, {"rope_theta": 500, "rope_parameters": LLAMA_3}],
)
def test_each_notation_and_both_together(keys):
  model = read(**keys).model
  assert (model["rotary_base"], model["rotary_scaling"]) == WANTED


def test_the_older_name_of_the_type_and_a_length_that_is_left_out():
  scaling = {**LLAMA_3, "type": "llama3"}
  del scaling["rope_type"], scaling["original_max_position_embeddings"]
  model = read(rope_scaling=scaling, max_position_embeddings=64).model
  assert model["rotary_scaling"] == (8.0, 1.0, 4.0, 64.0)


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({**NEW, "rope_theta": 1e4}, "rope_theta or rope_scaling contradicts rope_parameters"),
    ({**OLD, "rope_parameters": {"rope_theta": 500.0}}, "contradicts rope_parameters"),
    ({"rope_scaling": {**LLAMA_3, "faktor": 2}}, "rope_scaling: faktor: not known for rope_type"),
    (
      {"rope_scaling": {**LLAMA_3, "factor": "8"}},
      "rope_scaling.factor: a number above 0 is expected",
    ),
    ({"rope_theta": 0}, "rope_theta=0: a number above 0 is needed"),
    ({"rope_scaling": "llama3"}, "rope_scaling: an object is expected, and"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: transformers rotates whole heads"),
  ],
)
def test_what_cannot_be_read_is_named(keys, said):
  theirs = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, **keys}
  [_, line] = problems(theirs)
  assert said in line


def test_gemma_3_has_a_base_for_layers_with_a_window():
  old = {"rope_theta": 1e5, "rope_local_base_freq": 20.0}
  new = {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_theta": 20.0}}
  for keys in (old, {"rope_parameters": new}, {**old, "rope_parameters": new}):
    model = read(model_type="gemma3_text", num_key_value_heads=2, **keys).model
    assert (model["rotary_base"], model["local_rotary_base"]) == (1e5, 20.0)
    assert model["local_rotary_scaling"] == ()


def test_layers_with_a_window_may_be_scaled_and_the_others_not():
  scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 20.0}
  new = {"full_attention": {"rope_theta": 1e5}, "sliding_attention": scaled}
  described = read(model_type="gemma3_text", num_key_value_heads=2, rope_parameters=new)
  assert described.model["rotary_scaling"] == ()
  assert described.model["local_rotary_scaling"] == ("linear", {"factor": 4.0})
  back = hf_config.write(described.model, described.positions, "gemma3_text")
  assert back["rope_parameters"]["sliding_attention"] == scaled
  assert back["rope_scaling"] is None
