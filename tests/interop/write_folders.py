"""Writes the folders of fixtures/ with Hugging Face's `transformers`, and the logits of each.

  pip install torch transformers==5.23.0     # in an environment of its own
  python tests/interop/write_folders.py NAME...
  pip install transformers==4.57.6
  python tests/interop/write_folders.py NAME...

A folder's own config_5.json says what model it has: a new one needs a file with its keys, of small
sizes. The first command completes it, and writes weights and logits; the second the config.json of
the older version, whose notation of rotary positions differs, from the one that is there.
"""

import contextlib
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "fixtures"
LENGTH = 12
OLD = transformers.__version__ < "5"
OLD_FILE, NEW_FILE = "config.json", "config_5.json"
ABSENT = object()
STAMPS = ("model_type", "architectures", "transformers_version", "torch_dtype")
FROM_ONE = ("gemma", "qwen3_next", "qwen3_5")  # whose scales are stored minus one
LEAST_MARGIN = 1e-5  # between the scores of two experts, or of two groups


def _number_of(value: dict[str, Any]) -> dict[str, Any] | float:
  """Returns what an object in a config.json stands for."""
  return float("inf") if value == {"__float__": "Infinity"} else value


def config_of(name: str, more: Mapping[str, Any] | None = None) -> transformers.PretrainedConfig:
  """Returns the config of a folder as the installed version has it.

  Args:
    name: of the folder.
    more: other values of its keys, or ABSENT. `rope` is a base and a scaling, which are written in
      the notation of this version.
  """
  path = FOLDER / name / (OLD_FILE if OLD and (FOLDER / name / OLD_FILE).exists() else NEW_FILE)
  content = json.loads(path.read_text(), object_hook=_number_of)
  keys = {**content, **(more or {})}
  if (rope := keys.pop("rope", ABSENT)) is not ABSENT:
    theta, scaling = rope
    if OLD:
      keys |= {"rope_theta": theta, "rope_scaling": scaling or None}
    else:
      keys["rope_parameters"] = {"rope_type": "default", **scaling, "rope_theta": theta}
  kept = {key: x for key, x in keys.items() if key not in STAMPS and x is not ABSENT}
  return transformers.AutoConfig.for_model(keys["model_type"], **kept)


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


def made(config: transformers.PretrainedConfig) -> torch.nn.Module:
  """Returns a model of a config with its own initial parameters."""
  config._attn_implementation = config._experts_implementation = "eager"
  return auto(config.model_type)(config).eval()


def randomized(name: str, config: transformers.PretrainedConfig) -> torch.nn.Module:
  """Returns a model with random parameters, scales around what does nothing."""
  model = made(config)
  for parameter_name, parameter in (*model.named_parameters(), *model.named_buffers()):
    if computed(parameter_name):
      continue
    scale = parameter_name.endswith("weight") and parameter.ndim == 1
    scale = scale and not name.startswith(FROM_ONE)
    drawn = torch.randn(parameter.shape, dtype=torch.float64)
    parameter.data = (0.3 if parameter.ndim == 1 else 0.4) * drawn + (1.0 if scale else 0.0)
  return model


def logits_of(
  config: transformers.PretrainedConfig, model: torch.nn.Module, check: Callable | None = None
) -> np.ndarray:
  """Returns the logits of a model in float64; `check` sees what its routers compute."""
  state = {key: x.double() for key, x in model.state_dict().items() if not computed(key)}
  config.dtype = "float64"
  with wide(), torch.no_grad():
    model = made(config).to(torch.float64)
    model.load_state_dict(state, strict=False)
    for one in model.modules() if check else ():
      if "Router" in type(one).__name__:
        one.register_forward_hook(check)
    return model(torch.from_numpy(tokens().astype(np.int64))).logits.numpy()


def write(name: str) -> None:
  """Writes a folder with random parameters, and its logits in float64."""
  torch.manual_seed(len(name))
  old, new = FOLDER / name / OLD_FILE, FOLDER / name / NEW_FILE
  kept = old.read_text() if old.exists() else ""
  model = randomized(name, config_of(name)).to(config_of(name).dtype)
  model.save_pretrained(FOLDER / name)
  (FOLDER / name / "model.safetensors").chmod(0o644)
  (FOLDER / name / "generation_config.json").unlink()
  old.rename(new)
  old.write_text(kept or new.read_text())  # also of one that version 4.57 does not know
  np.save(FOLDER / name / "logits.npy", logits_of(config_of(name), model, check_margin))


if __name__ == "__main__":
  for one in sys.argv[1:]:
    if not OLD:
      write(one)
      continue
    config = config_of(one)
    config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
    text = json.dumps(json.loads(config.to_json_string()), indent=1, sort_keys=True)
    (FOLDER / one / OLD_FILE).write_text(text + "\n")
