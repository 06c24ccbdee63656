"""Presets: the published sizes of open decoder families, and how their routers were balanced."""

import math
from typing import Any

from configs.schema.model_checks import GPT_2

# ------------------------------ dense decoders ------------------------------


def _llama(layers: int, width: int, feedforward: int, heads: int, kv_heads: int, **more) -> dict:
  sizes = {
    "layers": layers,
    "model_size": width,
    "feedforward_size": feedforward,
    "heads": heads,
    "kv_heads": kv_heads,
    "head_size": 128,
  }
  return {**sizes, "norm_epsilon": 1e-5, **more}


_LLAMA_3 = {
  "vocabulary_size": 128_256,
  "rotary_base": 500_000.0,
  "rotary_scaling": (8.0, 1.0, 4.0, 8192.0),
}


# Trained by Llama 3.1's scaling with another factor.
_LLAMA_3_2 = {
  **_LLAMA_3,
  "rotary_scaling": (32.0, 1.0, 4.0, 8192.0),
  "tied_embeddings": True,
}


_QWEN_2 = {
  "rotary_base": 1_000_000.0,
  "norm_epsilon": 1e-6,
  "biases": "qkv",
}


def _qwen_2(layers: int, width: int, feedforward: int, heads: int, kv_heads: int) -> dict:
  """Returns a Qwen 2.5: the smaller ones have tied embeddings, and fewer rows in their tables."""
  small = width <= 2048
  more = {"vocabulary_size": 151_936 if small else 152_064, "tied_embeddings": small}
  head_size = width // heads
  return _llama(
    *(layers, width, feedforward, heads, kv_heads), **{**_QWEN_2, **more, "head_size": head_size}
  )


_QWEN_3 = {
  "vocabulary_size": 151_936,
  "rotary_base": 1_000_000.0,
  "norm_epsilon": 1e-6,
  "query_key_norm": True,
}


_GEMMA = {
  "norm_epsilon": 1e-6,
  "norm_scale_from_one": True,
  "post_norms": True,
  "activation": "gelu",
  "scaled_embeddings": True,
  "tied_embeddings": True,
}


def _gemma_3(*sizes: int, head_size: int = 256, scale: int = 256) -> dict:
  """Returns the text model of a Gemma 3 with a vision tower; `scale`: query_pre_attn_scalar."""
  return {
    **_llama(*sizes, head_size=head_size, vocabulary_size=262_208),
    **_GEMMA,
    "query_key_norm": True,
    "attention_scale": scale**-0.5,
    "rotary_base": 1_000_000.0,
    "rotary_scaling": ("linear", {"factor": 8.0}),
    "local_rotary_base": 10_000.0,
    "window": 1024,
    "global_every": 6,
  }


_OLMO_2 = {
  "vocabulary_size": 100_352,
  "rotary_base": 500_000.0,
  "norm_epsilon": 1e-6,
  "pre_norms": False,
  "post_norms": True,
  "query_key_norm": True,
  "query_key_norm_across_heads": True,
}


_SMOLLM_2 = {"vocabulary_size": 49_152, "head_size": 64, "tied_embeddings": True}


# Of the 48 pairs that are rotated, in rows of more than 4,096 tokens: 31 powers of
# 1.118320672, and what a search has found.
_PHI_4_LONG = (
  *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649),
  *(
    2.446418898,
    2.735880826,
    3.059592084,
    3.421605075,
    3.826451687,
    4.279200023,
    4.785517845,
    5.351743533,
  ),
  *(
    5.984965424,
    6.693110555,
    7.485043894,
    8.370679318,
    9.36110372,
    10.4687158,
    11.70738129,
    13.09260651,
  ),
  *(
    14.64173252,
    16.37415215,
    18.31155283,
    20.47818807,
    22.90118105,
    25.61086418,
    28.64115884,
    32.03,
  ),
  *(32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7),
  *(32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
)


# preset -> (tokens of a row that it was trained on, keys of `model`), as published: the
# `config.json` beside each family's weights.
PRESETS: dict[str, tuple[int, dict[str, Any]]] = {
  "gpt2_124m": (
    1024,
    {
      **_llama(12, 768, 3072, 12, 12, head_size=64),
      **GPT_2,
      "max_positions": 1024,
      "vocabulary_size": 50_257,
    },
  ),
  "llama2_7b": (4096, _llama(32, 4096, 11_008, 32, 32, vocabulary_size=32_000)),
  "llama2_70b": (4096, _llama(80, 8192, 28_672, 64, 8, vocabulary_size=32_000)),
  "llama3_8b": (8192, _llama(32, 4096, 14_336, 32, 8, **_LLAMA_3)),
  "llama3_70b": (8192, _llama(80, 8192, 28_672, 64, 8, **_LLAMA_3)),
  "llama3_405b": (8192, _llama(126, 16_384, 53_248, 128, 8, **_LLAMA_3)),
  "llama3_2_1b": (8192, _llama(16, 2048, 8192, 32, 8, head_size=64, **_LLAMA_3_2)),
  "llama3_2_3b": (8192, _llama(28, 3072, 8192, 24, 8, **_LLAMA_3_2)),
  "llama3_3_70b": (8192, _llama(80, 8192, 28_672, 64, 8, **_LLAMA_3)),
  "mistral_7b": (8192, _llama(32, 4096, 14_336, 32, 8, vocabulary_size=32_000, window=4096)),
  "mistral_nemo_12b": (
    8192,
    _llama(40, 5120, 14_336, 32, 8, vocabulary_size=131_072, rotary_base=1_000_000.0),
  ),
  "qwen2_5_0_5b": (4096, _qwen_2(24, 896, 4864, 14, 2)),
  "qwen2_5_1_5b": (4096, _qwen_2(28, 1536, 8960, 12, 2)),
  "qwen2_5_3b": (4096, _qwen_2(36, 2048, 11_008, 16, 2)),
  "qwen2_5_7b": (4096, _qwen_2(28, 3584, 18_944, 28, 4)),
  "qwen2_5_14b": (4096, _qwen_2(48, 5120, 13_824, 40, 8)),
  "qwen2_5_32b": (4096, _qwen_2(64, 5120, 27_648, 40, 8)),
  "qwen2_5_72b": (4096, _qwen_2(80, 8192, 29_568, 64, 8)),
  "qwen3_0_6b": (4096, _llama(28, 1024, 3072, 16, 8, **_QWEN_3) | {"tied_embeddings": True}),
  "qwen3_1_7b": (4096, _llama(28, 2048, 6144, 16, 8, **_QWEN_3) | {"tied_embeddings": True}),
  "qwen3_4b": (4096, _llama(36, 2560, 9728, 32, 8, **_QWEN_3) | {"tied_embeddings": True}),
  "qwen3_8b": (4096, _llama(36, 4096, 12_288, 32, 8, **_QWEN_3)),
  "qwen3_14b": (4096, _llama(40, 5120, 17_408, 40, 8, **_QWEN_3)),
  "qwen3_32b": (4096, _llama(64, 5120, 25_600, 64, 8, **_QWEN_3)),
  "gemma2_9b": (
    8192,
    {
      **_llama(42, 3584, 14_336, 16, 8, head_size=256, vocabulary_size=256_000),
      **_GEMMA,
      "attention_scale": 256**-0.5,
      "attention_soft_cap": 50.0,
      "logits_soft_cap": 30.0,
      "window": 4096,
      "global_every": 2,
    },
  ),
  "gemma3_1b": (
    8192,
    {
      **_llama(26, 1152, 6912, 4, 1, head_size=256, vocabulary_size=262_144),
      **_GEMMA,
      "query_key_norm": True,
      "attention_scale": 256**-0.5,
      "rotary_base": 1_000_000.0,
      "local_rotary_base": 10_000.0,
      "window": 512,
      "global_every": 6,
    },
  ),
  "gemma3_4b": (8192, _gemma_3(34, 2560, 10_240, 8, 4)),
  "gemma3_12b": (8192, _gemma_3(48, 3840, 15_360, 16, 8)),
  "gemma3_27b": (8192, _gemma_3(62, 5376, 21_504, 32, 16, head_size=128, scale=168)),
  "phi4_mini": (
    4096,
    {
      **_llama(32, 3072, 8192, 24, 8, vocabulary_size=200_064, tied_embeddings=True),
      "rotary_size": 96,
      "rotary_scaling": (
        "longrope",
        {
          "factor": 32.0,
          "original_length": 4096,
          "short_factors": (1.0,) * 48,
          "long_factors": _PHI_4_LONG,
        },
      ),
    },
  ),
  "olmo2_1b": (4096, _llama(16, 2048, 8192, 16, 16, **_OLMO_2)),
  "olmo2_7b": (4096, _llama(32, 4096, 11_008, 32, 32, **_OLMO_2)),
  "olmo2_13b": (4096, _llama(40, 5120, 13_824, 40, 40, **_OLMO_2)),
  "olmo2_32b": (4096, _llama(64, 5120, 27_648, 40, 8, **_OLMO_2)),
  "smollm2_135m": (2048, _llama(30, 576, 1536, 9, 3, rotary_base=100_000.0, **_SMOLLM_2)),
  "smollm2_360m": (2048, _llama(32, 960, 2560, 15, 5, rotary_base=100_000.0, **_SMOLLM_2)),
  "smollm2_1_7b": (2048, _llama(24, 2048, 8192, 32, 32, rotary_base=130_000.0, **_SMOLLM_2)),
  "smollm3_3b": (
    4096,
    {
      **_llama(36, 2048, 11_008, 16, 4, vocabulary_size=128_256, tied_embeddings=True),
      "norm_epsilon": 1e-6,
      "rotary_base": 5_000_000.0,
      "layer_types": ("full", "full", "full", "full_unrotated"),
    },
  ),
}


# ------------------------------ mixtures of experts ------------------------------

_MIXTRAL = {"experts": 8, "rotary_base": 1_000_000.0, "norm_epsilon": 1e-5, "head_size": 128}
_QWEN_3_EXPERTS = {
  "vocabulary_size": 151_936,
  "rotary_base": 1_000_000.0,
  "norm_epsilon": 1e-6,
  "query_key_norm": True,
  "head_size": 128,
  "kv_heads": 4,
  "experts": 128,
  "experts_per_token": 8,
}


def _deepseek(heads: int, mscale: float, **sizes) -> dict[str, Any]:
  """Returns a DeepSeek-V2 or V3: latent attention, YaRN by 40, shared experts, dense layers first.

  Args:
    heads: of queries, keys and values.
    mscale: of YaRN over all dims; the scores are scaled by the square of what follows from it.
    **sizes: the others.
  """
  head_size = 128 + 64
  scale = 0.1 * mscale * math.log(40.0) + 1
  return {
    "attention": "latent",
    "heads": heads,
    "kv_heads": heads,
    "head_size": head_size,
    "value_head_size": 128,
    "latent_size": 512,
    "rotary_size": 64,
    "rotary_pairs": "adjacent",
    "attention_scale": head_size**-0.5 * scale**2,
    "rotary_scaling": (
      "yarn",
      {"factor": 40.0, "original_length": 4096, "attention_factor": 1.0},
    ),
    "norm_epsilon": 1e-6,
    **sizes,
  }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
  return {
    "layers": layers,
    "model_size": 2880,
    "feedforward_size": 2880,
    "heads": 64,
    "kv_heads": 8,
    "head_size": 64,
    "vocabulary_size": 201_088,
    "norm_epsilon": 1e-5,
    "rotary_base": 150_000.0,
    "rotary_scaling": (
      "yarn",
      {"factor": 32.0, "original_length": 4096, "truncate": False},
    ),
    "window": 128,
    "layer_types": ("sliding", "full"),
    "attention_sinks": True,
    "biases": "attention",
    "experts": experts,
    "experts_per_token": 4,
    "router_scores": "softmax_of_chosen",
    "router_bias": True,
    "expert_biases": True,
    "activation": "gelu_sigmoid",
    "gate_limit": 7.0,
    "up_offset": 1.0,
  }


def _expert_sizes(
  layers: int, width: int, feedforward: int, heads: int, kv_heads: int, **more
) -> dict:
  return {
    "layers": layers,
    "model_size": width,
    "feedforward_size": feedforward,
    "heads": heads,
    "kv_heads": kv_heads,
    **more,
  }


# preset -> (tokens of a row that it was trained on, keys of `model`, keys of `training`), from the
# `config.json` beside each family's weights and, of V3 and OLMoE, the reports (arXiv:2412.19437,
# 2409.02060).
EXPERT_PRESETS: dict[str, tuple[int, dict[str, Any], dict[str, float]]] = {
  "mixtral_8x7b": (
    4096,
    _expert_sizes(32, 4096, 14_336, 32, 8, vocabulary_size=32_000, **_MIXTRAL),
    {"balance_loss": 0.02},
  ),
  "mixtral_8x22b": (
    4096,
    _expert_sizes(56, 6144, 16_384, 48, 8, vocabulary_size=32_000, **_MIXTRAL),
    {"balance_loss": 0.001},
  ),
  "qwen3_30b_a3b": (
    4096,
    {
      **_QWEN_3_EXPERTS,
      **{"layers": 48, "model_size": 2048, "feedforward_size": 6144, "heads": 32},
      "expert_feedforward_size": 768,
    },
    {"balance_loss": 0.001},
  ),
  "qwen3_235b_a22b": (
    4096,
    {
      **_QWEN_3_EXPERTS,
      **{"layers": 94, "model_size": 4096, "feedforward_size": 12_288, "heads": 64},
      "expert_feedforward_size": 1536,
    },
    {"balance_loss": 0.001},
  ),
  "olmoe_1b_7b": (
    4096,
    _expert_sizes(
      *(16, 2048, 1024, 16, 16),
      vocabulary_size=50_304,
      norm_epsilon=1e-5,
      query_key_norm=True,
      query_key_norm_across_heads=True,
      experts=64,
      experts_per_token=8,
      router_normalized=False,
    ),
    {"balance_loss": 0.01, "router_z_loss": 0.001},
  ),
  "deepseek_v2_lite": (
    4096,
    _deepseek(
      16,
      0.707,
      layers=27,
      model_size=2048,
      feedforward_size=10_944,
      vocabulary_size=102_400,
      experts=64,
      experts_per_token=6,
      expert_feedforward_size=1408,
      shared_feedforward_size=2 * 1408,
      dense_layers=1,
      router_normalized=False,
    ),
    {"balance_loss": 0.001},
  ),
  "deepseek_v3": (
    4096,
    _deepseek(
      128,
      1.0,
      layers=61,
      model_size=7168,
      feedforward_size=18_432,
      vocabulary_size=129_280,
      query_latent_size=1536,
      experts=256,
      experts_per_token=8,
      expert_feedforward_size=2048,
      shared_feedforward_size=2048,
      dense_layers=3,
      router_scores="sigmoid",
      router_correction=True,
      router_scale=2.5,
      router_groups=8,
      router_top_groups=4,
      router_group_score="top2",
    ),
    {"balance_loss": 0.0001, "router_bias_rate": 0.001},
  ),
  "gpt_oss_20b": (4096, _gpt_oss(24, 32), {"balance_loss": 0.01}),
  "gpt_oss_120b": (4096, _gpt_oss(36, 128), {"balance_loss": 0.01}),
}
