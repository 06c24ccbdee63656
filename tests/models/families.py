"""Small decoders of the open families, and parameters for them that NumPy draws, by name."""

import math
import zlib

import jax
import numpy as np

from configs.schema.recipes import GPT_2
from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job
from training.setup import Job

ROWS, LENGTH = 2, 24
KEPT = (5, 11, 17, 23)  # the positions whose logits are in the fixture
SIZES = {
  "model.layers": 3,
  "model.model_size": 32,
  "model.feedforward_size": 56,
  "model.heads": 4,
  "model.kv_heads": 2,
  "model.head_size": 10,
  "model.vocabulary_size": 61,
  "model.vocabulary_multiple": 1,
  "data.sequence_length": LENGTH,
  "data.global_batch_size": ROWS,
  "training.matmul_precision": "highest",
}
GEMMA = {
  "norm_scale_from_one": True,
  "post_norms": True,
  "activation": "gelu",
  "scaled_embeddings": True,
  "tied_embeddings": True,
  "window": 5,
  "attention_scale": 12**-0.5,
}
FACTORS = {
  "short_factors": (1.0, 1.05, 1.2, 1.5, 1.7),
  "long_factors": (1.1, 1.4, 2.5, 6.0, 9.0),
}
OLMO = {
  "pre_norms": False,
  "post_norms": True,
  "query_key_norm": True,
  "query_key_norm_across_heads": True,
}
LATENT = {
  "attention": "latent",
  "kv_heads": 4,
  "rotary_size": 4,
  "rotary_pairs": "adjacent",
  "latent_size": 16,
  "value_head_size": 6,
}
# family, or one with an option (`llama_yarn`) -> keys of `model`. Windows, and the original length
# of scaled positions, are shorter than the rows.
FAMILIES = {
  "gpt2": {**GPT_2, "kv_heads": 4, "head_size": 8},
  "llama2": {"norm_epsilon": 1e-5},
  "llama3": {"rotary_base": 500.0, "rotary_scaling": (8.0, 1.0, 4.0, 16.0), "norm_epsilon": 1e-5},
  "mistral": {"window": 7, "norm_epsilon": 1e-5},
  "qwen2": {"biases": "qkv"},
  "qwen3": {"query_key_norm": True, "tied_embeddings": True},
  "gemma2": {
    **GEMMA,
    "global_every": 2,
    "attention_soft_cap": 5.0,
    "logits_soft_cap": 3.0,
  },
  "gemma3": {
    **GEMMA,
    "global_every": 3,
    "query_key_norm": True,
    "rotary_base": 1000.0,
    "local_rotary_base": 20.0,
  },
  "qwen2_windows": {"biases": "qkv", "window": 6, "layer_types": ("full", "sliding", "sliding")},
  "gemma3_pattern": {
    **GEMMA,
    "layer_types": ("full", "sliding"),
    "query_key_norm": True,
    "rotary_base": 1000.0,
    "rotary_scaling": ("linear", {"factor": 8.0}),
    "local_rotary_base": 20.0,
  },
  "gemma3_local": {
    **GEMMA,
    "layer_types": ("sliding", "full"),
    "query_key_norm": True,
    "rotary_base": 1000.0,
    "rotary_scaling": ("linear", {"factor": 8.0}),
    "local_rotary_base": 20.0,
    "local_rotary_scaling": (
      "yarn",
      {"factor": 4.0, "original_length": 8, "beta_fast": 2.0, "beta_slow": 0.2},
    ),
  },
  "llama_biases": {"biases": "attention,mlp"},
  "qwen3_biases": {"query_key_norm": True, "biases": "attention"},
  "phi3": {
    "head_size": 8,
    "rotary_size": 6,
    "norm_epsilon": 1e-5,
    "rotary_scaling": (
      "longrope",
      {
        "factor": 2.0,
        "original_length": 16,
        "short_factors": (1.0, 1.1, 1.3),
        "long_factors": (1.2, 3.0, 9.0),
      },
    ),
  },
  "smollm3": {"tied_embeddings": True, "layer_types": ("full", "full_unrotated", "full")},
  "smollm3_windows": {"window": 7, "layer_types": ("full", "sliding_unrotated")},
  "olmo2": {**OLMO, "rotary_base": 500.0},
  "olmo2_biases": {**OLMO, "biases": "attention", "rotary_scaling": ("linear", {"factor": 2.0})},
  # transformers 4 and 5 both read 500,000 as the base of its layers with a window, from one key.
  "olmo3": {
    **OLMO,
    "window": 6,
    "layer_types": ("sliding", "full"),
    "rotary_base": 500_000.0,
    "local_rotary_base": 500_000.0,
    "rotary_scaling": (
      "yarn",
      {"factor": 8.0, "original_length": 16, "beta_fast": 1.0, "beta_slow": 0.1},
    ),
  },
  "granite": {
    "biases": "attention",
    "tied_embeddings": True,
    "attention_scale": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "logits_divisor": 6.0,
  },
  "deepseek3": {
    **LATENT,
    "query_latent_size": 24,
    "rotary_base": 100.0,
    # mscale and mscale_all_dim of 1, as published.
    "attention_scale": 10**-0.5 * (0.1 * math.log(8) + 1) ** 2,
    "rotary_scaling": (
      "yarn",
      {
        "factor": 8.0,
        "original_length": 16,
        "beta_fast": 2.0,
        "beta_slow": 0.2,
        "attention_factor": 1.0,
      },
    ),
  },
  "deepseek3_halves": {**LATENT, "rotary_pairs": "halves", "query_latent_size": 24},
  # Of whose norms those of latent vectors have another epsilon.
  "deepseek3_biases": {
    **LATENT,
    "query_latent_size": 24,
    "biases": "attention",
    "norm_epsilon": 1e-2,
  },
  "deepseek2": LATENT,
  # Another mscale than mscale_all_dim.
  "deepseek2_yarn": {
    **LATENT,
    "query_latent_size": 40,
    "attention_scale": 10**-0.5 * (0.1 * 0.5 * math.log(4) + 1) ** 2,
    "rotary_scaling": (
      "yarn",
      {
        "factor": 4.0,
        "original_length": 16,
        "attention_factor": (0.1 * math.log(4) + 1) / (0.1 * 0.5 * math.log(4) + 1),
      },
    ),
  },
  "llama_relu": {"activation": "relu"},
  "llama_erf": {"activation": "gelu_erf"},
  "gpt2_squared": {**GPT_2, "kv_heads": 4, "head_size": 8, "activation": "relu_squared"},
  "gpt2_sigmoid": {**GPT_2, "kv_heads": 4, "head_size": 8, "activation": "gelu_sigmoid"},
  # Scores without a factor of their own, divided by the number of the layer.
  "gpt2_inverse": {
    **GPT_2,
    "kv_heads": 4,
    "head_size": 8,
    "attention_scale": 1.0,
    "attention_scale_by_inverse_layer": True,
  },
  # A table of positions that is longer than the rows.
  "gpt2_positions": {**GPT_2, "kv_heads": 4, "head_size": 8, "max_positions": 37},
  "llama_linear": {"rotary_scaling": ("linear", {"factor": 4.0})},
  "llama_dynamic": {"rotary_scaling": ("dynamic", {"factor": 3.0, "original_length": 16})},
  "llama_yarn": {
    "rotary_base": 100.0,
    "rotary_scaling": (
      "yarn",
      {"factor": 4.0, "original_length": 16, "beta_fast": 2.0, "beta_slow": 0.2, "truncate": False},
    ),
  },
  "qwen3_yarn": {
    "query_key_norm": True,
    "rotary_base": 50.0,
    "rotary_scaling": (
      "yarn",
      {"factor": 2.0, "original_length": 12, "beta_fast": 1.0, "beta_slow": 0.1},
    ),
  },
  "llama_longrope": {
    "rotary_scaling": ("longrope", {"factor": 2.0, "original_length": 12, **FACTORS}),
  },
  # As long as the rows: the short factors.
  "llama_shortrope": {
    "rotary_scaling": ("longrope", {"factor": 4.0, "original_length": 24, **FACTORS}),
  },
}


def job_of(family: str, strategy: str = "single", **overrides) -> Job:
  """Returns a small job of a family."""
  keys = {f"model.{key}": value for key, value in FAMILIES[family].items()}
  return make_job(strategy, "lm", **{**SIZES, **keys, **overrides})


def drawn(job: Job) -> dict[str, np.ndarray]:
  """Returns name -> float32 array, for a job in float64 too; each part shows in the logits."""
  arrays = {}
  for name, leaf in named_leaves(job.state.params).items():
    random = np.random.RandomState(zlib.crc32(name.encode()))  # of all NumPys the same
    values = random.standard_normal(leaf.shape).astype(np.float32)
    # A scale is near what leaves its input as it is; kernels keep the size of what they multiply.
    start = 0.0 if job.config.model.norm_scale_from_one else 1.0
    scale = name.endswith("scale")
    size = 0.5 if leaf.ndim < 3 or name.endswith("bias") else 2 * job.config.model.model_size**-0.5
    arrays[name] = start + 0.3 * values if scale else size * values
  return arrays


def tokens() -> np.ndarray:
  """Returns int32 [ROWS, LENGTH]."""
  return np.random.RandomState(7).randint(1, 61, (ROWS, LENGTH)).astype(np.int32)


def tree_of(job: Job, arrays: dict[str, np.ndarray]) -> dict:
  """Returns the arrays as the job's tree of parameters, laid out as the job's."""
  structure = jax.tree.structure(job.state.params)
  leaves = [arrays[n].astype(x.dtype) for n, x in named_leaves(job.state.params).items()]
  return jax.device_put(jax.tree.unflatten(structure, leaves), job.state_shardings.params)
