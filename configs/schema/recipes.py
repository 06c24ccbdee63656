"""Recipes: a model, a data set and how it is trained. A strategy is chosen apart from them."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from configs.schema import defaults, mup_checks, vit_checks
from configs.schema.expert_presets import EXPERT_PRESETS
from configs.schema.presets import PRESETS
from input_pipeline.sources import catalog
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
    mup_checks.finalize(model)
  if model.name == "vit":
    vit_checks.finalize(model)


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
      "data": defaults.data(**data),
      "training": defaults.training(**training),
      "optimizer": defaults.optimizer(**(optimizer or {})),
      "evaluation": defaults.evaluation(**(evaluation or {})),
    }
  )


def lm() -> ConfigDict:
  """Returns a byte-level decoder of 0.66 M parameters on the source of the standard library."""
  model = {
    "name": "transformer",
    "layers": 3,  # transformer blocks
    "model_size": 128,  # width of the residual stream
    "feedforward_size": 384,  # hidden width of the MLP
    # muP: the width at which learning rates were tuned; the other widths of that model are smaller
    # in proportion. 0: off
    "base_width": 0,
    "base_head_size": config_dict.placeholder(int),  # muP: head size there; head_size
    # grouped_query, or latent: keys and values of all heads are projections of one latent vector
    # per token (multi-head latent attention, DeepSeek)
    "attention": "grouped_query",
    "latent_size": 0,  # of latent attention: numbers of that vector
    "query_latent_size": 0,  # of a latent vector of the queries; 0: they have none
    "value_head_size": config_dict.placeholder(int),  # of latent attention; head_size
    "heads": 8,  # query heads
    "kv_heads": 4,  # key/value heads; fewer than heads: grouped-query attention
    "head_size": config_dict.placeholder(int),  # model_size / heads
    "vocabulary_size": config_dict.placeholder(int),  # as the tokenizer's; 256: bytes
    "vocabulary_multiple": 128,  # the vocabulary is padded to a multiple of this, on every mesh
    "positions": "rotary",  # rotary (RoPE) or learned
    "max_positions": config_dict.placeholder(int),  # of learned ones; data.sequence_length
    "rotary_base": 10_000.0,  # RoPE's theta
    # Dims of a head that are rotated, the first ones; 0: all. Of latent attention the last ones of
    # queries, and of a key that all heads share
    "rotary_size": 0,
    "rotary_pairs": "halves",  # dims that are rotated together: i, i + h, or adjacent: 2i, 2i + 1
    # For rows longer than pretraining: linear, dynamic, yarn, longrope or llama3, with its numbers:
    # ("yarn", {"factor": 4.0, "original_length": 32768}); four numbers are llama3's (factor, low,
    # high, original length); (): none
    "rotary_scaling": (),
    "local_rotary_base": 0.0,  # theta of sliding-window layers, unscaled; 0: rotary_base
    "window": 0,  # sliding-window attention: tokens that a token attends to; 0: all
    "global_every": 0,  # every n-th layer has full attention in spite of the window; 0: none
    # Instead of global_every: the type of each layer, full or sliding (it has the window), or
    # full_unrotated or sliding_unrotated (without RoPE); repeated where there are more layers:
    # ("sliding", "sliding", "full")
    "layer_types": (),
    "norm": "rms",  # rms or layer
    "norm_epsilon": 1e-6,  # added to the variance
    "norm_scale_from_one": False,  # the stored scale is added to one (Gemma)
    "pre_norms": True,  # normalize the inputs of attention and MLP
    "post_norms": False,  # normalize the outputs: also (Gemma 2), or instead (OLMo 2)
    "query_key_norm": False,  # RMSNorm of each query and key head
    "query_key_norm_across_heads": False,  # of all heads of a token at once (OLMo 2)
    # Largest magnitude of queries, keys and values, after their norms (OLMoE); 0: any
    "clip_qkv": 0.0,
    # none, qkv, attention, mlp, all (GPT-2; without a gate's), or names: "query,value,out". Names
    # are query, key, value, out, gate, up, down
    "biases": "none",
    # silu, gelu (tanh approximation), gelu_erf (exact), gelu_sigmoid (x sigmoid(1.702 x)), relu or
    # relu_squared
    "activation": "silu",
    "gated": True,  # MLP: down(f(gate(x)) * up(x)); else down(f(up(x)))
    # Mixture of experts: routed experts of a sparse layer, in place of its MLP; 0: all are dense
    "experts": 0,
    "experts_per_token": 2,  # top-k
    "expert_feedforward_size": config_dict.placeholder(int),  # of an expert; feedforward_size
    "shared_feedforward_size": 0,  # width of the shared experts together; 0: there are none
    "dense_layers": 0,  # the first layers, which have no experts
    "sparse_every": 1,  # of the layers after those each so many-th has experts
    "mlp_only_layers": (),  # further layers without experts, by their numbers from 0 on: (3, 5)
    # softmax, sigmoid (DeepSeek-V3), or softmax_of_chosen: over the chosen logits alone (gpt-oss)
    "router_scores": "softmax",
    "router_normalized": True,  # the gates of a token are divided by their sum
    "router_scale": 1.0,  # factor of the gates
    "router_groups": 1,  # of experts, from the best of which a token's are chosen
    "router_top_groups": 1,  # how many are the best
    "router_group_score": "max",  # the largest score (DeepSeek-V2), or top2: sum of two (V3)
    "router_bias": False,  # a trained bias of the router's logits (gpt-oss)
    # A bias of the scores by which experts are chosen, moved by training.router_bias_rate (V3)
    "router_correction": False,
    "expert_biases": False,  # of an expert's gate, up and down (gpt-oss)
    "gate_limit": 0.0,  # largest gate, and largest magnitude of up, in experts (gpt-oss); 0: none
    "up_offset": 0.0,  # added to up in experts (gpt-oss)
    # How tokens reach experts on other devices: rounds of all-to-all, or gathered
    "expert_exchange": "rounds",
    # Rows of the buffer between two devices, relative to the mean: memory and speed, not results
    "expert_capacity": 1.25,
    # Factor of the scores; head_size**-0.5, or with base_width base_head_size**0.5 / head_size
    "attention_scale": config_dict.placeholder(float),
    # Scores of the n-th layer, counted from 1, are divided by n (GPT-2)
    "attention_scale_by_inverse_layer": False,
    "attention_soft_cap": 0.0,  # soft-capping of the scaled scores; 0: off
    "attention_sinks": False,  # a learned score per head in the softmax, without a value (gpt-oss)
    "logits_soft_cap": 0.0,  # soft-capping of the logits; 0: off
    "scaled_embeddings": False,  # multiply embeddings by model_size**0.5 (base_width**0.5)
    "embedding_multiplier": 1.0,  # factor of the embeddings (Granite)
    "residual_multiplier": 1.0,  # factor of what attention and MLP add to the residual (Granite)
    "logits_divisor": 1.0,  # divides the logits, before their soft cap (Granite's logits_scaling)
    "context_attention": "auto",  # where context > 1: ring, gather, or auto: by a cost formula
    # 1; tied: model_size**-0.5, or with base_width base_width**-0.5
    "embedding_standard_deviation": config_dict.placeholder(float),
    "dropout_rate": 0.0,  # of the outputs of attention and MLP
    "tied_embeddings": False,  # compute the logits with the embedding table
    # Intra-document attention masking; positions restart. By default with data that are read from
    # files, not with TFDS data sets
    "separate_documents": config_dict.placeholder(bool),
  }
  return ConfigDict(
    {
      "task": "causal_lm",  # what is learnt; the recipe fixes it
      "model": model,
      "data": defaults.data(name="python_source", global_batch_size=32, sequence_length=128),
      "training": defaults.training(steps=200),
      "optimizer": defaults.optimizer(learning_rate=8e-3),
      "evaluation": defaults.evaluation(every_steps=50, steps=8, sample_tokens=120),
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
  model = {
    "folder": "",  # model=hf: a folder with config.json and safetensors, or hf://OWNER/NAME
  }
  for key in hf_config.KEYS:
    value = config.model[key]
    model[key] = config_dict.placeholder(int if value is None else type(value))
  model["attention_scale"] = config_dict.placeholder(float)
  config.model = ConfigDict({**config.model, **model})
  config.data.sequence_length = config_dict.placeholder(int)  # 2048, or the model's most
  config.training.rematerialization = "full"
  config.optimizer.learning_rate = config_dict.placeholder(float)  # 1e-5; of adapters 2e-4
  config.evaluation.sample_tokens = 0
  return config


def mlp() -> ConfigDict:
  """Returns a small classifier of images (handwritten digits)."""
  model = {
    "name": "mlp",
    "input_size": config_dict.placeholder(int),  # values per image
    "model_size": 128,
    "feedforward_size": config_dict.placeholder(int),  # as model_size
    "base_width": 0,  # muP: the width at which learning rates were tuned; 0: off
    "output_size": config_dict.placeholder(int),  # classes
    "bias_standard_deviation": 0.0,  # of initial biases
  }
  return ConfigDict(
    {
      "task": "classification",
      "model": model,
      "data": defaults.data(name="digits", global_batch_size=128),
      "training": defaults.training(steps=400),
      "optimizer": defaults.optimizer(learning_rate=2e-3, weight_decay=0.05),
      "evaluation": defaults.evaluation(every_steps=100),
    }
  )


def vit() -> ConfigDict:
  """Returns a vision transformer of 0.1 M parameters that classifies handwritten digits."""
  model = {
    "name": "vit",
    "input_size": config_dict.placeholder(int),  # values per image
    "channels": 1,  # of an image: 3 of a coloured one
    "image_size": config_dict.placeholder(int),  # pixels of a side; follows from input_size
    "patch_size": 2,  # pixels of a patch's side
    "layers": 2,
    "model_size": 64,
    "feedforward_size": 256,
    "heads": 4,
    "norm_epsilon": 1e-6,  # added to the variance
    "dropout_rate": 0.2,  # of the outputs of attention and MLP
    "output_size": config_dict.placeholder(int),  # classes
  }
  return make(
    "classification",
    model,
    data={"name": "digits", "global_batch_size": 128},
    training={"steps": 400},
    optimizer={"learning_rate": 2e-3, "weight_decay": 0.05},
    evaluation={"every_steps": 100},
  )


def mlp_tutorial() -> ConfigDict:
  """Returns the tutorial's network [784, W, W, W, 10] on one random batch, W rows of it."""
  model = {
    "name": "mlp",
    "input_size": 784,
    "model_size": config_dict.placeholder(int),  # W: 8192 on an accelerator, 512 on a CPU
    "feedforward_size": config_dict.placeholder(int),  # as model_size
    "base_width": 0,  # muP: the width at which learning rates were tuned; 0: off
    "output_size": 10,
    "bias_standard_deviation": 1.0,
  }
  return ConfigDict(
    {
      "task": "regression",
      "model": model,
      "data": defaults.data(
        name="random_normal",
        global_batch_size=config_dict.placeholder(int),  # as W by default
        shuffle=False,
      ),
      "training": defaults.training(steps=30),
      "optimizer": defaults.optimizer(
        name="sgd",
        learning_rate=1e-5,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        clip_norm=0.0,
      ),
      "evaluation": defaults.evaluation(),
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
