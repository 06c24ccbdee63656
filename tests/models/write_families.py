r"""Writes the logits that Hugging Face's `transformers` gives for the decoders of families.py.

  pip install torch transformers==5.23.0     # beside the project's own requirements
  python -m tests.models.write_families

The tests compare with what it has written, and with the library itself where it is installed.
"""

import pathlib

import numpy as np
import torch
import transformers

from tests.models.families import FAMILIES, LENGTH, SIZES, drawn, job_of, tokens

FILE = pathlib.Path(__file__).parent / "fixtures" / "families.npz"
# Ours -> theirs, of a layer; kernels are transposed.
LAYER = {
  "attention_norm": "input_layernorm",
  "attention/query": "self_attn.q_proj",
  "attention/key": "self_attn.k_proj",
  "attention/value": "self_attn.v_proj",
  "attention/out": "self_attn.o_proj",
  "attention/query_norm": "self_attn.q_norm",
  "attention/key_norm": "self_attn.k_norm",
  "mlp_norm": "post_attention_layernorm",
  "mlp/gate": "mlp.gate_proj",
  "mlp/up": "mlp.up_proj",
  "mlp/down": "mlp.down_proj",
}
GEMMA_LAYER = {
  **LAYER,
  "attention_post_norm": "post_attention_layernorm",
  "mlp_norm": "pre_feedforward_layernorm",
  "mlp_post_norm": "post_feedforward_layernorm",
}
GPT_2_LAYER = {
  "attention_norm": "ln_1",
  "attention/out": "attn.c_proj",
  "mlp_norm": "ln_2",
  "mlp/up": "mlp.c_fc",
  "mlp/down": "mlp.c_proj",
}


def theirs(family: str) -> torch.nn.Module:
  """Returns their model of a family, with its own initial weights."""
  keys = {key.partition(".")[2]: value for key, value in SIZES.items() if key.startswith("model.")}
  keys |= FAMILIES[family]
  common = {
    "vocab_size": keys["vocabulary_size"],
    "hidden_size": keys["model_size"],
    "intermediate_size": keys["feedforward_size"],
    "num_hidden_layers": keys["layers"],
    "num_attention_heads": keys["heads"],
    "num_key_value_heads": keys["kv_heads"],
    "head_dim": keys["head_size"],
    "rms_norm_eps": keys.get("norm_epsilon", 1e-6),
    "tie_word_embeddings": keys.get("tied_embeddings", False),
    "max_position_embeddings": LENGTH,
    "attn_implementation": "eager",
  }
  base = keys.get("rotary_base", 10_000.0)
  rotary = {"rope_type": "default", "rope_theta": base}
  kinds = [
    "full_attention" if (layer + 1) % keys.get("global_every", 10**9) == 0 else "sliding_attention"
    for layer in range(keys["layers"])
  ]
  if family == "gpt2":
    config = transformers.GPT2Config(
      vocab_size=keys["vocabulary_size"],
      n_positions=LENGTH,
      n_embd=keys["model_size"],
      n_layer=keys["layers"],
      n_head=keys["heads"],
      n_inner=keys["feedforward_size"],
      attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)
  if family in ("llama2", "llama3"):
    if family == "llama3":
      factor, low, high, length = keys["rotary_scaling"]
      rotary |= {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(length),
      }
    config = transformers.LlamaConfig(**common, rope_parameters=rotary)
    return transformers.LlamaForCausalLM(config)
  if family == "mistral":
    config = transformers.MistralConfig(
      **common, rope_parameters=rotary, sliding_window=keys["window"]
    )
    return transformers.MistralForCausalLM(config)
  if family == "qwen2":
    common.pop("head_dim")
    config = transformers.Qwen2Config(**common, rope_parameters=rotary)
    config.head_dim = keys["head_size"]
    return transformers.Qwen2ForCausalLM(config)
  if family == "qwen3":
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common, rope_parameters=rotary))
  gemma = {
    "query_pre_attn_scalar": 12,
    "sliding_window": keys["window"],
    "layer_types": kinds,
    "hidden_activation": "gelu_pytorch_tanh",
  }
  if family == "gemma2":
    config = transformers.Gemma2Config(
      **common,
      **gemma,
      rope_parameters=rotary,
      attn_logit_softcapping=keys["attention_soft_cap"],
      final_logit_softcapping=keys["logits_soft_cap"],
    )
    return transformers.Gemma2ForCausalLM(config)
  rotaries = {
    "full_attention": rotary,
    "sliding_attention": {"rope_type": "default", "rope_theta": keys["local_rotary_base"]},
  }
  config = transformers.Gemma3TextConfig(**common, **gemma, rope_parameters=rotaries)
  return transformers.Gemma3ForCausalLM(config)


def converted(family: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns their names -> arrays, of ours."""
  if family == "gpt2":
    return _gpt2(arrays)
  table = GEMMA_LAYER if family.startswith("gemma") else LAYER
  found = {"model.embed_tokens.weight": arrays["embed/table"]}
  found["model.norm.weight"] = arrays["final_norm/scale"]
  if "unembed/kernel" in arrays:
    found["lm_head.weight"] = arrays["unembed/kernel"].T
  for name, stacked in arrays.items():
    if not name.startswith("layers/"):
      continue
    part, _, kind = name.removeprefix("layers/").rpartition("/")
    for number, value in enumerate(stacked):
      where = f"model.layers.{number}.{table[part]}"
      if kind == "kernel":
        rows = -1 if part == "attention/out" else value.shape[0]
        columns = value.shape[-1] if part == "attention/out" else -1
        found[f"{where}.weight"] = value.reshape(rows, columns).T
      elif kind == "bias":
        found[f"{where}.bias"] = value.reshape(-1)
      else:
        found[f"{where}.weight"] = value
  return found


def _gpt2(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns GPT-2's names -> arrays: its kernels are not transposed, and three of them are one."""
  found = {
    "transformer.wte.weight": arrays["embed/table"],
    "transformer.wpe.weight": arrays["positions/table"],
    "transformer.ln_f.weight": arrays["final_norm/scale"],
    "transformer.ln_f.bias": arrays["final_norm/bias"],
  }
  kinds = {"kernel": "weight", "scale": "weight", "bias": "bias"}
  for number in range(SIZES["model.layers"]):
    layer = {n.removeprefix("layers/"): x[number] for n, x in arrays.items() if "layers/" in n}
    start = f"transformer.h.{number}"
    for kind in ("kernel", "bias"):
      joined = [layer[f"attention/{name}/{kind}"] for name in ("query", "key", "value")]
      shape = (layer["attention/query/kernel"].shape[0], -1) if kind == "kernel" else (-1,)
      whole = np.concatenate([part.reshape(shape) for part in joined], axis=-1)
      found[f"{start}.attn.c_attn.{kinds[kind]}"] = whole
    for name, value in layer.items():
      part, _, kind = name.rpartition("/")
      if part in GPT_2_LAYER:
        if part == "attention/out" and kind == "kernel":
          value = value.reshape(-1, value.shape[-1])
        found[f"{start}.{GPT_2_LAYER[part]}.{kinds[kind]}"] = value
  return found


def logits(family: str) -> np.ndarray:
  """Returns float32 [ROWS, LENGTH, V] of their model with our parameters."""
  model = theirs(family).eval()
  state = {
    n: torch.from_numpy(np.array(x)) for n, x in converted(family, drawn(job_of(family))).items()
  }
  missing, unexpected = model.load_state_dict(state, strict=False)
  missing = [name for name in missing if name != "lm_head.weight"]  # tied: the embedding's table
  if missing or unexpected:
    raise ValueError(f"{family}: missing {missing}, unexpected {unexpected}")
  model.tie_weights()
  with torch.no_grad():
    return model(torch.from_numpy(tokens().astype(np.int64))).logits.float().numpy()


if __name__ == "__main__":
  FILE.parent.mkdir(exist_ok=True)
  np.savez_compressed(FILE, **{family: logits(family) for family in FAMILIES})
