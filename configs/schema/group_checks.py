"""What is wrong with the parameter groups of an optimizer: optimizer.groups."""

from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from runtime.suggest import nearest
from training.optimizer import optimizer_keys

EXAMPLE = '({"parameters": "embed/*", "learning_rate": 1e-3, "weight_decay": 0.0},)'
# Keys of `optimizer` that a group may not have for itself.
SHARED = (
  *("groups", "ema_decays", "state_dtype", "state_memory", "schedule", "final_fraction"),
  *("clip_groups", "clip_quantile", "clip_window"),
  *("warmup_steps", "warmup_tokens", "decay_steps", "decay_tokens", "decay"),
)


def wrong(optimizer: ConfigDict) -> Iterator[str]:
  """Yields a line for each mistake in optimizer.groups of a finalized config."""
  groups = optimizer.groups
  if not isinstance(groups, tuple) or not all(isinstance(group, Mapping) for group in groups):
    yield f"optimizer.groups={groups!r}: a tuple of groups, such as {EXAMPLE}"
    return
  for number, group in enumerate(groups):
    yield from _group(optimizer, group, f"optimizer.groups, group {number + 1}")


def _group(optimizer: ConfigDict, group: Mapping[str, Any], where: str) -> Iterator[str]:
  patterns = group.get("parameters", ())
  patterns = (patterns,) if isinstance(patterns, str) else patterns
  several = isinstance(patterns, tuple) and patterns != ()
  if not several or not all(isinstance(one, str) for one in patterns):
    yield f"{where}: `parameters` is a pattern of their names or several, such as {EXAMPLE}"
  own = {key: value for key, value in group.items() if key != "parameters"}
  known = [key for key in optimizer if key not in SHARED]
  used = optimizer_keys(group.get("name", optimizer.name))
  for key, value in own.items():
    if key in SHARED and key in optimizer:
      yield f"{where}: {key} is the same for all groups; set optimizer.{key}"
    elif key not in known:
      yield f"{where}: unknown key {key!r}; one of {', '.join(known)}{nearest(key, known)}"
    elif type(value) is not type(optimizer[key]) and not _number(value, optimizer[key]):
      yield f"{where}: {key}={value!r} is no {type(optimizer[key]).__name__}"
    elif key in ("learning_rate", "weight_decay") and value < 0:
      yield f"{where}: {key}={value}: at least 0"
    elif key == "clip_norm" and not (optimizer.clip_groups and value >= 0):
      yield f"{where}: clip_norm={value}: at least 0, and with optimizer.clip_groups=true only"
    elif key not in ("name", "arguments", "learning_rate", "clip_norm", *used):
      name = group.get("name", optimizer.name)
      yield f"{where}: {key}={value!r}: {name} does not use it; it uses {', '.join(used)}"
  if not own:
    yield f"{where}: it has no key of its own, so it changes nothing; such as {EXAMPLE}"


def _number(value: Any, like: Any) -> bool:
  return isinstance(like, float) and type(value) is int
