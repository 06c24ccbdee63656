"""The parts that families are made of: keys of a config.json, read and written back.

Rotary positions stand in a file in one of two notations: transformers 4.57 reads `rope_theta` and
`rope_scaling`; version 5 reads `rope_parameters`, which has the base in it and, in families with
two kinds of layers, an object for each kind. A file with both must say the same twice; both are
written.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from interop.hf_family import Ours, Part, Theirs, bias_names, short, types_of, yarn_factor
from runtime import forms
from runtime.layer_kinds import is_sparse
from runtime.suggest import nearest

# ------------------------------ parts of one key ------------------------------


def same(theirs: str, ours: str, kind: type = int) -> Part:
  """Returns the part of a key that both have with the same value.

  Args:
    theirs: in config.json.
    ours: in `model`.
    kind: int (a size), float (at least 0) or bool.
  """

  def read(config: Theirs) -> dict[str, Any]:
    return {ours: value_of(config, theirs, kind)}

  return Part((theirs,), read, lambda model: {theirs: model[ours]})


def value_of(config: Theirs, key: str, kind: type = int) -> Any:
  """Returns a key's value; raises ValueError where it is missing or of another kind."""
  value, form = config.get(key), _FORMS[kind]
  if form.fits(value):
    return kind(value)
  raise ValueError(f"{key}={short(value)}: {form.name} is needed")


_FORMS = {int: forms.SIZE, float: forms.AT_LEAST_0, bool: forms.FLAG}


def choice(theirs: str, ours: str, table: Mapping[str, str]) -> Part:
  """Returns the part of a key with names; of several names for ours, the first is written."""

  def read(config: Theirs) -> dict[str, Any]:
    value = config.get(theirs)
    if value not in table:
      known = ", ".join(table)
      raise ValueError(
        f"{theirs}={short(value)}: one of {known} is needed{nearest(str(value), table)}"
      )
    return {ours: table[value]}

  def write(model: Ours) -> dict[str, Any]:
    names = [name for name, value in table.items() if value == model[ours]]
    return {theirs: names[0] if names else model[ours]}

  return Part((theirs,), read, write)


def optional(theirs: str, ours: str) -> Part:
  """Returns the part of a number of which null and 0 turn something off."""

  def read(config: Theirs) -> dict[str, Any]:
    return {ours: 0.0 if config.get(theirs) is None else value_of(config, theirs, float)}

  return Part((theirs,), read, lambda model: {theirs: model[ours] or None})


def above_0(theirs: str, ours: str) -> Part:
  """Returns the part of a number above 0, of which null turns something off, and 0 is ours."""

  def read(config: Theirs) -> dict[str, Any]:
    return {ours: 0.0 if config.get(theirs) is None else _positive(config, theirs)}

  return Part((theirs,), read, lambda model: {theirs: model[ours] or None})


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

# ------------------------------ parts of several keys ------------------------------


def kv_heads_of(config: Theirs) -> int:
  """Returns the key/value heads; null: as many as there are query heads."""
  key = (
    "num_attention_heads" if config.get("num_key_value_heads") is None else "num_key_value_heads"
  )
  return value_of(config, key)


def head_size_of(config: Theirs, width: str = "hidden_size", heads: str = "num_attention_heads"):
  """Returns the size of a head; null: the width over the heads."""
  if config.get("head_dim") is not None:
    return value_of(config, "head_dim")
  size, count = value_of(config, width), value_of(config, heads)
  if size % count:
    raise ValueError(
      f"{width}={size} is not a multiple of {heads}={count}, and head_dim is missing"
    )
  return size // count


KV_HEADS = Part(
  ("num_key_value_heads",),
  lambda config: {"kv_heads": kv_heads_of(config)},
  lambda model: {"num_key_value_heads": model["kv_heads"]},
)
HEAD_SIZE = Part(
  ("head_dim",),
  lambda config: {"head_size": head_size_of(config)},
  lambda model: {"head_dim": model["head_size"]},
)
# Scores are scaled by the size of a head.
SCALE = Part((), lambda config: {"attention_scale": head_size_of(config) ** -0.5}, lambda model: {})
# Gemma's, by a number of its own.
QUERY_SCALE = Part(
  ("query_pre_attn_scalar",),
  lambda config: {"attention_scale": _positive(config, "query_pre_attn_scalar") ** -0.5},
  lambda model: {"query_pre_attn_scalar": _rounded(model["attention_scale"] ** -2)},
)


def _positive(config: Theirs, key: str) -> float:
  if (value := value_of(config, key, float)) > 0:
    return value
  raise ValueError(f"{key}={value}: a number above 0 is needed")


def _rounded(value: float) -> float | int:
  """Returns a number without the rounding error of a power, as an int where it is one."""
  near = round(value)
  return near if abs(value - near) < 1e-9 * abs(value) else value


def biases(*keys: str) -> Part:
  """Returns the part of biases: some of attention_bias and mlp_bias."""
  ours = {"attention_bias": "attention", "mlp_bias": "mlp"}

  def read(config: Theirs) -> dict[str, Any]:
    given = [ours[key] for key in keys if key in config and value_of(config, key, bool)]
    return {"biases": ",".join(given) or "none"}

  def write(model: Ours) -> dict[str, Any]:
    names = bias_names(model)
    any_of = {"attention_bias": "out" in names, "mlp_bias": "down" in names}
    return {key: any_of[key] for key in keys}

  return Part(keys, read, write)


# In `attention_bias` alone, ONLY of `hf_config.py` says that there is no mlp_bias.
BIASES, MLP_BIASES = biases("attention_bias"), biases("attention_bias", "mlp_bias")


# ------------------------------ windows and layer types ------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"


def pattern(kinds: list[str], window: int | None) -> dict[str, Any]:
  """Returns the keys of `model` for the attention of each layer.

  Raises:
    ValueError: a layer type that is not known.
  """
  for kind in dict.fromkeys(kinds):
    if kind not in (FULL, SLIDING):
      raise ValueError(f"layer_types: {short(kind)}: one of {FULL}, {SLIDING} is needed")
  if SLIDING not in kinds or not window:
    return {"window": 0, "global_every": 0, "layer_types": ()}
  if FULL not in kinds:
    return {"window": window, "global_every": 0, "layer_types": ()}
  every = kinds.index(FULL) + 1
  if all((kind == FULL) == ((layer + 1) % every == 0) for layer, kind in enumerate(kinds)):
    return {"window": window, "global_every": every, "layer_types": ()}
  ours = tuple(kind.partition("_")[0] for kind in kinds)
  return {"window": window, "global_every": 0, "layer_types": ours}


def kinds_of(model: Ours) -> list[str]:
  """Returns the layer types of keys of `model`."""
  return [f"{one.partition('_')[0]}_attention" for one in types_of(model)]


def _window(config: Theirs) -> int | None:
  return None if config.get("sliding_window") is None else value_of(config, "sliding_window")


# Mistral, Phi-3: all layers have the window, or none.
WINDOW = Part(
  ("sliding_window",),
  lambda config: {"window": _window(config) or 0},
  lambda model: {"sliding_window": model["window"] or None},
)


def _qwen_window(config: Theirs) -> dict[str, Any]:
  """Qwen: a window only if use_sliding_window, in the layers from max_window_layers on."""
  window = _window(config) if value_of(config, "use_sliding_window", bool) else None
  kinds, layers = config.get("layer_types"), value_of(config, "num_hidden_layers")
  if kinds is None:
    first = config.get("max_window_layers")
    if type(first) is not int:
      raise ValueError(f"max_window_layers={short(first)}: a whole number is needed")
    kinds = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
  return pattern(checked_kinds(kinds, layers), window)


def _qwen_window_back(model: Ours) -> dict[str, Any]:
  kinds = kinds_of(model)
  first = kinds.index(SLIDING) if SLIDING in kinds else len(kinds)
  return {
    "use_sliding_window": bool(model["window"]),
    "sliding_window": model["window"] or None,
    "max_window_layers": first,
    "layer_types": kinds,
  }


QWEN_WINDOW = Part(
  ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
  _qwen_window,
  _qwen_window_back,
)


def checked_kinds(kinds: Any, layers: int) -> list[str]:
  """Returns layer types; raises ValueError where they are not one for each layer."""
  if not isinstance(kinds, list) or len(kinds) != layers:
    raise ValueError(f"layer_types={short(kinds)}: one for each of the {layers} layers is needed")
  return kinds


def _alternating(config: Theirs, every: Any) -> dict[str, Any]:
  """Gemma 2 and 3: full attention in every n-th layer, windows in the others."""
  kinds, layers = config.get("layer_types"), value_of(config, "num_hidden_layers")
  if kinds is None:
    if type(every) is not int or every < 1:
      raise ValueError(f"sliding_window_pattern={short(every)}: a whole number of at least 1")
    kinds = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]
  return pattern(checked_kinds(kinds, layers), _window(config))


def _gemma_3_every(config: Theirs) -> Any:
  names = ("sliding_window_pattern", "_sliding_window_pattern")
  return next((config[name] for name in names if name in config), 6)


def _alternating_back(model: Ours) -> dict[str, Any]:
  return {"sliding_window": model["window"] or None, "layer_types": kinds_of(model)}


GEMMA_2_WINDOW = Part(
  ("sliding_window", "layer_types"), lambda config: _alternating(config, 2), _alternating_back
)
GEMMA_3_WINDOW = Part(
  ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
  lambda config: _alternating(config, _gemma_3_every(config)),
  _alternating_back,
)

OLMO_3_WINDOW = Part(
  ("sliding_window", "layer_types"), lambda config: _alternating(config, 4), _alternating_back
)


def _smollm_3(config: Theirs) -> dict[str, Any]:
  """SmolLM 3: layers without rotary positions, which may have a window."""
  rotated, layers = config.get("no_rope_layers"), value_of(config, "num_hidden_layers")
  if rotated is None:
    every = value_of(config, "no_rope_layer_interval")
    rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
  if not isinstance(rotated, list) or len(rotated) != layers or not {*rotated} <= {0, 1}:
    raise ValueError(
      f"no_rope_layers={short(rotated)}: 0 or 1 for each of the {layers} layers is needed"
    )
  window = _window(config) if value_of(config, "use_sliding_window", bool) else None
  if (kinds := config.get("layer_types")) is None:
    kinds = [FULL if one or not window else SLIDING for one in rotated]
  found = pattern(checked_kinds(kinds, layers), window)
  if all(rotated):
    return found
  types = types_of({**found, "layers": layers})
  types = [one if rope else f"{one}_unrotated" for one, rope in zip(types, rotated, strict=True)]
  return {**found, "global_every": 0, "layer_types": tuple(types)}


SMOLLM_3 = Part(
  (
    "no_rope_layers",
    "no_rope_layer_interval",
    "use_sliding_window",
    "sliding_window",
    "layer_types",
  ),
  _smollm_3,
  lambda model: {
    "no_rope_layers": [int("unrotated" not in one) for one in types_of(model)],
    "use_sliding_window": bool(model["window"]),
    **_alternating_back(model),
  },
)

# ------------------------------ of GPT-2 ------------------------------


def gpt_2_feedforward(config: Theirs) -> dict[str, Any]:
  if config.get("n_inner") is None:
    return {"feedforward_size": 4 * value_of(config, "n_embd")}
  return {"feedforward_size": value_of(config, "n_inner")}


def gpt_2_heads(config: Theirs) -> dict[str, Any]:
  size = head_size_of({**config, "head_dim": None}, "n_embd", "n_head")
  scale = size**-0.5 if value_of(config, "scale_attn_weights", bool) else 1.0
  heads = value_of(config, "n_head")
  return {"heads": heads, "kv_heads": heads, "head_size": size, "attention_scale": scale}


# ------------------------------ rotary positions ------------------------------

UNSCALED = "default"
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_LLAMA_3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _read_llama3(rope: Mapping[str, Any], config: Theirs) -> tuple[float, ...]:
  lengths = {"original_max_position_embeddings": config.get("max_position_embeddings")}
  return tuple(map(float, numbers({**lengths, **rope}, _LLAMA_3)))


def _write_llama3(scaling: tuple[float, ...]) -> dict[str, Any]:
  factor, low, high, length = scaling
  return dict(zip(_LLAMA_3, (factor, low, high, int(length)), strict=True))


ORIGINAL = "original_max_position_embeddings"
_YARN_KEYS = {
  "beta_fast": "beta_fast",
  "beta_slow": "beta_slow",
  "attention_factor": "attention_factor",
}


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
  given = [key for key in _YARN_KEYS if rope.get(key) is not None]
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
SCALINGS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], Theirs], tuple]]] = {
  UNSCALED: ((), lambda rope, config: ()),
  "llama3": (_LLAMA_3, _read_llama3),
  "linear": (("factor",), _read_linear),
  "dynamic": (("factor", ORIGINAL), _read_dynamic),
  "yarn": (
    ("factor", ORIGINAL, *_YARN_KEYS, "mscale", "mscale_all_dim", "truncate"),
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
    return {"rope_type": UNSCALED}
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
    found |= {key: ours[key] for key in (*_YARN_KEYS, "truncate") if key in ours}
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
  kind = rope.get("rope_type", rope.get("type", UNSCALED))
  if kind not in SCALINGS:
    raise ValueError(
      f"rope_type={short(kind)}: known are {', '.join(SCALINGS)}{nearest(str(kind), SCALINGS)}"
    )
  keys, read = SCALINGS[kind]
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
    found = _write_partial(model) if partial else _write_rotary(model)
    if older and found["rope_scaling"]:
      scaling = dict(found["rope_scaling"])
      if scaling["rope_type"] == "longrope":  # of which it wants three keys alone
        scaling.pop("factor", None)
      found["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    return found

  return Part((*ROPE_KEYS, ORIGINAL), read, write)


def _rotary_size(config: Theirs, new: Any) -> int:
  share = (new or {}).get("partial_rotary_factor", config.get("partial_rotary_factor"))
  if share is None or share == 1:
    return 0
  [share] = numbers({"partial_rotary_factor": share}, ("partial_rotary_factor",))
  return int(head_size_of(config) * share)


def _write_rotary(model: Ours) -> dict[str, Any]:
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
  found, size = _write_rotary(model), model["rotary_size"] or model["head_size"]
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


def _read_latent(config: Theirs) -> dict[str, Any]:
  heads = value_of(config, "num_attention_heads")
  if config.get("num_key_value_heads") not in (None, heads):
    raise ValueError(
      f"num_key_value_heads={short(config['num_key_value_heads'])}: each of the {heads} heads has "
      f"keys and values of its own"
    )
  rank, size = config.get("q_lora_rank"), _head_size(config)
  # Of a file that transformers has written: that of the rotated dims, and the sum.
  for key, follows in (("head_dim", config["qk_rope_head_dim"]), ("qk_head_dim", size)):
    if config.get(key) not in (None, follows):
      raise ValueError(
        f"{key}={short(config[key])}: it would be {follows}, by qk_rope_head_dim and "
        f"qk_nope_head_dim; delete it"
      )
  return {
    "heads": heads,
    "kv_heads": heads,
    "query_latent_size": 0 if rank is None else value_of(config, "q_lora_rank"),
    "head_size": size,
    **{ours: value_of(config, theirs) for theirs, ours in _LATENT_SIZES.items()},
  }


def _head_size(config: Theirs) -> int:
  return sum(value_of(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))


def _write_latent(model: Ours) -> dict[str, Any]:
  heads = model["heads"]
  return {
    "num_attention_heads": heads,
    "num_key_value_heads": heads,
    "q_lora_rank": model["query_latent_size"] or None,
    "qk_nope_head_dim": model["head_size"] - model["rotary_size"],
    **{theirs: model[ours] for theirs, ours in _LATENT_SIZES.items()},
  }


LATENT = Part(
  (
    *(
      "num_attention_heads",
      "num_key_value_heads",
      "q_lora_rank",
      "qk_nope_head_dim",
      *_LATENT_SIZES,
    ),
    *("head_dim", "qk_head_dim"),
  ),
  _read_latent,
  _write_latent,
)


def _read_interleave(config: Theirs) -> dict[str, Any]:
  adjacent = value_of(config, "rope_interleave", bool)
  return {"rotary_pairs": "adjacent" if adjacent else "halves"}


INTERLEAVE = Part(
  ("rope_interleave",),
  _read_interleave,
  lambda model: {"rope_interleave": model["rotary_pairs"] == "adjacent"},
)

# ------------------------------ rotary positions and the scale ------------------------------

_PLAIN_ROPE = rope()
# With YaRN, scores are also scaled by the square of a factor that follows from this number.
_ALL, _ONE = "mscale_all_dim", "mscale"


def _read_latent_rope(config: Theirs) -> dict[str, Any]:
  found = _PLAIN_ROPE.read(config)
  given = config.get("rope_parameters") or config.get("rope_scaling") or {}
  share = given.get(_ALL) if found["rotary_scaling"] else None
  factor = yarn_factor(*numbers(given, ("factor",)), share) if share else 1.0
  return {**found, "attention_scale": _head_size(config) ** -0.5 * factor**2}


def _write_latent_rope(model: Ours) -> dict[str, Any]:
  found, scaling = _PLAIN_ROPE.write(model), tuple(model["rotary_scaling"])
  if not scaling or scaling[0] != "yarn":
    return found
  numbers, log = scaling[1], 0.1 * math.log(scaling[1]["factor"])
  factor = math.sqrt(model["attention_scale"] * math.sqrt(model["head_size"]))
  if math.isclose(factor, 1.0, rel_tol=1e-12) or log <= 0:
    return found
  attention = numbers.get("attention_factor", yarn_factor(numbers["factor"]))
  every, one = (
    float(f"{(x - 1) / log:.13g}") for x in (factor, attention * factor)
  )  # as published
  more = {_ALL: every}
  more |= {"attention_factor": attention} if one <= 0 else {_ONE: one}
  for key in ("rope_scaling", "rope_parameters"):
    kept = {name: x for name, x in found[key].items() if name != "attention_factor"}
    found[key] = {**kept, **more}
  return found


LATENT_ROPE = Part((*ROPE_KEYS, ORIGINAL), _read_latent_rope, _write_latent_rope)


# ------------------------------ mixtures of experts ------------------------------

# Of training and of what is returned beside the logits.
EXPERTS_IGNORED = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
EXPERTS_PER_TOKEN = same("num_experts_per_tok", "experts_per_token")
ROUTER_NORMALIZED = same("norm_topk_prob", "router_normalized", bool)
# The experts have the one width that the file names.
EXPERT_WIDTH_OF_ALL = Part(
  (),
  lambda config: {"expert_feedforward_size": value_of(config, "intermediate_size")},
  lambda model: {"intermediate_size": model["expert_feedforward_size"]},
)
EXPERT_WIDTH = same("moe_intermediate_size", "expert_feedforward_size")


_EXPERT_COUNTS = ("num_experts", "num_local_experts")


def expert_count(default: int, *written: str) -> Part:
  """Returns the part of the number of experts, whose name differs between versions.

  Args:
    default: where a file has none.
    written: names, among `num_experts` and `num_local_experts`.
  """

  def read(config: Theirs) -> dict[str, Any]:
    given = {key: value_of(config, key) for key in _EXPERT_COUNTS if config.get(key) is not None}
    if len({*given.values()}) > 1:
      raise ValueError(f"num_experts={given[_EXPERT_COUNTS[0]]} contradicts {_EXPERT_COUNTS[1]}")
    return {"experts": next(iter(given.values()), default)}

  return Part(_EXPERT_COUNTS, read, lambda model: dict.fromkeys(written, model["experts"]))


def layers_of(sparse: list[bool]) -> dict[str, Any]:
  """Returns the keys of `model` by which these layers, and no others, have experts."""
  for dense in range(len(sparse)):
    for every in range(1, len(sparse) - dense + 1):
      found = {"dense_layers": dense, "sparse_every": every, "mlp_only_layers": ()}
      pattern = SimpleNamespace(experts=1, **found)
      if all(is_sparse(pattern, layer) == one for layer, one in enumerate(sparse)):
        return found
  return {"mlp_only_layers": tuple(layer for layer, one in enumerate(sparse) if not one)}


def sparse_of(model: Ours) -> list[bool]:
  """Returns whether each layer has experts."""
  pattern = SimpleNamespace(**{key: model[key] for key in ("experts", *_SPARSE_LAYERS)})
  return [is_sparse(pattern, layer) for layer in range(model["layers"])]


_SPARSE_LAYERS = ("dense_layers", "sparse_every", "mlp_only_layers")

# ------------------------------ Qwen 3 ------------------------------


def _read_qwen(config: Theirs) -> dict[str, Any]:
  """Of every `decoder_sparse_step` layers the last has experts, if it is not listed."""
  layers, step = (value_of(config, key) for key in ("num_hidden_layers", _STEP))
  listed = config.get(_LISTED) or []
  if not isinstance(listed, list) or not all(type(one) is int for one in listed):
    raise ValueError(f"{_LISTED}={short(listed)}: a list of numbers of layers is needed")
  sparse = [layer not in listed and (layer + 1) % step == 0 for layer in range(layers)]
  if not any(sparse):
    raise ValueError(
      f"{_STEP}={step}, {_LISTED}={short(listed)}: none of the {layers} layers has experts; such a "
      f"model is of type 'qwen3'"
    )
  return layers_of(sparse)


def _write_qwen(model: Ours) -> dict[str, Any]:
  dense = [layer for layer, one in enumerate(sparse_of(model)) if not one]
  even = not model["dense_layers"] and not model["mlp_only_layers"]
  return {
    _STEP: model["sparse_every"] if even else 1,
    _LISTED: [] if even else dense,
  }


_STEP, _LISTED = "decoder_sparse_step", "mlp_only_layers"
QWEN_3_EXPERTS = Part((_STEP, _LISTED), _read_qwen, _write_qwen)


def _read_qwen_window(config: Theirs) -> dict[str, Any]:
  used = value_of(config, "use_sliding_window", bool)
  return WINDOW.read(config) if used else {"window": 0}


# Unlike the dense Qwen 3: all layers have the window, or none.
QWEN_3_WINDOW = Part(
  ("use_sliding_window", "sliding_window"),
  _read_qwen_window,
  lambda model: {"use_sliding_window": bool(model["window"]), **WINDOW.write(model)},
)

# ------------------------------ gpt-oss ------------------------------

_GPT_OSS_YARN = {
  "rope_type": "yarn",
  "factor": 32.0,
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "truncate": False,
  "original_max_position_embeddings": 4096,
}


def with_yarn(rope: Part) -> Part:
  """Returns the part of gpt-oss' rotary positions, which are scaled where a file says nothing."""
  notations = ("rope_scaling", "rope_parameters")

  def read(config: Theirs) -> dict[str, Any]:
    plain = all(config.get(key) is None for key in notations)
    return rope.read({**config, "rope_scaling": _GPT_OSS_YARN} if plain else config)

  return Part(rope.keys, read, rope.write)


# ------------------------------ DeepSeek ------------------------------

_SHARED_EXPERTS, _EXPERT_WIDTH, _FIRST_SPARSE = (
  "n_shared_experts",
  "moe_intermediate_size",
  "first_k_dense_replace",
)
# Keys without effect on the logits, or that name the router that its model_type has.
_DEEPSEEK_NAMED = {
  "deepseek_v2": {"scoring_func": ("softmax",), "norm_topk_prob": (False,)},
  "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
}
DEEPSEEK_IGNORED = (
  *("aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers", "num_nextn_predict_layers"),
  *EXPERTS_IGNORED,
)


def deepseek_experts(model_type: str) -> Part:
  """Returns the part of DeepSeek's experts; a model may also have none.

  Args:
    model_type: deepseek_v2 or deepseek_v3.
  """
  named = _DEEPSEEK_NAMED[model_type]

  def read(config: Theirs) -> dict[str, Any]:
    layers, dense = value_of(config, "num_hidden_layers"), config.get(_FIRST_SPARSE)
    if type(dense) is not int or dense < 0:
      raise ValueError(f"{_FIRST_SPARSE}={short(dense)}: a whole number of at least 0 is needed")
    if dense >= layers:
      return {}
    for key, values in {**named, "moe_layer_freq": (1,)}.items():
      if config.get(key) not in (None, *values):
        raise ValueError(f"{key}={short(config[key])}: only {values[0]} is read")
    width = value_of(config, _EXPERT_WIDTH)
    return {
      "experts": value_of(config, "n_routed_experts"),
      "dense_layers": dense,
      **EXPERTS_PER_TOKEN.read(config),
      "expert_feedforward_size": width,
      "shared_feedforward_size": width * (config.get(_SHARED_EXPERTS) or 0),
      "router_scale": value_of(config, "routed_scaling_factor", float),
      **(_read_v2(config) if model_type == "deepseek_v2" else _read_v3(config)),
    }

  def write(model: Ours) -> dict[str, Any]:
    if not model["experts"]:
      return {_FIRST_SPARSE: model["layers"]}
    shared, width = model["shared_feedforward_size"], model["expert_feedforward_size"]
    return {
      "n_routed_experts": model["experts"],
      _FIRST_SPARSE: model["dense_layers"],
      "moe_layer_freq": 1,
      **EXPERTS_PER_TOKEN.write(model),
      _EXPERT_WIDTH: width,
      _SHARED_EXPERTS: shared // width,
      "routed_scaling_factor": model["router_scale"],
      **{key: values[0] for key, values in named.items()},
      "n_group": model["router_groups"],
      "topk_group": model["router_top_groups"],
      **(_DEEPSEEK_GREEDY[model["router_groups"] > 1] if model_type == "deepseek_v2" else {}),
      **({} if model_type == "deepseek_v2" else ROUTER_NORMALIZED.write(model)),
    }

  keys = (
    *(_SHARED_EXPERTS, _EXPERT_WIDTH, _FIRST_SPARSE),
    *EXPERTS_PER_TOKEN.keys,
    *named,
    "moe_layer_freq",
    "topk_method",
  )
  more = ("n_routed_experts", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob")
  return Part((*dict.fromkeys((*keys, *more)),), read, write)


_DEEPSEEK_GREEDY: Mapping[bool, dict[str, str]] = {
  False: {"topk_method": "greedy"},
  True: {"topk_method": "group_limited_greedy"},
}


def _read_v2(config: Theirs) -> dict[str, Any]:
  method = config.get("topk_method")
  if not any(method == one["topk_method"] for one in _DEEPSEEK_GREEDY.values()):
    raise ValueError(f"topk_method={short(method)}: greedy or group_limited_greedy is needed")
  groups = _read_groups(config, "max") if method == "group_limited_greedy" else {}
  return {"router_scores": "softmax", "router_normalized": False, **groups}


def _read_v3(config: Theirs) -> dict[str, Any]:
  more = {"router_scores": "sigmoid", "router_correction": True, **ROUTER_NORMALIZED.read(config)}
  return {**more, **_read_groups(config, "top2")}


def _read_groups(config: Theirs, score: str) -> dict[str, Any]:
  return {
    "router_groups": value_of(config, "n_group"),
    "router_top_groups": value_of(config, "topk_group"),
    "router_group_score": score,
  }
