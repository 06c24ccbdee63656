"""Recipes: a model, a data set and how it is trained. A strategy is chosen apart from them.

Presets are recipes of the published sizes of open decoder families.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from configs.keys import table
from input_pipeline import catalog
from runtime.extensions import Table
from runtime.suggest import nearest
from training.tasks import DPO, GRPO

HF = "hf"  # the model of a folder
TASKS_OF_DATA = {catalog.PREFERENCES: DPO, catalog.PROMPTS: GRPO}


def base(argument: str) -> ConfigDict:
  """Returns model, data, training, optimizer and evaluation for a recipe.

  Args:
    argument: a recipe's name, or `model=NAME,data=NAME`: the model's own recipe, with the
      data set exchanged.

  Raises:
    ValueError: an unknown recipe, model or key.
  """
  name, data = parse(argument)
  config = _recipe(name, "model" if "=" in argument else "recipe")
  if data:
    config.data.name = data
  config.task = TASKS_OF_DATA.get(data, config.task)
  if data in (*catalog.RENDERED, catalog.PROMPTS):
    config.evaluation.sample_tokens = lm().evaluation.sample_tokens
  return config


def make(
  task: str,
  model: Mapping[str, Any],
  *,
  data: Mapping[str, Any],
  training: Mapping[str, Any],
  optimizer: Mapping[str, Any] | None = None,
  evaluation: Mapping[str, Any] | None = None,
) -> ConfigDict:
  """Returns a recipe; the keys that are not given have the defaults that all recipes share.

  Args:
    task: a name in `training.tasks.TASKS`.
    model: `name`, one of `models.MODELS`, and whatever keys the model reads. `model_size` and the
      like are refused below 1. Image tasks size `input_size` and `output_size` by the data set
      where these are placeholders.
    data: at least `name` and `global_batch_size`.
    training: at least `steps`.
    optimizer: other than AdamW at 1e-3 with a cosine schedule.
    evaluation: when to evaluate; by default at the end.
  """
  return ConfigDict(
    {
      "task": task,
      "model": dict(model),
      "data": table.section("data", **data),
      "training": table.section("training", **training),
      "optimizer": table.section("optimizer", **(optimizer or {})),
      "evaluation": table.section("evaluation", **(evaluation or {})),
    }
  )


def lm() -> ConfigDict:
  """Returns a byte-level decoder of 0.66 M parameters on the source of the standard library."""
  return make(
    "causal_lm",
    table.model("transformer"),
    data={"name": "python_source", "global_batch_size": 32, "sequence_length": 128},
    training={"steps": 200},
    optimizer={"learning_rate": 8e-3},
    evaluation={"every_steps": 50, "steps": 8, "sample_tokens": 120},
  )


def lm_bpe() -> ConfigDict:
  """Returns `lm` on tokens of a BPE that the run trains first, for fewer steps, as they are longer.

  Layouts and plans, which train no tokenizer, have its vocabulary all the same.
  """
  config = lm()
  config.model.vocabulary_size = config.data.train_tokenizer = 4096
  config.training.steps = 128
  config.evaluation.update(every_steps=32, sample_tokens=96)
  return config


def hf() -> ConfigDict:
  """Returns the decoder of a model folder, to be trained further; its keys are the folder's."""
  from interop import hf_config  # of this recipe alone

  config = lm()
  model = {"folder": ""}
  for key in hf_config.KEYS:
    value = config.model[key]
    model[key] = config_dict.placeholder(int if value is None else type(value))
  model["attention_scale"] = config_dict.placeholder(float)
  config.model = ConfigDict({**config.model, **model})
  config.data.sequence_length = config_dict.placeholder(int)
  config.training.rematerialization = "full"
  config.optimizer.learning_rate = config_dict.placeholder(float)
  config.evaluation.sample_tokens = 0
  return config


def mlp() -> ConfigDict:
  """Returns a small classifier of images (handwritten digits)."""
  return _classifier(table.model("mlp"))


def vit() -> ConfigDict:
  """Returns a vision transformer of 0.1 M parameters that classifies handwritten digits."""
  return _classifier(table.model("vit"))


def _classifier(model: Mapping[str, Any]) -> ConfigDict:
  return make(
    "classification",
    model,
    data={"name": "digits", "global_batch_size": 128},
    training={"steps": 400},
    optimizer={"learning_rate": 2e-3, "weight_decay": 0.05},
    evaluation={"every_steps": 100},
  )


def mlp_tutorial() -> ConfigDict:
  """Returns the tutorial's network [784, W, W, W, 10] on one random batch, W rows of it."""
  sizes = {"input_size": 784, "output_size": 10, "bias_standard_deviation": 1.0}
  sgd = {"name": "sgd", "learning_rate": 1e-5, "schedule": "constant", "warmup_steps": 0}
  return make(
    "regression",
    table.model("mlp", **sizes, model_size=config_dict.placeholder(int)),
    data={
      "name": "random_normal",
      "global_batch_size": config_dict.placeholder(int),  # as W
      "shuffle": False,
    },
    training={"steps": 30},
    optimizer={**sgd, "weight_decay": 0.0, "clip_norm": 0.0},
  )


# name -> function that returns a config, as those above.
RECIPES: Table = Table(
  "recipe",
  {"lm": lm, "mlp": mlp, "mlp_tutorial": mlp_tutorial, "vit": vit, "lm_bpe": lm_bpe},
  numerics=False,
)


# ------------------------------ published decoders ------------------------------


@dataclasses.dataclass(frozen=True)
class Preset:
  """A decoder of a published size.

  Attributes:
    length: tokens of a row that it was trained on.
    model: keys of `model`, by the `config.json` beside the family's weights.
    training: keys of `training`: how its experts were balanced.
  """

  length: int
  model: Mapping[str, Any]
  training: Mapping[str, float] = dataclasses.field(default_factory=dict)


# Keys of `training`, how experts were balanced: beside the weights of V3, OLMoE and GLM-4.5, by
# their reports (arXiv:2412.19437, 2409.02060, 2508.06471); not of Llama 4 and Mistral Small 4.
_BALANCE = ("balance_loss", "router_z_loss", "router_bias_rate")


def _decoder(length: int, sizes: tuple[int, ...], family: Mapping, **more: Any) -> Preset:
  """Returns a preset.

  Args:
    length: of it.
    sizes: layers, model_size, feedforward_size, heads and kv_heads.
    family: what it shares with others, of `model` or of _BALANCE.
    more: what is its own.
  """
  names = ("layers", "model_size", "feedforward_size", "heads", "kv_heads")
  keys = {**dict(zip(names, sizes, strict=True)), **family, **more}
  training = {key: keys.pop(key) for key in _BALANCE if key in keys}
  return Preset(length, keys, training)


_LLAMA_2 = {"head_size": 128, "norm_epsilon": 1e-5, "vocabulary_size": 32_000}
_LLAMA_3 = {
  **_LLAMA_2,
  "vocabulary_size": 128_256,
  "rotary_base": 500_000.0,
  "rotary_scaling": (8.0, 1.0, 4.0, 8192.0),
}
# Trained by Llama 3.1's scaling with another factor.
_LLAMA_3_2 = {**_LLAMA_3, "rotary_scaling": (32.0, 1.0, 4.0, 8192.0), "tied_embeddings": True}
_MISTRAL_NEMO = {**_LLAMA_2, "vocabulary_size": 131_072, "rotary_base": 1_000_000.0}
GPT_2 = {
  **{"positions": "learned", "norm": "layer", "norm_epsilon": 1e-5, "biases": "all"},
  **{"activation": "gelu", "gated": False, "tied_embeddings": True},
}
_GPT_2 = {**GPT_2, "head_size": 64, "max_positions": 1024, "vocabulary_size": 50_257}
# Its layers' attention is taken as dense: half of them have banded patterns in the paper.
_GPT_3 = {**_GPT_2, "head_size": 128, "max_positions": 2048}
_QWEN_2 = {"rotary_base": 1_000_000.0, "norm_epsilon": 1e-6, "biases": "qkv"}
# The smaller ones have tied embeddings, and fewer rows in their tables.
_QWEN_2_SMALL = {**_QWEN_2, "vocabulary_size": 151_936, "tied_embeddings": True}
_QWEN_2_LARGE = {**_QWEN_2, "vocabulary_size": 152_064}
_QWEN_3 = {
  **{"head_size": 128, "norm_epsilon": 1e-6, "query_key_norm": True},
  **{"vocabulary_size": 151_936, "rotary_base": 1_000_000.0},
}
_QWEN_3_TIED = {**_QWEN_3, "tied_embeddings": True}
_QWEN_3_EXPERTS = {**_QWEN_3, "experts": 128, "experts_per_token": 8, "balance_loss": 0.001}
# Gated DeltaNet in three of four layers.
_QWEN_3_LINEAR = {
  **{"head_size": 256, "norm_epsilon": 1e-6, "query_key_norm": True, "norm_scale_from_one": True},
  **{"attention_gate": True, "rotary_base": 1e7, "rotary_size": 64},
  **{"mixer": "gated_delta", "layer_types": (*("mixer",) * 3, "full"), "convolution_size": 4},
  **{"mixer_heads": 32, "mixer_key_heads": 16, "mixer_head_size": 128},
  "mixer_value_head_size": 128,
}
_QWEN_3_NEXT = {
  **{**_QWEN_3_LINEAR, "vocabulary_size": 151_936, "experts": 512, "experts_per_token": 10},
  **{"expert_feedforward_size": 512, "shared_feedforward_size": 512, "shared_gate": True},
  "balance_loss": 0.001,
}
_QWEN_3_5 = {**_QWEN_3_LINEAR, "vocabulary_size": 248_320}
_QWEN_3_5_MOE = {
  **{**_QWEN_3_NEXT, "vocabulary_size": 248_320, "experts": 256, "experts_per_token": 8},
}
_GEMMA = {
  **{"head_size": 256, "norm_epsilon": 1e-6, "norm_scale_from_one": True, "post_norms": True},
  **{"activation": "gelu", "scaled_embeddings": True, "tied_embeddings": True},
  "attention_scale": 256**-0.5,
}
_GEMMA_2 = {
  **_GEMMA,
  **{"vocabulary_size": 256_000, "attention_soft_cap": 50.0, "logits_soft_cap": 30.0},
  **{"window": 4096, "global_every": 2},
}
_GEMMA_3 = {
  **_GEMMA,
  **{"query_key_norm": True, "rotary_base": 1_000_000.0, "local_rotary_base": 10_000.0},
  **{"vocabulary_size": 262_144, "window": 512, "global_every": 6},
}
# The text models of those with a vision tower.
_GEMMA_3_VISION = {
  **_GEMMA_3,
  **{"vocabulary_size": 262_208, "window": 1024, "rotary_scaling": ("linear", {"factor": 8.0})},
}
_OLMO_2 = {
  **{"head_size": 128, "norm_epsilon": 1e-6, "pre_norms": False, "post_norms": True},
  **{"query_key_norm": True, "query_key_norm_across_heads": True},
  **{"vocabulary_size": 100_352, "rotary_base": 500_000.0},
}
# Three of four layers with Gated DeltaNet, whose norms are before it; attention has no positions.
_OLMO_HYBRID = {
  **{**_OLMO_2, "rotary_base": 10_000.0, "mixer": "gated_delta", "mixer_pre_norms": True},
  **{"mixer_heads": 30, "mixer_head_size": 96, "mixer_value_head_size": 192},
  **{"mixer_negative_eigenvalues": True, "mixer_norm_epsilon": 1e-5},
  "layer_types": (*("mixer",) * 3, "full_unrotated"),
}
_LFM_2 = {
  **{"norm_epsilon": 1e-5, "query_key_norm": True, "tied_embeddings": True, "rotary_base": 1e6},
  **{"vocabulary_size": 65_536, "mixer": "short_convolution", "convolution_size": 3},
  "layer_types": tuple(
    "full" if layer in (2, 5, 8, 10, 12, 14) else "mixer" for layer in range(16)
  ),
}
_BAMBA = {
  **{"norm_epsilon": 1e-5, "vocabulary_size": 128_256, "rotary_size": 64, "mixer": "mamba2"},
  **{"mixer_heads": 128, "mixer_key_heads": 1, "mixer_head_size": 128, "mixer_value_head_size": 64},
  "layer_types": tuple("full" if layer in (9, 18, 27) else "mixer" for layer in range(32)),
}
_PARTS = {"M": "mixer", "*": "full_unrotated", "-": "mlp", "E": "mlp"}
_NEMOTRON_H = {
  **{"head_size": 128, "norm_epsilon": 1e-5, "vocabulary_size": 131_072, "mixer": "mamba2"},
  **{"mixer_heads": 128, "mixer_key_heads": 8, "mixer_head_size": 128, "mixer_value_head_size": 64},
  **{"activation": "relu_squared", "gated": False},
  "layer_types": tuple(
    _PARTS[one]
    for one in f"M-M-M-M*-{'M-M-M-M-M*-' * 3}M-M-M-M-M-"  # as published
  ),
}
_NEMOTRON_3_NANO = {
  **{**_NEMOTRON_H, "mixer_heads": 64, "experts": 128, "experts_per_token": 6},
  **{"expert_feedforward_size": 1856, "shared_feedforward_size": 3712, "router_scale": 2.5},
  **{"router_scores": "sigmoid", "router_correction": True},
  "layer_types": tuple(
    _PARTS[one]
    for one in f"MEMEM*{'EMEMEM*' * 4}EMEMEMEM*EMEMEMEME"  # as published
  ),
  **{"balance_loss": 0.0001, "router_bias_rate": 0.001},
}
_KIMI_LINEAR = {
  **{"head_size": 192, "norm_epsilon": 1e-5, "vocabulary_size": 163_840, "attention": "latent"},
  **{"latent_size": 512, "rotary_size": 64, "value_head_size": 128, "mixer": "kimi_delta"},
  **{"mixer_heads": 32, "mixer_head_size": 128, "mixer_value_head_size": 128, "dense_layers": 1},
  **{"experts": 256, "experts_per_token": 8, "expert_feedforward_size": 1024},
  **{"shared_feedforward_size": 1024, "router_scale": 2.446, "router_scores": "sigmoid"},
  "router_correction": True,
  "layer_types": tuple(
    "full_unrotated" if layer in (4, 8, 12, 16, 20, 24, 27) else "mixer" for layer in range(1, 28)
  ),
  **{"balance_loss": 0.0001, "router_bias_rate": 0.001},
}
# As its config.json says: half of a head is rotated, of which the base is 10,000 in the report
# (arXiv:2501.08313, section 2) and 10,000,000 in that file.
_MINIMAX = {
  **{"head_size": 128, "norm_epsilon": 1e-5, "vocabulary_size": 200_064, "rotary_base": 1e7},
  **{"rotary_size": 64, "mixer": "lightning", "layer_types": (*("mixer",) * 7, "full")},
  **{"normed_residual": 3.5565588200778455, "experts": 32, "experts_per_token": 2},
  "balance_loss": 0.001,
}
_GRANITE_4_H = {
  **{"norm_epsilon": 1e-5, "vocabulary_size": 100_352, "tied_embeddings": True},
  **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22},
  **{"mixer": "mamba2", "mixer_key_heads": 1, "mixer_head_size": 128, "mixer_value_head_size": 64},
  "layer_types": tuple(
    "full_unrotated" if layer in (5, 15, 25, 35) else "mixer" for layer in range(40)
  ),
}
_GRANITE_4_MICRO = {"mixer_heads": 64, "attention_scale": 0.015625, "logits_divisor": 8.0}
_GRANITE_4_TINY = {
  **{"mixer_heads": 48, "attention_scale": 0.0078125, "logits_divisor": 6.0, "experts": 64},
  **{"experts_per_token": 6, "shared_feedforward_size": 1024},
  "router_scores": "softmax_of_chosen",
}
_GRANITE_4_SMALL = {
  **{"mixer_heads": 128, "attention_scale": 0.0078125, "logits_divisor": 16.0, "experts": 72},
  **{"experts_per_token": 10, "shared_feedforward_size": 1536},
  "router_scores": "softmax_of_chosen",
}
_SMOLLM_2 = {
  **{"head_size": 64, "norm_epsilon": 1e-5, "vocabulary_size": 49_152, "tied_embeddings": True},
  "rotary_base": 100_000.0,
}
_SMOLLM_3 = {
  **{"head_size": 128, "norm_epsilon": 1e-6, "vocabulary_size": 128_256, "tied_embeddings": True},
  **{"rotary_base": 5e6, "layer_types": ("full", "full", "full", "full_unrotated")},
}
# Of the 48 pairs that are rotated, in rows of more than 4,096 tokens: 31 powers of 1.118320672, and
# what a search has found.
_PHI_4_LONG = """
  1.0 1.118320672 1.250641126 1.398617824 1.564103225 1.74916897 1.956131817 2.187582649
  2.446418898 2.735880826 3.059592084 3.421605075 3.826451687 4.279200023 4.785517845 5.351743533
  5.984965424 6.693110555 7.485043894 8.370679318 9.36110372 10.4687158 11.70738129 13.09260651
  14.64173252 16.37415215 18.31155283 20.47818807 22.90118105 25.61086418 28.64115884 32.03
  32.1 32.13 32.23 32.6 32.61 32.64 32.66 32.7 32.71 32.93 32.97 33.28 33.49 33.5 44.16 47.77
"""
_PHI_4 = {
  **{"head_size": 128, "norm_epsilon": 1e-5, "vocabulary_size": 200_064, "tied_embeddings": True},
  "rotary_size": 96,
  "rotary_scaling": (
    "longrope",
    {
      **{"factor": 32.0, "original_length": 4096, "short_factors": (1.0,) * 48},
      "long_factors": tuple(map(float, _PHI_4_LONG.split())),
    },
  ),
}
_MIXTRAL = {**_LLAMA_2, "experts": 8, "rotary_base": 1_000_000.0}
_OLMOE = {
  **{"vocabulary_size": 50_304, "norm_epsilon": 1e-5},
  **{"query_key_norm": True, "query_key_norm_across_heads": True},
  **{"experts": 64, "experts_per_token": 8, "router_normalized": False},
  **{"balance_loss": 0.01, "router_z_loss": 0.001},
}
_GPT_OSS = {
  **{"head_size": 64, "vocabulary_size": 201_088, "norm_epsilon": 1e-5, "biases": "attention"},
  **{"window": 128, "layer_types": ("sliding", "full"), "attention_sinks": True},
  "rotary_base": 150_000.0,
  "rotary_scaling": ("yarn", {"factor": 32.0, "original_length": 4096, "truncate": False}),
  **{"experts_per_token": 4, "router_scores": "softmax_of_chosen", "router_bias": True},
  **{"expert_biases": True, "activation": "gelu_sigmoid", "gate_limit": 7.0, "up_offset": 1.0},
  "balance_loss": 0.01,
}
# Latent attention, YaRN by 40, shared experts, dense layers first.
_DEEPSEEK = {
  **{"attention": "latent", "head_size": 128 + 64, "value_head_size": 128, "latent_size": 512},
  **{"rotary_size": 64, "rotary_pairs": "adjacent", "norm_epsilon": 1e-6},
  "rotary_scaling": (
    "yarn",
    {"factor": 40.0, "original_length": 4096, "attention_factor": 1.0},
  ),
}
_DEEPSEEK_V2_LITE = {
  **{**_DEEPSEEK, "vocabulary_size": 102_400, "router_normalized": False, "dense_layers": 1},
  **{"experts": 64, "experts_per_token": 6},
  **{"expert_feedforward_size": 1408, "shared_feedforward_size": 2 * 1408},
  "balance_loss": 0.001,
}
_DEEPSEEK_V3 = {
  **{**_DEEPSEEK, "vocabulary_size": 129_280, "query_latent_size": 1536, "dense_layers": 3},
  **{"experts": 256, "experts_per_token": 8},
  **{"expert_feedforward_size": 2048, "shared_feedforward_size": 2048},
  **{"router_scores": "sigmoid", "router_correction": True, "router_scale": 2.5},
  **{"router_groups": 8, "router_top_groups": 4, "router_group_score": "top2"},
  **{"balance_loss": 0.0001, "router_bias_rate": 0.001},
}
_GLM_4 = {
  **{"head_size": 128, "norm_epsilon": 1e-5, "vocabulary_size": 151_552, "biases": "qkv"},
  **{"rotary_base": 1_000_000.0, "rotary_size": 64, "experts_per_token": 8},
  **{"router_scores": "sigmoid", "router_correction": True},
  **{"balance_loss": 0.0001, "router_bias_rate": 0.001},
}
# Layers in turn see chunks with rotary positions, and all without.
_LLAMA_4 = {
  **{"head_size": 128, "norm_epsilon": 1e-5, "vocabulary_size": 202_048, "rotary_base": 500_000.0},
  **{"rotary_pairs": "adjacent", "window": 8192, "window_chunks": True},
  "layer_types": ("sliding", "sliding", "sliding", "full_unrotated"),
  "attention_temperature": ("unrotated", 0.1, 8192),
  **{"experts_per_token": 1, "expert_feedforward_size": 8192, "shared_feedforward_size": 8192},
  **{"router_scores": "sigmoid", "router_normalized": False, "router_scales_inputs": True},
  "balance_loss": 0.001,
}


def _mistral_yarn(factor: float, length: int) -> dict[str, Any]:
  """Returns keys of Mistral's newer models, whose scores grow with the position."""
  numbers = {"factor": factor, "original_length": length, "attention_factor": 1.0}
  temperature = ("all", 0.1, length)
  return {"rotary_scaling": ("yarn", numbers), "attention_temperature": temperature}


_MINISTRAL_3 = {**_MISTRAL_NEMO, **_mistral_yarn(16.0, 16_384)}
_MISTRAL_4 = {
  **{"attention": "latent", "head_size": 64 + 64, "value_head_size": 128, "latent_size": 256},
  **{"query_latent_size": 1024, "rotary_size": 64, "rotary_pairs": "adjacent"},
  **{"norm_epsilon": 1e-6, "vocabulary_size": 131_072, **_mistral_yarn(128.0, 8192)},
  "attention_scale": 128**-0.5 * (0.1 * math.log(128.0) + 1) ** 2,
  **{"experts": 128, "experts_per_token": 4},
  **{"expert_feedforward_size": 2048, "shared_feedforward_size": 2048},
  "balance_loss": 0.001,
}


def _yarn_scale(mscale: float) -> float:
  """Returns the factor of DeepSeek's scores, by YaRN's mscale over all dims."""
  return _DEEPSEEK["head_size"] ** -0.5 * (0.1 * mscale * math.log(40.0) + 1) ** 2


PRESETS: dict[str, Preset] = {
  "gpt2_124m": _decoder(1024, (12, 768, 3072, 12, 12), _GPT_2),
  "gpt3_175b": _decoder(2048, (96, 12_288, 49_152, 96, 96), _GPT_3),
  "llama2_7b": _decoder(4096, (32, 4096, 11_008, 32, 32), _LLAMA_2),
  "llama2_70b": _decoder(4096, (80, 8192, 28_672, 64, 8), _LLAMA_2),
  "llama3_8b": _decoder(8192, (32, 4096, 14_336, 32, 8), _LLAMA_3),
  "llama3_70b": _decoder(8192, (80, 8192, 28_672, 64, 8), _LLAMA_3),
  "llama3_405b": _decoder(8192, (126, 16_384, 53_248, 128, 8), _LLAMA_3),
  "llama3_2_1b": _decoder(8192, (16, 2048, 8192, 32, 8), _LLAMA_3_2, head_size=64),
  "llama3_2_3b": _decoder(8192, (28, 3072, 8192, 24, 8), _LLAMA_3_2),
  "llama3_3_70b": _decoder(8192, (80, 8192, 28_672, 64, 8), _LLAMA_3),
  "mistral_7b": _decoder(8192, (32, 4096, 14_336, 32, 8), _LLAMA_2, window=4096),
  "mistral_nemo_12b": _decoder(8192, (40, 5120, 14_336, 32, 8), _MISTRAL_NEMO),
  "ministral3_3b": _decoder(8192, (26, 3072, 9216, 32, 8), _MINISTRAL_3, tied_embeddings=True),
  "ministral3_8b": _decoder(8192, (34, 4096, 14_336, 32, 8), _MINISTRAL_3),
  "ministral3_14b": _decoder(8192, (40, 5120, 16_384, 32, 8), _MINISTRAL_3, rotary_base=1e9),
  "qwen2_5_0_5b": _decoder(4096, (24, 896, 4864, 14, 2), _QWEN_2_SMALL),
  "qwen2_5_1_5b": _decoder(4096, (28, 1536, 8960, 12, 2), _QWEN_2_SMALL),
  "qwen2_5_3b": _decoder(4096, (36, 2048, 11_008, 16, 2), _QWEN_2_SMALL),
  "qwen2_5_7b": _decoder(4096, (28, 3584, 18_944, 28, 4), _QWEN_2_LARGE),
  "qwen2_5_14b": _decoder(4096, (48, 5120, 13_824, 40, 8), _QWEN_2_LARGE),
  "qwen2_5_32b": _decoder(4096, (64, 5120, 27_648, 40, 8), _QWEN_2_LARGE),
  "qwen2_5_72b": _decoder(4096, (80, 8192, 29_568, 64, 8), _QWEN_2_LARGE),
  "qwen3_0_6b": _decoder(4096, (28, 1024, 3072, 16, 8), _QWEN_3_TIED),
  "qwen3_1_7b": _decoder(4096, (28, 2048, 6144, 16, 8), _QWEN_3_TIED),
  "qwen3_4b": _decoder(4096, (36, 2560, 9728, 32, 8), _QWEN_3_TIED),
  "qwen3_8b": _decoder(4096, (36, 4096, 12_288, 32, 8), _QWEN_3),
  "qwen3_14b": _decoder(4096, (40, 5120, 17_408, 40, 8), _QWEN_3),
  "qwen3_32b": _decoder(4096, (64, 5120, 25_600, 64, 8), _QWEN_3),
  "gemma2_9b": _decoder(8192, (42, 3584, 14_336, 16, 8), _GEMMA_2),
  "gemma3_1b": _decoder(8192, (26, 1152, 6912, 4, 1), _GEMMA_3),
  "gemma3_4b": _decoder(8192, (34, 2560, 10_240, 8, 4), _GEMMA_3_VISION),
  "gemma3_12b": _decoder(8192, (48, 3840, 15_360, 16, 8), _GEMMA_3_VISION),
  "gemma3_27b": _decoder(
    8192, (62, 5376, 21_504, 32, 16), _GEMMA_3_VISION, head_size=128, attention_scale=168**-0.5
  ),
  "phi4_mini": _decoder(4096, (32, 3072, 8192, 24, 8), _PHI_4),
  "olmo2_1b": _decoder(4096, (16, 2048, 8192, 16, 16), _OLMO_2),
  "olmo2_7b": _decoder(4096, (32, 4096, 11_008, 32, 32), _OLMO_2),
  "olmo2_13b": _decoder(4096, (40, 5120, 13_824, 40, 40), _OLMO_2),
  "olmo2_32b": _decoder(4096, (64, 5120, 27_648, 40, 8), _OLMO_2),
  "olmo_hybrid_7b": _decoder(8192, (32, 3840, 11_008, 30, 30), _OLMO_HYBRID),
  "smollm2_135m": _decoder(2048, (30, 576, 1536, 9, 3), _SMOLLM_2),
  "smollm2_360m": _decoder(2048, (32, 960, 2560, 15, 5), _SMOLLM_2),
  "smollm2_1_7b": _decoder(2048, (24, 2048, 8192, 32, 32), _SMOLLM_2, rotary_base=130_000.0),
  "lfm2_350m": _decoder(4096, (16, 1024, 4608, 16, 8), _LFM_2),
  "lfm2_700m": _decoder(4096, (16, 1536, 6912, 24, 8), _LFM_2),
  "lfm2_1_2b": _decoder(4096, (16, 2048, 8192, 32, 8), _LFM_2),
  "bamba_9b": _decoder(4096, (32, 4096, 14_336, 32, 8), _BAMBA),
  "granite4_h_tiny": _decoder(4096, (40, 1536, 512, 12, 4), _GRANITE_4_H, **_GRANITE_4_TINY),
  "granite4_h_small": _decoder(4096, (40, 4096, 768, 32, 8), _GRANITE_4_H, **_GRANITE_4_SMALL),
  "granite4_h_micro": _decoder(4096, (40, 2048, 8192, 32, 8), _GRANITE_4_H, **_GRANITE_4_MICRO),
  "smollm3_3b": _decoder(4096, (36, 2048, 11_008, 16, 4), _SMOLLM_3),
  "nemotron_h_8b": _decoder(8192, (52, 4096, 21_504, 32, 8), _NEMOTRON_H),
  "nemotron3_nano_30b_a3b": _decoder(8192, (52, 2688, 1856, 32, 2), _NEMOTRON_3_NANO),
  "kimi_linear_48b_a3b": _decoder(4096, (27, 2304, 9216, 32, 32), _KIMI_LINEAR),
  "minimax_text_01": _decoder(8192, (80, 6144, 9216, 64, 8), _MINIMAX),
  "mixtral_8x7b": _decoder(4096, (32, 4096, 14_336, 32, 8), _MIXTRAL, balance_loss=0.02),
  "mixtral_8x22b": _decoder(4096, (56, 6144, 16_384, 48, 8), _MIXTRAL, balance_loss=0.001),
  "qwen3_30b_a3b": _decoder(
    4096, (48, 2048, 6144, 32, 4), _QWEN_3_EXPERTS, expert_feedforward_size=768
  ),
  "qwen3_235b_a22b": _decoder(
    4096, (94, 4096, 12_288, 64, 4), _QWEN_3_EXPERTS, expert_feedforward_size=1536
  ),
  "qwen3_next_80b_a3b": _decoder(4096, (48, 2048, 5120, 16, 2), _QWEN_3_NEXT),
  "qwen3_5_9b": _decoder(4096, (32, 4096, 12_288, 16, 4), _QWEN_3_5),
  "qwen3_5_35b_a3b": _decoder(4096, (40, 2048, 512, 16, 2), _QWEN_3_5_MOE),
  "olmoe_1b_7b": _decoder(4096, (16, 2048, 1024, 16, 16), _OLMOE),
  "deepseek_v2_lite": _decoder(
    4096, (27, 2048, 10_944, 16, 16), _DEEPSEEK_V2_LITE, attention_scale=_yarn_scale(0.707)
  ),
  "deepseek_v3": _decoder(
    4096, (61, 7168, 18_432, 128, 128), _DEEPSEEK_V3, attention_scale=_yarn_scale(1.0)
  ),
  "mistral_small_4": _decoder(8192, (36, 4096, 12_288, 32, 32), _MISTRAL_4),
  "llama4_scout": _decoder(
    8192,
    (48, 5120, 16_384, 40, 8),
    _LLAMA_4,
    experts=16,
    query_key_unit_norm=True,
    rotary_scaling=(16.0, 1.0, 1.0, 8192.0),
  ),
  "llama4_maverick": _decoder(
    8192, (48, 5120, 16_384, 40, 8), _LLAMA_4, experts=128, sparse_every=2
  ),
  "glm4_5_air": _decoder(
    4096,
    (46, 4096, 10_944, 96, 8),
    _GLM_4,
    experts=128,
    dense_layers=1,
    expert_feedforward_size=1408,
    shared_feedforward_size=1408,
  ),
  "glm4_5": _decoder(
    4096,
    (92, 5120, 12_288, 96, 8),
    _GLM_4,
    experts=160,
    dense_layers=3,
    query_key_norm=True,
    router_scale=2.5,
    expert_feedforward_size=1536,
    shared_feedforward_size=1536,
  ),
  "gpt_oss_20b": _decoder(4096, (24, 2880, 2880, 64, 8), _GPT_OSS, experts=32),
  "gpt_oss_120b": _decoder(4096, (36, 2880, 2880, 64, 8), _GPT_OSS, experts=128),
}


# ------------------------------ by name ------------------------------


def _preset(preset: Preset) -> ConfigDict:
  """Returns a decoder of a published size, on the data of `lm`, rematerialized."""
  config = lm()
  config.model.update(preset.model)
  config.training.update(preset.training, rematerialization="full")
  config.data.sequence_length = preset.length
  config.optimizer.learning_rate = 3e-4
  config.evaluation.sample_tokens = 0
  return config


def _recipe(name: str, what: str) -> ConfigDict:
  if name in RECIPES:
    return RECIPES[name]()
  if name in PRESETS:
    return _preset(PRESETS[name])
  if name == HF:
    return hf()
  known = names()
  raise ValueError(f"unknown {what} {name!r}; there are {', '.join(known)}{nearest(name, known)}")


def names() -> list[str]:
  """Returns all recipes: the small ones, the presets, and that of a model folder."""
  return [*RECIPES, *PRESETS, HF]


def parse(argument: str) -> tuple[str, str]:
  """Returns (recipe, data set or "") of `lm`, or of `model=lm,data=text`.

  Raises:
    ValueError: another key, or one without a value.
  """
  if "=" not in argument:
    return argument, ""
  chosen = {"model": "lm", "data": ""}
  for part in argument.split(","):
    key, equals, value = part.partition("=")
    if not equals or key not in chosen or not value:
      raise ValueError(f"--config=FILE:{argument}: {part!r} is neither model=NAME nor data=NAME")
    chosen[key] = value
  return chosen["model"], chosen["data"]
