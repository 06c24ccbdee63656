"""config.json -> keys of `model` and back: every key is used, has no effect, or is refused."""

import pytest

from configs import base
from configs.schema import finalize, recipes
from interop import hf_config, hf_parts
from interop.hf_config import FAMILIES
from tests.interop import folders

LLAMA = {
  "model_type": "llama",
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "vocab_size": 37,
}
# As published with DeepSeek-V3, of which only the first three layers are dense.
V3 = {
  "model_type": "deepseek_v3",
  "hidden_size": 7168,
  "intermediate_size": 18_432,
  "num_hidden_layers": 3,
  "first_k_dense_replace": 3,
  "num_attention_heads": 128,
  "num_key_value_heads": 128,
  "q_lora_rank": 1536,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "vocab_size": 129_280,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10_000,
  "rope_scaling": {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
  },
  "max_position_embeddings": 163_840,
  "n_routed_experts": 256,
  "scoring_func": "sigmoid",
  "num_nextn_predict_layers": 1,
}
LITE = {"q_lora_rank": None, "model_type": "deepseek_v2", "num_attention_heads": 16}
LITE |= {"num_key_value_heads": 16}
# Of mixtures of experts, without the keys that any file has.
SHARED = {"vocab_size": 37, "hidden_size": 16, "num_attention_heads": 4}
MIXTRAL = {"model_type": "mixtral", **SHARED}
QWEN = {"model_type": "qwen3_moe", **SHARED, "num_hidden_layers": 6}
GPT_OSS = {"model_type": "gpt_oss", **SHARED, "num_hidden_layers": 3}
DEEPSEEK_V2 = {"model_type": "deepseek_v2", **SHARED, "num_experts_per_tok": 6}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", **SHARED}
LLAMA_4 = {"model_type": "llama4_text", **SHARED, "num_hidden_layers": 4, "num_key_value_heads": 2}
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


def of(theirs, **keys):
  """Returns the keys of `model` of a config.json with some keys more."""
  return hf_config.read({**theirs, **keys}, "config.json").model


def test_every_key_of_a_decoder_is_determined_or_the_users_own():
  model = recipes.lm().model
  assert {*hf_config.OWN} | {*hf_config.SIZES} <= {*model}
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
  adjusted = {"lfm2": ("intermediate_size", "block_auto_adjust_ff_dim")}
  adjusted |= dict.fromkeys(("ministral3", "mistral4"), ("rope_parameters",))  # its mscale
  spelled = {"head_dim", "max_window_layers", "n_inner", *adjusted.pop(name, ())}
  for key in {*back} & {*given} - spelled:
    same = hf_config.same_value(back[key], given[key])
    assert same or not (back[key] or given[key]), key
  assert back["architectures"] == given["architectures"]


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
    ({"model_type": ["llama"]}, 'model_type: a text is expected, and ["llama"] is there'),
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
  known, parts = ", ".join(FAMILIES), ", ".join(hf_config.TEXT_PARTS)
  assert line.startswith(
    f"F/config.json: unknown model_type 'lama'; known are {known}, {parts}; did"
  )
  assert line.endswith("did you mean 'llama'?")
  assert problems({"hidden_size": 4}) == [
    "F/config.json has no model_type, so it is not the config.json of a model"
  ]
  assert problems([]) == ["F/config.json holds a list, not a JSON object"]


@pytest.mark.parametrize(
  ("theirs", "said"),
  [
    (
      {"model_type": "gemma4", "text_config": {"head_dim": 256, "global_head_dim": 512}},
      "model_type 'gemma4_text', head_dim=256, global_head_dim=512: layers with and without a",
    ),
    (
      {"model_type": "deepseek_v32", "index_topk": 2048},
      "model_type 'deepseek_v32', index_topk=2048: a token attends to the index_topk keys that",
    ),
  ],
)
def test_a_model_type_that_is_not_read_says_why_and_what_to_take(theirs, said):
  [line] = problems(theirs)
  assert line.startswith(f"F/config.json: {said}")
  assert "; take " in line


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
    *(("gpt2_124m", "gpt2"), ("mistral_7b", "mistral"), ("qwen2_5_7b", "qwen2")),
    *(("gemma2_9b", "gemma2"), ("lfm2_1_2b", "lfm2"), ("bamba_9b", "bamba")),
    *(("nemotron_h_8b", "nemotron_h"), ("kimi_linear_48b_a3b", "kimi_linear")),
    *(("olmo_hybrid_7b", "olmo_hybrid"), ("granite4_h_micro", "granitemoehybrid")),
    *(("qwen3_next_80b_a3b", "qwen3_next"), ("nemotron3_nano_30b_a3b", "nemotron_h")),
  ],
)
def test_the_family_of_a_model_is_found_by_what_it_has(preset, model_type):
  assert hf_config.write(model_of(preset), 24)["model_type"] == model_type


# ------------------------------ published files ------------------------------

# As LFM2-1.2B's file has them: sizes under older names, layers by the numbers of those with
# attention.
LFM_2 = {
  **{"model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "rope_theta": 1e6},
  **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65_536, "norm_eps": 1e-5},
  **{"block_ff_dim": 12_288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
  **{"block_auto_adjust_ff_dim": True, "conv_L_cache": 3, "conv_bias": False},
  **{"full_attn_idxs": [2, 5, 8, 10, 12, 14], "tie_embedding": True, "block_norm_eps": 1e-5},
}


# As Nemotron 3 Nano's file has them, but those that are as in the class.
NEMOTRON_3 = {
  **{"model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "norm_eps": 1e-5},
  **{
    "mamba_num_heads": 64,
    "num_key_value_heads": 2,
    "num_hidden_layers": 52,
    "rope_theta": 10_000,
  },
  **{"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856},
  **{"moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5},
  **{"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
  **{"partial_rotary_factor": 1.0, "moe_latent_size": None, "use_mamba_kernels": True},
}
# All sizes are those of the class.
OLMO_HYBRID = {"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}}
FILES = {
  "lfm2_1_2b": LFM_2,
  "nemotron3_nano_30b_a3b": NEMOTRON_3,
  "olmo_hybrid_7b": OLMO_HYBRID,
}


@pytest.mark.parametrize("preset", FILES)
def test_a_published_file_is_its_preset(preset):
  found = hf_config.canonical(hf_config.read(FILES[preset], "config.json").model)
  wanted = hf_config.canonical({key: model_of(preset)[key] for key in hf_config.KEYS})
  assert not [key for key in wanted if not hf_config.same_value(found[key], wanted[key])]


# ------------------------------ what is refused ------------------------------

GEMMA_3 = {**LLAMA, "model_type": "gemma3_text", "num_key_value_heads": 2}
BAMBA = {**LLAMA, "model_type": "bamba", "mamba_n_heads": 8, "mamba_expand": 2}
GRANITE_4 = {**LLAMA, "model_type": "granitemoehybrid", "mamba_n_heads": 8, "num_local_experts": 0}
MINIMAX = {**LLAMA, "model_type": "minimax", "num_key_value_heads": 2}
REFUSED = [
  (GRANITE_4, {"num_local_experts": -1}, "num_local_experts=-1: a whole number"),
  (GRANITE_4, {"layer_types": ["mamba", "conv"]}, "for each of the 2 layers is needed"),
  (GRANITE_4, {"layer_types": ["mamba"] * 3}, "for each of the 2 layers is needed"),
  (BAMBA, {"mamba_d_head": 9}, "or mamba_expand * hidden_size: 32"),
  (BAMBA, {"mamba_conv_bias": False}, "mamba_conv_bias=False: only True is read"),
  (BAMBA, {"time_step_limit": [0.5]}, "the smallest and the largest step are needed"),
  (BAMBA, {"partial_rotary_factor": 1.0}, "partial_rotary_factor=1.0: it is 0.5"),
  (LFM_2, {"conv_bias": True}, "conv_bias=True: only False is read"),
  (LFM_2, {"layer_types": ["conv"] * 15 + ["mamba"]}, "conv, full_attention for each of the 16"),
  (MINIMAX, {"sliding_window": 3}, "sliding_window=3: only None is read"),
  (
    GEMMA_3,
    {"attn_logit_softcapping": 2.0},
    "attn_logit_softcapping=2.0: transformers does not",
  ),
  # Rotary positions.
  (LLAMA, {**NEW, "rope_theta": 1e4}, "rope_theta or rope_scaling contradicts rope_parameters"),
  (LLAMA, {**OLD, "rope_parameters": {"rope_theta": 500.0}}, "contradicts rope_parameters"),
  (LLAMA, {"rope_scaling": {**LLAMA_3, "faktor": 2}}, "rope_scaling: faktor: not known for rope_"),
  (LLAMA, {"rope_scaling": {**LLAMA_3, "factor": "8"}}, "rope_scaling.factor: a number above 0 is"),
  (LLAMA, {"rope_theta": 0}, "rope_theta=0: a number above 0 is needed"),
  (LLAMA, {"rope_scaling": "llama3"}, "rope_scaling: an object is expected, and"),
  (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: transformers rotates whole "),
  # Latent attention.
  (V3, {"num_key_value_heads": 8}, "each of the 128 heads has keys and values of its own"),
  (V3, {"q_lora_rank": 0}, "q_lora_rank=0: a whole number of at least 1"),
  (V3, {"head_dim": 128}, "head_dim=128: it would be 64, by qk_rope"),
  (V3, {"qk_head_dim": 128}, "qk_head_dim=128: it would be 192"),
  (V3, {"mlp_bias": True}, "mlp_bias=True: models of this type are read without"),
  # Experts.
  (
    QWEN,
    {"decoder_sparse_step": 7},
    "decoder_sparse_step=7, mlp_only_layers=[]: none of the 6 layers has experts",
  ),
  (
    QWEN,
    {"num_local_experts": 4, "num_experts": 5},
    "num_experts=5 contradicts num_local_experts",
  ),
  (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0: "),
  (LLAMA_4, {"num_experts_per_tok": 2}, "num_experts_per_tok=2: only 1 is read"),
  (LLAMA_4, {"layer_types": ["sliding_attention"] * 4}, "one of chunked_attention, full_attention"),
  (LLAMA_4, {"moe_layers": []}, "moe_layers=[]: none of the 4 layers has experts"),
  (LLAMA_4, {"attention_chunk_size": None}, "attention_chunk_size=None: a whole number of at lea"),
  (
    {**LLAMA, "model_type": "ministral3", "num_key_value_heads": 2},
    {"rope_parameters": {"rope_type": "default", "original_max_position_embeddings": 8}},
    "rope_parameters: llama_4_scaling_beta=None: a number above 0 is needed",
  ),
  (
    MIXTRAL,
    {"model_type": "olmoe", "clip_qkv": 0},
    "clip_qkv=0: a number above 0 is needed",
  ),
  (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc': greedy or"),
  (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob=True: only False is read"),
  (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax': only sig"),
  (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2: only 1 is read"),
  (NEMOTRON_3, {"moe_latent_size": 64}, "moe_latent_size=64: only None is read"),
  (NEMOTRON_3, {"layers_block_type": [*"ME*-"]}, "the types mlp (-) and moe (E) in one model"),
  (OLMO_HYBRID, {"hidden_act": "gelu"}, "hidden_act='gelu': only silu is read"),
]


@pytest.mark.parametrize(("theirs", "keys", "said"), REFUSED)
def test_what_cannot_be_expressed_is_refused(theirs, keys, said):
  [_, line] = problems({**theirs, **keys})
  assert line.startswith("  ")
  assert said in line


# ------------------------------ rotary positions ------------------------------


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


# ------------------------------ latent attention ------------------------------


def test_the_sizes_and_the_scale_are_the_published_ones():
  model = of(V3)
  assert (model["attention"], model["rotary_pairs"]) == ("latent", "adjacent")
  assert (model["heads"], model["kv_heads"], model["head_size"]) == (128, 128, 192)
  assert (model["rotary_size"], model["value_head_size"]) == (64, 128)
  assert (model["latent_size"], model["query_latent_size"]) == (512, 1536)
  # 192 ** -0.5 times the square of 0.1 ln 40 + 1 = 1.3688879.
  assert model["attention_scale"] == pytest.approx(0.135234, rel=1e-5)
  assert model["rotary_scaling"][1]["attention_factor"] == 1.0


@pytest.mark.parametrize(("one", "every"), [(1.0, 1.0), (0.707, 0.707), (0.5, 1.5), (0.1, 0.9)])
def test_the_scale_is_written_back_as_mscale(one, every):
  scaling = {**V3["rope_scaling"], "mscale": one, "mscale_all_dim": every}
  given = hf_config.read({**V3, "rope_scaling": scaling}, "config.json")
  back = hf_config.write(given.model, given.positions, "deepseek_v3")
  again = hf_config.canonical(hf_config.read(back, "back").model)
  wanted = hf_config.canonical(given.model)
  assert all(hf_config.same_value(again[key], wanted[key]) for key in wanted)
  assert back["rope_scaling"]["mscale_all_dim"] == pytest.approx(every)
  assert back["rope_parameters"]["mscale"] == pytest.approx(one)
  assert back["first_k_dense_replace"] == 3


def test_norms_of_latent_vectors_keep_their_epsilon_whatever_the_others_have():
  model = of(V3, rms_norm_eps=1e-5, attention_bias=True)
  assert (model["norm_epsilon"], model["latent_norm_epsilon"]) == (1e-5, 1e-6)
  assert model["biases"] == "attention"
  back = hf_config.write(model, 64, "deepseek_v3")
  assert (back["rms_norm_eps"], back["attention_bias"]) == (1e-5, True)
  with pytest.raises(ValueError, match=r"latent_norm_epsilon=1e-05 \(it would be 1e-06\)"):
    hf_config.write({**model, "latent_norm_epsilon": 1e-5}, 64, "deepseek_v3")


# ------------------------------ mixtures of experts ------------------------------


@pytest.mark.parametrize(
  ("theirs", "wanted"),
  [
    (
      LLAMA,
      {
        **{"kv_heads": 4, "head_size": 4, "tied_embeddings": False, "norm_epsilon": 1e-6},
        **{"rotary_base": 1e4, "window": 0},
      },
    ),
    (LLAMA | {"model_type": "mistral"}, {"window": 4096, "kv_heads": 8}),
    (
      LLAMA | {"model_type": "mistral", "num_key_value_heads": None, "sliding_window": None},
      {"window": 0, "kv_heads": 4},
    ),
    (LLAMA | {"model_type": "qwen2"}, {"window": 0}),
    (LLAMA | {"model_type": "phi3"}, {"norm_epsilon": 1e-5}),
    (
      GEMMA_3,
      {
        **{"tied_embeddings": True, "rotary_base": 1e6, "local_rotary_base": 1e4},
        **{"head_size": 256, "attention_scale": 256**-0.5, "logits_soft_cap": 0.0},
      },
    ),
    (GEMMA_3 | {"final_logit_softcapping": 3.0}, {"logits_soft_cap": 3.0}),
    (GEMMA_3 | {"model_type": "gemma2"}, {"attention_soft_cap": 50.0, "logits_soft_cap": 30.0}),
    (
      GEMMA_3 | {"model_type": "gemma2", "attn_logit_softcapping": None},
      {"attention_soft_cap": 0.0},
    ),
    (V3 | {"head_dim": 64, "qk_head_dim": 192}, {"head_size": 192}),
    (V3 | LITE, {"query_latent_size": 0, "rotary_pairs": "adjacent"}),
    (V3 | {"rope_interleave": False}, {"rotary_pairs": "halves"}),
    (MIXTRAL, {"experts": 8, "experts_per_token": 2, "expert_feedforward_size": 14_336}),
    (QWEN, {"experts": 128, "experts_per_token": 8, "router_normalized": False, "dense_layers": 0}),
    (QWEN | {"num_local_experts": 5}, {"experts": 5}),
    (
      GPT_OSS,
      {
        "experts": 128,
        "gate_limit": 7.0,
        "up_offset": 1.0,
        "activation": "gelu_sigmoid",
        "biases": "attention",
        "global_every": 2,
        "window": 128,
        "rotary_base": 150_000.0,
      },
    ),
    (DEEPSEEK_V2, {"experts": 64, "shared_feedforward_size": 2814, "router_groups": 1}),
    (
      DEEPSEEK_V2 | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
      {"router_groups": 8, "router_top_groups": 3, "router_group_score": "max"},
    ),
    (
      DEEPSEEK_V3,
      {
        "experts": 256,
        "dense_layers": 3,
        "expert_feedforward_size": 2048,
        "shared_feedforward_size": 2048,
        "router_scores": "sigmoid",
        "router_correction": True,
        "router_scale": 2.5,
        "router_groups": 8,
        "router_top_groups": 4,
        "router_group_score": "top2",
      },
    ),
    (
      LLAMA_4,
      {
        "window": 8192,
        "window_chunks": True,
        "layer_types": ("sliding", "sliding", "sliding", "full_unrotated"),
        "attention_temperature": ("unrotated", 0.1, 8192),
        "shared_feedforward_size": 8192,
        "feedforward_size": 16_384,
        "rotary_pairs": "adjacent",
      },
    ),
    (
      LLAMA_4 | {"interleave_moe_layer_step": 2, "attn_temperature_tuning": False},
      {"mlp_only_layers": (0, 2), "attention_temperature": ()},
    ),
    (
      {**SHARED, "model_type": "ministral3"},
      {"rotary_base": 1e6, "attention_temperature": ("all", 0.1, 16_384)},
    ),
    (DEEPSEEK_V3 | {"first_k_dense_replace": 61}, {"experts": 0, "router_correction": False}),
  ],
)
def test_keys_and_defaults_of_each_model_type(theirs, wanted):
  found = of(theirs)
  assert {key: found[key] for key in wanted} == wanted
  if theirs == GPT_OSS:  # scaled where a file says nothing
    kind, numbers = found["rotary_scaling"]
    assert (kind, numbers["factor"], numbers["truncate"]) == ("yarn", 32.0, False)


@pytest.mark.parametrize(
  ("keys", "sparse"),
  [
    ({}, (0, 1, 2, 3, 4, 5)),
    ({"decoder_sparse_step": 3}, (2, 5)),
    ({"mlp_only_layers": [0, 1]}, (2, 3, 4, 5)),
    ({"decoder_sparse_step": 2, "mlp_only_layers": [3, 9]}, (1, 5)),
    ({"num_hidden_layers": 3, "decoder_sparse_step": 2}, (1,)),
  ],
)
def test_layers_without_experts(keys, sparse):
  model = of(QWEN, **keys)
  assert [layer for layer, one in enumerate(hf_parts.sparse_of(model)) if one] == [*sparse]
  again = of(hf_config.write({**model, "head_size": 4}, 32, "qwen3_moe"))
  assert hf_parts.sparse_of(again) == hf_parts.sparse_of(model)


def test_layers_behind_dense_ones_are_listed():
  model = {**of(QWEN), "head_size": 4, "dense_layers": 2, "sparse_every": 3}
  back = hf_config.write(model, 32, "qwen3_moe")
  assert (back["decoder_sparse_step"], back["mlp_only_layers"]) == (1, [0, 1, 2, 3, 5])


def test_shared_experts_of_a_width_between_two_are_not_written():
  model = {**of(DEEPSEEK_V3), "shared_feedforward_size": 2049}
  with pytest.raises(ValueError, match=r"shared_feedforward_size=2049 \(it would be 2048\)"):
    hf_config.write(model, 64, "deepseek_v3")
