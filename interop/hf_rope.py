"""Rotary positions in a config.json, in both notations.

transformers 4.57 reads `rope_theta` and `rope_scaling`; version 5 reads `rope_parameters`, which
has the base in it and, in families with two kinds of layers, an object for each kind. A file with
both must say the same twice; both are written.
"""

from collections.abc import Callable, Mapping
from typing import Any

from interop.hf_family import Ours, Part, Theirs, short, yarn_factor
from interop.hf_parts import head_size_of
from runtime import forms
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


ORIGINAL = "original_max_position_embeddings"
_YARN = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attention_factor"}


def _read_linear(rope: Mapping[str, Any], config: Theirs) -> tuple:
  return "linear", {"factor": float(*numbers(rope, ("factor",)))}


def _read_dynamic(rope: Mapping[str, Any], config: Theirs) -> tuple:
  """The length from which it scales is the longest row, whatever the object says."""
  [factor] = numbers(rope, ("factor",))
  [original] = numbers(config, ("max_position_embeddings",))
  return "dynamic", {"factor": float(factor), "original_length": original}


def _original(rope: Mapping[str, Any], config: Theirs) -> float:
  found = config.get(ORIGINAL) or rope.get(ORIGINAL) or config.get("max_position_embeddings")
  return numbers({ORIGINAL: found}, (ORIGINAL,))[0]


def _read_yarn(rope: Mapping[str, Any], config: Theirs) -> tuple:
  original = _original(rope, config)
  if (factor := rope.get("factor")) is None:
    factor = numbers(config, ("max_position_embeddings",))[0] / original
  given = [key for key in _YARN if rope.get(key) is not None]
  found = dict(zip(given, map(float, numbers(rope, tuple(given))), strict=True))
  one, every = rope.get("mscale"), rope.get("mscale_all_dim")
  if one and every and "attention_factor" not in found:
    found["attention_factor"] = yarn_factor(factor, one) / yarn_factor(factor, every)
  if rope.get("truncate") is not None:
    found["truncate"] = bool(rope["truncate"])
  factor = float(*numbers({"factor": factor}, ("factor",)))
  return "yarn", {"factor": factor, "original_length": original, **found}


def _read_longrope(rope: Mapping[str, Any], config: Theirs) -> tuple:
  """The factor is the ratio of the two lengths wherever the file has both beside the object."""
  original, found = _original(rope, config), {}
  for ours, theirs in (("short_factors", "short_factor"), ("long_factors", "long_factor")):
    if not isinstance(rope.get(theirs), (list, tuple)):
      raise ValueError(f"rope_scaling: {theirs}={short(rope.get(theirs))}: a list is needed")
    every = dict(enumerate(rope[theirs]))
    found[ours] = tuple(map(float, numbers(every, tuple(every))))
  if rope.get("attention_factor") is not None:
    found["attention_factor"] = float(*numbers(rope, ("attention_factor",)))
  elif rope.get("factor") is not None and not config.get(ORIGINAL):
    found["factor"] = float(*numbers(rope, ("factor",)))
  else:
    found["factor"] = numbers(config, ("max_position_embeddings",))[0] / original
  return "longrope", {"original_length": original, **found}


# rope_type -> (its keys; (their object, config.json) -> model.rotary_scaling).
READ: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], Theirs], tuple]]] = {
  DEFAULT: ((), lambda rope, config: ()),
  "llama3": (_LLAMA_3, _read_llama3),
  "linear": (("factor",), _read_linear),
  "dynamic": (("factor", ORIGINAL), _read_dynamic),
  "yarn": (
    ("factor", ORIGINAL, *_YARN, "mscale", "mscale_all_dim", "truncate"),
    _read_yarn,
  ),
  "longrope": (
    ("factor", ORIGINAL, "short_factor", "long_factor", "attention_factor"),
    _read_longrope,
  ),
}


def write_scaling(scaling: tuple) -> dict[str, Any]:
  """Returns the object of a `model.rotary_scaling` with its rope_type."""
  if not scaling:
    return {"rope_type": DEFAULT}
  if not isinstance(scaling[0], str):
    return {"rope_type": "llama3", **_write_llama3(scaling)}
  kind, ours = scaling
  if kind == "llama3":
    names = ("factor", "low", "high", "original_length")
    return {"rope_type": kind, **_write_llama3(tuple(ours[name] for name in names))}
  found = {"rope_type": kind}
  if kind == "longrope":
    found |= {f"{name}_factor": [*ours[f"{name}_factors"]] for name in ("short", "long")}
  else:
    found["factor"] = ours["factor"]
    found |= {key: ours[key] for key in (*_YARN, "truncate") if key in ours}
  if kind == "yarn":
    found[ORIGINAL] = int(ours["original_length"])
  if "attention_factor" in ours:
    found["attention_factor"] = ours["attention_factor"]
  return found


def _lengths(scaling: tuple) -> dict[str, int]:
  """Returns the lengths that a kind of scaling reads beside its object."""
  kind, ours = scaling if scaling and isinstance(scaling[0], str) else ("", {})
  if kind == "dynamic":
    return {"max_position_embeddings": int(ours["original_length"])}
  if kind != "longrope":
    return {}
  longest = round(ours["original_length"] * ours["factor"]) if "factor" in ours else None
  found = {ORIGINAL: int(ours["original_length"])}
  return found | ({"max_position_embeddings": longest} if longest else {})


def numbers(rope: Mapping[str, Any], keys: tuple[str, ...]) -> list[float]:
  """Returns the values of keys; raises ValueError for one that is no number above 0."""
  for key in keys:
    if not forms.ABOVE_0.fits(rope.get(key)):
      raise ValueError(f"rope_scaling: {key}={short(rope.get(key))}: a number above 0 is needed")
  return [rope[key] for key in keys]


def _base_and_scaling(
  given: Any, config: Theirs, theta: Any, *, partial: bool = False
) -> tuple[float, tuple]:
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
  if share not in (None, 1, 1.0) and not partial:
    raise ValueError(
      f"partial_rotary_factor={short(share)}: transformers rotates whole heads in this family; "
      f"given such a factor version 4.57 fails, and 5 fails or ignores it, so the model's own "
      f"logits are not known. Delete it if whole heads are meant"
    )
  [base] = numbers({"rope_theta": rope.get("rope_theta", theta)}, ("rope_theta",))
  return float(base), read(rope, config)


def _both(
  config: Theirs, new: Any, default: float, *, partial: bool = False
) -> tuple[float, tuple]:
  """Returns (base, model.rotary_scaling) of a file that has one of the notations, or both.

  Args:
    config: the file.
    new: the object of version 5; None: there is none.
    default: the base where the file names none.
    partial: whether the family can rotate a part of each head.
  """
  theta, old = config.get("rope_theta"), config.get("rope_scaling")
  if new is None:
    return _base_and_scaling(old, config, default if theta is None else theta, partial=partial)
  found = _base_and_scaling(new, config, default if theta is None else theta, partial=partial)
  again = found if old is None else _base_and_scaling(old, config, found[0], partial=partial)
  if again != found or theta not in (None, found[0]):
    raise ValueError("rope_theta or rope_scaling contradicts rope_parameters")
  return found


def rope(default: float = 10_000.0, *, partial: bool = False, older: bool = False) -> Part:
  """Returns the part of one kind of rotary positions for all layers.

  Args:
    default: the base where a file names none.
    partial: whether the family can rotate a part of each head.
    older: whether version 4.57 wants `type` in place of `rope_type` from the family.
  """

  def read(config: Theirs) -> dict[str, Any]:
    new = config.get("rope_parameters")
    base, scaling = _both(config, new, default, partial=partial)
    found = {"rotary_base": base, "rotary_scaling": scaling}
    return {**found, "rotary_size": _rotary_size(config, new)} if partial else found

  def write(model: Ours) -> dict[str, Any]:
    found = _write_partial(model) if partial else _write(model)
    if older and found["rope_scaling"]:
      scaling = dict(found["rope_scaling"])
      if scaling["rope_type"] == "longrope":  # of which it wants three keys alone
        scaling.pop("factor", None)
      found["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    return found

  return Part((*KEYS, ORIGINAL), read, write)


def _rotary_size(config: Theirs, new: Any) -> int:
  share = (new or {}).get("partial_rotary_factor", config.get("partial_rotary_factor"))
  if share is None or share == 1:
    return 0
  [share] = numbers({"partial_rotary_factor": share}, ("partial_rotary_factor",))
  return int(head_size_of(config) * share)


def _write(model: Ours) -> dict[str, Any]:
  base, scaling = model["rotary_base"], tuple(model["rotary_scaling"])
  one, lengths = write_scaling(scaling), _lengths(scaling)
  new = {**one, **{key: value for key, value in lengths.items() if key == ORIGINAL}}
  if one["rope_type"] == "longrope" and "factor" in scaling[1]:
    # The ratio of the lengths again, without which transformers warns.
    one, new = ({**x, "factor": scaling[1]["factor"]} for x in (one, new))
  return {
    "rope_theta": base,
    "rope_scaling": one if scaling else None,
    "rope_parameters": {**new, "rope_theta": base},
    **lengths,
  }


def _write_partial(model: Ours) -> dict[str, Any]:
  found, size = _write(model), model["rotary_size"] or model["head_size"]
  share = size / model["head_size"]
  found["rope_parameters"] = {**found["rope_parameters"], "partial_rotary_factor": share}
  return {**found, "partial_rotary_factor": share}


def rope_by_layer(default: float, local_default: float, local_key: str = "") -> Part:
  """Returns Gemma 3's part: layers with a window have a base and a scaling of their own.

  The notation of version 4.57 has no such scaling: files that need it are for version 5.

  Args:
    default: the base where a file names none.
    local_default: that of layers with a window.
    local_key: of it in the notation of version 4.57; "": there both kinds have one base (OLMo 3).
  """

  def read(config: Theirs) -> dict[str, Any]:
    new = config.get("rope_parameters")
    if new is not None and not (isinstance(new, Mapping) and {*new} <= {FULL, SLIDING}):
      raise ValueError(f"rope_parameters={short(new)}: an object with {FULL}, {SLIDING} is needed")
    base, scaling = _both(config, None if new is None else new.get(FULL), default)
    local = config.get(local_key) if local_key else config.get("rope_theta")
    given = (new or {}).get(SLIDING)
    found, local_scaling = _base_and_scaling(
      given, config, local_default if local is None else local
    )
    if local_key and local not in (None, found):
      raise ValueError(f"{local_key} contradicts rope_parameters")
    of_local = {"local_rotary_base": found, "local_rotary_scaling": local_scaling}
    return {"rotary_base": base, "rotary_scaling": scaling, **of_local}

  def write(model: Ours) -> dict[str, Any]:
    of = "local_" if model["local_rotary_base"] else ""
    every, local = (
      _write({key: model[f"{one}{key}"] for key in ("rotary_base", "rotary_scaling")})
      for one in ("", of)
    )
    by_layer = {FULL: every["rope_parameters"], SLIDING: local["rope_parameters"]}
    named = {local_key: local["rope_theta"]} if local_key else {}
    return {**local, **every, "rope_parameters": by_layer, **named}

  return Part((*KEYS, *filter(None, [local_key])), read, write)
