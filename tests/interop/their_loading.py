"""Loads exported folders with transformers; run by the Python of an environment that has it.

  PYTHON their_loading.py DTYPE GIVEN.npz WRITTEN.npz FOLDER...

DTYPE is float32 or float64, in which it computes. GIVEN has `tokens`; WRITTEN gets the logits of
each folder, by its name. Whatever transformers or Python warn of is an error.
"""

import json
import logging
import pathlib
import sys
import warnings

import numpy as np
import torch

if sys.argv[1] == "float64":  # also what the library computes in float32 whatever the weights are
  torch.float32 = torch.float = torch.float64
  torch.Tensor.float = torch.Tensor.double
  torch.set_default_dtype(torch.float64)

import transformers
from transformers.utils import logging as their_logging

said = []
# Version 5 says this of every long Phi-3 folder, in the notation that 4.57 requires of them.
PHI_3 = "to be used together with `max_position_embeddings` to determine a scaling factor"
# And this where layers with a window are scaled by YaRN to another length than all others.
LOCAL_YARN = "does not match the ratio implicitly set by other parameters"
# And this of Llama 4 Scout's own numbers.
SCOUT = "field must be greater than low_freq_factor"


class Listener(logging.Handler):
  """Keeps what is logged."""

  def emit(self, record):
    """Keeps a record of a warning or an error."""
    message = record.getMessage()
    known = any(one in message for one in (PHI_3, LOCAL_YARN, SCOUT))
    if record.levelno >= logging.WARNING and not known:
      said.append(message)


def main(dtype, given, written, *folders):
  warnings.simplefilter("error")
  their_logging.disable_default_handler()
  their_logging.disable_progress_bar()
  their_logging.add_handler(Listener())
  logging.getLogger().addHandler(Listener())
  tokens = torch.from_numpy(np.load(given)["tokens"].astype(np.int64))
  found = {}
  for folder in map(pathlib.Path, folders):
    adapter, base = folder / "adapter_config.json", folder
    if adapter.exists():
      base = json.loads(adapter.read_text())["base_model_name_or_path"]
    keys = {} if transformers.__version__ < "5" else {"experts_implementation": "eager"}
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
      base, attn_implementation="eager", dtype="auto", output_loading_info=True, **keys
    )
    assert not any(loading.values()), (folder, loading)
    if adapter.exists():
      import peft

      with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what peft calls
        model = peft.PeftModel.from_pretrained(model, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    text = "def f(x):\n  return 'ä'"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text, (folder, ids)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id, folder
    assert not said, (folder, said)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    with torch.no_grad():
      found[folder.name] = model.eval()(tokens).logits.numpy()
    found[f"{folder.name}/ids"] = np.array(ids)
  np.savez(written, **found)


if __name__ == "__main__":
  main(*sys.argv[1:])
