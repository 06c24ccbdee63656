"""The parts that families are made of: keys of a config.json, read and written back.

Rotary positions stand in a file in one of two notations: transformers 4.57 reads `rope_theta` and
`rope_scaling`; version 5 reads `rope_parameters`, which has the base in it and, in families with
two kinds of layers, an object for each kind. A file with both must say the same twice; both are
written.

`hf_config.FORM` is checked before any part reads: lists, objects and texts are what they are.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from runtime import forms
from runtime.layer_kinds import is_sparse
from runtime.suggest import nearest

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


# ------------------------------ parts of one key ------------------------------


def short(value: Any) -> str:
  """Returns a value as a message shows it."""
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:57]}..."


def value_of(theirs: Theirs, key: str, form: forms.Kind = forms.SIZE) -> Any:
  """Returns a key's value; raises ValueError where it is missing or of another form."""
  if form.fits(value := theirs.get(key)):
    return value
  raise ValueError(f"{key}={short(value)}: {form.name} is needed")


def same(key: str, ours: str, kind: type = int) -> Part:
  """Returns the part of a key that both have with the same value.

  Args:
    key: in config.json.
    ours: in `model`.
    kind: int (a size), float (at least 0) or bool.
  """
  form = {int: forms.SIZE, float: forms.AT_LEAST_0, bool: forms.FLAG}[kind]
  return Part(
    (key,),
    lambda theirs: {ours: kind(value_of(theirs, key, form))},
    lambda model: {key: model[ours]},
  )


def optional(key: str, ours: str, form: forms.Kind = forms.AT_LEAST_0) -> Part:
  """Returns the part of a number of which null turns something off, and 0 is ours."""

  def read(theirs: Theirs) -> dict[str, Any]:
    return {ours: 0.0 if theirs.get(key) is None else float(value_of(theirs, key, form))}

  return Part((key,), read, lambda model: {key: model[ours] or None})


def choice(key: str, ours: str, table: Mapping[str, str]) -> Part:
  """Returns the part of a key with names; of several names for ours, the first is written."""

  def read(theirs: Theirs) -> dict[str, Any]:
    value = theirs.get(key)
    if value not in table:
      known = ", ".join(table)
      raise ValueError(
        f"{key}={short(value)}: one of {known} is needed{nearest(str(value), table)}"
      )
    return {ours: table[value]}

  def write(model: Ours) -> dict[str, Any]:
    names = [name for name, value in table.items() if value == model[ours]]
    return {key: names[0] if names else model[ours]}

  return Part((key,), read, write)


def only(key: str, value: Any) -> Part:
  """Returns the part of a key that says what all models of a family have."""

  def read(theirs: Theirs) -> dict[str, Any]:
    if theirs.get(key) in (None, value):
      return {}
    raise ValueError(f"{key}={short(theirs[key])}: only {value} is read")

  return Part((key,), read, lambda model: {key: value})


def constant(**ours: Any) -> Part:
  """Returns the part of keys of `model` that no key of config.json determines."""
  return Part((), lambda theirs: ours, lambda model: {})


ACTIVATIONS = {
  "silu": "silu",
  "swish": "silu",
  "gelu_pytorch_tanh": "gelu",
  "gelu_new": "gelu",
  "gelu_fast": "gelu",
  "gelu_accurate": "gelu",
  "gelu": "gelu_erf",
  "gelu_python": "gelu_erf",
  "quick_gelu": "gelu_sigmoid",
  "relu": "relu",
  "relu2": "relu_squared",
}

# ------------------------------ heads, scales and biases ------------------------------


def head_size_of(theirs: Theirs, width: str = "hidden_size", heads: str = "num_attention_heads"):
  """Returns the size of a head; null: the width over the heads."""
  if theirs.get("head_dim") is not None:
    return value_of(theirs, "head_dim")
  size, count = value_of(theirs, width), value_of(theirs, heads)
  if size % count:
    raise ValueError(
      f"{width}={size} is not a multiple of {heads}={count}, and head_dim is missing"
    )
  return size // count


def _kv_heads(theirs: Theirs) -> dict[str, Any]:
  """Null: as many as there are query heads."""
  missing = theirs.get("num_key_value_heads") is None
  return {"kv_heads": value_of(theirs, f"num_{'attention' if missing else 'key_value'}_heads")}


KV_HEADS = Part(
  ("num_key_value_heads",), _kv_heads, lambda model: {"num_key_value_heads": model["kv_heads"]}
)
HEAD_SIZE = Part(
  ("head_dim",),
  lambda theirs: {"head_size": head_size_of(theirs)},
  lambda model: {"head_dim": model["head_size"]},
)
# Scores are scaled by the size of a head.
SCALE = Part((), lambda theirs: {"attention_scale": head_size_of(theirs) ** -0.5}, lambda model: {})
# Gemma's, by a number of its own.
QUERY_SCALE = Part(
  ("query_pre_attn_scalar",),
  lambda theirs: {
    "attention_scale": float(value_of(theirs, "query_pre_attn_scalar", forms.ABOVE_0)) ** -0.5
  },
  lambda model: {"query_pre_attn_scalar": _rounded(model["attention_scale"] ** -2)},
)


def _rounded(value: float) -> float | int:
  """Returns a number without the rounding error of a power, as an int where it is one."""
  near = round(value)
  return near if abs(value - near) < 1e-9 * abs(value) else value


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


def biases(*keys: str) -> Part:
  """Returns the part of biases: some of attention_bias and mlp_bias."""
  ours = {"attention_bias": "attention", "mlp_bias": "mlp"}

  def read(theirs: Theirs) -> dict[str, Any]:
    given = [ours[key] for key in keys if key in theirs and value_of(theirs, key, forms.FLAG)]
    return {"biases": ",".join(given) or "none"}

  def write(model: Ours) -> dict[str, Any]:
    names = bias_names(model)
    any_of = {"attention_bias": "out" in names, "mlp_bias": "down" in names}
    return {key: any_of[key] for key in keys}

  return Part(keys, read, write)


# In `attention_bias` alone, ONLY of `hf_config.py` says that there is no mlp_bias.
BIASES, MLP_BIASES = biases("attention_bias"), biases("attention_bias", "mlp_bias")

# ------------------------------ of GPT-2 ------------------------------


def _gpt_2_feedforward(theirs: Theirs) -> dict[str, Any]:
  if theirs.get("n_inner") is None:
    return {"feedforward_size": 4 * value_of(theirs, "n_embd")}
  return {"feedforward_size": value_of(theirs, "n_inner")}


def _gpt_2_heads(theirs: Theirs) -> dict[str, Any]:
  size, heads = head_size_of(theirs, "n_embd", "n_head"), value_of(theirs, "n_head")
  scale = size**-0.5 if value_of(theirs, "scale_attn_weights", forms.FLAG) else 1.0
  return {"heads": heads, "kv_heads": heads, "head_size": size, "attention_scale": scale}


GPT_2_FEEDFORWARD = Part(
  ("n_inner",), _gpt_2_feedforward, lambda model: {"n_inner": model["feedforward_size"]}
)
GPT_2_HEADS = Part(
  ("n_head", "scale_attn_weights"),
  _gpt_2_heads,
  lambda model: {
    "n_head": model["heads"],
    "scale_attn_weights": model["attention_scale"] != 1.0 or model["head_size"] == 1,
  },
)

# ------------------------------ windows and layer types ------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"


def types_of(ours: Ours) -> tuple[str, ...]:
  """Returns the type of each layer, as in `model.layer_types`."""
  named, every = ours["layer_types"], ours["global_every"]
  if named:
    return tuple(named[layer % len(named)] for layer in range(ours["layers"]))
  layers = range(1, ours["layers"] + 1)
  full = [not ours["window"] or (every > 0 and layer % every == 0) for layer in layers]
  return tuple("full" if one else "sliding" for one in full)


def _by_layer(theirs: Theirs, window: int | None, is_full: Callable[[int], bool]) -> dict[str, Any]:
  """Returns the keys of `model` for the attention of each layer.

  Args:
    theirs: a config.json, which may have `layer_types`.
    window: of the layers that have one; None, 0: they have none.
    is_full: whether a layer has no window, where the file does not list them.

  Raises:
    ValueError: layer types that are not known, or not one for each layer.
  """
  kinds, layers = theirs.get("layer_types"), value_of(theirs, "num_hidden_layers")
  if kinds is None:
    kinds = [FULL if is_full(layer) else SLIDING for layer in range(layers)]
  if len(kinds) != layers:
    raise ValueError(f"layer_types={short(kinds)}: one for each of the {layers} layers is needed")
  for kind in dict.fromkeys(kinds):
    if kind not in (FULL, SLIDING):
      raise ValueError(f"layer_types: {short(kind)}: one of {FULL}, {SLIDING} is needed")
  found = {"window": window, "global_every": 0, "layer_types": ()}
  if SLIDING not in kinds or not window:
    return {**found, "window": 0}
  if FULL not in kinds:
    return found
  every = kinds.index(FULL) + 1
  if all((kind == FULL) == ((layer + 1) % every == 0) for layer, kind in enumerate(kinds)):
    return {**found, "global_every": every}
  return {**found, "layer_types": tuple(kind.partition("_")[0] for kind in kinds)}


def _by_layer_back(model: Ours) -> dict[str, Any]:
  kinds = [f"{one.partition('_')[0]}_attention" for one in types_of(model)]
  return {"sliding_window": model["window"] or None, "layer_types": kinds}


def _window(theirs: Theirs) -> int | None:
  return None if theirs.get("sliding_window") is None else value_of(theirs, "sliding_window")


def _used_window(theirs: Theirs) -> int | None:
  return _window(theirs) if value_of(theirs, "use_sliding_window", forms.FLAG) else None


# Mistral, Phi-3: all layers have the window, or none.
WINDOW = Part(
  ("sliding_window",),
  lambda theirs: {"window": _window(theirs) or 0},
  lambda model: {"sliding_window": model["window"] or None},
)
# Mixtures of Qwen 3, unlike its dense models.
QWEN_3_MOE_WINDOW = Part(
  ("use_sliding_window", "sliding_window"),
  lambda theirs: {"window": _used_window(theirs) or 0},
  lambda model: {"use_sliding_window": bool(model["window"]), **WINDOW.write(model)},
)


def _qwen_window(theirs: Theirs) -> dict[str, Any]:
  """In the layers from max_window_layers on."""
  window = _used_window(theirs)

  def is_full(layer: int) -> bool:
    return not window or layer < value_of(theirs, "max_window_layers", forms.COUNT)

  return _by_layer(theirs, window, is_full)


def _qwen_window_back(model: Ours) -> dict[str, Any]:
  found = _by_layer_back(model)
  kinds = found["layer_types"]
  first = kinds.index(SLIDING) if SLIDING in kinds else len(kinds)
  return {"use_sliding_window": bool(model["window"]), "max_window_layers": first, **found}


QWEN_WINDOW = Part(
  ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
  _qwen_window,
  _qwen_window_back,
)


def alternating(every: int, *names: str) -> Part:
  """Returns the part of models with full attention in every n-th layer, and windows in the others.

  Args:
    every: n where a file has none of these names.
    *names: keys with n, of files that do not list the layers.
  """

  def read(theirs: Theirs) -> dict[str, Any]:
    given = next((name for name in names if name in theirs), "")

    def is_full(layer: int) -> bool:
      return (layer + 1) % (value_of(theirs, given) if given else every) == 0

    return _by_layer(theirs, _window(theirs), is_full)

  return Part(("sliding_window", "layer_types", *names), read, _by_layer_back)


def _smollm_3(theirs: Theirs) -> dict[str, Any]:
  """SmolLM 3: layers without rotary positions, which may have a window."""
  rotated, layers = theirs.get("no_rope_layers"), value_of(theirs, "num_hidden_layers")
  if rotated is None:
    every = value_of(theirs, "no_rope_layer_interval")
    rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
  if len(rotated) != layers or not {*rotated} <= {0, 1}:
    raise ValueError(
      f"no_rope_layers={short(rotated)}: 0 or 1 for each of the {layers} layers is needed"
    )
  window = _used_window(theirs)
  found = _by_layer(theirs, window, lambda layer: bool(rotated[layer]) or not window)
  if all(rotated):
    return found
  types = types_of({**found, "layers": layers})
  types = [one if rope else f"{one}_unrotated" for one, rope in zip(types, rotated, strict=True)]
  return {**found, "global_every": 0, "layer_types": tuple(types)}


SMOLLM_3 = Part(
  (
    *("no_rope_layers", "no_rope_layer_interval"),
    *("use_sliding_window", "sliding_window", "layer_types"),
  ),
  _smollm_3,
  lambda model: {
    "no_rope_layers": [int("unrotated" not in one) for one in types_of(model)],
    "use_sliding_window": bool(model["window"]),
    **_by_layer_back(model),
  },
)

# ------------------------------ rotary positions ------------------------------

UNSCALED = "default"
ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_LLAMA_3 = {
  "factor": "factor",
  "low": "low_freq_factor",
  "high": "high_freq_factor",
  "original_length": ORIGINAL,
}


def named_scaling(scaling: tuple) -> tuple[str, dict[str, Any]]:
  """Returns the rope_type of a `model.rotary_scaling`, and its numbers by our names."""
  if not scaling:
    return UNSCALED, {}
  if isinstance(scaling[0], str):
    return scaling[0], dict(scaling[1])
  return "llama3", dict(zip(_LLAMA_3, scaling, strict=True))


def yarn_factor(factor: float, scale: float = 1.0) -> float:
  """Returns YaRN's factor of the attention. Source: arXiv:2309.00071, equation 22."""
  return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _numbers(rope: Mapping[str, Any], *keys: str) -> list[float]:
  """Returns the values of keys; raises ValueError for one that is no number above 0."""
  for key in keys:
    if not forms.ABOVE_0.fits(rope.get(key)):
      raise ValueError(f"rope_scaling: {key}={short(rope.get(key))}: a number above 0 is needed")
  return [rope[key] for key in keys]


def _original(rope: Mapping[str, Any], theirs: Theirs) -> float:
  found = theirs.get(ORIGINAL) or rope.get(ORIGINAL) or theirs.get(LONGEST)
  return _numbers({ORIGINAL: found}, ORIGINAL)[0]


def _llama3(rope: Mapping[str, Any], theirs: Theirs) -> tuple:
  return tuple(map(float, _numbers({ORIGINAL: theirs.get(LONGEST), **rope}, *_LLAMA_3.values())))


def _linear(rope: Mapping[str, Any], theirs: Theirs) -> tuple:
  return "linear", {"factor": float(*_numbers(rope, "factor"))}


def _dynamic(rope: Mapping[str, Any], theirs: Theirs) -> tuple:
  """The length from which it scales is the longest row, whatever the object says."""
  [factor], [original] = _numbers(rope, "factor"), _numbers(theirs, LONGEST)
  return "dynamic", {"factor": float(factor), "original_length": original}


def _yarn(rope: Mapping[str, Any], theirs: Theirs) -> tuple:
  original = _original(rope, theirs)
  if (factor := rope.get("factor")) is None:
    factor = _numbers(theirs, LONGEST)[0] / original
  given = ("beta_fast", "beta_slow", "attention_factor")
  given = [key for key in given if rope.get(key) is not None]
  found = dict(zip(given, map(float, _numbers(rope, *given)), strict=True))
  one, every = rope.get("mscale"), rope.get("mscale_all_dim")
  if one and every and "attention_factor" not in found:
    found["attention_factor"] = yarn_factor(factor, one) / yarn_factor(factor, every)
  if rope.get("truncate") is not None:
    found["truncate"] = rope["truncate"]
  return "yarn", {"factor": float(factor), "original_length": original, **found}


def _longrope(rope: Mapping[str, Any], theirs: Theirs) -> tuple:
  """The factor is the ratio of the two lengths wherever the file has both beside the object."""
  original, found = _original(rope, theirs), {}
  for ours, key in (("short_factors", "short_factor"), ("long_factors", "long_factor")):
    if not isinstance(rope.get(key), (list, tuple)):
      raise ValueError(f"rope_scaling: {key}={short(rope.get(key))}: a list is needed")
    every = dict(enumerate(rope[key]))
    found[ours] = tuple(map(float, _numbers(every, *every)))
  if rope.get("attention_factor") is not None:
    found["attention_factor"] = float(*_numbers(rope, "attention_factor"))
  elif rope.get("factor") is not None and not theirs.get(ORIGINAL):
    found["factor"] = float(*_numbers(rope, "factor"))
  else:
    found["factor"] = _numbers(theirs, LONGEST)[0] / original
  return "longrope", {"original_length": original, **found}


@dataclasses.dataclass(frozen=True)
class Scaling:
  """A rope_type.

  Attributes:
    numbers: our name of each of its numbers -> their key.
    read: (their object, config.json) -> model.rotary_scaling.
    read_alone: keys that are read besides, and not written.
  """

  numbers: Mapping[str, str]
  read: Callable[[Mapping[str, Any], Theirs], tuple]
  read_alone: tuple[str, ...] = ()


_FACTOR = {"factor": "factor"}
_YARN = {key: key for key in ("beta_fast", "beta_slow", "attention_factor", "truncate")}
_LONGROPE = {
  "short_factors": "short_factor",
  "long_factors": "long_factor",
  "attention_factor": "attention_factor",
}
SCALINGS = {
  UNSCALED: Scaling({}, lambda rope, theirs: ()),
  "llama3": Scaling(_LLAMA_3, _llama3),
  "linear": Scaling(_FACTOR, _linear),
  "dynamic": Scaling(_FACTOR, _dynamic, (ORIGINAL,)),
  "yarn": Scaling(
    {**_FACTOR, "original_length": ORIGINAL, **_YARN}, _yarn, ("mscale", "mscale_all_dim")
  ),
  "longrope": Scaling({**_LONGROPE, **_FACTOR}, _longrope, (ORIGINAL,)),
}


def _base_and_scaling(
  given: Mapping[str, Any] | None, theirs: Theirs, theta: Any, *, partial: bool = False
) -> tuple[float, tuple]:
  """Returns (base, model.rotary_scaling) of one object; null: no scaling."""
  rope = given or {}
  kind = rope.get("rope_type", rope.get("type", UNSCALED))
  if kind not in SCALINGS:
    raise ValueError(
      f"rope_type={short(kind)}: known are {', '.join(SCALINGS)}{nearest(str(kind), SCALINGS)}"
    )
  scaling = SCALINGS[kind]
  known = {*scaling.numbers.values(), *scaling.read_alone}
  known |= {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
  if unknown := sorted(key for key in {*rope} - known if rope[key] is not None):
    raise ValueError(f"rope_scaling: {', '.join(unknown)}: not known for rope_type {kind!r}")
  share = rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor"))
  if share not in (None, 1, 1.0) and not partial:
    raise ValueError(
      f"partial_rotary_factor={short(share)}: transformers rotates whole heads in this family; "
      f"given such a factor version 4.57 fails, and 5 fails or ignores it, so the model's own "
      f"logits are not known. Delete it if whole heads are meant"
    )
  [base] = _numbers({"rope_theta": rope.get("rope_theta", theta)}, "rope_theta")
  return float(base), scaling.read(rope, theirs)


def _both(
  theirs: Theirs, new: Any, default: float, *, partial: bool = False
) -> tuple[float, tuple]:
  """Returns (base, model.rotary_scaling) of a file that has one of the notations, or both.

  Args:
    theirs: the file.
    new: the object of version 5; None: there is none.
    default: the base where the file names none.
    partial: whether the family can rotate a part of each head.
  """
  theta, old = theirs.get("rope_theta"), theirs.get("rope_scaling")
  base = default if theta is None else theta
  if new is None:
    return _base_and_scaling(old, theirs, base, partial=partial)
  found = _base_and_scaling(new, theirs, base, partial=partial)
  again = found if old is None else _base_and_scaling(old, theirs, found[0], partial=partial)
  if again != found or theta not in (None, found[0]):
    raise ValueError("rope_theta or rope_scaling contradicts rope_parameters")
  return found


def rope(
  default: float = 10_000.0,
  *,
  partial: bool = False,
  older: bool = False,
  unstated: Mapping[str, Any] | None = None,
) -> Part:
  """Returns the part of one kind of rotary positions for all layers.

  Args:
    default: the base where a file names none.
    partial: whether the family can rotate a part of each head.
    older: whether version 4.57 wants `type` in place of `rope_type` from the family.
    unstated: rope_scaling of a file that says nothing of it.
  """

  def read(theirs: Theirs) -> dict[str, Any]:
    new = theirs.get("rope_parameters")
    if unstated and new is None and theirs.get("rope_scaling") is None:
      theirs = {**theirs, "rope_scaling": unstated}
    base, scaling = _both(theirs, new, default, partial=partial)
    found = {"rotary_base": base, "rotary_scaling": scaling}
    return {**found, "rotary_size": _rotary_size(theirs, new)} if partial else found

  def write(model: Ours) -> dict[str, Any]:
    found = _write_rotary(model)
    if partial:
      share = (model["rotary_size"] or model["head_size"]) / model["head_size"]
      found["partial_rotary_factor"] = found["rope_parameters"]["partial_rotary_factor"] = share
    if older and found["rope_scaling"]:
      scaling = dict(found["rope_scaling"])
      if scaling["rope_type"] == "longrope":  # of which it wants three keys alone
        scaling.pop("factor", None)
      found["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    return found

  return Part((*ROPE_KEYS, ORIGINAL), read, write)


def _rotary_size(theirs: Theirs, new: Any) -> int:
  share = (new or {}).get("partial_rotary_factor", theirs.get("partial_rotary_factor"))
  if share is None or share == 1:
    return 0
  [share] = _numbers({"partial_rotary_factor": share}, "partial_rotary_factor")
  return int(head_size_of(theirs) * share)


def _write_rotary(model: Ours) -> dict[str, Any]:
  base, (kind, ours) = model["rotary_base"], named_scaling(tuple(model["rotary_scaling"]))
  scaling = {"rope_type": kind}
  for name, key in SCALINGS[kind].numbers.items():
    if name in ours:
      value = int(ours[name]) if name == "original_length" else ours[name]
      scaling[key] = [*value] if isinstance(value, tuple) else value
  # Lengths that are read beside the object.
  lengths, new = {}, {**scaling, "rope_theta": base}
  if kind == "dynamic":
    lengths = {LONGEST: int(ours["original_length"])}
  if kind == "longrope":
    lengths = {ORIGINAL: int(ours["original_length"])}
    new |= lengths
    if "factor" in ours:
      lengths[LONGEST] = round(ours["original_length"] * ours["factor"])
  return {
    "rope_theta": base,
    "rope_scaling": scaling if kind != UNSCALED else None,
    "rope_parameters": new,
    **lengths,
  }


def rope_by_layer(default: float, local_default: float, local_key: str = "") -> Part:
  """Returns Gemma 3's part: layers with a window have a base and a scaling of their own.

  The notation of version 4.57 has no such scaling: files that need it are for version 5.

  Args:
    default: the base where a file names none.
    local_default: that of layers with a window.
    local_key: of it in the notation of version 4.57; "": there both kinds have one base (OLMo 3).
  """

  def read(theirs: Theirs) -> dict[str, Any]:
    new = theirs.get("rope_parameters")
    if new is not None and not {*new} <= {FULL, SLIDING}:
      raise ValueError(f"rope_parameters={short(new)}: an object with {FULL}, {SLIDING} is needed")
    base, scaling = _both(theirs, None if new is None else new.get(FULL), default)
    local = theirs.get(local_key or "rope_theta")
    found, local_scaling = _base_and_scaling(
      (new or {}).get(SLIDING), theirs, local_default if local is None else local
    )
    if local_key and local not in (None, found):
      raise ValueError(f"{local_key} contradicts rope_parameters")
    of_local = {"local_rotary_base": found, "local_rotary_scaling": local_scaling}
    return {"rotary_base": base, "rotary_scaling": scaling, **of_local}

  def write(model: Ours) -> dict[str, Any]:
    of = "local_" if model["local_rotary_base"] else ""
    every, local = (
      _write_rotary({key: model[f"{one}{key}"] for key in ("rotary_base", "rotary_scaling")})
      for one in ("", of)
    )
    by_layer = {FULL: every["rope_parameters"], SLIDING: local["rope_parameters"]}
    named = {local_key: local["rope_theta"]} if local_key else {}
    return {**local, **every, "rope_parameters": by_layer, **named}

  return Part((*ROPE_KEYS, *filter(None, [local_key])), read, write)


# ------------------------------ multi-head latent attention ------------------------------

_LATENT_SIZES = {
  "kv_lora_rank": "latent_size",
  "qk_rope_head_dim": "rotary_size",
  "v_head_dim": "value_head_size",
}


def _read_latent(theirs: Theirs) -> dict[str, Any]:
  heads = value_of(theirs, "num_attention_heads")
  if theirs.get("num_key_value_heads") not in (None, heads):
    raise ValueError(
      f"num_key_value_heads={short(theirs['num_key_value_heads'])}: each of the {heads} heads has "
      f"keys and values of its own"
    )
  rank, size = theirs.get("q_lora_rank"), _latent_head_size(theirs)
  # Of a file that transformers has written: that of the rotated dims, and the sum.
  for key, follows in (("head_dim", theirs["qk_rope_head_dim"]), ("qk_head_dim", size)):
    if theirs.get(key) not in (None, follows):
      raise ValueError(
        f"{key}={short(theirs[key])}: it would be {follows}, by qk_rope_head_dim and "
        f"qk_nope_head_dim; delete it"
      )
  return {
    "heads": heads,
    "kv_heads": heads,
    "query_latent_size": 0 if rank is None else value_of(theirs, "q_lora_rank"),
    "head_size": size,
    **{ours: value_of(theirs, key) for key, ours in _LATENT_SIZES.items()},
  }


def _latent_head_size(theirs: Theirs) -> int:
  return sum(value_of(theirs, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))


def _write_latent(model: Ours) -> dict[str, Any]:
  heads = model["heads"]
  return {
    "num_attention_heads": heads,
    "num_key_value_heads": heads,
    "q_lora_rank": model["query_latent_size"] or None,
    "qk_nope_head_dim": model["head_size"] - model["rotary_size"],
    **{key: model[ours] for key, ours in _LATENT_SIZES.items()},
  }


LATENT = Part(
  (
    *("num_attention_heads", "num_key_value_heads", "q_lora_rank", "qk_nope_head_dim"),
    *(*_LATENT_SIZES, "head_dim", "qk_head_dim"),
  ),
  _read_latent,
  _write_latent,
)
INTERLEAVE = Part(
  ("rope_interleave",),
  lambda theirs: {
    "rotary_pairs": "adjacent" if value_of(theirs, "rope_interleave", forms.FLAG) else "halves"
  },
  lambda model: {"rope_interleave": model["rotary_pairs"] == "adjacent"},
)

_PLAIN_ROPE = rope()


def _read_latent_rope(theirs: Theirs) -> dict[str, Any]:
  """With YaRN, scores are also scaled by the square of a factor that mscale_all_dim gives."""
  found = _PLAIN_ROPE.read(theirs)
  given = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
  share = given.get("mscale_all_dim") if found["rotary_scaling"] else None
  factor = yarn_factor(*_numbers(given, "factor"), share) if share else 1.0
  return {**found, "attention_scale": _latent_head_size(theirs) ** -0.5 * factor**2}


def _write_latent_rope(model: Ours) -> dict[str, Any]:
  found, (kind, ours) = _PLAIN_ROPE.write(model), named_scaling(tuple(model["rotary_scaling"]))
  if kind != "yarn":
    return found
  log = 0.1 * math.log(ours["factor"])
  factor = math.sqrt(model["attention_scale"] * math.sqrt(model["head_size"]))
  if math.isclose(factor, 1.0, rel_tol=1e-12) or log <= 0:
    return found
  attention = ours.get("attention_factor", yarn_factor(ours["factor"]))
  every, one = (
    float(f"{(x - 1) / log:.13g}") for x in (factor, attention * factor)
  )  # as published
  more = {"mscale_all_dim": every}
  more |= {"attention_factor": attention} if one <= 0 else {"mscale": one}
  for key in ("rope_scaling", "rope_parameters"):
    kept = {name: x for name, x in found[key].items() if name != "attention_factor"}
    found[key] = {**kept, **more}
  return found


LATENT_ROPE = Part((*ROPE_KEYS, ORIGINAL), _read_latent_rope, _write_latent_rope)

# ------------------------------ mixtures of experts ------------------------------

EXPERTS_PER_TOKEN = same("num_experts_per_tok", "experts_per_token")
ROUTER_NORMALIZED = same("norm_topk_prob", "router_normalized", bool)
EXPERT_WIDTH = same("moe_intermediate_size", "expert_feedforward_size")
# The experts have the one width that the file names.
EXPERT_WIDTH_OF_ALL = Part(
  (),
  lambda theirs: {"expert_feedforward_size": value_of(theirs, "intermediate_size")},
  lambda model: {"intermediate_size": model["expert_feedforward_size"]},
)
_EXPERT_COUNTS = ("num_experts", "num_local_experts")


def expert_count(default: int, *written: str) -> Part:
  """Returns the part of the number of experts, whose name differs between versions.

  Args:
    default: where a file has none.
    *written: names, among `num_experts` and `num_local_experts`.
  """

  def read(theirs: Theirs) -> dict[str, Any]:
    given = {key: value_of(theirs, key) for key in _EXPERT_COUNTS if theirs.get(key) is not None}
    if len({*given.values()}) > 1:
      raise ValueError(f"num_experts={given[_EXPERT_COUNTS[0]]} contradicts {_EXPERT_COUNTS[1]}")
    return {"experts": next(iter(given.values()), default)}

  return Part(_EXPERT_COUNTS, read, lambda model: dict.fromkeys(written, model["experts"]))


_STEP, _LISTED = "decoder_sparse_step", "mlp_only_layers"


def sparse_of(model: Ours) -> list[bool]:
  """Returns whether each layer has experts."""
  of_layers = ("experts", "dense_layers", "sparse_every", "mlp_only_layers")
  pattern = SimpleNamespace(**{key: model[key] for key in of_layers})
  return [is_sparse(pattern, layer) for layer in range(model["layers"])]


def _read_sparse_layers(theirs: Theirs) -> dict[str, Any]:
  """Of every `decoder_sparse_step` layers the last has experts, if it is not listed."""
  layers, step = (value_of(theirs, key) for key in ("num_hidden_layers", _STEP))
  listed = theirs.get(_LISTED) or []
  sparse = [layer not in listed and (layer + 1) % step == 0 for layer in range(layers)]
  if not any(sparse):
    raise ValueError(
      f"{_STEP}={step}, {_LISTED}={short(listed)}: none of the {layers} layers has experts; such a "
      f"model is of type 'qwen3'"
    )
  for dense in range(layers):
    for every in range(1, layers - dense + 1):
      found = {"dense_layers": dense, "sparse_every": every, "mlp_only_layers": ()}
      pattern = SimpleNamespace(experts=1, **found)
      if all(is_sparse(pattern, layer) == one for layer, one in enumerate(sparse)):
        return found
  return {"mlp_only_layers": tuple(layer for layer, one in enumerate(sparse) if not one)}


def _write_sparse_layers(model: Ours) -> dict[str, Any]:
  dense = [layer for layer, one in enumerate(sparse_of(model)) if not one]
  even = not model["dense_layers"] and not model["mlp_only_layers"]
  return {_STEP: model["sparse_every"] if even else 1, _LISTED: [] if even else dense}


SPARSE_LAYERS = Part((_STEP, _LISTED), _read_sparse_layers, _write_sparse_layers)

# ------------------------------ mixtures of DeepSeek ------------------------------

_FIRST_SPARSE = "first_k_dense_replace"


def behind_dense_layers(*parts: Part) -> Part:
  """Returns DeepSeek's parts of experts as one; a model may also have dense layers alone."""

  def read(theirs: Theirs) -> dict[str, Any]:
    dense = value_of(theirs, _FIRST_SPARSE, forms.whole(0))
    if dense >= value_of(theirs, "num_hidden_layers"):
      return {}
    found = {"dense_layers": dense}
    for part in parts:
      found |= part.read(theirs)
    return found

  def write(model: Ours) -> dict[str, Any]:
    if not model["experts"]:
      return {_FIRST_SPARSE: model["layers"]}
    found = {_FIRST_SPARSE: model["dense_layers"]}
    for part in parts:
      found |= part.write(model)
    return found

  return Part((_FIRST_SPARSE, *(key for part in parts for key in part.keys)), read, write)


# As wide as so many experts.
SHARED_EXPERTS = Part(
  ("n_shared_experts",),
  lambda theirs: {
    "shared_feedforward_size": value_of(theirs, "moe_intermediate_size")
    * (theirs.get("n_shared_experts") or 0)
  },
  lambda model: {
    "n_shared_experts": model["shared_feedforward_size"] // model["expert_feedforward_size"]
  },
)


def _read_groups(theirs: Theirs) -> dict[str, Any]:
  ours = {"router_groups": "n_group", "router_top_groups": "topk_group"}
  return {name: value_of(theirs, key) for name, key in ours.items()}


ROUTER_GROUPS = Part(
  ("n_group", "topk_group"),
  _read_groups,
  lambda model: {"n_group": model["router_groups"], "topk_group": model["router_top_groups"]},
)
_METHODS = ("greedy", "group_limited_greedy")


def _read_method(theirs: Theirs) -> dict[str, Any]:
  if (method := theirs.get("topk_method")) not in _METHODS:
    raise ValueError(f"topk_method={short(method)}: {' or '.join(_METHODS)} is needed")
  return {} if method == _METHODS[0] else _read_groups(theirs)


# Groups in one of two methods.
GROUPS_BY_METHOD = Part(
  ("topk_method", *ROUTER_GROUPS.keys),
  _read_method,
  lambda model: {"topk_method": _METHODS[model["router_groups"] > 1], **ROUTER_GROUPS.write(model)},
)
