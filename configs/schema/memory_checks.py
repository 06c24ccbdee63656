"""Which values the keys about memory may have: rematerialization, and where optimizer state is."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from runtime import rematerialization
from training.optimizer import optimizer_row, optimizers_with


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the keys about memory.

  Args:
    config: finalized.
  """
  names = rematerialization.names_of(config.model)
  try:
    rematerialization.parse(config.training.rematerialization, names)
  except ValueError as error:
    yield f"training.rematerialization: {error}"
  yield from _state(config.optimizer)


def _state(keys: ConfigDict) -> Iterator[str]:
  """Yields why the optimizer's state cannot be where `optimizer.state_memory` says."""
  if keys.state_memory == "host":
    yield from (f"optimizer.state_memory=host: {why}" for why in on_the_device(keys))


def on_the_device(keys: ConfigDict) -> Iterator[str]:
  """Yields why an optimizer's state has to be on the device.

  Args:
    keys: the config's section `optimizer`.
  """
  groups = [group for group in keys.groups if isinstance(group, dict)]
  names = [keys.name, *(group["name"] for group in groups if "name" in group)]
  if others := [name for name in dict.fromkeys(names) if not optimizer_row(name).elementwise]:
    yield (
      f"layers are updated one by one, and {' and '.join(others)} may need whole arrays; it is for "
      f"{', '.join(optimizers_with(lambda row: row.elementwise))}"
    )
  if keys.state_dtype not in ("float32", "float64"):
    yield (
      f"layers are updated one by one, and optimizer.state_dtype={keys.state_dtype} rounds whole "
      "arrays; set it to float32"
    )
  for key in ("clip_quantile", "clip_groups"):
    if keys[key]:
      yield (
        f"layers are updated one by one, and optimizer.{key}={keys[key]} needs the norm of all; "
        f"clip with optimizer.clip_norm alone"
      )
