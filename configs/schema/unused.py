"""Keys that a config's optimizer, model or task does not use: refused where they are set."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from configs.schema import expert_checks, recipes
from runtime import extensions
from training.optimizer import optimizer_keys
from training.tasks import DPO, TASKS

# Keys of `optimizer` that every optimizer uses.
_GENERAL = (
  *("name", "arguments", "state_dtype", "state_memory", "learning_rate", "groups", "ema_decays"),
  *("clip_norm", "clip_groups", "clip_quantile", "clip_window"),
  *("schedule", "final_fraction", "warmup_steps", "warmup_tokens"),
  *("decay_steps", "decay_tokens", "decay"),
)
# The others -> the value that turns it off, and says what is so; None where there is none. A
# recipe may have more, for an optimizer of its own.
_OPTIMIZER = {
  "beta_1": None,
  "beta_2": None,
  "epsilon": None,
  "momentum": 0.0,
  "weight_decay": 0.0,
  "independent_weight_decay": False,
}
_TOKENS = {
  "training.z_loss": 0.0,
  "data.sequence_length": 0,
  "data.sequence_length_ramp": (),
  "data.text_feature": "",
  "data.files": "",
  "data.sources": (),
  "data.stages": (),
  "data.evaluation_files": "",
  "data.tokenizer": "bytes",
  "data.train_tokenizer": 0,
  "data.packing": "concatenate",
  "data.chat_template": "",
  "data.untrained_conversations": "refuse",
  "data.long_conversations": "refuse",
  "evaluation.sample_tokens": 0,
}
_DPO = {"training.dpo_beta": 0.1, "training.dpo_label_smoothing": 0.0}
_IMAGES = {"data.image_feature": "", "data.label_feature": ""}
# How a task's rows are read -> keys that only other rows have, and their values while unset.
ROWS = {
  "text": {**_IMAGES, "data.examples": 0, "data.input_size": 0, "data.target_size": 0},
  "image": {**_TOKENS, "data.examples": 0},
  "random": {**_TOKENS, **_IMAGES},
}
# Keys about how a decoder is computed. A registered model that reads any of the first four names
# them in its READS; those of matmuls are for one whose axis table has `residual_sequence`.
_COMPUTED = {
  "training.rematerialization": "none",
  "training.matmul_dtype": "compute",
  "training.gradient_reduction_dtype": "compute",
  "training.scan_unroll": 1,
}
_OF_TOKENS = {
  "training.attention_kernel": "xla",
  "training.loss_chunks": 1,
  "training.z_loss": 0.0,
}
_EXPERTS = {**expert_checks.TRAINING, "training.grouped_matmul": "tiles"}
_REGIONS = {
  "partitioning.reshard_after_forward": True,
  "partitioning.sequence_parallel": False,
  "partitioning.collective_matmul": False,
}
_READABLE = {**_COMPUTED, **_OF_TOKENS}
_OF_ENCODERS = ("training.rematerialization", "training.scan_unroll")
MODELS = {
  "mlp": {**_COMPUTED, **_EXPERTS, **_REGIONS},
  "vit": {**{key: off for key, off in _COMPUTED.items() if key not in _OF_ENCODERS}, **_EXPERTS},
}


def of_model(config: ConfigDict) -> dict[str, object]:
  """Returns the keys outside of `model` that a config's model does not use -> their unset value."""
  model = extensions.registered("model", config.model.name)
  if model is None:
    return MODELS.get(config.model.name, {})
  # For a task without tokens `validate` has checks of its own.
  known = {**_COMPUTED, **(_OF_TOKENS if TASKS[config.task].of_tokens else {})}
  reads = getattr(model, "READS", ())
  split = "residual_sequence" in config.partitioning.activations
  keys = {key: off for key, off in known.items() if key not in reads}
  return {**_EXPERTS, **keys} | ({} if split else _REGIONS)


def of_task(config: ConfigDict) -> dict[str, object]:
  """Returns the keys that a config's task does not use -> their unset value."""
  task = TASKS[config.task]
  sampled = {} if task.of_tokens else {"evaluation.sample_tokens": 0}
  pairs = {"training.z_loss": 0.0, "data.text_feature": ""} if config.task == DPO else _DPO
  return {**ROWS.get(task.rows, {}), **sampled, **pairs}


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each key that is set, and that nothing reads.

  A key counts as set where its value is neither the recipe's nor the one that turns it off.

  Args:
    config: finalized.
  """
  recipe, name = recipes.base(config.argument), config.optimizer.name
  used = optimizer_keys(name)
  for key, value in config.optimizer.items():
    if key in (*_GENERAL, *used):
      continue
    if value not in (_OPTIMIZER.get(key), recipe.optimizer.get(key)):
      yield (
        f"optimizer.{key}={value!r}: {name} does not use it; of those keys it uses "
        f"{', '.join(used)}; its own arguments are given by optimizer.arguments"
      )
  for who, keys in (
    (f"the model {config.model.name}", of_model(config)),
    (f"the task {config.task}", of_task(config)),
  ):
    for full, off in keys.items():
      section, _, key = full.partition(".")
      value = config[section][key]
      if value not in (off, recipe.get(section, {}).get(key, off)):
        named = full in _READABLE and extensions.registered("model", config.model.name)
        hint = ", or name it in the model's READS" if named else ""
        yield f"{full}={value!r}: {who} does not use it; leave it at {off!r}{hint}"


def reset(config: ConfigDict) -> None:
  """Sets the optimizer's keys that it does not use to the recipe's; `compare` exchanges it."""
  recipe, used = recipes.base(config.argument), optimizer_keys(config.optimizer.name)
  for key in config.optimizer:
    if key not in (*_GENERAL, *used):
      config.optimizer[key] = recipe.optimizer[key]
