"""Keys that a config's optimizer, model or task does not read: refused where they are set.

Who reads a key is said by `readers` in its row (`configs/keys`), in these words:

  text, image, random: tasks whose rows are of this kind
  tokens: tasks of tokens
  dpo, not dpo: the task DPO alone, or all others
  decoder, layers (decoders and encoders), experts, regions (models whose sequence can be split
    between blocks), logits (of a vocabulary): models
  optimizer: optimizers whose row in `training.optimizer` names the key

A registered model reads what its READS names, and the keys of regions if its axis table has
`residual_sequence`.
"""

from collections.abc import Callable, Iterator, Mapping

from ml_collections import ConfigDict

from configs.keys import table
from configs.keys.row import Key
from configs.schema import recipes
from runtime import extensions
from training.optimizer import optimizer_keys
from training.tasks import DPO, TASKS

_ROWS = {"text", "image", "random"}
_OF_MODELS = {
  "transformer": {"decoder", "layers", "experts", "regions", "logits"},
  # Tasks without tokens have checks of their own for keys of logits.
  "vit": {"layers", "regions", "logits"},
  "mlp": {"logits"},
}
_READABLE = {"decoder", "layers", "logits"}  # what a registered model may name in its READS


def of_model(config: ConfigDict) -> dict[str, object]:
  """Returns the keys outside of `model` that a config's model does not read -> value when unset."""
  return dict(_unread(config, _model_reads))


def of_task(config: ConfigDict) -> dict[str, object]:
  """Returns the keys that a config's task does not read -> their unset value."""
  return dict(_unread(config, _task_reads))


def _unread(config: ConfigDict, reads: Callable) -> Iterator[tuple[str, object]]:
  for key, row, _ in table.rows(config):
    if row.readers and not key.startswith("model.") and not reads(config, key, {*row.readers}):
      yield key, row.unread


def _model_reads(config: ConfigDict, key: str, readers: set[str]) -> bool:
  wanted = readers & {"decoder", "layers", "experts", "regions", "logits"}
  if not wanted:
    return True
  registered = extensions.registered("model", config.model.name)
  if registered is None:
    return bool(wanted & _OF_MODELS.get(config.model.name, wanted))
  if "regions" in wanted:
    return "residual_sequence" in config.partitioning.activations
  if wanted == {"logits"} and not TASKS[config.task].of_tokens:
    return True
  return key in getattr(registered, "READS", ()) and bool(wanted & _READABLE)


def _task_reads(config: ConfigDict, key: str, readers: set[str]) -> bool:
  task = TASKS[config.task]
  rows = readers & _ROWS
  return not (
    (rows and task.rows in _ROWS and task.rows not in rows)
    or ("tokens" in readers and not task.of_tokens)
    or ("dpo" in readers and config.task != DPO)
    or ("not dpo" in readers and config.task == DPO)
  )


def _of_other_optimizers(config: ConfigDict) -> Iterator[tuple[str, object]]:
  """Yields the keys of `optimizer` that a config's optimizer does not read, and their values."""
  used = optimizer_keys(config.optimizer.name)
  for key, value in config.optimizer.items():
    row = table.find(f"optimizer.{key}")  # None: a recipe's own key, for an optimizer of its own
    if key not in used and (row is None or "optimizer" in row.readers):
      yield key, value


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each key that is set, and that nothing reads.

  A key counts as set where its value is neither the recipe's nor the one that turns it off.

  Args:
    config: finalized.
  """
  recipe, name = recipes.base(config.argument), config.optimizer.name
  for key, value in _of_other_optimizers(config):
    row = table.find(f"optimizer.{key}") or Key(None)
    if value not in (row.unread, recipe.optimizer.get(key)):
      yield (
        f"optimizer.{key}={value!r}: {name} does not use it; of those keys it uses "
        f"{', '.join(optimizer_keys(name))}; its own arguments are given by optimizer.arguments"
      )
  for who, keys in (
    (f"the model {config.model.name}", of_model(config)),
    (f"the task {config.task}", of_task(config)),
  ):
    yield from _set(config, recipe, who, keys)


def _set(
  config: ConfigDict, recipe: ConfigDict, who: str, keys: Mapping[str, object]
) -> Iterator[str]:
  """Yields a line for each of these keys that is set."""
  for full, off in keys.items():
    section, _, key = full.partition(".")
    value = config[section][key]
    if value not in (off, recipe.get(section, {}).get(key, off)):
      readable = {*table.find(full).readers} & _READABLE
      named = readable and extensions.registered("model", config.model.name)
      hint = ", or name it in the model's READS" if named else ""
      yield f"{full}={value!r}: {who} does not use it; leave it at {off!r}{hint}"


def reset(config: ConfigDict) -> None:
  """Sets the optimizer's keys that it does not use to the recipe's; `compare` exchanges it."""
  recipe = recipes.base(config.argument)
  for key, _ in [*_of_other_optimizers(config)]:
    config.optimizer[key] = recipe.optimizer[key]
