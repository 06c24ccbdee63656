"""The parts that families are made of: keys of a config.json, read and written back."""

from collections.abc import Mapping
from typing import Any

from interop.hf_family import Ours, Part, Theirs, bias_names, short, types_of
from runtime import forms
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


# In `attention_bias` alone, `hf_ignored.py` says that there is no mlp_bias.
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
