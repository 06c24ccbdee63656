"""Run by a Python with transformers: writes folders of random models, and what it knows of them.

  python tests/interop/random_folders.py FOLDER DRAWN,... ALL,...

Of each model_type in DRAWN, FOLDER/MODEL_TYPE_N gets config.json, weights in one file or several,
and logits.npy, float64 [2, LENGTH, V]. FOLDER/defaults.json has model_type -> the config of its
class, with its defaults, of each in ALL.
"""

import importlib
import inspect
import json
import pathlib
import random
import re
import sys
from typing import Any

import numpy as np
import torch
import transformers
from write_folders import auto, wide

LENGTH, COUNT, LEAST_VOCABULARY = 20, 3, 40
OLD = transformers.__version__ < "5"
LLAMA_3 = {
  "rope_type": "llama3",
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 3.0,
  "original_max_position_embeddings": 12,
}


def rotary(base: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
  """Returns the keys of rotary positions in this version's notation."""
  if OLD:
    return {"rope_theta": base, **({"rope_scaling": scaling} if scaling else {})}
  return {"rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": base}}


def keys_of(model_type: str, draw: random.Random) -> dict[str, Any]:
  """Returns random keys of a config."""
  heads = draw.choice([2, 4, 6])
  ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
  if model_type == "gpt2":
    return {
      **ids,
      "vocab_size": LEAST_VOCABULARY,
      "n_embd": heads * 4,
      "n_layer": 2,
      "n_head": heads,
      "n_positions": 30,
      "n_inner": draw.choice([None, 20]),
      "layer_norm_epsilon": 1e-4,
      "tie_word_embeddings": draw.choice([True, False]),
      "activation_function": draw.choice(["gelu_new", "gelu_pytorch_tanh"]),
      "scale_attn_weights": draw.choice([True, False]),
      "scale_attn_by_inverse_layer_idx": draw.choice([True, False]),
      "reorder_and_upcast_attn": draw.choice([True, False]),
    }
  found = {
    **ids,
    "vocab_size": draw.choice([LEAST_VOCABULARY, 57]),
    "hidden_size": heads * draw.choice([4, 8]),
    "intermediate_size": draw.choice([20, 33]),
    "num_hidden_layers": draw.choice([2, 3, 4]),
    "num_attention_heads": heads,
    "num_key_value_heads": draw.choice([n for n in (1, 2, 3, heads) if heads % n == 0]),
    "max_position_embeddings": 64,
    "tie_word_embeddings": draw.choice([True, False]),
    "rms_norm_eps": draw.choice([1e-5, 1e-6, 1e-3]),
  }
  base, scaling = draw.choice([100.0, 1e4, 5e5]), None
  if model_type not in ("qwen2", "phi3", "olmoe", "deepseek_v3"):
    found["head_dim"] = draw.choice([4, 6, 8])
  if model_type == "llama":
    scaling = draw.choice([None, LLAMA_3])
  if model_type in ("mistral", "phi3"):
    found["sliding_window"] = draw.choice([None, 3, 9])
  if model_type in ("qwen2", "qwen3", "qwen3_moe"):
    found["use_sliding_window"] = draw.choice([True, False])
    found.update(sliding_window=5, max_window_layers=draw.choice([0, 99]))
  if model_type in ("qwen3_moe", "olmoe"):
    found.update(num_experts=5, num_experts_per_tok=2, norm_topk_prob=draw.choice([True, False]))
  if model_type == "qwen3_moe":
    found.update(num_hidden_layers=4, moe_intermediate_size=10)
    found["decoder_sparse_step"] = draw.choice([1, 2])
    found["mlp_only_layers"] = draw.choice([[], [1], [0, 1], [1, 2]])
  if model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
    keys = draw.choice([1, 2])
    found.update(head_dim=8, linear_num_key_heads=keys, linear_num_value_heads=2 * keys)
    found.update(linear_key_head_dim=draw.choice([3, 5]), linear_value_head_dim=4)
    found.update(num_hidden_layers=5, linear_conv_kernel_dim=draw.choice([2, 4]))
    found["full_attention_interval"] = draw.choice([2, 3])
  if model_type in ("qwen3_next", "qwen3_5_moe_text"):
    found.update(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=10)
    found["shared_expert_intermediate_size"] = 14
  if model_type == "olmoe":
    found["clip_qkv"] = draw.choice([None, 0.5, 1.5])
  if model_type == "deepseek_v3":
    found.update(num_key_value_heads=heads, first_k_dense_replace=found["num_hidden_layers"])
    found.update(kv_lora_rank=8, q_lora_rank=draw.choice([None, 6]), v_head_dim=5)
    found.update(qk_nope_head_dim=6, qk_rope_head_dim=4, num_mtp_layers=0)
    found["attention_bias"] = draw.choice([True, False])
  if model_type == "glm4_moe":
    found.update(num_nextn_predict_layers=0, moe_intermediate_size=10, num_experts_per_tok=2)
    found.update(n_routed_experts=8, n_group=draw.choice([1, 4]), topk_group=1)
    found.update(head_dim=8, partial_rotary_factor=draw.choice([0.5, 0.25, 1.0]))
    found.update(first_k_dense_replace=draw.choice([0, 1]), n_shared_experts=draw.choice([1, 2]))
    for key in ("use_qk_norm", "attention_bias", "norm_topk_prob"):
      found[key] = draw.choice([True, False])
  if model_type in ("mistral4", "ministral3"):
    numbers = {"factor": 3.0, "original_max_position_embeddings": 6, "beta_fast": 2.0}
    scaling = {"rope_type": "yarn", **numbers, "llama_4_scaling_beta": draw.choice([0.1, 0.9])}
    scaling["mscale"] = scaling["mscale_all_dim"] = 1.0
  if model_type == "ministral3":
    found["sliding_window"] = draw.choice([None, 3])
  if model_type == "mistral4":
    found.update(num_key_value_heads=heads, kv_lora_rank=8, q_lora_rank=draw.choice([None, 6]))
    found.update(qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, moe_intermediate_size=10)
    found.update(n_routed_experts=8, num_experts_per_tok=2, n_group=draw.choice([1, 4]))
    found.update(first_k_dense_replace=draw.choice([0, 1]), head_dim=10)
  if model_type == "llama4_text":
    found.update(num_hidden_layers=4, intermediate_size_mlp=20, num_local_experts=5)
    found.update(no_rope_layer_interval=draw.choice([2, 3, 9]), attention_chunk_size=7)
    found.update(interleave_moe_layer_step=draw.choice([1, 2]), floor_scale=4, attn_scale=0.6)
    for key in ("use_qk_norm", "attn_temperature_tuning", "attention_bias"):
      found[key] = draw.choice([True, False])
  if model_type.startswith("gemma"):
    found["tie_word_embeddings"] = True
  if model_type in ("gemma2", "gemma3_text"):
    found["query_pre_attn_scalar"] = draw.choice([7, 16])
    found["sliding_window"] = draw.choice([3, 8])
    found["final_logit_softcapping"] = draw.choice([None, 3.0])
  if model_type == "gemma2":
    found["attn_logit_softcapping"] = draw.choice([None, 2.0])
  if model_type == "lfm2":
    found.pop("head_dim")
    found["norm_eps"] = found.pop("rms_norm_eps")
    kinds = [draw.choice(["conv", "full_attention"]) for _ in range(found["num_hidden_layers"])]
    found["layer_types"] = ["full_attention", *kinds[1:]]
    found.update(conv_L_cache=draw.choice([2, 3, 5]), block_multiple_of=8)
    found["block_auto_adjust_ff_dim"] = draw.choice([True, False])
  if model_type in ("bamba", "granitemoehybrid", "falcon_h1"):
    if model_type != "falcon_h1":
      found.pop("head_dim")
    # Of Bamba and Granite version 4.57 has one norm of all groups; published models have one.
    groups = [1] if OLD and model_type != "falcon_h1" else [1, heads // 2, heads]
    found.update(mamba_n_heads=heads, mamba_n_groups=draw.choice(groups))
    found.update(mamba_d_state=draw.choice([3, 8]), mamba_d_conv=draw.choice([2, 4]))
    found["mamba_chunk_size"] = draw.choice([4, 7, 256])
  if model_type == "falcon_h1":
    found.update(mamba_d_ssm=heads * 6, mamba_rms_norm=draw.choice([True, False]))
    found.update(mamba_norm_before_gate=draw.choice([True, False]), key_multiplier=0.5)
    found.update(ssm_multipliers=[0.5, 1.5, 0.7, 1.2, 0.9], mlp_multipliers=[0.8, 1.3])
  if model_type == "bamba":
    found["attn_layer_indices"] = [1]
  if model_type == "granitemoehybrid":
    found["num_local_experts"] = draw.choice([0, 4])
    found.update(num_experts_per_tok=2, shared_intermediate_size=found["intermediate_size"])
    found["layer_types"] = ["mamba", "attention", *["mamba"] * (found["num_hidden_layers"] - 2)]
    found["position_embedding_type"] = draw.choice([None, "rope"])
    found.update(embedding_multiplier=2.0, attention_multiplier=0.4, logits_scaling=3.0)
  if model_type != "gemma3_text":
    return found | rotary(base, scaling)
  found["sliding_window_pattern"] = draw.choice([2, 3])
  if OLD:
    return found | {"rope_theta": base, "rope_local_base_freq": 50.0}
  kinds = {"full_attention": base, "sliding_attention": 50.0}
  rotaries = {kind: {"rope_type": "default", "rope_theta": x} for kind, x in kinds.items()}
  return found | {"rope_parameters": rotaries}


def write(folder: pathlib.Path, model_type: str, seed: int) -> None:
  """Writes a folder with its logits."""
  draw = random.Random(f"{model_type}{seed}")
  torch.manual_seed(seed)
  config = transformers.AutoConfig.for_model(model_type, **keys_of(model_type, draw))
  if not OLD:
    config._experts_implementation = "eager"
  model = auto(model_type)(config)
  for name, parameter in model.named_parameters():
    scale = parameter.ndim == 1 and name.endswith("weight") and "gemma" not in model_type
    drawn = torch.randn(parameter.shape)
    parameter.data = (0.3 if parameter.ndim == 1 else 0.4) * drawn + (1.0 if scale else 0.0)
  model = model.to(draw.choice([torch.float32, torch.bfloat16]))
  model.save_pretrained(folder, max_shard_size=draw.choice(["5GB", "4KB"]))
  state = {name: value.double() for name, value in model.state_dict().items()}
  config = transformers.AutoConfig.from_pretrained(folder)
  config._attn_implementation = "eager"
  if not OLD:
    config._experts_implementation = "eager"
  with wide(), torch.no_grad():
    model = auto(model_type)(config, dtype=torch.float64)
    model = model.eval().to(torch.float64)
    model.load_state_dict(state)
    logits = model(torch.from_numpy(tokens().astype(np.int64))).logits
  np.save(folder / "logits.npy", logits.numpy())


def read_of(config: transformers.PretrainedConfig) -> list[str]:
  """Returns the keys that the code of a config's models reads."""
  name = type(config).__module__.replace("configuration_", "modeling_")
  code = inspect.getsource(importlib.import_module(name))
  return sorted({*re.findall(r"config\.(\w+)", code), *re.findall(r'config, "(\w+)"', code)})


def tokens() -> np.ndarray:
  """Returns int32 [2, LENGTH]."""
  random_state = np.random.RandomState(3)
  return random_state.randint(3, LEAST_VOCABULARY, (2, LENGTH)).astype(np.int32)


if __name__ == "__main__":
  root, (every, all_) = pathlib.Path(sys.argv[1]), (word.split(",") for word in sys.argv[2:])
  for one in every:
    for number in range(COUNT):
      write(root / f"{one}_{number}", one, number)
  known = {one: transformers.AutoConfig.for_model(one) for one in all_}
  (root / "read.json").write_text(json.dumps({one: read_of(x) for one, x in known.items()}))
  (root / "defaults.json").write_text(json.dumps({one: x.to_dict() for one, x in known.items()}))
