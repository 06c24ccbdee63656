"""Low-rank adapters: which linear layers get one, and which keys of `lora` go together."""

import fnmatch
from collections.abc import Iterator

from ml_collections import ConfigDict

from runtime.suggest import most_similar

# What the keys of `lora` are while there are no adapters.
OFF = {"rank": 0, "alpha": 16.0, "targets": ("*",), "rs": False, "dropout": 0.0}
_LAYERS = (
  *(f"layers/attention/{name}" for name in ("query", "key", "value", "out")),
  *(f"layers/mlp/{name}" for name in ("gate", "up", "down")),
)
ADAPTERS = "*/lora_*"  # the names of their parameters


def linear_layers(config: ConfigDict) -> list[str]:
  """Returns the names of the layers of a decoder that may have an adapter."""
  return [name for name in _LAYERS if config.model.gated or name != "layers/mlp/gate"]


def finalize(config: ConfigDict) -> None:
  """Fills in what follows from `lora`; `config` is unlocked.

  `lora.targets` becomes the names of layers, `training.trainable` includes the adapters.

  Raises:
    ValueError: a target that matches no layer.
  """
  lora, training = config.lora, config.training
  given = training.trainable
  if lora.rank <= 0 or config.model.name != "transformer":
    training.trainable = ("*",) if given is None else given
    return
  lora.targets = _layers(lora.targets, linear_layers(config))
  given = given or ()
  training.trainable = given if ADAPTERS in given else (ADAPTERS, *given)


def _layers(targets: tuple, names: list[str]) -> tuple[str, ...]:
  """Returns the names that targets match, as a whole or by their last part."""

  def matches(target: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, target) or fnmatch.fnmatchcase(name.split("/")[-1], target)

  wrong = [one for one in targets if not any(matches(str(one), name) for name in names)]
  if wrong or not targets:
    short = [name.split("/")[-1] for name in names]
    lines = [
      f"{one!r} matches no linear layer; near is {most_similar(str(one), short, 1)[0]}"
      for one in wrong
    ]
    raise ValueError(
      f"lora.targets: {'; '.join(lines) or '() names no layer'}. The layers are "
      f"{', '.join(short)}; embeddings and the kernel of the logits have no adapters, but can be "
      f"trained in full: --config.training.trainable=\"('unembed/*',)\""
    )
  return tuple(name for name in names if any(matches(target, name) for target in targets))


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each key of `lora` that is wrong or not read, of a finalized config."""
  lora = config.lora
  if lora.rank < 0:
    yield f"lora.rank={lora.rank}: at least 1, or 0 for no adapters"
  elif lora.rank == 0:
    for key, off in OFF.items():
      if lora[key] != off:
        yield f"lora.{key}={lora[key]!r}: lora.rank=0 means no adapters; set lora.rank, such as 16"
  elif config.model.name != "transformer":
    yield (
      f"lora.rank={lora.rank}: the model {config.model.name} has no adapters; leave it at 0, or "
      f"choose layers to train by training.trainable"
    )
  if not lora.alpha > 0:
    yield f"lora.alpha={lora.alpha}: above 0"
  if not 0 <= lora.dropout < 1:
    yield f"lora.dropout={lora.dropout}: at least 0 and below 1"
