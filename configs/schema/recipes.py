"""Recipes: a model, a data set and how it is trained. A strategy is chosen apart from them."""

from ml_collections import ConfigDict, config_dict

from configs.schema.presets import PRESETS
from runtime.suggest import nearest

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
  return config


def finalize(config: ConfigDict, accelerated: bool) -> None:
  """Fills in the sizes that depend on the data set or on the hardware; `config` is unlocked."""
  model, data = config.model, config.data
  if data.kind == "random":
    width = 8192 if accelerated else 512
    for section, key in ((model, "model_size"), (data, "global_batch_size")):
      section[key] = width if section[key] is None else section[key]
    data.examples = data.global_batch_size
  if data.kind == "image":
    known = IMAGE_SIZES.get(data.name, (None, None))
    for key, value in zip(("input_size", "output_size"), known, strict=True):
      if model[key] is None:
        if value is None:
          raise ValueError(
            f"data.name={data.name!r}: set model.{key} (values per image, or classes); it is "
            f"known for {', '.join(IMAGE_SIZES)} only"
          )
        model[key] = value
  if model.name == "mlp":
    if model.feedforward_size is None:
      model.feedforward_size = model.model_size
    data.input_size, data.target_size = model.input_size, model.output_size
  if model.name == "transformer" and model.embedding_standard_deviation is None:
    model.embedding_standard_deviation = model.model_size**-0.5 if model.tied_embeddings else 1.0
  if model.name == "transformer" and model.head_size is None:
    if model.heads > 0 and model.model_size % model.heads:
      raise ValueError(
        f"model.model_size={model.model_size} is not a multiple of model.heads={model.heads}; "
        f"change one, or set model.head_size"
      )
    model.head_size = model.model_size // max(1, model.heads)
  if model.name == "transformer" and model.attention_scale is None:
    model.attention_scale = model.head_size**-0.5 if model.head_size > 0 else 1.0


def _data(**keys) -> dict:
  """Returns the keys that every kind of data has; `kind` is text, image or random."""
  common = {
    "data_dir": "",  # "": TFDS_DATA_DIR, or ~/tensorflow_datasets
    "train_split": "train",
    "evaluation_split": "test",
    "shuffle": True,  # anew each epoch
    "prefetch_batches": 2,  # prepared ahead, in the background
    "max_bad_records": 0,  # of a split: that many unreadable ones get weight 0; 0 refuses them
    "sequence_length": 0,  # tokens per row (text)
    "text_feature": "",  # "": the only one there is
    "image_feature": "",
    "label_feature": "",
    "examples": 0,  # rows (random)
    "input_size": 0,  # values per example (image, random); derived from the model
    "target_size": 0,  # classes (image), values (random); derived from the model
    # Rows, counted from 0 over all epochs, that no step trains on, in ranges (first, the one
    # behind the last): ((544, 608),)
    "skip_rows": (),
    "skip_batches": (),  # the same by batches of global_batch_size rows, from 0: (17, 18)
  }
  return {**common, **keys}


def _training(**keys) -> dict:
  common = {
    "steps": 0,
    "gradient_accumulation_steps": 1,  # microbatches per step
    "parameter_dtype": "float32",
    "compute_dtype": config_dict.placeholder(str),  # bfloat16 on accelerators
    "matmul_precision": config_dict.placeholder(str),  # default, high, highest
    "rematerialization": "none",  # or dots, full: what the backward pass computes again
    # splash: a kernel that never has all scores, the default on TPUs where it can be; or xla.
    "attention_kernel": config_dict.placeholder(str),
    "loss_chunks": 1,  # of a row of tokens, whose logits are there one chunk at a time
    # A step is bad whose loss or gradient norm is not finite, or whose loss lies above the mean of
    # the last bad_step_window losses by more than so many of their standard deviations (0: off).
    "bad_step_deviations": 0.0,
    "bad_step_window": 100,  # steps
    "on_bad_step": "stop",  # or roll_back: to the last good checkpoint, skipping its batch
    "bad_step_skips": 1,  # batches that a rollback skips, the last of them the bad step's
    "max_rollbacks": 3,  # of a run, over all its starts; one more bad step stops it
    # Compare what devices hold copies of, also before every save; 0 is off.
    "replica_check_every_steps": 10,
  }
  return {**common, **keys}


def _optimizer(**keys) -> dict:
  common = {
    "name": "adamw",
    "learning_rate": 1e-3,  # at its peak
    "schedule": "cosine",  # to a tenth of the peak; or constant
    "warmup_steps": config_dict.placeholder(int),  # linear; a twentieth of the steps
    "beta_1": 0.9,
    "beta_2": 0.95,
    "epsilon": 1e-8,
    "momentum": 0.0,  # sgd only
    "weight_decay": 0.1,  # of kernels and tables, not of scales and biases
    "clip_norm": 1.0,  # of the global gradient norm; 0 is off
  }
  return {**common, **keys}


def _evaluation(**keys) -> dict:
  common = {
    "every_steps": 0,  # and at the end
    "steps": 0,  # batches of each but the last; 0: the whole split
    "final_steps": 0,  # batches of the last one, and of the verb evaluate; 0: the whole split
    "sample_tokens": 0,  # drawn when training ends (text); 0 is off
  }
  return {**common, **keys}


def lm() -> ConfigDict:
  """Returns a byte-level decoder of 0.66 M parameters on the source of the standard library."""
  model = {
    "name": "transformer",
    "layers": 3,
    "model_size": 128,
    "feedforward_size": 384,
    "heads": 8,
    "kv_heads": 4,
    "head_size": config_dict.placeholder(int),  # model_size / heads
    "vocabulary_size": 256,  # tokens are bytes
    "vocabulary_multiple": 128,  # rounded up to this, so that shapes never depend on the mesh
    "positions": "rotary",  # or learned
    "rotary_base": 10_000.0,
    "rotary_scaling": (),  # Llama 3.1's: (factor, low, high, length trained on at first)
    "local_rotary_base": 0.0,  # of layers that see a window, unscaled; 0: as the others
    "window": 0,  # tokens that a layer sees, its own the last; 0: all of the past
    "global_every": 0,  # every n-th layer sees all of the past in spite of it; 0: none
    "norm": "rms",  # or layer
    "norm_epsilon": 1e-6,
    "norm_scale_from_one": False,  # what is stored is added to one
    "post_norms": False,  # what attention and MLP add is normalised too
    "query_key_norm": False,  # RMSNorm of each query and key head
    "biases": "none",  # or qkv, all
    "activation": "silu",  # or gelu, its tanh form
    "gated": True,  # down(f(gate(x)) * up(x)), else down(f(up(x)))
    "attention_scale": config_dict.placeholder(float),  # of the scores; head_size**-0.5
    "attention_soft_cap": 0.0,  # of the scaled scores; 0 is off
    "logits_soft_cap": 0.0,
    "scaled_embeddings": False,  # by model_size**0.5
    "context_attention": "auto",  # where context > 1: ring, gather, or what should be faster
    "embedding_standard_deviation": config_dict.placeholder(float),  # 1; tied: model_size**-0.5
    "dropout_rate": 0.0,
    "tied_embeddings": False,  # the logits by the embedding's table
    "separate_documents": False,  # a row's documents do not see one another; positions restart
  }
  return ConfigDict(
    {
      "model": model,
      "data": _data(kind="text", name="python_source", global_batch_size=32, sequence_length=128),
      "training": _training(steps=200, loss="next_token"),
      "optimizer": _optimizer(learning_rate=8e-3),
      "evaluation": _evaluation(every_steps=50, steps=8, sample_tokens=120),
    }
  )


def mlp() -> ConfigDict:
  """Returns a small classifier of images (handwritten digits)."""
  model = {
    "name": "mlp",
    "input_size": config_dict.placeholder(int),  # values per image
    "model_size": 128,
    "feedforward_size": config_dict.placeholder(int),  # as model_size
    "output_size": config_dict.placeholder(int),  # classes
    "bias_standard_deviation": 0.0,
  }
  return ConfigDict(
    {
      "model": model,
      "data": _data(kind="image", name="digits", global_batch_size=128),
      "training": _training(steps=400, loss="classification"),
      "optimizer": _optimizer(learning_rate=2e-3, weight_decay=0.05),
      "evaluation": _evaluation(every_steps=100),
    }
  )


def mlp_tutorial() -> ConfigDict:
  """Returns the tutorial's network [784, W, W, W, 10] on one random batch, W rows of it."""
  model = {
    "name": "mlp",
    "input_size": 784,
    "model_size": config_dict.placeholder(int),  # W: 8192 on an accelerator, 512 on a CPU
    "feedforward_size": config_dict.placeholder(int),  # as model_size
    "output_size": 10,
    "bias_standard_deviation": 1.0,
  }
  return ConfigDict(
    {
      "model": model,
      "data": _data(
        kind="random",
        name="random_normal",
        global_batch_size=config_dict.placeholder(int),  # as W by default
        shuffle=False,
      ),
      "training": _training(steps=30, loss="squared_error"),
      "optimizer": _optimizer(
        name="sgd",
        learning_rate=1e-5,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        clip_norm=0.0,
      ),
      "evaluation": _evaluation(),
    }
  )


RECIPES = {"lm": lm, "mlp": mlp, "mlp_tutorial": mlp_tutorial}


def _preset(name: str) -> ConfigDict:
  """Returns a decoder of a published size, on the data of `lm`, rematerialized."""
  length, keys = PRESETS[name]
  config = lm()
  config.model.update(keys)
  config.data.sequence_length = length
  config.training.rematerialization = "full"
  config.optimizer.learning_rate = 3e-4
  config.evaluation.sample_tokens = 0
  return config


def _recipe(name: str, what: str) -> ConfigDict:
  if name in RECIPES:
    return RECIPES[name]()
  if name in PRESETS:
    return _preset(name)
  known = [*RECIPES, *PRESETS]
  raise ValueError(f"unknown {what} {name!r}; there are {', '.join(known)}{nearest(name, known)}")
