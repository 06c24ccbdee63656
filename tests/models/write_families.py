r"""Writes the logits that Hugging Face's `transformers` gives for the decoders of families.py.

  make .venv-transformers5/.installed
  python -m tests.models.write_families          # or only some: ... gpt2 llama_yarn

The tests compare with what it has written, and those marked `transformers` with the library itself.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.models.families import FAMILIES, KEPT, SIZES, drawn, job_of, tokens

ROOT = pathlib.Path(__file__).parents[2]
FILE = pathlib.Path(__file__).parent / "fixtures" / "families.npz"
# Major version -> the Python that has it; `make test-transformers` makes both.
PYTHONS = {
  version: os.environ.get(
    f"TRANSFORMERS_{version}_PYTHON", str(ROOT / f".venv-transformers{version}/bin/python")
  )
  for version in ("4", "5")
}
ACTIVATIONS = {
  "silu": "silu",
  "gelu": "gelu_pytorch_tanh",
  "gelu_erf": "gelu",
  "gelu_sigmoid": "quick_gelu",
  "relu": "relu",
  "relu_squared": "relu2",
}
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
POST_NORM_LAYER = {
  **LAYER,
  "attention_post_norm": "post_attention_layernorm",
  "mlp_norm": "pre_feedforward_layernorm",
  "mlp_post_norm": "post_feedforward_layernorm",
}
OLMO_LAYER = {
  **LAYER,
  "attention_post_norm": "post_attention_layernorm",
  "mlp_post_norm": "post_feedforward_layernorm",
}
GPT_2_LAYER = {
  "attention_norm": "ln_1",
  "attention/out": "attn.c_proj",
  "mlp_norm": "ln_2",
  "mlp/up": "mlp.c_fc",
  "mlp/down": "mlp.c_proj",
}
# The name up to the first underscore -> the `model_type` of the config, where they differ.
MODEL_TYPES = {
  "llama2": "llama",
  "llama3": "llama",
  "gemma3": "gemma3_text",
  "deepseek2": "deepseek_v2",
  "deepseek3": "deepseek_v3",
}
# Of a layer of DeepSeek, besides LAYER's.
DEEPSEEK_LAYER = {
  **LAYER,
  "attention/query_latent": "self_attn.q_a_proj",
  "attention/query_latent_norm": "self_attn.q_a_layernorm",
  "attention/latent": "self_attn.kv_a_proj_with_mqa",
  "attention/latent_norm": "self_attn.kv_a_layernorm",
  "attention/rotary_key": "rotary",  # joined to the latent vector's
  "attention/key_value": "self_attn.kv_b_proj",
}
# family -> its mscale and mscale_all_dim.
MSCALES = {"deepseek3": (1.0, 1.0), "deepseek2_yarn": (1.0, 0.5)}


def keys_of(family: str) -> dict[str, Any]:
  """Returns our keys of `model` that a family's small decoder sets."""
  sizes = {key.partition(".")[2]: value for key, value in SIZES.items() if key.startswith("model.")}
  return sizes | FAMILIES[family]


def their_config(family: str) -> dict[str, Any]:
  """Returns the `config.json` of a family's small decoder, in the notation that both versions read.

  Version 5 reads the older rope_theta and rope_scaling, version 4 does not read rope_parameters.
  """
  keys = keys_of(family)
  kind = family.partition("_")[0]
  kind = MODEL_TYPES.get(kind, kind)
  if kind == "gpt2":
    return {
      "model_type": kind,
      "vocab_size": keys["vocabulary_size"],
      "n_positions": keys.get("max_positions", SIZES["data.sequence_length"]),
      "n_embd": keys["model_size"],
      "n_layer": keys["layers"],
      "n_head": keys["heads"],
      "n_inner": keys["feedforward_size"],
      "activation_function": ACTIVATIONS[keys["activation"]],
      "scale_attn_weights": keys.get("attention_scale") != 1.0,
      "scale_attn_by_inverse_layer_idx": (by := "attention_scale_by_inverse_layer" in keys),
      "reorder_and_upcast_attn": by,  # which is a matter of rounding
    }
  found = {
    "model_type": kind,
    "vocab_size": keys["vocabulary_size"],
    "hidden_size": keys["model_size"],
    "intermediate_size": keys["feedforward_size"],
    "num_hidden_layers": keys["layers"],
    "num_attention_heads": keys["heads"],
    "num_key_value_heads": keys["kv_heads"],
    "head_dim": keys["head_size"],
    "hidden_act": ACTIVATIONS[keys.get("activation", "silu")],
    "rms_norm_eps": keys.get("norm_epsilon", 1e-6),
    "tie_word_embeddings": keys.get("tied_embeddings", False),
    "max_position_embeddings": SIZES["data.sequence_length"],
    "rope_theta": keys.get("rotary_base", 10_000.0),
  }
  if "rotary_size" in keys and not kind.startswith("deepseek"):
    found["partial_rotary_factor"] = keys["rotary_size"] / keys["head_size"]
  if kind == "phi3":
    found["pad_token_id"] = 0
  biases = keys.get("biases", "").split(",")
  found["attention_bias"], found["mlp_bias"] = "attention" in biases, "mlp" in biases
  found |= _scaling(keys)
  if "window" in keys:
    found["sliding_window"] = keys["window"]
    found["layer_types"] = [f"{one.partition('_')[0]}_attention" for one in _layer_types(keys)]
  if kind == "mistral":
    found.pop("layer_types")  # all have the window
  if kind == "qwen2" and "window" in keys:  # it knows them by the first layer that slides
    found["use_sliding_window"] = True
    found["max_window_layers"] = found.pop("layer_types").index("sliding_attention")
  if kind == "granite":
    found["attention_multiplier"] = keys["attention_scale"]
    found["logits_scaling"] = keys["logits_divisor"]
    found |= {key: keys[key] for key in ("embedding_multiplier", "residual_multiplier")}
  if kind.startswith("deepseek"):
    found |= _deepseek_config(family, keys)
  if kind.startswith("olmo"):
    found["pad_token_id"] = 0
  if kind == "olmo2" and "rope_scaling" in found:  # version 4 wants these two keys of it
    scaling = found["rope_scaling"]
    found["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
  if kind == "smollm3":
    found["use_sliding_window"] = "window" in keys
    found["no_rope_layers"] = [int("unrotated" not in one) for one in _layer_types(keys)]
    found["pad_token_id"] = 0
  if kind.startswith("gemma"):
    found["query_pre_attn_scalar"] = round(keys["attention_scale"] ** -2)
  if kind == "gemma2":
    found["attn_logit_softcapping"] = keys["attention_soft_cap"]
    found["final_logit_softcapping"] = keys["logits_soft_cap"]
  if kind == "gemma3_text":
    found["rope_local_base_freq"] = keys["local_rotary_base"]
  if "local_rotary_scaling" in keys:  # version 4 has no notation for it
    local = _scaling({"rotary_scaling": keys["local_rotary_scaling"]})["rope_scaling"]
    theta, local_theta = found.pop("rope_theta"), found.pop("rope_local_base_freq")
    found["rope_parameters"] = {
      "full_attention": {**found.pop("rope_scaling"), "rope_theta": theta},
      "sliding_attention": {**local, "rope_theta": local_theta},
    }
  return found


def _deepseek_config(family: str, keys: dict[str, Any]) -> dict[str, Any]:
  """Returns the keys of DeepSeek's attention, and those that make all layers dense."""
  found = {
    "first_k_dense_replace": keys["layers"],
    "kv_lora_rank": keys["latent_size"],
    "q_lora_rank": keys.get("query_latent_size"),
    "qk_nope_head_dim": keys["head_size"] - keys["rotary_size"],
    "qk_rope_head_dim": keys["rotary_size"],
    "v_head_dim": keys["value_head_size"],
    "head_dim": keys["rotary_size"],
  }
  if family.startswith("deepseek3"):
    found |= {"rope_interleave": keys["rotary_pairs"] == "adjacent", "num_mtp_layers": 0}
  if family in MSCALES:
    one, every = MSCALES[family]
    scaling = {**_scaling(keys)["rope_scaling"], "mscale": one, "mscale_all_dim": every}
    scaling.pop("attention_factor")
    found["rope_scaling"] = scaling
  return found


def _layer_types(keys: dict[str, Any]) -> list[str]:
  every, types = keys.get("global_every") or 10**9, keys.get("layer_types")
  if not types:
    types = ["full" if (layer + 1) % every == 0 else "sliding" for layer in range(keys["layers"])]
  return [types[layer % len(types)] for layer in range(keys["layers"])]


def _scaling(keys: dict[str, Any]) -> dict[str, Any]:
  """Returns `rope_scaling`, and the keys beside it that its kind reads."""
  if not (scaling := keys.get("rotary_scaling")):
    return {}
  if not isinstance(scaling[0], str):
    names = ("factor", "low", "high", "original_length")
    scaling = "llama3", {**dict(zip(names, scaling, strict=True)), "original_length": 16}
  kind, numbers = scaling
  names = {
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
  }
  theirs = {names.get(name, name): value for name, value in numbers.items()}
  original = theirs.get("original_max_position_embeddings")
  found = {"rope_scaling": {"rope_type": kind, **theirs}}
  if kind == "dynamic":
    found["max_position_embeddings"] = theirs.pop("original_max_position_embeddings")
    found["rope_scaling"] = {"rope_type": kind, **theirs}
  if kind == "longrope":  # its default attention factor is by the ratio of the two lengths
    found["original_max_position_embeddings"] = original
    found["max_position_embeddings"] = int(original * numbers["factor"])
    factors = {
      key: value for key, value in theirs.items() if key in ("short_factor", "long_factor")
    }
    found["rope_scaling"] = {"type": kind, **factors}  # all that Phi-3 allows in version 4
  return found


def converted(family: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns their names -> arrays, of ours."""
  if family.startswith("gpt2"):
    return _gpt2(arrays)
  table = POST_NORM_LAYER if "layers/mlp_post_norm/scale" in arrays else LAYER
  table = OLMO_LAYER if family.startswith("olmo") else table
  if family.startswith("deepseek"):
    return _deepseek(arrays)
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
      else:
        found[f"{where}.{'bias' if kind == 'bias' else 'weight'}"] = value.reshape(-1)
  return _fused(found) if family == "phi3" else found


def _deepseek(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns DeepSeek's names -> arrays: kernels transposed, and one of two of ours."""
  found = {"model.embed_tokens.weight": arrays["embed/table"]}
  found["model.norm.weight"] = arrays["final_norm/scale"]
  found["lm_head.weight"] = arrays["unembed/kernel"].T
  for number in range(SIZES["model.layers"]):
    where = f"model.layers.{number}."
    for name in (name for name in arrays if name.startswith("layers/")):
      part, _, kind = name.removeprefix("layers/").rpartition("/")
      value, theirs = arrays[name][number], DEEPSEEK_LAYER[part]
      if kind == "kernel":
        value = value.reshape(-1, value.shape[-1]) if part.endswith("out") else value
        value = value.reshape(value.shape[0], -1).T
      if part == "attention/query" and "layers/attention/query_latent/kernel" in arrays:
        theirs = "self_attn.q_b_proj"
      found[f"{where}{theirs}.{'bias' if kind == 'bias' else 'weight'}"] = value
    for kind in ("weight", "bias"):
      if (rotary := found.pop(f"{where}rotary.{kind}", None)) is not None:
        joined = f"{where}self_attn.kv_a_proj_with_mqa.{kind}"
        found[joined] = np.concatenate([found[joined], rotary])
  return found


def _fused(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns Phi-3's names -> arrays of Llama's: it joins those that read the same."""
  joined = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
  found = dict(found)
  for whole, parts in joined.items():
    for name in [name for name in found if f".{parts[0]}." in name]:
      arrays = [found.pop(name.replace(parts[0], part)) for part in parts]
      found[name.replace(parts[0], whole)] = np.concatenate(arrays)
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


def known_to(version: str) -> list[str]:
  """Returns the families that a version of transformers computes as published.

  Version 4 leaves out the factor of DeepSeek-V2's scores under YaRN, which version 5 and the code
  published with the model have; and it does not scale the positions of Gemma 3's local layers.
  """
  unknown = ("deepseek2_yarn", "gemma3_local") if version == "4" else ()
  return [name for name in FAMILIES if name not in unknown]


def logits(families: Sequence[str], version: str) -> dict[str, np.ndarray]:
  """Returns float64 [ROWS, LENGTH, V] of each family, of their models with our parameters.

  Args:
    families: names in FAMILIES.
    version: of transformers, "4" or "5".
  """
  folders = {
    family: (their_config(family), converted(family, drawn(job_of(family)))) for family in families
  }
  return library_logits(folders, version)


def library_logits(
  folders: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]], version: str
) -> dict[str, np.ndarray]:
  """Returns float64 [ROWS, LENGTH, V] of models by name: config.json and tensors."""
  arrays = {"tokens": tokens(), "models": json.dumps({n: one for n, (one, _) in folders.items()})}
  for name, (_, tensors) in folders.items():
    arrays |= {f"{name}/{key}": array for key, array in tensors.items()}
  with tempfile.TemporaryDirectory() as folder:
    given, written = pathlib.Path(folder) / "given.npz", pathlib.Path(folder) / "written.npz"
    np.savez(given, **arrays)
    script = pathlib.Path(__file__).parent / "their_logits.py"
    subprocess.run([PYTHONS[version], script, given, written], check=True)
    with np.load(written) as found:
      return dict(found)


if __name__ == "__main__":
  FILE.parent.mkdir(exist_ok=True)
  kept = {}
  if names := sys.argv[1:]:
    with np.load(FILE) as before:
      kept = dict(before)
  found = {name: x[:, KEPT] for name, x in logits(names or [*FAMILIES], "5").items()}
  np.savez_compressed(FILE, **kept | found)
