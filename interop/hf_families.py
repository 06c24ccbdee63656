"""The families, by the `model_type` of config.json: which keys they have, and their defaults.

A new family is a row of _SIZES and an entry of FAMILIES, made of the parts of `hf_parts.py` or of
new ones, and an entry in `name_maps.py`. Defaults are those of transformers, versions 4.57 and 5.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from interop import hf_parts as parts
from interop.hf_parts import Part, rope, rope_by_layer, same
from runtime import forms


@dataclasses.dataclass(frozen=True)
class Family:
  """What the config.json of a model_type says, and what it leaves out.

  Attributes:
    architecture: the class that transformers loads.
    parts: read and write the keys.
    defaults: of keys that a config.json may lack, as transformers has them.
    fixed: keys of `model` that are the same in all models of the family.
    only: further keys -> (the values that can be expressed, the first its default; why).
    ignored: further keys without effect on what the model computes.
    positions: the key with the longest row that the model was trained for.
  """

  architecture: str
  parts: tuple[Part, ...]
  defaults: Mapping[str, Any]
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  only: Mapping[str, tuple[tuple[Any, ...], str]] = dataclasses.field(default_factory=dict)
  ignored: tuple[str, ...] = ()
  positions: str = "max_position_embeddings"


# ------------------------------ defaults ------------------------------

_COLUMNS = (
  *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
  *("num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps"),
)
_SIZES = {
  "llama": (4096, 11_008, 32, 32, None, 32_000, 2048, 1e-6),
  "mistral": (4096, 14_336, 32, 32, 8, 32_000, 131_072, 1e-6),
  "mixtral": (4096, 14_336, 32, 32, 8, 32_000, 131_072, 1e-5),
  "qwen2": (4096, 22_016, 32, 32, 32, 151_936, 32_768, 1e-6),
  "qwen3": (4096, 22_016, 32, 32, 32, 151_936, 32_768, 1e-6),
  "qwen3_moe": (2048, 6144, 24, 32, 4, 151_936, 32_768, 1e-6),
  "gemma": (3072, 24_576, 28, 16, 16, 256_000, 8192, 1e-6),
  "gemma2": (2304, 9216, 26, 8, 4, 256_000, 8192, 1e-6),
  "gemma3_text": (2304, 9216, 26, 8, 4, 262_208, 131_072, 1e-6),
  "phi3": (3072, 8192, 32, 32, None, 32_064, 4096, 1e-5),
  "olmo2": (4096, 11_008, 32, 32, None, 50_304, 2048, 1e-5),
  "olmo3": (4096, 11_008, 32, 32, None, 50_304, 2048, 1e-5),
  "olmoe": (2048, 2048, 16, 16, None, 50_304, 4096, 1e-5),
  "smollm3": (2048, 11_008, 36, 16, 4, 128_256, 32_768, 1e-6),
  "granite": (4096, 11_008, 32, 32, None, 32_000, 2048, 1e-6),
  "gpt_oss": (2880, 2880, 36, 64, 8, 201_088, 131_072, 1e-5),
  "deepseek_v2": (4096, 11_008, 32, 32, None, 102_400, 2048, 1e-6),
  "deepseek_v3": (7168, 18_432, 61, 128, None, 129_280, 4096, 1e-6),
}


def _defaults(model_type: str, **more: Any) -> dict[str, Any]:
  """Returns the defaults of a family: its row of _SIZES, and others."""
  sizes = dict(zip(_COLUMNS, _SIZES[model_type], strict=True))
  return {**sizes, "hidden_act": "silu", "tie_word_embeddings": False, **more}


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True}
_GEMMA_2 = {**_GEMMA, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096}
_DEEPSEEK = {
  "kv_lora_rank": 512,
  "q_lora_rank": 1536,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
}

# ------------------------------ what several families have ------------------------------

_ENDS = (
  same("vocab_size", "vocabulary_size"),
  same("rms_norm_eps", "norm_epsilon", float),
  same("tie_word_embeddings", "tied_embeddings", bool),
)
_STACK = (
  same("num_hidden_layers", "layers"),
  same("hidden_size", "model_size"),
  same("intermediate_size", "feedforward_size"),
)
_COMMON = (
  *(*_STACK, same("num_attention_heads", "heads"), parts.KV_HEADS, parts.HEAD_SIZE, *_ENDS),
)
_SILU = parts.choice("hidden_act", "activation", parts.ACTIVATIONS)
_PLAIN = (*_COMMON, parts.SCALE, _SILU)
_MIXTURE = (parts.EXPERTS_PER_TOKEN, parts.EXPERT_WIDTH_OF_ALL)
# Of training and of what is returned beside the logits.
_EXPERTS_IGNORED = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")

_GEMMA_2_PARTS = (
  *(*_COMMON, parts.QUERY_SCALE, parts.BIASES),
  parts.choice("hidden_activation", "activation", parts.ACTIVATIONS),
  parts.optional("final_logit_softcapping", "logits_soft_cap"),
)
_GEMMA_2_IGNORED = ("hidden_act", "cache_implementation")
_GEMMA_FIXED = {"norm_scale_from_one": True, "scaled_embeddings": True}
_GEMMA_2_FIXED = {**_GEMMA_FIXED, "post_norms": True}
_OLMO_FIXED = {
  "pre_norms": False,
  "post_norms": True,
  "query_key_norm": True,
  "query_key_norm_across_heads": True,
}

# Norms of latent vectors have an epsilon of 1e-6, whatever the others have.
_DEEPSEEK_PARTS = (*_STACK, parts.LATENT, *_ENDS, parts.BIASES, _SILU, parts.LATENT_ROPE)
_DEEPSEEK_EXPERTS = (
  same("n_routed_experts", "experts"),
  same("routed_scaling_factor", "router_scale", float),
  *(parts.EXPERTS_PER_TOKEN, parts.EXPERT_WIDTH, parts.SHARED_EXPERTS),
  parts.only("moe_layer_freq", 1),
)
_DEEPSEEK_IGNORED = (
  *("aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers", "num_nextn_predict_layers"),
  *_EXPERTS_IGNORED,
)

_GPT_OSS_YARN = {
  "rope_type": "yarn",
  "factor": 32.0,
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "truncate": False,
  "original_max_position_embeddings": 4096,
}

# ------------------------------ the families ------------------------------

# In the order in which `hf_config.write` tries them.
FAMILIES: dict[str, Family] = {
  "llama": Family("LlamaForCausalLM", (*_PLAIN, parts.MLP_BIASES, rope()), _defaults("llama")),
  "mistral": Family(
    "MistralForCausalLM",
    (*_PLAIN, parts.WINDOW, rope()),
    _defaults("mistral", sliding_window=4096),
  ),
  "qwen2": Family(
    "Qwen2ForCausalLM",
    (*_PLAIN, parts.QWEN_WINDOW, rope()),
    _defaults("qwen2", **_QWEN, max_window_layers=28),
    fixed={"biases": "qkv"},
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    (*_PLAIN, parts.BIASES, parts.QWEN_WINDOW, rope()),
    _defaults("qwen3", **_QWEN, max_window_layers=28, head_dim=128),
    fixed={"query_key_norm": True},
  ),
  "gemma": Family(
    "GemmaForCausalLM",
    (
      *(*_COMMON, parts.SCALE, parts.BIASES, rope()),
      # `gelu` in a file of Gemma 1 stands for the tanh approximation that it was trained with.
      parts.choice(
        *("hidden_act", "activation"),
        dict.fromkeys(("gelu_pytorch_tanh", "gelu", "gelu_new"), "gelu"),
      ),
    ),
    _defaults("gemma", **_GEMMA, hidden_act="gelu_pytorch_tanh"),
    fixed=_GEMMA_FIXED,
    ignored=("hidden_activation",),
  ),
  "gemma2": Family(
    "Gemma2ForCausalLM",
    (
      *(*_GEMMA_2_PARTS, parts.alternating(2), rope()),
      parts.optional("attn_logit_softcapping", "attention_soft_cap"),
    ),
    _defaults("gemma2", **_GEMMA_2, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    fixed=_GEMMA_2_FIXED,
    ignored=_GEMMA_2_IGNORED,
  ),
  "gemma3_text": Family(
    "Gemma3ForCausalLM",
    (
      *_GEMMA_2_PARTS,
      parts.alternating(6, "sliding_window_pattern", "_sliding_window_pattern"),
      rope_by_layer(1_000_000.0, 10_000.0, "rope_local_base_freq"),
    ),
    _defaults("gemma3_text", **_GEMMA_2),
    fixed={**_GEMMA_2_FIXED, "query_key_norm": True},
    only={
      "attn_logit_softcapping": (
        (None,),
        "transformers does not apply it in this family, so the model's own logits are not known; "
        "set it to null for those of transformers",
      ),
    },
    ignored=_GEMMA_2_IGNORED,
  ),
  "gpt2": Family(
    "GPT2LMHeadModel",
    (
      same("n_layer", "layers"),
      same("n_embd", "model_size"),
      same("n_positions", "max_positions"),
      same("vocab_size", "vocabulary_size"),
      same("layer_norm_epsilon", "norm_epsilon", float),
      same("tie_word_embeddings", "tied_embeddings", bool),
      *(parts.GPT_2_FEEDFORWARD, parts.GPT_2_HEADS),
      same("scale_attn_by_inverse_layer_idx", "attention_scale_by_inverse_layer", bool),
      parts.choice("activation_function", "activation", {"gelu_new": "gelu", **parts.ACTIVATIONS}),
    ),
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
    (*_PLAIN, parts.WINDOW, rope(partial=True, older=True)),
    _defaults("phi3", sliding_window=None),
  ),
  "olmo2": Family(
    "Olmo2ForCausalLM",
    (*_PLAIN, parts.BIASES, rope(older=True)),
    _defaults("olmo2"),
    fixed=_OLMO_FIXED,
  ),
  "olmo3": Family(
    "Olmo3ForCausalLM",
    (*_PLAIN, parts.BIASES, parts.alternating(4), rope_by_layer(500_000.0, 500_000.0)),
    _defaults("olmo3", sliding_window=4096),
    fixed=_OLMO_FIXED,
  ),
  "smollm3": Family(
    "SmolLM3ForCausalLM",
    (*_PLAIN, parts.MLP_BIASES, parts.SMOLLM_3, rope(2_000_000.0)),
    _defaults(
      "smollm3", tie_word_embeddings=True, use_sliding_window=False, no_rope_layer_interval=4
    ),
  ),
  "granite": Family(
    "GraniteForCausalLM",
    (
      *(*_COMMON, _SILU, parts.MLP_BIASES, rope()),
      same("attention_multiplier", "attention_scale", float),
      same("embedding_multiplier", "embedding_multiplier", float),
      same("residual_multiplier", "residual_multiplier", float),
      same("logits_scaling", "logits_divisor", float),
    ),
    _defaults(
      "granite",
      attention_multiplier=1.0,
      embedding_multiplier=1.0,
      residual_multiplier=1.0,
      logits_scaling=1.0,
    ),
  ),
  "mixtral": Family(
    "MixtralForCausalLM",
    (
      *(*_PLAIN, parts.WINDOW, rope(1_000_000.0)),
      *(parts.expert_count(8, "num_local_experts"), *_MIXTURE),
    ),
    _defaults("mixtral", num_experts_per_tok=2),
    ignored=_EXPERTS_IGNORED,
  ),
  "qwen3_moe": Family(
    "Qwen3MoeForCausalLM",
    (
      *(*_PLAIN, parts.BIASES, parts.QWEN_3_MOE_WINDOW, rope()),
      parts.expert_count(128, "num_experts", "num_local_experts"),
      *(parts.SPARSE_LAYERS, parts.EXPERTS_PER_TOKEN, parts.EXPERT_WIDTH),
      parts.ROUTER_NORMALIZED,
    ),
    _defaults(
      "qwen3_moe",
      **_QWEN,
      num_experts_per_tok=8,
      moe_intermediate_size=768,
      decoder_sparse_step=1,
      norm_topk_prob=False,
    ),
    fixed={"query_key_norm": True},
    ignored=(*_EXPERTS_IGNORED, "max_window_layers"),
  ),
  "olmoe": Family(
    "OlmoeForCausalLM",
    (
      *(*_PLAIN, parts.BIASES, rope()),
      *(parts.expert_count(64, "num_experts"), *_MIXTURE, parts.ROUTER_NORMALIZED),
      parts.optional("clip_qkv", "clip_qkv", forms.ABOVE_0),
    ),
    _defaults("olmoe", num_experts_per_tok=8, norm_topk_prob=False),
    fixed={"query_key_norm": True, "query_key_norm_across_heads": True},
    ignored=_EXPERTS_IGNORED,
  ),
  "gpt_oss": Family(
    "GptOssForCausalLM",
    (
      *(*_COMMON, parts.SCALE, parts.BIASES, parts.alternating(2)),
      rope(150_000.0, unstated=_GPT_OSS_YARN),
      *(parts.expert_count(128, "num_local_experts"), *_MIXTURE),
      parts.optional("swiglu_limit", "gate_limit"),
    ),
    _defaults(
      "gpt_oss",
      head_dim=64,
      attention_bias=True,
      sliding_window=128,
      num_experts_per_tok=4,
      swiglu_limit=7.0,
    ),
    fixed={
      "activation": "gelu_sigmoid",
      "attention_sinks": True,
      "router_scores": "softmax_of_chosen",
      "router_bias": True,
      "expert_biases": True,
      "up_offset": 1.0,
    },
    only={
      "hidden_act": (("silu",), "experts of this family have x sigmoid(1.702 x)"),
      "swiglu_alpha": ((1.702,), "the number in the sigmoid of the experts is fixed"),
    },
    ignored=(*_EXPERTS_IGNORED, "initial_context_length", "experts_per_token"),
  ),
  "deepseek_v3": Family(
    "DeepseekV3ForCausalLM",
    (
      *(*_DEEPSEEK_PARTS, parts.INTERLEAVE),
      parts.behind_dense_layers(
        *(*_DEEPSEEK_EXPERTS, parts.ROUTER_GROUPS, parts.ROUTER_NORMALIZED),
        *(parts.only("scoring_func", "sigmoid"), parts.only("topk_method", "noaux_tc")),
        parts.constant(router_scores="sigmoid", router_correction=True, router_group_score="top2"),
      ),
    ),
    _defaults(
      "deepseek_v3",
      **_DEEPSEEK,
      first_k_dense_replace=3,
      n_routed_experts=256,
      n_shared_experts=1,
      num_experts_per_tok=8,
      moe_intermediate_size=2048,
      n_group=8,
      topk_group=4,
      norm_topk_prob=True,
      routed_scaling_factor=2.5,
      rope_interleave=True,
    ),
    fixed={"attention": "latent"},
    ignored=_DEEPSEEK_IGNORED,
  ),
  "deepseek_v2": Family(
    "DeepseekV2ForCausalLM",
    (
      *_DEEPSEEK_PARTS,
      parts.behind_dense_layers(
        *(*_DEEPSEEK_EXPERTS, parts.GROUPS_BY_METHOD),
        *(parts.only("scoring_func", "softmax"), parts.only("norm_topk_prob", False)),
        parts.constant(router_normalized=False),
      ),
    ),
    _defaults(
      "deepseek_v2",
      **_DEEPSEEK,
      first_k_dense_replace=0,
      n_routed_experts=64,
      n_shared_experts=2,
      moe_intermediate_size=1407,
      topk_method="greedy",
      routed_scaling_factor=1.0,
    ),
    fixed={"attention": "latent", "rotary_pairs": "adjacent"},
    ignored=_DEEPSEEK_IGNORED,
  ),
}
