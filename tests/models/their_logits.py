"""Logits of Hugging Face's `transformers`, in float64: run by the Python that has it installed.

  PYTHON tests/models/their_logits.py REQUESTS.npz LOGITS.npz

REQUESTS.npz has JSON under `models` (name -> their config.json, as a dict), the parameters under
NAME/THEIR_NAME, and `tokens`. Nothing of this project is imported: that Python lacks what it needs.
"""

import json
import sys

import numpy as np
import torch

# The library computes norms, the softmax, and rotary angles in float32 whatever the parameters are.
torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)

import transformers  # noqa: E402


def logits(keys: dict, arrays: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
  """Returns float64 [B, T, V] of the model with this config and these parameters."""
  keys = dict(keys)
  config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
  model = model.double().eval()
  state = {name: torch.from_numpy(np.array(x, np.float64)) for name, x in arrays.items()}
  missing, unexpected = model.load_state_dict(state, strict=False)
  missing = [name for name in missing if name != "lm_head.weight" or not config.tie_word_embeddings]
  if missing or unexpected:
    raise ValueError(f"{config.model_type}: missing {missing}, unexpected {unexpected}")
  model.tie_weights()
  with torch.no_grad():
    return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def main(requests: str, output: str) -> None:
  """Writes the logits of all requests."""
  with np.load(requests) as given:
    models, found = json.loads(str(given["models"])), {}
    for name, keys in models.items():
      start = f"{name}/"
      arrays = {key.removeprefix(start): given[key] for key in given if key.startswith(start)}
      found[name] = logits(keys, arrays, given["tokens"])
  np.savez(output, **found)


if __name__ == "__main__":
  main(*sys.argv[1:])
