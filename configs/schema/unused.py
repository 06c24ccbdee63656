"""Keys that a config's optimizer, model or task does not use: refused where they are set."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from configs.schema import recipes
from training.tasks import TASKS

# Keys of `optimizer` that not every optimizer uses -> the value that turns it off, and says what is
# so; None where there is none.
_OPTIMIZER = {
  "beta_1": None,
  "beta_2": None,
  "epsilon": None,
  "momentum": 0.0,
  "weight_decay": 0.0,
}
# Optimizer -> which of them it uses. Those of optax take their own by `optimizer.arguments`;
# whether one of them takes weight decay, `training.optimizer` finds out.
OPTIMIZER_KEYS = {
  "adamw": ("beta_1", "beta_2", "epsilon", "weight_decay"),
  "sgd": ("momentum",),
}
OTHERS = ("weight_decay",)

_TOKENS = {"data.sequence_length": 0, "data.text_feature": "", "evaluation.sample_tokens": 0}
_IMAGES = {"data.image_feature": "", "data.label_feature": ""}
# How a task's rows are read -> keys that only other rows have, and their values while unset.
ROWS = {
  "text": {**_IMAGES, "data.examples": 0, "data.input_size": 0, "data.target_size": 0},
  "image": {**_TOKENS, "data.examples": 0},
  "random": {**_TOKENS, **_IMAGES},
}
# Model -> keys about how a decoder is computed.
MODELS = {"mlp": {"training.rematerialization": "none", "partitioning.sequence_parallel": False}}


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each key that is set, and that nothing reads.

  A key counts as set where its value is neither the recipe's nor the one that turns it off.

  Args:
    config: finalized.
  """
  recipe, name = recipes.base(config.argument), config.optimizer.name
  used = OPTIMIZER_KEYS.get(name, OTHERS)
  own = "" if name in OPTIMIZER_KEYS else "; its own arguments are given by optimizer.arguments"
  for key, off in _OPTIMIZER.items():
    value = config.optimizer[key]
    if key not in used and value not in (off, recipe.optimizer[key]):
      yield (
        f"optimizer.{key}={value!r}: {name} does not use it; of those keys it uses "
        f"{', '.join(used)}{own}"
      )
  task = TASKS[config.task]
  for who, keys in (
    (f"the model {config.model.name}", MODELS.get(config.model.name, {})),
    (f"the task {config.task}", ROWS.get(task.rows, {})),
  ):
    for full, off in keys.items():
      section, _, key = full.partition(".")
      value = config[section][key]
      if value not in (off, recipe.get(section, {}).get(key, off)):
        yield f"{full}={value!r}: {who} does not use it; leave it at {off!r}"


def reset(config: ConfigDict) -> None:
  """Sets the optimizer's keys that it does not use to the recipe's; `compare` exchanges it."""
  recipe, used = recipes.base(config.argument), OPTIMIZER_KEYS.get(config.optimizer.name, OTHERS)
  for key in _OPTIMIZER:
    if key not in used:
      config.optimizer[key] = recipe.optimizer[key]
