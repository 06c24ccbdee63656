"""A family: some model_types' table of parts, and what the parts read of either side's keys."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

Theirs = Mapping[str, Any]  # of a config.json, missing keys filled in
Ours = Mapping[str, Any]  # of config.model


@dataclasses.dataclass(frozen=True)
class Part:
  """Some keys of config.json and the keys of `model` that they determine.

  Attributes:
    keys: of config.json.
    read: config.json -> keys of `model`; raises ValueError for what `model` cannot express.
    write: keys of `model` -> keys of config.json.
  """

  keys: tuple[str, ...]
  read: Callable[[Theirs], dict[str, Any]]
  write: Callable[[Ours], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Family:
  """What the config.json of a model_type says, and what it leaves out.

  Attributes:
    architecture: the class that transformers loads, without `ForCausalLM`'s siblings.
    parts: read and write the keys.
    defaults: of keys that a config.json may lack, as transformers has them.
    fixed: keys of `model` that are the same in all models of the family.
    only: further keys -> (the values that can be expressed, the first its default; why).
    ignored: further keys without effect on what the model computes.
    positions: the key with the longest row that the model was trained for.
  """

  architecture: str
  parts: tuple[Part, ...]
  defaults: Mapping[str, Any]
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  only: Mapping[str, tuple[tuple[Any, ...], str]] = dataclasses.field(default_factory=dict)
  ignored: tuple[str, ...] = ()
  positions: str = "max_position_embeddings"


def types_of(ours: Ours) -> tuple[str, ...]:
  """Returns the type of each layer, as in `model.layer_types`."""
  named, every = ours["layer_types"], ours["global_every"]
  if named:
    return tuple(named[layer % len(named)] for layer in range(ours["layers"]))
  layers = range(1, ours["layers"] + 1)
  full = [not ours["window"] or (every > 0 and layer % every == 0) for layer in layers]
  return tuple("full" if one else "sliding" for one in full)


_BIASES = {
  "none": (),
  "qkv": ("query", "key", "value"),
  "attention": ("query", "key", "value", "out"),
  "mlp": ("gate", "up", "down"),
  "all": ("query", "key", "value", "out", "up", "down"),
}


def bias_names(ours: Ours) -> tuple[str, ...]:
  """Returns the linear layers that have a bias by `model.biases`."""
  named = {one for part in ours["biases"].split(",") for one in _BIASES.get(part, (part,))}
  every = (*_BIASES["attention"], *(_BIASES["mlp"] if ours["gated"] else ("up", "down")))
  return tuple(name for name in every if name in named)


def yarn_factor(factor: float, scale: float = 1.0) -> float:
  """Returns YaRN's factor of the attention. Source: arXiv:2309.00071, equation 22."""
  return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def short(value: Any) -> str:
  """Returns a value as a message shows it."""
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:57]}..."
