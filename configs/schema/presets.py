"""Presets: the published sizes of the open decoder families."""

from typing import Any

from configs.schema.decoder_checks import GPT_2


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
