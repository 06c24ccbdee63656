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
  "mistral_7b": (8192, _llama(32, 4096, 14_336, 32, 8, vocabulary_size=32_000, window=4096)),
  "qwen3_0_6b": (4096, _llama(28, 1024, 3072, 16, 8, **_QWEN_3) | {"tied_embeddings": True}),
  "qwen3_8b": (4096, _llama(36, 4096, 12_288, 32, 8, **_QWEN_3)),
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
}
