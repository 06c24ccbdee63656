"""config.json -> keys of `model` and back: every key is used, has no effect, or is refused."""

import pytest

from configs import base
from configs.schema import finalize, recipes
from interop import hf_config
from interop.hf_families import FAMILIES
from tests.interop import folders

# Keys of `model` that no folder determines.
OWN = {
  *("name", "vocabulary_multiple", "context_attention", "embedding_standard_deviation"),
  *("dropout_rate", "separate_documents", "base_width", "base_head_size"),
  *("expert_exchange", "expert_capacity"),
}
LLAMA = {
  "model_type": "llama",
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "vocab_size": 37,
}


def read(**keys):
  return hf_config.read({**LLAMA, **keys}, "config.json")


def model_of(preset):
  """Returns the keys of `model` of a preset, finalized."""
  return finalize.finalize(base.get_config(preset), "cpu").model.to_dict()


def problems(theirs):
  """Returns the lines of a refusal."""
  with pytest.raises(ValueError, match=r"config\.json") as caught:
    hf_config.read(theirs, "F/config.json")
  return str(caught.value).splitlines()


def test_every_key_of_a_decoder_is_determined_or_the_users_own():
  model = recipes.lm().model
  assert {*hf_config.KEYS} == {*model} - OWN
  for key, value in hf_config.NEUTRAL.items():
    assert model[key] == value, key


@pytest.mark.parametrize("name", folders.NAMES)
def test_both_notations_are_read_the_same_and_written_back(name):
  old, new = (hf_config.read(folders.config_of(name, v), name) for v in folders.VERSIONS)
  assert old == new
  assert {*old.model} == {*hf_config.KEYS}
  back = hf_config.write(old.model, old.positions, old.model_type)
  again = hf_config.read(back, "back")
  assert (again.model_type, again.positions) == (old.model_type, old.positions)
  one, two = (hf_config.canonical(found.model) for found in (again, old))
  assert not [key for key in one if not hf_config.same_value(one[key], two[key])]
  given = folders.config_of(name)
  # What was written says the same where the original has the key, up to how a default is spelled.
  for key in {*back} & {*given} - {"head_dim", "max_window_layers", "n_inner"}:
    same = hf_config.same_value(back[key], given[key])
    assert same or not (back[key] or given[key]), key
  assert back["architectures"] == given["architectures"]


def test_missing_keys_have_the_defaults_of_their_model_type():
  llama = read().model
  assert (llama["kv_heads"], llama["head_size"], llama["tied_embeddings"]) == (4, 4, False)
  assert (llama["norm_epsilon"], llama["rotary_base"], llama["window"]) == (1e-6, 1e4, 0)
  mistral = read(model_type="mistral", num_key_value_heads=2).model
  assert (mistral["window"], mistral["head_size"]) == (4096, 4)
  assert read(model_type="qwen2", num_key_value_heads=2).model["window"] == 0
  gemma = read(model_type="gemma3_text", num_key_value_heads=2).model
  assert gemma["tied_embeddings"]
  assert (gemma["rotary_base"], gemma["local_rotary_base"]) == (1e6, 1e4)
  assert (gemma["head_size"], gemma["attention_scale"]) == (256, 256**-0.5)
  gemma2 = read(model_type="gemma2", num_key_value_heads=2).model
  assert (gemma2["attention_soft_cap"], gemma2["logits_soft_cap"]) == (50.0, 30.0)
  assert read(model_type="phi3").model["norm_epsilon"] == 1e-5


def test_null_is_a_value_where_it_turns_something_off():
  mistral = read(model_type="mistral", num_key_value_heads=None, sliding_window=None).model
  assert (mistral["window"], mistral["kv_heads"]) == (0, 4)
  gemma2 = read(model_type="gemma2", num_key_value_heads=2, attn_logit_softcapping=None).model
  assert (gemma2["attention_soft_cap"], gemma2["logits_soft_cap"]) == (0.0, 30.0)


def test_soft_caps_of_gemma_3_are_those_that_transformers_applies():
  keys = {"model_type": "gemma3_text", "num_key_value_heads": 2}
  assert read(**keys, final_logit_softcapping=3.0).model["logits_soft_cap"] == 3.0
  with pytest.raises(ValueError, match=r"attn_logit_softcapping=2.0: transformers does not apply"):
    read(**keys, attn_logit_softcapping=2.0)


def test_of_a_model_with_images_the_decoder_is_read():
  inner = {**LLAMA, "model_type": "gemma3_text", "num_key_value_heads": 2}
  outer = {"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 8}}
  outer |= {"mm_tokens_per_image": 256, "eos_token_id": [1, 106]}
  assert hf_config.read(outer, "config.json") == hf_config.read(inner, "config.json")
  part = hf_config.text_part(outer)
  assert part == {**inner, "eos_token_id": [1, 106]}
  assert hf_config.text_part(inner) is inner
  [_, line] = problems({**outer, "quantization_config": {"bits": 4}})
  assert "the weights are quantized" in line


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"num_hidden_layers": 10**9}, "at most 4,096 is expected, and 1000000000 is there"),
    (
      {"vocab_size": 10**12},
      "vocab_size=1000000000000: a whole number of at least 1 and at most 2,",
    ),
    ({"hidden_size": 10**30}, "and at most 2,147,483,647 is needed"),
    ({"model_type": ["llama"]}, 'model_type: a text is expected, and ["llama"] is there'),
    ({"hidden_act": ["silu"]}, 'hidden_act: a text is expected, and ["silu"] is there'),
    ({"rope_scaling": {"rope_type": []}}, "rope_scaling.rope_type: a text is expected, and []"),
    ({f"key_{number}": 0 for number in range(100_000)}, "and 99,980 more"),
  ],
)
def test_absurd_values_are_refused_in_a_short_message(keys, said):
  lines = problems({**LLAMA, **keys})
  assert any(said in line for line in lines)
  assert len(lines) <= 22


def test_layer_types_become_windows():
  keys = {"model_type": "qwen3", "num_key_value_heads": 2, "sliding_window": 5}
  keys |= {"num_hidden_layers": 4, "use_sliding_window": True}
  full, part = "full_attention", "sliding_attention"
  for types, wanted in (
    ([part, full, part, full], (5, 2)),
    ([part] * 4, (5, 0)),
    ([full] * 4, (0, 0)),
    ([part, part, full, part], (5, 3)),
  ):
    found = read(**keys, layer_types=types).model
    assert (found["window"], found["global_every"]) == wanted
    back = hf_config.write(found, 32, "qwen3")
    assert back["layer_types"] == types
  assert read(**keys, max_window_layers=4).model["window"] == 0
  assert read(**keys, max_window_layers=0).model["window"] == 5


def test_all_that_is_wrong_is_in_one_message():
  lines = problems(
    {
      **LLAMA,
      "hidden_act": "tanh",
      "attention_bias": "yes",
      "rope_scaling": {"rope_type": "lama3", "factor": 8.0},
      "num_attention_heads": 0,
      "hiden_size": 16,
      "quantization_config": {"bits": 4},
      "is_encoder_decoder": True,
    }
  )
  assert lines[0] == "F/config.json describes a model that cannot be built:"
  text = "\n".join(lines[1:])
  for said in (
    "hidden_act='tanh'",
    "attention_bias='yes': true or false",
    "rope_type='lama3': known are default, llama3, linear, dynamic, yarn, longrope; did ",
    "num_attention_heads=0: a whole number of at least 1",
    "hiden_size=16: not known for model_type 'llama'; did you mean 'hidden_size'?",
    "quantization_config={'bits': 4}: the weights are quantized; take the folder of",
    "is_encoder_decoder=True: only decoders",
  ):
    assert said in text, (said, text)


def test_an_unknown_model_type_is_named_beside_those_that_are_known():
  [line] = problems({**LLAMA, "model_type": "lama"})
  known = ", ".join(FAMILIES)
  assert line.startswith(
    f"F/config.json: unknown model_type 'lama'; known are {known}, gemma3; did"
  )
  assert line.endswith("did you mean 'llama'?")
  assert problems({"hidden_size": 4}) == [
    "F/config.json has no model_type, so it is not the config.json of a model"
  ]
  assert problems([]) == ["F/config.json holds a list, not a JSON object"]


def test_what_no_family_has_is_named_when_it_is_written():
  model = model_of("qwen3_8b")
  with pytest.raises(ValueError, match=r"nearest, 'qwen3', cannot express:\n  model.post_norms=Tr"):
    hf_config.write({**model, "post_norms": True}, 32)
  with pytest.raises(ValueError, match=r"'llama', cannot express:\n  model.query_key_norm=True"):
    hf_config.write(model, 32, "llama")
  plain = model_of("llama2_7b")
  with pytest.raises(ValueError, match="nearest, 'llama'") as caught:  # not one that has no silu
    hf_config.write({**plain, "attention_soft_cap": 5.0, "logits_soft_cap": 9.0}, 32)
  assert [line.split("=")[0] for line in str(caught.value).splitlines()[1:]] == [
    "  model.attention_soft_cap",
    "  model.logits_soft_cap",
  ]


@pytest.mark.parametrize(
  ("preset", "model_type"),
  [
    ("gpt2_124m", "gpt2"),
    ("llama3_8b", "llama"),
    ("mistral_7b", "mistral"),
    ("qwen2_5_7b", "qwen2"),
    ("qwen3_8b", "qwen3"),
    ("gemma2_9b", "gemma2"),
  ],
)
def test_the_family_of_a_model_is_found_by_what_it_has(preset, model_type):
  assert hf_config.write(model_of(preset), 24)["model_type"] == model_type
