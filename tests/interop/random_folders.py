"""Run by a Python with transformers: writes folders of random models, and what it knows of them.

  python tests/interop/random_folders.py FOLDER DRAWN,... ALL,...

Of each name in DRAWN, a folder of fixtures/, FOLDER/NAME_N gets config.json, weights in one
file or several, and logits.npy. FOLDER/defaults.json has model_type -> the config of its class,
with its defaults, of each in ALL, and FOLDER/read.json the keys that its code reads.
"""

import importlib
import inspect
import json
import pathlib
import random
import re
import sys

import numpy as np
import torch
import transformers
import write_folders
from write_folders import ABSENT, OLD, config_of, logits_of

COUNT = 3
LLAMA_3 = {
  **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
  "original_max_position_embeddings": 16,
}
YARN = {
  **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0},
  **{"beta_slow": 0.2, "mscale": 1.0, "mscale_all_dim": 1.0},
}
BASES = [(base, {}) for base in (100.0, 1e4, 5e5)]
WINDOWS = {"use_sliding_window": [True, False], "sliding_window": [5], "max_window_layers": [0, 1]}
LINEAR = {
  "layer_types": [["linear_attention", "linear_attention", "full_attention"] * 2],
  **{"num_hidden_layers": [6], "linear_num_key_heads": [1, 2, 4]},
  **{"linear_key_head_dim": [3, 5], "linear_conv_kernel_dim": [2, 4]},
}
# Of Bamba and Granite version 4.57 has one norm of all groups; published models have one.
MAMBA = {"mamba_n_groups": [1] if OLD else [1, 2], "mamba_d_state": [3, 8], "mamba_d_conv": [2, 4]}
MAMBA["mamba_chunk_size"] = [4, 7, 256]
LATENT = {"q_lora_rank": [None, 6], "first_k_dense_replace": [0, 1], "n_group": [1, 4]}
LATENT |= {"topk_group": [1], "num_experts_per_tok": [2]}
# Of any model, but GPT-2's; then name -> the values that keys of its folder may have besides.
# Lists that follow from the number of layers are left out.
FULL = ["full_attention"]
LISTS = ("layer_types", "no_rope_layers", "moe_layers", "mlp_layer_types", "pad_token_id")
ANY = {
  **{key: [ABSENT] for key in LISTS},
  **{"hidden_size": [16, 24], "intermediate_size": [20, 33], "num_hidden_layers": [2, 3]},
  **{"tie_word_embeddings": [True, False], "rms_norm_eps": [1e-5, 1e-3], "rope": BASES},
}
GRANITE = {**MAMBA, "num_hidden_layers": [3], "hidden_size": [16]}
GRANITE["layer_types"] = [["mamba", "attention", "mamba"], ["mamba", "mamba", "attention"]]
CHOICES = {
  "llama": {"rope": [*BASES, (100.0, LLAMA_3)], "head_dim": [4, 6], "mlp_bias": [True, False]},
  "mistral": {"sliding_window": [None, 3, 9]},
  "phi3": {"sliding_window": [None, 3, 9]},
  "qwen2": WINDOWS,
  "qwen3": {**WINDOWS, "attention_bias": [True, False]},
  "gemma": {"tie_word_embeddings": [True]},
  "gemma2": {
    **{"query_pre_attn_scalar": [7, 16], "sliding_window": [3, 8], "tie_word_embeddings": [True]},
    **{"final_logit_softcapping": [None, 3.0], "attn_logit_softcapping": [None, 2.0]},
  },
  "gemma3": {
    **{"query_pre_attn_scalar": [7, 16], "sliding_window": [3, 8], "tie_word_embeddings": [True]},
    **{"sliding_window_pattern": [2, 3], "final_logit_softcapping": [None, 3.0], "rope": [ABSENT]},
  },
  "gpt2": {
    **{"scale_attn_weights": [True, False], "scale_attn_by_inverse_layer_idx": [True, False]},
    **{"n_inner": [None, 20], "tie_word_embeddings": [True, False]},
    "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
  },
  "qwen3_moe": {
    **{"num_hidden_layers": [4], "decoder_sparse_step": [1, 2], "norm_topk_prob": [True, False]},
    "mlp_only_layers": [[], [1], [0, 1], [1, 2]],
  },
  "olmoe": {"clip_qkv": [None, 0.5, 1.5], "norm_topk_prob": [True, False]},
  "deepseek_v3": {
    **{**LATENT, "num_hidden_layers": [2], "rope_interleave": [True, False]},
    **{"rope": [(100.0, {}), (100.0, YARN)], "attention_bias": [True, False]},
  },
  "glm4_moe": {
    **{"first_k_dense_replace": [0, 1], "n_shared_experts": [1, 2], "use_qk_norm": [True, False]},
    **{"partial_rotary_factor": [0.5, 0.25, 1.0], "attention_bias": [True, False]},
  },
  "ministral3": {"sliding_window": [None, 3], "rope": [ABSENT]},
  "mistral4": {**LATENT, "rope": [ABSENT]},
  "llama4": {
    **{"num_hidden_layers": [4], "no_rope_layer_interval": [2, 3, 9]},
    **{"attention_chunk_size": [5, 9], "interleave_moe_layer_step": [1, 2], "rope": [ABSENT]},
    **{key: [True, False] for key in ("use_qk_norm", "attn_temperature_tuning")},
  },
  "lfm2": {
    **{"num_hidden_layers": [4], "conv_L_cache": [2, 3, 5], "rms_norm_eps": [ABSENT]},
    "layer_types": [["full_attention", *kinds] for kinds in (["conv"] * 3, FULL * 2 + ["conv"])],
  },
  "bamba": {**MAMBA, "num_hidden_layers": [4], "hidden_size": [16]},
  "granitemoehybrid": GRANITE,
  "granitemoehybrid_experts": GRANITE,
  "falcon_h1": {
    **{**MAMBA, "mamba_n_groups": [1, 2], "mamba_rms_norm": [True, False]},
    "mamba_norm_before_gate": [True, False],
  },
  "olmo_hybrid": {  # with and without positions; keys as wide as values, see docs/models.md
    **{"num_hidden_layers": [4], "linear_conv_kernel_dim": [2, 4], "rope": [*BASES, ABSENT]},
    **{"linear_allow_neg_eigval": [True, False], "attention_bias": [True, False]},
    "layer_types": [[*["linear_attention"] * 3, *FULL], [*FULL, "linear_attention"] * 2],
  },
  "qwen3_next": LINEAR,
  "qwen3_5": LINEAR,
  "qwen3_5_moe": LINEAR,
}


def drawn(name: str, draw: random.Random) -> dict:
  """Returns keys of a folder."""
  choices = {**({} if name == "gpt2" else ANY), **CHOICES[name]}
  return {key: draw.choice(values) for key, values in choices.items()}


def write(folder: pathlib.Path, name: str, seed: int) -> None:
  """Writes a folder with its logits."""
  draw = random.Random(f"{name}{seed}")
  torch.manual_seed(seed)
  config = config_of(name, {**drawn(name, draw), "pad_token_id": 0})
  model = write_folders.randomized(name, config)
  model = model.to(draw.choice([torch.float32, torch.bfloat16]))
  model.save_pretrained(folder, max_shard_size=draw.choice(["5GB", "4KB"]))
  np.save(folder / "logits.npy", logits_of(config, model))


def read_of(config: transformers.PretrainedConfig) -> list[str]:
  """Returns the keys that the code of a config's models reads."""
  name = type(config).__module__.replace("configuration_", "modeling_")
  code = inspect.getsource(importlib.import_module(name))
  return sorted({*re.findall(r"config\.(\w+)", code), *re.findall(r'config, "(\w+)"', code)})


if __name__ == "__main__":
  root, (every, all_) = pathlib.Path(sys.argv[1]), (word.split(",") for word in sys.argv[2:])
  for one in every:
    for number in range(COUNT):
      write(root / f"{one}_{number}", one, number)
  known = {one: transformers.AutoConfig.for_model(one) for one in all_}
  (root / "read.json").write_text(json.dumps({one: read_of(x) for one, x in known.items()}))
  (root / "defaults.json").write_text(json.dumps({one: x.to_dict() for one, x in known.items()}))
