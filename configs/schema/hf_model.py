"""`model=hf`: the decoder that a model folder describes."""

from ml_collections import ConfigDict

from input_pipeline.text import tokenizer
from interop import hf_config, hf_folder
from training.optimizer import optimizer_row

KEY = "model.folder"
LONGEST = 2048  # tokens of a row by default, where the model takes as many
LEARNING_RATES = {False: 1e-5, True: 2e-4}  # of AdamW, of all parameters and of adapters


def is_folder(config: ConfigDict) -> bool:
  """Returns whether a config's model is that of a folder."""
  return "folder" in config.model


def finalize(config: ConfigDict) -> None:
  """Fills in what a folder's config.json determines; `config` is unlocked.

  A key of `model` that is set stays, where the parameters and their shapes are the same with it.

  Raises:
    ValueError: the folder cannot be read, or describes a model that is not there; or keys of
      `model` that contradict it.
  """
  model, data = config.model, config.data
  if not model.folder:
    raise ValueError(
      f"{KEY}='': name the folder of the model, such as --config.{KEY}=Qwen3-0.6B; one of the "
      f"Hugging Face Hub is hf://OWNER/NAME. `sample` and `evaluate` read it from the run of "
      f"--checkpoint, if that has saved a step"
    )
  folder = hf_folder.local(model.folder, KEY)
  described = hf_folder.read_config(folder, KEY)
  wrong = [
    f"model.{key}={model[key]!r}: it is {described.model[key]!r} in {folder / hf_folder.CONFIG}"
    for key in hf_config.SHAPES
    if model[key] is not None and not hf_config.same_value(model[key], described.model[key])
  ]
  if wrong:
    lines = "\n".join(f"  {line}" for line in wrong)
    raise ValueError(f"{KEY}={model.folder} has parameters of other shapes; leave unset:\n{lines}")
  for key, value in described.model.items():
    if model[key] is None:
      model[key] = value
  if data.sequence_length is None:
    data.sequence_length = min(LONGEST, described.positions)
  if not data.tokenizer:
    data.tokenizer = str(tokenizer.find_file(folder).parent)
  if not config.checkpoint.initialize_from and not hf_folder.is_copy(folder):
    config.checkpoint.initialize_from = model.folder
  if hf_folder.is_adapter(config.checkpoint.initialize_from):
    from interop import peft_adapter  # which imports JAX

    peft_adapter.adopt(config, config.checkpoint.initialize_from, described.model_type)
  if config.optimizer.learning_rate is None:
    scale = optimizer_row(config.optimizer.name).default
    config.optimizer.learning_rate = LEARNING_RATES[config.lora.rank > 0] * scale.rate
