"""Rotary positions in a config.json, in both notations.

transformers 4.57 reads `rope_theta` and `rope_scaling`; version 5 reads `rope_parameters`, which
has the base in it and, in families with two kinds of layers, an object for each kind. A file with
both must say the same twice; both are written.
"""

from collections.abc import Callable, Mapping
from typing import Any

from interop.hf_config import Ours, Part, Theirs, short
from runtime.suggest import nearest

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT = "default"
KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_LLAMA_3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _read_llama3(rope: Mapping[str, Any], config: Theirs) -> tuple[float, ...]:
  lengths = {"original_max_position_embeddings": config.get("max_position_embeddings")}
  return tuple(map(float, numbers({**lengths, **rope}, _LLAMA_3)))


def _write_llama3(scaling: tuple[float, ...]) -> dict[str, Any]:
  factor, low, high, length = scaling
  return dict(zip(_LLAMA_3, (factor, low, high, int(length)), strict=True))


# rope_type -> (its keys; (their object, config.json) -> model.rotary_scaling).
READ: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], Theirs], tuple]]] = {
  DEFAULT: ((), lambda rope, config: ()),
  "llama3": (_LLAMA_3, _read_llama3),
}


def write_scaling(scaling: tuple) -> dict[str, Any]:
  """Returns the object of a `model.rotary_scaling` with its rope_type."""
  if not scaling:
    return {"rope_type": DEFAULT}
  return {"rope_type": "llama3", **_write_llama3(scaling)}


def numbers(rope: Mapping[str, Any], keys: tuple[str, ...]) -> list[float]:
  """Returns the values of keys; raises ValueError for one that is no number above 0."""
  for key in keys:
    if type(rope.get(key)) not in (int, float) or not 0 < rope[key] < float("inf"):
      raise ValueError(f"rope_scaling: {key}={short(rope.get(key))}: a number above 0 is needed")
  return [rope[key] for key in keys]


def _base_and_scaling(given: Any, config: Theirs, theta: Any) -> tuple[float, tuple]:
  """Returns (base, model.rotary_scaling) of one object; null: no scaling."""
  rope = {} if given is None else given
  if not isinstance(rope, Mapping):
    raise ValueError(f"rope_scaling={short(given)}: an object or null is needed")
  kind = rope.get("rope_type", rope.get("type", DEFAULT))
  if kind not in READ:
    raise ValueError(
      f"rope_type={short(kind)}: known are {', '.join(READ)}{nearest(str(kind), READ)}"
    )
  keys, read = READ[kind]
  unknown = {*rope} - {*keys, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
  if unknown := sorted(key for key in unknown if rope[key] is not None):
    raise ValueError(f"rope_scaling: {', '.join(unknown)}: not known for rope_type {kind!r}")
  share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
  if share not in (None, 1, 1.0):
    raise ValueError(f"partial_rotary_factor={short(share)}: only 1 is read")
  [base] = numbers({"rope_theta": rope.get("rope_theta", theta)}, ("rope_theta",))
  return float(base), read(rope, config)


def _both(config: Theirs, new: Any, default: float) -> tuple[float, tuple]:
  """Returns (base, model.rotary_scaling) of a file that has one of the notations, or both.

  Args:
    config: the file.
    new: the object of version 5; None: there is none.
    default: the base where the file names none.
  """
  theta, old = config.get("rope_theta"), config.get("rope_scaling")
  if new is None:
    return _base_and_scaling(old, config, default if theta is None else theta)
  found = _base_and_scaling(new, config, default if theta is None else theta)
  again = found if old is None else _base_and_scaling(old, config, found[0])
  if again != found or theta not in (None, found[0]):
    raise ValueError("rope_theta or rope_scaling contradicts rope_parameters")
  return found


def rope(default: float = 10_000.0) -> Part:
  """Returns the part of one kind of rotary positions for all layers; `default` is the base."""

  def read(config: Theirs) -> dict[str, Any]:
    base, scaling = _both(config, config.get("rope_parameters"), default)
    return {"rotary_base": base, "rotary_scaling": scaling}

  return Part(KEYS, read, _write)


def _write(model: Ours) -> dict[str, Any]:
  base, scaling = model["rotary_base"], tuple(model["rotary_scaling"])
  one = write_scaling(scaling)
  return {
    "rope_theta": base,
    "rope_scaling": one if scaling else None,
    "rope_parameters": {**one, "rope_theta": base},
  }


def rope_by_layer(default: float, local_default: float) -> Part:
  """Returns Gemma 3's part: layers with a window have a base of their own, and no scaling."""

  def read(config: Theirs) -> dict[str, Any]:
    new = config.get("rope_parameters")
    if new is not None and not (isinstance(new, Mapping) and {*new} <= {FULL, SLIDING}):
      raise ValueError(f"rope_parameters={short(new)}: an object with {FULL}, {SLIDING} is needed")
    base, scaling = _both(config, None if new is None else new.get(FULL), default)
    local = config.get("rope_local_base_freq")
    given = (new or {}).get(SLIDING)
    found, local_scaling = _base_and_scaling(
      given, config, local_default if local is None else local
    )
    if local_scaling:
      raise ValueError(f"rope_parameters: {SLIDING} is scaled; only {FULL} may be")
    if local not in (None, found):
      raise ValueError("rope_local_base_freq contradicts rope_parameters")
    return {"rotary_base": base, "rotary_scaling": scaling, "local_rotary_base": found}

  return Part((*KEYS, "rope_local_base_freq"), read, _write_by_layer)


def _write_by_layer(model: Ours) -> dict[str, Any]:
  local, found = model["local_rotary_base"] or model["rotary_base"], _write(model)
  return {
    **found,
    "rope_local_base_freq": local,
    "rope_parameters": {
      FULL: found["rope_parameters"],
      SLIDING: {"rope_type": DEFAULT, "rope_theta": local},
    },
  }
