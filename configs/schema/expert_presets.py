"""Presets with mixtures of experts: the published sizes, and how their routers were balanced."""

import math
from typing import Any

_MIXTRAL = {"experts": 8, "rotary_base": 1_000_000.0, "norm_epsilon": 1e-5, "head_size": 128}
_QWEN_3 = {
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


def _sizes(layers: int, width: int, feedforward: int, heads: int, kv_heads: int, **more) -> dict:
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
    _sizes(32, 4096, 14_336, 32, 8, vocabulary_size=32_000, **_MIXTRAL),
    {"balance_loss": 0.02},
  ),
  "mixtral_8x22b": (
    4096,
    _sizes(56, 6144, 16_384, 48, 8, vocabulary_size=32_000, **_MIXTRAL),
    {"balance_loss": 0.001},
  ),
  "qwen3_30b_a3b": (
    4096,
    {
      **_QWEN_3,
      **{"layers": 48, "model_size": 2048, "feedforward_size": 6144, "heads": 32},
      "expert_feedforward_size": 768,
    },
    {"balance_loss": 0.001},
  ),
  "qwen3_235b_a22b": (
    4096,
    {
      **_QWEN_3,
      **{"layers": 94, "model_size": 4096, "feedforward_size": 12_288, "heads": 64},
      "expert_feedforward_size": 1536,
    },
    {"balance_loss": 0.001},
  ),
  "olmoe_1b_7b": (
    4096,
    _sizes(
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
