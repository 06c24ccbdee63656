r"""Writes small model folders with Hugging Face's `transformers`, and the logits that it gives.

  pip install torch transformers==5.23.0     # in an environment of its own
  python tests/interop/write_folders.py
  pip install transformers==4.57.6
  python tests/interop/write_folders.py --config-only

The first command writes weights and logits, the second the config.json of the older version, whose
notation of rotary positions differs.
"""

import argparse
import contextlib
import json
import pathlib
from collections.abc import Callable

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "fixtures"
LENGTH = 12
COMMON = {
  "vocab_size": 37,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 32,
}
LLAMA_3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
GEMMA = {"head_dim": 6, "query_pre_attn_scalar": 9, "sliding_window": 5}
LATENT = {
  "num_hidden_layers": 3,
  "first_k_dense_replace": 1,
  "num_key_value_heads": 4,
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 6,
  "qk_rope_head_dim": 4,
  "v_head_dim": 5,
  "n_routed_experts": 8,
  "num_experts_per_tok": 3,
  "moe_intermediate_size": 10,
  "n_group": 4,
  "topk_group": 2,
}
LINEAR = {
  "num_hidden_layers": 4,
  "head_dim": 8,
  "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
  "linear_num_key_heads": 2,
  "linear_num_value_heads": 4,
  "linear_key_head_dim": 5,
  "linear_value_head_dim": 3,
  "linear_conv_kernel_dim": 3,
}
LINEAR_EXPERTS = {
  **LINEAR,
  "num_experts": 5,
  "num_experts_per_tok": 3,
  "moe_intermediate_size": 10,
  "shared_expert_intermediate_size": 14,
}
YARN = {
  "rope_type": "yarn",
  "factor": 4.0,
  "original_max_position_embeddings": 8,
  "beta_fast": 2.0,
  "beta_slow": 0.2,
  "mscale": 1.0,
  "mscale_all_dim": 1.0,
}
TEMPERED = {**YARN, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.7}
# Those that version 4.57 does not know, or that are left to 5: their two files are the same.
NOT_IN_4 = ("ministral3", "mistral4", "nemotron_h", "kimi_linear", "minimax")
# name -> (model_type, keys of its config, dtype of the file). `rope` is written in the notation of
# the version that is installed.
FOLDERS = {
  "llama": ("llama", {"rms_norm_eps": 1e-5, "rope": (500.0, LLAMA_3)}, "float32"),
  "mistral": ("mistral", {"head_dim": 6, "sliding_window": 5, "rope": (1000.0, {})}, "bfloat16"),
  "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope": (1000.0, {})}, "float16"),
  "qwen3": ("qwen3", {"head_dim": 6, "rope": (1000.0, {})}, "bfloat16"),
  "gemma": ("gemma", {"head_dim": 6}, "bfloat16"),
  "gemma2": ("gemma2", {**GEMMA, "final_logit_softcapping": 3.0}, "bfloat16"),
  "gemma3": (
    "gemma3_text",
    {**GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3},
    "float64",
  ),
  "gpt2": ("gpt2", {}, "float32"),
  "phi3": ("phi3", {"pad_token_id": 0, "sliding_window": 7}, "bfloat16"),
  "lfm2": (
    "lfm2",
    {
      "num_hidden_layers": 4,
      "layer_types": ["conv", "full_attention", "conv", "conv"],
      "block_multiple_of": 8,
      "rope": (1000.0, {}),
    },
    "bfloat16",
  ),
  "bamba": (
    "bamba",
    {
      **{"num_hidden_layers": 4, "attn_layer_indices": [2], "mamba_chunk_size": 5},
      **{"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_conv": 3},
      "rope": (1000.0, {}),
    },
    "float32",
  ),
  "falcon_h1": (
    "falcon_h1",
    {
      **{"mamba_d_ssm": 24, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 5},
      **{"head_dim": 6, "mamba_rms_norm": True, "key_multiplier": 0.7, "lm_head_multiplier": 0.4},
      **{"attention_in_multiplier": 0.8, "attention_out_multiplier": 0.9},
      **{"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6, "embedding_multiplier": 2.0},
      **{"ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "mlp_multipliers": [0.9, 0.7]},
      "rope": (1000.0, {}),
    },
    "float32",
  ),
  "granitemoehybrid_experts": (
    "granitemoehybrid",
    {
      **{"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
      **{"mamba_n_heads": 4, "mamba_d_state": 6, "num_local_experts": 6, "num_experts_per_tok": 3},
      **{"intermediate_size": 10, "shared_intermediate_size": 20, "residual_multiplier": 0.4},
      **{"position_embedding_type": "rope", "rope": (1000.0, {})},
    },
    "bfloat16",
  ),
  "granitemoehybrid": (
    "granitemoehybrid",
    {
      **{"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
      **{"mamba_n_heads": 4, "mamba_d_state": 6, "num_local_experts": 0},
      **{"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4},
      **{"logits_scaling": 2.0, "shared_intermediate_size": 20, "tie_word_embeddings": True},
    },
    "float32",
  ),
  "nemotron_h": (
    "nemotron_h",
    {
      # The pattern of Nemotron-H 8B in small, with a layer of MLP behind another.
      "layers_block_type": [
        {"M": "linear_attention", "*": "full_attention", "-": "mlp"}[one] for one in "M-M*-M-M*--"
      ],
      **{"mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 5},
      **{"conv_kernel": 3, "head_dim": 6, "chunk_size": 5},
    },
    "bfloat16",
  ),
  "kimi_linear": (
    "kimi_linear",
    {
      **{"num_hidden_layers": 4, "num_key_value_heads": 4, "kv_lora_rank": 8},
      **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
      **{"linear_head_dim": 5, "linear_num_heads": 2, "linear_conv_kernel_dim": 3},
      "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
      **{"num_experts": 8, "num_experts_per_token": 3, "moe_intermediate_size": 10},
      **{"num_expert_group": 4, "topk_group": 2, "pad_token_id": 0},
    },
    "bfloat16",
  ),
  "minimax": (
    "minimax",
    {
      **{"num_hidden_layers": 3, "num_local_experts": 6, "head_dim": 6, "block_size": 5},
      "layer_types": ["linear_attention", "full_attention", "linear_attention"],
      **dict.fromkeys(("full_attn_alpha_factor", "linear_attn_alpha_factor"), 1.4),
      "mlp_alpha_factor": 1.4,
      "rope": (1000.0, {}),
    },
    "bfloat16",
  ),
  "mixtral": ("mixtral", {"num_local_experts": 6, "rope": (1000.0, {})}, "bfloat16"),
  "qwen3_moe": (
    "qwen3_moe",
    {
      "head_dim": 6,
      "num_hidden_layers": 5,
      "mlp_only_layers": [1, 4],
      "num_experts": 5,
      "num_experts_per_tok": 3,
      "moe_intermediate_size": 10,
      "norm_topk_prob": True,
      "rope": (1000.0, {}),
    },
    "bfloat16",
  ),
  "olmoe": (
    "olmoe",
    {
      "pad_token_id": 0,
      "num_experts": 5,
      "num_experts_per_tok": 2,
      "clip_qkv": 0.8,
      "rope": (1000.0, {}),
    },
    "float32",
  ),
  "qwen3_next": ("qwen3_next", {**LINEAR_EXPERTS, "rope": (1000.0, {})}, "bfloat16"),
  "qwen3_5": ("qwen3_5_text", {**LINEAR, "rope": (1000.0, {})}, "float32"),
  "qwen3_5_moe": ("qwen3_5_moe_text", {**LINEAR_EXPERTS, "rope": (1000.0, {})}, "bfloat16"),
  "gpt_oss": (
    "gpt_oss",
    {
      "head_dim": 6,
      "num_hidden_layers": 3,
      "intermediate_size": 20,
      "num_local_experts": 4,
      "num_experts_per_tok": 2,
      "sliding_window": 5,
      "swiglu_limit": 0.5,
      "rope": (
        1000.0,
        {
          "rope_type": "yarn",
          "factor": 4.0,
          "original_max_position_embeddings": 8,
          "beta_fast": 2.0,
          "beta_slow": 0.2,
          "truncate": False,
        },
      ),
    },
    "bfloat16",
  ),
  "deepseek_v2": (
    "deepseek_v2",
    {
      **LATENT,
      "q_lora_rank": None,
      "n_shared_experts": 1,
      "topk_method": "group_limited_greedy",
      "routed_scaling_factor": 1.5,
      "rope": (100.0, {}),
    },
    "float32",
  ),
  "deepseek_v3": (
    "deepseek_v3",
    {
      **LATENT,
      "q_lora_rank": 6,
      "n_shared_experts": 2,
      "num_nextn_predict_layers": 0,
      "rope": (100.0, YARN),
    },
    "bfloat16",
  ),
  "ministral3": (
    "ministral3",
    {"head_dim": 6, "sliding_window": 5, "rope": (100.0, TEMPERED)},
    "bfloat16",
  ),
  "mistral4": (
    "mistral4",
    {**LATENT, "q_lora_rank": 6, "n_shared_experts": 2, "rope": (100.0, TEMPERED)},
    "bfloat16",
  ),
  "llama4": (
    "llama4_text",
    {
      "num_hidden_layers": 4,
      "head_dim": 6,
      "intermediate_size": 10,
      "intermediate_size_mlp": 24,
      "num_local_experts": 6,
      "interleave_moe_layer_step": 2,
      "attention_chunk_size": 5,
      "no_rope_layer_interval": 3,
      "attn_scale": 0.7,
      "floor_scale": 3,
      "rope": (100.0, {**LLAMA_3, "low_freq_factor": 1.0, "high_freq_factor": 1.0}),
    },
    "bfloat16",
  ),
  "glm4_moe": (
    "glm4_moe",
    {
      **{key: LATENT[key] for key in LATENT if key[:2] not in ("kv", "qk", "v_")},
      "num_key_value_heads": 2,
      "head_dim": 8,
      "attention_bias": True,
      "use_qk_norm": True,
      "num_nextn_predict_layers": 0,
      "routed_scaling_factor": 1.5,
      "partial_rotary_factor": 0.5,
      "rope": (1000.0, {}),
    },
    "bfloat16",
  ),
}
FROM_ONE = ("gemma", "qwen3_next", "qwen3_5")  # whose scales are stored minus one
LEAST_MARGIN = 1e-5  # between the scores of two experts, or of two groups


def config_of(name: str) -> transformers.PretrainedConfig:
  """Returns the config of a folder, as the installed version has it."""
  model_type, keys, dtype = FOLDERS[name]
  keys = {**COMMON, **keys, "dtype": dtype}
  theta, scaling = keys.pop("rope", (None, {}))
  if theta and transformers.__version__ < "5":
    keys |= {"rope_theta": theta, **({"rope_scaling": scaling} if scaling else {})}
  elif theta:
    keys["rope_parameters"] = {"rope_type": "default", **scaling, "rope_theta": theta}
  if model_type == "gpt2":
    keys = {
      "vocab_size": 37,
      "n_embd": 16,
      "n_layer": 2,
      "n_head": 4,
      "n_positions": 16,
      "dtype": dtype,
    }
  keys.update(bos_token_id=1, eos_token_id=2)
  return transformers.AutoConfig.for_model(model_type, **keys)


def tokens() -> np.ndarray:
  """Returns int32 [2, LENGTH]."""
  return np.random.RandomState(3).randint(3, 37, (2, LENGTH)).astype(np.int32)


@contextlib.contextmanager
def wide():
  """Makes float64 of what transformers computes in float32 whatever the model's dtype.

  That is norms, softmax and rotary positions.
  """
  kept = torch.float32, torch.float, torch.Tensor.float
  torch.float32 = torch.float = torch.float64
  torch.Tensor.float = torch.Tensor.double
  torch.set_default_dtype(torch.float64)
  try:
    yield
  finally:
    torch.float32, torch.float, torch.Tensor.float = kept
    torch.set_default_dtype(torch.float32)


def made(name: str, dtype: str | None = None) -> torch.nn.Module:
  """Returns a model of a folder's config with its own initial parameters."""
  config = config_of(name)
  config.dtype = dtype or config.dtype
  config._attn_implementation = config._experts_implementation = "eager"
  return auto(config.model_type)(config).eval()


def auto(model_type: str) -> Callable:
  """Returns what makes a model of a config."""
  if model_type == "mistral4":  # which version 5.23 does not know as a language model
    from transformers.models.mistral4 import modeling_mistral4

    return modeling_mistral4.Mistral4ForCausalLM._from_config
  return transformers.AutoModelForCausalLM.from_config


def check_margin(router: torch.nn.Module, inputs: tuple, outputs: tuple) -> None:
  """Refuses parameters with which rounding would choose other experts."""
  logits = outputs[type(router).__name__ == "Llama4Router"]  # its first are of the chosen alone
  scores, groups = logits.softmax(-1), getattr(router, "num_group", None)
  if (bias := getattr(router, "e_score_correction_bias", None)) is not None:
    scores = logits.sigmoid() + bias
  compared = [scores]
  if groups:
    grouped = scores.unflatten(-1, (groups, -1))
    compared.append(grouped.amax(-1) if bias is None else grouped.topk(2, dim=-1).values.sum(-1))
  margin = min(one.sort().values.diff().min().item() for one in compared)
  if margin < LEAST_MARGIN:
    raise ValueError(f"{type(router).__name__}: {margin}; draw other parameters")


def computed(name: str) -> bool:
  """Returns whether an array of a model is no parameter: the code computes it itself."""
  return "inv_freq" in name or "slope_rate" in name or name.endswith("_decay")


def write(name: str) -> None:
  """Writes a folder with random parameters, and its logits in float64."""
  torch.manual_seed(len(name))
  model = made(name)
  for parameter_name, parameter in (*model.named_parameters(), *model.named_buffers()):
    if computed(parameter_name):
      continue
    scale = parameter_name.endswith("weight") and parameter.ndim == 1
    scale = scale and not name.startswith(FROM_ONE)
    drawn = torch.randn(parameter.shape, dtype=torch.float64)
    parameter.data = (0.3 if parameter.ndim == 1 else 0.4) * drawn + (1.0 if scale else 0.0)
  model = model.to(getattr(torch, FOLDERS[name][2]))
  model.save_pretrained(FOLDER / name)
  (FOLDER / name / "model.safetensors").chmod(0o644)
  (FOLDER / name / "generation_config.json").unlink()
  config = (FOLDER / name / "config.json").rename(FOLDER / name / "config_5.json")
  if FOLDERS[name][0] in NOT_IN_4:
    (FOLDER / name / "config.json").write_text(config.read_text())
  state = {key: x.double() for key, x in model.state_dict().items() if not computed(key)}
  with wide(), torch.no_grad():
    model = made(name, "float64").to(torch.float64)
    model.load_state_dict(state, strict=False)
    checked = [one for one in model.modules() if "Router" in type(one).__name__]
    for one in checked:
      one.register_forward_hook(check_margin)
    logits = model(torch.from_numpy(tokens().astype(np.int64))).logits
  np.save(FOLDER / name / "logits.npy", logits.numpy())


if __name__ == "__main__":
  parser = argparse.ArgumentParser()
  parser.add_argument("--config-only", action="store_true")
  parser.add_argument("names", nargs="*", default=[*FOLDERS], help="which; all")
  given = parser.parse_args()
  only = given.config_only
  for one in given.names:
    if not only:
      write(one)
      continue
    config = config_of(one)
    config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
    text = json.dumps(json.loads(config.to_json_string()), indent=1, sort_keys=True)
    (FOLDER / one / "config.json").write_text(text + "\n")
