"""Recipes: a model, a data set and how it is trained. A strategy is chosen apart from them."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from configs.keys import table
from configs.schema import model_checks
from configs.schema.presets import EXPERT_PRESETS, PRESETS
from input_pipeline import catalog
from input_pipeline.text import tokenizer
from interop import hf_config
from runtime.extensions import Table
from runtime.suggest import nearest
from training.tasks import DPO, TASKS

HF = "hf"  # the model of a folder
# Data sets whose sizes are known here: (values per image, classes).
IMAGE_SIZES = {"digits": (64, 10), "mnist": (784, 10), "fashion_mnist": (784, 10)}


def base(argument: str) -> ConfigDict:
  """Returns model, data, training, optimizer and evaluation for a recipe.

  Args:
    argument: a recipe's name, or `model=NAME,data=NAME`: the model's own recipe, with the
      data set exchanged.

  Raises:
    ValueError: an unknown recipe, model or key.
  """
  if "=" not in argument:
    return _recipe(argument, "recipe")
  chosen = {}
  for part in argument.split(","):
    key, equals, value = part.partition("=")
    if not equals or key not in ("model", "data") or not value:
      raise ValueError(f"--config=FILE:{argument}: {part!r} is neither model=NAME nor data=NAME")
    chosen[key] = value
  config = _recipe(chosen.get("model", "lm"), "model")
  if data := chosen.get("data"):
    config.data.name = data
  if data == catalog.PREFERENCES:
    config.task = DPO
  return config


def finalize(config: ConfigDict, accelerated: bool) -> None:
  """Fills in the sizes that depend on the data set or on the hardware; `config` is unlocked."""
  model, data = config.model, config.data
  task = TASKS[config.task]
  if task.rows == "random":
    width = 8192 if accelerated else 512
    for section, key in ((model, "model_size"), (data, "global_batch_size")):
      section[key] = width if section[key] is None else section[key]
    data.examples = data.global_batch_size
  if task.rows == "image":
    known = IMAGE_SIZES.get(data.name, (None, None))
    for key, value in zip(("input_size", "output_size"), known, strict=True):
      if key in model and model[key] is None:
        if value is None:
          raise ValueError(
            f"data.name={data.name!r}: set model.{key} (values per image, or classes); it is "
            f"known for {', '.join(IMAGE_SIZES)} only"
          )
        model[key] = value
  _finalize_text(model, data, task.rows == "text")
  if model.get("feedforward_size", 0) is None:
    model.feedforward_size = model.model_size
  if model.get("expert_feedforward_size", 0) is None:
    model.expert_feedforward_size = model.feedforward_size
  if not task.of_tokens and "input_size" in model and "output_size" in model:
    data.input_size, data.target_size = model.input_size, model.output_size
  if model.name == "transformer" and model.embedding_standard_deviation is None:
    width = model.base_width or model.model_size
    model.embedding_standard_deviation = width**-0.5 if model.tied_embeddings else 1.0
  if model.name == "transformer" and model.head_size is None:
    if model.heads > 0 and model.model_size % model.heads:
      raise ValueError(
        f"model.model_size={model.model_size} is not a multiple of model.heads={model.heads}; "
        f"change one, or set model.head_size"
      )
    model.head_size = model.model_size // max(1, model.heads)
  if model.name == "transformer" and model.value_head_size is None:
    model.value_head_size = model.head_size
  if model.name == "transformer" and model.max_positions is None:
    model.max_positions = data.sequence_length
  if model.name == "transformer":
    model_checks.finalize_mup(model)
  if model.name == "vit":
    model_checks.finalize_vit(model)


def _finalize_text(model: ConfigDict, data: ConfigDict, of_text: bool) -> None:
  """Finds the tokenizer, and sizes the vocabulary by it."""
  of_files = data.name in catalog.OF_FILES
  if data.packing is None and data.name == catalog.PREFERENCES:
    data.packing = "none"
  if data.packing is None:
    data.packing = "best_fit" if of_files else "concatenate"
  data.tokenizer = tokenizer.resolve(data) if of_text and of_files else data.tokenizer or "bytes"
  if model.get("vocabulary_size", 0) is None:
    model.vocabulary_size = tokenizer.load(data.tokenizer).size
  if model.get("separate_documents", False) is None:
    model.separate_documents = of_files


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
  return ConfigDict(
    {
      "task": "causal_lm",
      "model": table.model("transformer"),
      "data": table.section(
        "data", name="python_source", global_batch_size=32, sequence_length=128
      ),
      "training": table.section("training", steps=200),
      "optimizer": table.section("optimizer", learning_rate=8e-3),
      "evaluation": table.section("evaluation", every_steps=50, steps=8, sample_tokens=120),
    }
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
  return ConfigDict(
    {
      "task": "classification",
      "model": table.model("mlp"),
      "data": table.section("data", name="digits", global_batch_size=128),
      "training": table.section("training", steps=400),
      "optimizer": table.section("optimizer", learning_rate=2e-3, weight_decay=0.05),
      "evaluation": table.section("evaluation", every_steps=100),
    }
  )


def vit() -> ConfigDict:
  """Returns a vision transformer of 0.1 M parameters that classifies handwritten digits."""
  return make(
    "classification",
    table.model("vit"),
    data={"name": "digits", "global_batch_size": 128},
    training={"steps": 400},
    optimizer={"learning_rate": 2e-3, "weight_decay": 0.05},
    evaluation={"every_steps": 100},
  )


def mlp_tutorial() -> ConfigDict:
  """Returns the tutorial's network [784, W, W, W, 10] on one random batch, W rows of it."""
  sizes = {"input_size": 784, "output_size": 10, "bias_standard_deviation": 1.0}
  sizes["model_size"] = config_dict.placeholder(int)
  return ConfigDict(
    {
      "task": "regression",
      "model": table.model("mlp", **sizes),
      "data": table.section(
        "data",
        name="random_normal",
        global_batch_size=config_dict.placeholder(int),  # as W
        shuffle=False,
      ),
      "training": table.section("training", steps=30),
      "optimizer": table.section(
        "optimizer",
        name="sgd",
        learning_rate=1e-5,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        clip_norm=0.0,
      ),
      "evaluation": table.section("evaluation"),
    }
  )


# name -> function that returns a config, as those above.
RECIPES: Table = Table(
  "recipe",
  {"lm": lm, "mlp": mlp, "mlp_tutorial": mlp_tutorial, "vit": vit, "lm_bpe": lm_bpe},
  numerics=False,
)


def _preset(name: str) -> ConfigDict:
  """Returns a decoder of a published size, on the data of `lm`, rematerialized."""
  length, keys, *training = EXPERT_PRESETS.get(name) or PRESETS[name]
  config = lm()
  config.model.update(keys)
  config.training.update(*training)
  config.data.sequence_length = length
  config.training.rematerialization = "full"
  config.optimizer.learning_rate = 3e-4
  config.evaluation.sample_tokens = 0
  return config


def _recipe(name: str, what: str) -> ConfigDict:
  if name in RECIPES:
    return RECIPES[name]()
  if name in PRESETS or name in EXPERT_PRESETS:
    return _preset(name)
  if name == HF:
    return hf()
  known = [*RECIPES, *PRESETS, *EXPERT_PRESETS, HF]
  raise ValueError(f"unknown {what} {name!r}; there are {', '.join(known)}{nearest(name, known)}")
