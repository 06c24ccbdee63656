"""The families, by the `model_type` of config.json: which keys they have, and their defaults.

A new family is an entry of FAMILIES, made of the parts of `hf_parts.py` and `hf_rope.py` or of new
ones, and an entry in `name_tables.py`. Defaults are those of transformers, versions 4.57 and 5.
"""

from interop import hf_parts as parts
from interop.hf_common import COMMON, SILU, SIZES
from interop.hf_expert_families import EXPERT_FAMILIES
from interop.hf_family import Family, Part
from interop.hf_rope import rope, rope_by_layer

QWEN = {
  **SIZES,
  "intermediate_size": 22_016,
  "num_key_value_heads": 32,
  "vocab_size": 151_936,
  "max_position_embeddings": 32_768,
  "use_sliding_window": False,
  "sliding_window": 4096,
  "max_window_layers": 28,
}
GEMMA = {
  **SIZES,
  "hidden_act": "gelu_pytorch_tanh",
  "hidden_activation": "gelu_pytorch_tanh",
  "head_dim": 256,
  "vocab_size": 256_000,
  "max_position_embeddings": 8192,
  "tie_word_embeddings": True,
}
GEMMA_FIXED = {"norm_scale_from_one": True, "scaled_embeddings": True}
GEMMA_2 = {
  **GEMMA,
  "hidden_size": 2304,
  "intermediate_size": 9216,
  "num_hidden_layers": 26,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "query_pre_attn_scalar": 256,
  "sliding_window": 4096,
}
# `gelu` in a config.json of Gemma 1 stands for the tanh approximation that it was trained with.
GEMMA_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "gelu": "gelu", "gelu_new": "gelu"}
GEMMA_ACTIVATION = parts.choice("hidden_activation", "activation", parts.ACTIVATIONS)
ATTENTION_SOFT_CAP = parts.optional("attn_logit_softcapping", "attention_soft_cap")
LOGITS_SOFT_CAP = parts.optional("final_logit_softcapping", "logits_soft_cap")

OLMO = {
  **SIZES,
  "vocab_size": 50_304,
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 2048,
}
OLMO_FIXED = {
  "pre_norms": False,
  "post_norms": True,
  "query_key_norm": True,
  "query_key_norm_across_heads": True,
}

GPT_2_PARTS = (
  parts.same("n_layer", "layers"),
  parts.same("n_embd", "model_size"),
  parts.same("n_positions", "max_positions"),
  parts.same("vocab_size", "vocabulary_size"),
  parts.same("layer_norm_epsilon", "norm_epsilon", float),
  parts.same("tie_word_embeddings", "tied_embeddings", bool),
  Part(("n_inner",), parts.gpt_2_feedforward, lambda model: {"n_inner": model["feedforward_size"]}),
  Part(
    ("n_head", "scale_attn_weights"),
    parts.gpt_2_heads,
    lambda model: {
      "n_head": model["heads"],
      "scale_attn_weights": model["attention_scale"] != 1.0 or model["head_size"] == 1,
    },
  ),
  parts.same("scale_attn_by_inverse_layer_idx", "attention_scale_by_inverse_layer", bool),
  parts.choice("activation_function", "activation", {"gelu_new": "gelu", **parts.ACTIVATIONS}),
)

# In the order in which `hf_config.write` tries them.
FAMILIES: dict[str, Family] = {
  "llama": Family(
    "LlamaForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.MLP_BIASES, rope()),
    {**SIZES, "max_position_embeddings": 2048},
  ),
  "mistral": Family(
    "MistralForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.WINDOW, rope()),
    {
      **SIZES,
      "intermediate_size": 14_336,
      "num_key_value_heads": 8,
      "sliding_window": 4096,
      "max_position_embeddings": 131_072,
    },
  ),
  "qwen2": Family(
    "Qwen2ForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.QWEN_WINDOW, rope()),
    QWEN,
    fixed={"biases": "qkv"},
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.BIASES, parts.QWEN_WINDOW, rope()),
    {**QWEN, "head_dim": 128},
    fixed={"query_key_norm": True},
  ),
  "gemma": Family(
    "GemmaForCausalLM",
    (
      *COMMON,
      parts.SCALE,
      parts.choice("hidden_act", "activation", GEMMA_ACTIVATIONS),
      parts.BIASES,
      rope(),
    ),
    {
      **GEMMA,
      "hidden_size": 3072,
      "intermediate_size": 24_576,
      "num_hidden_layers": 28,
      "num_attention_heads": 16,
      "num_key_value_heads": 16,
    },
    fixed=GEMMA_FIXED,
    ignored=("hidden_activation",),
  ),
  "gemma2": Family(
    "Gemma2ForCausalLM",
    (
      *COMMON,
      parts.QUERY_SCALE,
      GEMMA_ACTIVATION,
      parts.BIASES,
      parts.GEMMA_2_WINDOW,
      ATTENTION_SOFT_CAP,
      LOGITS_SOFT_CAP,
      rope(),
    ),
    {**GEMMA_2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    fixed={**GEMMA_FIXED, "post_norms": True},
    ignored=("hidden_act", "cache_implementation"),
  ),
  "gemma3_text": Family(
    "Gemma3ForCausalLM",
    (
      *COMMON,
      parts.QUERY_SCALE,
      GEMMA_ACTIVATION,
      parts.BIASES,
      parts.GEMMA_3_WINDOW,
      LOGITS_SOFT_CAP,
      rope_by_layer(1_000_000.0, 10_000.0, "rope_local_base_freq"),
    ),
    {
      **GEMMA_2,
      "vocab_size": 262_208,
      "max_position_embeddings": 131_072,
    },
    fixed={**GEMMA_FIXED, "post_norms": True, "query_key_norm": True},
    only={
      "attn_logit_softcapping": (
        (None,),
        "transformers does not apply it in this family, so the model's own logits are not known; "
        "set it to null for those of transformers",
      ),
    },
    ignored=("hidden_act", "cache_implementation"),
  ),
  "gpt2": Family(
    "GPT2LMHeadModel",
    GPT_2_PARTS,
    {
      "n_layer": 12,
      "n_embd": 768,
      "n_head": 12,
      "n_positions": 1024,
      "vocab_size": 50_257,
      "layer_norm_epsilon": 1e-5,
      "tie_word_embeddings": True,
      "activation_function": "gelu_new",
      "scale_attn_weights": True,
      "scale_attn_by_inverse_layer_idx": False,
    },
    fixed={"positions": "learned", "norm": "layer", "biases": "all", "gated": False},
    ignored=(
      *("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout"),
      *("summary_proj_to_labels", "summary_type", "summary_use_proj", "gradient_checkpointing"),
    ),
    positions="n_positions",
  ),
  "phi3": Family(
    "Phi3ForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.WINDOW, rope(partial=True, older=True)),
    {
      **SIZES,
      "hidden_size": 3072,
      "intermediate_size": 8192,
      "vocab_size": 32_064,
      "rms_norm_eps": 1e-5,
      "max_position_embeddings": 4096,
      "sliding_window": None,
    },
  ),
  "olmo2": Family(
    "Olmo2ForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.BIASES, rope(older=True)),
    OLMO,
    fixed=OLMO_FIXED,
  ),
  "olmo3": Family(
    "Olmo3ForCausalLM",
    (
      *COMMON,
      parts.SCALE,
      SILU,
      parts.BIASES,
      parts.OLMO_3_WINDOW,
      rope_by_layer(500_000.0, 500_000.0),
    ),
    {**OLMO, "sliding_window": 4096},
    fixed=OLMO_FIXED,
  ),
  "smollm3": Family(
    "SmolLM3ForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.MLP_BIASES, parts.SMOLLM_3, rope(2_000_000.0)),
    {
      **SIZES,
      "hidden_size": 2048,
      "num_hidden_layers": 36,
      "num_attention_heads": 16,
      "num_key_value_heads": 4,
      "vocab_size": 128_256,
      "max_position_embeddings": 32_768,
      "tie_word_embeddings": True,
      "use_sliding_window": False,
      "no_rope_layer_interval": 4,
    },
  ),
  "granite": Family(
    "GraniteForCausalLM",
    (
      *COMMON,
      parts.same("attention_multiplier", "attention_scale", float),
      parts.same("embedding_multiplier", "embedding_multiplier", float),
      parts.same("residual_multiplier", "residual_multiplier", float),
      parts.same("logits_scaling", "logits_divisor", float),
      SILU,
      parts.MLP_BIASES,
      rope(),
    ),
    {
      **SIZES,
      "max_position_embeddings": 2048,
      **dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        1.0,
      ),
    },
  ),
  **EXPERT_FAMILIES,
}
