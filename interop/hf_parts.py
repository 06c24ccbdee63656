"""The parts that families are made of: keys of a config.json, read and written back.

Rotary positions stand in a file in one of two notations: transformers 4.57 reads `rope_theta` and
`rope_scaling`; version 5 reads `rope_parameters`, which has the base in it and, in families with
two kinds of layers, an object for each kind. A file with both must say the same twice; both are
written.

`hf_config.FORM` is checked before any part reads: lists, objects and texts are what they are.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from types import SimpleNamespace
from typing import Any

from runtime import forms
from runtime.layer_kinds import BIASES, MIXER, is_sparse, layer_type
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
  write: Callable[[Ours], dict[str, Any]] = lambda model: {}


def short(value: Any) -> str:
  """Returns a value as a message shows it."""
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:57]}..."


def value_of(theirs: Theirs, key: str, form: forms.Kind = forms.SIZE) -> Any:
  """Returns a key's value; raises ValueError where it is missing or of another form."""
  if form.fits(value := theirs.get(key)):
    return value
  raise ValueError(f"{key}={short(value)}: {form.name} is needed")


def _unchanged(value: Any) -> Any:
  return value


def _or_null(value: Any) -> Any:
  return value or None


# ------------------------------ parts of one key ------------------------------


def field(
  key: str,
  ours: str,
  form: forms.Kind = forms.SIZE,
  *,
  null: Callable[[Theirs], Any] | None = None,
  read: Callable[[Any], Any] = _unchanged,
  write: Callable[[Any], Any] = _unchanged,
) -> Part:
  """Returns the part of one key of config.json and one of `model`.

  Args:
    key: in config.json.
    ours: in `model`.
    form: of their value.
    null: gives our value where theirs is null or missing; by default that is refused.
    read: their value -> ours.
    write: our value -> theirs.
  """

  def read_key(theirs: Theirs) -> dict[str, Any]:
    if null is not None and theirs.get(key) is None:
      return {ours: null(theirs)}
    return {ours: read(value_of(theirs, key, form))}

  return Part((key,), read_key, lambda model: {key: write(model[ours])})


def number(key: str, ours: str) -> Part:
  """Returns the part of a number of at least 0."""
  return field(key, ours, forms.AT_LEAST_0, read=float)


def flag(key: str, ours: str) -> Part:
  """Returns the part of true or false."""
  return field(key, ours, forms.FLAG)


def optional(key: str, ours: str, form: forms.Kind = forms.AT_LEAST_0) -> Part:
  """Returns the part of a number of which null turns something off, and 0 is ours."""
  return field(key, ours, form, null=lambda theirs: 0.0, read=float, write=_or_null)


def choice(key: str, ours: str, table: Mapping[str, str]) -> Part:
  """Returns the part of a key with names; of several names for ours, the first is written."""

  def read(theirs: Theirs) -> dict[str, Any]:
    value = theirs.get(key)
    if not isinstance(value, Hashable) or value not in table:
      known = ", ".join(table)
      raise ValueError(
        f"{key}={short(value)}: one of {known} is needed{nearest(str(value), table)}"
      )
    return {ours: table[value]}

  names = {value: name for name, value in reversed(table.items())}
  return Part((key,), read, lambda model: {key: names.get(model[ours], model[ours])})


def only(key: str, value: Any) -> Part:
  """Returns the part of a key that says what all models of a family have."""

  def read(theirs: Theirs) -> dict[str, Any]:
    if theirs.get(key) in (None, value):
      return {}
    raise ValueError(f"{key}={short(theirs[key])}: only {value} is read")

  return Part((key,), read, lambda model: {key: value})


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


def _rounded(value: float) -> float | int:
  """Returns a number without the rounding error of a power, as an int where it is one."""
  near = round(value)
  return near if abs(value - near) < 1e-9 * abs(value) else value


# Null: as many as there are query heads.
KV_HEADS = field(
  "num_key_value_heads", "kv_heads", null=lambda theirs: value_of(theirs, "num_attention_heads")
)
HEAD_SIZE = field("head_dim", "head_size", null=head_size_of)
# Scores are scaled by the size of a head.
SCALE = Part((), lambda theirs: {"attention_scale": head_size_of(theirs) ** -0.5})
# Gemma's, by a number of its own.
QUERY_SCALE = field(
  "query_pre_attn_scalar",
  "attention_scale",
  forms.ABOVE_0,
  read=lambda value: float(value) ** -0.5,
  write=lambda scale: _rounded(scale**-2),
)


def bias_names(ours: Ours) -> tuple[str, ...]:
  """Returns the linear layers that have a bias by `model.biases`."""
  named = {one for part in ours["biases"].split(",") for one in BIASES.get(part, (part,))}
  every = (*BIASES["attention"], *(BIASES["mlp"] if ours["gated"] else ("up", "down")))
  return tuple(name for name in every if name in named)


def biases(**names: str) -> Part:
  """Returns the part of biases: keys of config.json -> our name of these, one of BIASES."""

  def read(theirs: Theirs) -> dict[str, Any]:
    given = [key for key in names if key in theirs and value_of(theirs, key, forms.FLAG)]
    return {"biases": ",".join(names[key] for key in given) or "none"}

  def write(model: Ours) -> dict[str, Any]:
    return {key: BIASES[name][-1] in bias_names(model) for key, name in names.items()}

  return Part((*names,), read, write)


# ------------------------------ of GPT-2 ------------------------------


def _gpt_2_heads(theirs: Theirs) -> dict[str, Any]:
  size, heads = head_size_of(theirs, "n_embd", "n_head"), value_of(theirs, "n_head")
  scale = size**-0.5 if value_of(theirs, "scale_attn_weights", forms.FLAG) else 1.0
  return {"heads": heads, "kv_heads": heads, "head_size": size, "attention_scale": scale}


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
  model = SimpleNamespace(**ours)
  return tuple(layer_type(model, layer) for layer in range(ours["layers"]))


# All layers have the window, or none.
WINDOW = field("sliding_window", "window", null=lambda theirs: 0, write=_or_null)


def _window(theirs: Theirs) -> int:
  """Returns the window of the layers that have one; 0: none has."""
  used = value_of(theirs, "use_sliding_window", forms.FLAG) if "use_sliding_window" in theirs else 1
  return WINDOW.read(theirs)["window"] if used else 0


def _by_layer(theirs: Theirs, full: list[bool]) -> dict[str, Any]:
  """Returns the keys of `model` for the attention of each layer.

  Args:
    theirs: a config.json, which may have `layer_types`.
    full: whether each layer has no window, where the file does not list them.

  Raises:
    ValueError: layer types that are not known, or not one for each layer.
  """
  kinds = theirs.get("layer_types")
  if kinds is not None:
    if len(kinds) != len(full):
      raise ValueError(
        f"layer_types={short(kinds)}: one for each of the {len(full)} layers is needed"
      )
    for kind in dict.fromkeys(kinds):
      if kind not in (FULL, SLIDING):
        raise ValueError(f"layer_types: {short(kind)}: one of {FULL}, {SLIDING} is needed")
    full = [kind == FULL for kind in kinds]
  window, every = _window(theirs), (full.index(True) if True in full else -1) + 1
  if all(full) or not window:
    return {"window": 0, "global_every": 0, "layer_types": ()}
  found = {"window": window, "global_every": every, "layer_types": ()}
  if not every or all(one == (n % every == 0) for n, one in enumerate(full, 1)):
    return found
  types = tuple("full" if one else "sliding" for one in full)
  return {**found, "global_every": 0, "layer_types": types}


def _write_by_layer(model: Ours) -> dict[str, Any]:
  """Returns all keys about the attention of each layer, of which each family has some."""
  types, window = types_of(model), model["window"]
  kinds = [f"{one.partition('_')[0]}_attention" for one in types]
  return {
    "sliding_window": window or None,
    "use_sliding_window": bool(window),
    "layer_types": kinds,
    "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else len(kinds),
    "no_rope_layers": [int("unrotated" not in one) for one in types],
  }


def _windows(read: Callable[[Theirs], dict[str, Any]], *more: str, listed: bool = True) -> Part:
  """Returns the part of windows, with some keys besides the common ones."""
  keys = ("sliding_window", *(["layer_types"] if listed else []), *more)
  return Part(
    keys, read, lambda model: {k: v for k, v in _write_by_layer(model).items() if k in keys}
  )


# All layers, as WINDOW: mixtures of Qwen 3, unlike its dense models.
QWEN_3_MOE_WINDOW = _windows(
  lambda theirs: {"window": _window(theirs)}, "use_sliding_window", listed=False
)


def _read_qwen(theirs: Theirs) -> dict[str, Any]:
  """In the layers from max_window_layers on."""
  layers = value_of(theirs, "num_hidden_layers")
  first = value_of(theirs, "max_window_layers", forms.COUNT) if _window(theirs) else layers
  return _by_layer(theirs, [layer < first for layer in range(layers)])


QWEN_WINDOW = _windows(_read_qwen, "use_sliding_window", "max_window_layers")


def alternating(every: int, *names: str) -> Part:
  """Returns the part of models with full attention in every n-th layer, and windows in the others.

  Args:
    every: n where a file has none of these names.
    *names: keys with n, of files that do not list the layers.
  """

  def read(theirs: Theirs) -> dict[str, Any]:
    given = next((value_of(theirs, name) for name in names if name in theirs), every)
    layers = value_of(theirs, "num_hidden_layers")
    return _by_layer(theirs, [layer % given == 0 for layer in range(1, layers + 1)])

  return _windows(read, *names)


def _rotated(theirs: Theirs) -> list[bool]:
  """Returns whether each layer has rotary positions."""
  rotated, layers = theirs.get("no_rope_layers"), value_of(theirs, "num_hidden_layers")
  if rotated is None:
    every = value_of(theirs, "no_rope_layer_interval")
    return [layer % every != 0 for layer in range(1, layers + 1)]
  if len(rotated) != layers or not {*rotated} <= {0, 1}:
    raise ValueError(
      f"no_rope_layers={short(rotated)}: 0 or 1 for each of the {layers} layers is needed"
    )
  return [bool(one) for one in rotated]


def _with_unrotated(found: Ours, rotated: list[bool]) -> dict[str, Any]:
  """Returns the keys of `_by_layer` where some layers have no rotary positions."""
  if all(rotated):
    return {**found}
  types = types_of({**found, "layers": len(rotated)})
  types = [one if rope else f"{one}_unrotated" for one, rope in zip(types, rotated, strict=True)]
  return {**found, "global_every": 0, "layer_types": tuple(types)}


def _read_smollm_3(theirs: Theirs) -> dict[str, Any]:
  """SmolLM 3: layers without rotary positions, which may have a window."""
  rotated = _rotated(theirs)
  return _with_unrotated(_by_layer(theirs, rotated), rotated)


SMOLLM_3 = _windows(
  _read_smollm_3, "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"
)

# ------------------------------ of Llama 4 ------------------------------

_CHUNKED, _CHUNK = "chunked_attention", "attention_chunk_size"


def _read_llama_4_layers(theirs: Theirs) -> dict[str, Any]:
  """Returns which layers rotate, which see chunks, and how scores of the others grow."""
  rotated = _rotated({**theirs, "no_rope_layers": theirs.get("no_rope_layers") or None})
  kinds = theirs.get("layer_types") or [_CHUNKED if one else FULL for one in rotated]
  if unknown := [kind for kind in kinds if kind not in (_CHUNKED, FULL)]:
    raise ValueError(f"layer_types: {short(unknown[0])}: one of {_CHUNKED}, {FULL} is needed")
  window = value_of(theirs, _CHUNK) if _CHUNKED in kinds else None
  kinds = [SLIDING if kind == _CHUNKED else kind for kind in kinds]
  found = _by_layer({**theirs, "layer_types": kinds, "sliding_window": window}, rotated)
  found = {**_with_unrotated(found, rotated), "window_chunks": bool(window)}
  if not all(rotated) and theirs.get("attn_temperature_tuning"):
    strength = value_of(theirs, "attn_scale", forms.ABOVE_0)
    found["attention_temperature"] = "unrotated", strength, value_of(theirs, "floor_scale")
  return found


def _write_llama_4_layers(model: Ours) -> dict[str, Any]:
  found = _write_by_layer(model)
  kinds = [_CHUNKED if kind == SLIDING else kind for kind in found["layer_types"]]
  written = {"no_rope_layers": found["no_rope_layers"], "layer_types": kinds}
  if model["window_chunks"]:
    written[_CHUNK] = model["window"]
  layers, *numbers = model["attention_temperature"] or ("",)
  written["attn_temperature_tuning"] = layers == "unrotated"
  return written | dict(zip(("attn_scale", "floor_scale"), numbers, strict=False))


LLAMA_4_LAYERS = Part(
  (
    *("no_rope_layers", "no_rope_layer_interval", "layer_types", _CHUNK),
    *("attn_temperature_tuning", "attn_scale", "floor_scale"),
  ),
  _read_llama_4_layers,
  _write_llama_4_layers,
)

# ------------------------------ of LFM2 ------------------------------


def _lfm_2_width(theirs: Theirs) -> dict[str, Any]:
  """Returns the width of the MLP: two thirds of the key's, rounded up, unless a key says no."""
  older = theirs.get("block_ff_dim") is not None  # which the class prefers
  width = value_of(theirs, "block_ff_dim" if older else "intermediate_size")
  if value_of(theirs, "block_auto_adjust_ff_dim", forms.FLAG):
    width = int(2 * width / 3)
    if theirs.get("block_ffn_dim_multiplier") is not None:
      multiple = value_of(theirs, "block_multiple_of")
      width = int(value_of(theirs, "block_ffn_dim_multiplier", forms.ABOVE_0) * width)
      width = multiple * -(-width // multiple)
  return {"feedforward_size": width}


_LFM_2_WIDTH = ("intermediate_size", "block_ff_dim", "block_auto_adjust_ff_dim")
LFM_2_WIDTH = Part(
  (*_LFM_2_WIDTH, "block_ffn_dim_multiplier", "block_multiple_of"),
  _lfm_2_width,
  lambda model: {
    "intermediate_size": model["feedforward_size"],
    "block_auto_adjust_ff_dim": False,
  },
)
LFM_2_TIED = Part(
  ("tie_word_embeddings", "tie_embedding"),
  lambda theirs: {
    "tied_embeddings": value_of(
      theirs,
      "tie_embedding" if "tie_embedding" in theirs else "tie_word_embeddings",
      forms.FLAG,
    )
  },
  lambda model: {"tie_word_embeddings": model["tied_embeddings"]},
)


# ------------------------------ mixers ------------------------------


def mixer_layers(
  kind: str,
  mixer: str,
  sizes: Mapping[str, str],
  *more: str,
  full: Callable[[Theirs, int], bool],
) -> Part:
  """Returns the part of models of which some layers have a mixer in place of attention.

  Args:
    kind: of these layers, in `layer_types`.
    mixer: `model.mixer`.
    sizes: key -> ours, of its sizes.
    *more: keys that `full` reads.
    full: whether a layer has attention, where a file does not list them.
  """

  def read(theirs: Theirs) -> dict[str, Any]:
    layers, kinds = value_of(theirs, "num_hidden_layers"), theirs.get("layer_types")
    if kinds is None:
      kinds = [FULL if full(theirs, layer) else kind for layer in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {FULL, kind}:
      raise ValueError(
        f"layer_types={short(kinds)}: {FULL} or {kind} for each of the {layers} layers is needed"
      )
    if kind not in kinds:
      return {}
    return {
      "mixer": mixer,
      "layer_types": tuple("full" if one == FULL else MIXER for one in kinds),
      **{ours: value_of(theirs, key) for key, ours in sizes.items()},
    }

  def write(model: Ours) -> dict[str, Any]:
    kinds = [kind if one == MIXER else f"{one}_attention" for one in types_of(model)]
    found = {key: model[ours] for key, ours in sizes.items()} if kind in kinds else {}
    return {"layer_types": kinds, **found}

  return Part(("layer_types", *sizes, *more), read, write)


def _is_listed(theirs: Theirs, layer: int) -> bool:
  return theirs.get("full_attn_idxs") is None or layer in theirs["full_attn_idxs"]


def _is_last_of_some(theirs: Theirs, layer: int) -> bool:
  return (layer + 1) % value_of(theirs, "full_attention_interval") == 0


LFM_2_LAYERS = mixer_layers(
  *("conv", "short_convolution", {"conv_L_cache": "convolution_size"}, "full_attn_idxs"),
  full=_is_listed,
)
LINEAR = {
  "linear_conv_kernel_dim": "convolution_size",
  "linear_num_value_heads": "mixer_heads",
  "linear_num_key_heads": "mixer_key_heads",
  "linear_key_head_dim": "mixer_head_size",
  "linear_value_head_dim": "mixer_value_head_size",
}
GATED_DELTA_LAYERS = mixer_layers(
  *("linear_attention", "gated_delta", LINEAR, "full_attention_interval"), full=_is_last_of_some
)

# ------------------------------ of Kimi Linear ------------------------------

_NESTED, _DENSE, _KINDS = "linear_attn_config", "first_k_dense_replace", "mlp_layer_types"
_KIMI_SIZES = {
  "linear_head_dim": ("mixer_head_size", "mixer_value_head_size"),
  "linear_num_heads": ("mixer_heads", "mixer_key_heads"),
  "linear_conv_kernel_dim": ("convolution_size",),
}
# Theirs in the object of published files -> of transformers.
_KIMI_NESTED = {
  "head_dim": "linear_head_dim",
  "num_heads": "linear_num_heads",
  "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_KIMI_LAYERS = mixer_layers(
  *("linear_attention", "kimi_delta", {}),
  full=lambda theirs, layer: (
    layer + 1 in theirs[_NESTED]["full_attn_layers"]
    if (theirs.get(_NESTED) or {}).get("full_attn_layers")
    else layer > 0 and layer % 4 == 0
  ),
)


def _read_kimi(theirs: Theirs) -> dict[str, Any]:
  """In the notation of the published files, whose layers count from 1, or of transformers."""
  nested = {
    _KIMI_NESTED[key]: x for key, x in (theirs.get(_NESTED) or {}).items() if key in _KIMI_NESTED
  }
  theirs = {**theirs, **nested}
  found, layers = _KIMI_LAYERS.read(theirs), value_of(theirs, "num_hidden_layers")
  types = found.get("layer_types", ("full",))
  found["layer_types"] = tuple("full_unrotated" if one == "full" else one for one in types)
  for key, names in _KIMI_SIZES.items():
    found |= dict.fromkeys(names, value_of(theirs, key))
  dense = value_of(theirs, _DENSE, forms.whole(0))
  kinds = theirs.get(_KINDS) or ["dense" if n < dense else "sparse" for n in range(layers)]
  if len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
    raise ValueError(f"{_KINDS}={short(kinds)}: dense or sparse for each of the {layers} layers")
  return {**found, "mlp_only_layers": tuple(n for n, one in enumerate(kinds) if one == "dense")}


def _write_kimi(model: Ours) -> dict[str, Any]:
  kinds = ["linear_attention" if one == MIXER else FULL for one in types_of(model)]
  sparse = ["sparse" if one else "dense" for one in sparse_of(model)]
  return {
    **{key: model[names[0]] for key, names in _KIMI_SIZES.items()},
    **{"layer_types": kinds, _KINDS: sparse, _DENSE: (*sparse, "sparse").index("sparse")},
    _NESTED: {
      **{ours: model[_KIMI_SIZES[key][0]] for ours, key in _KIMI_NESTED.items()},
      "full_attn_layers": [n for n, one in enumerate(kinds, 1) if one == FULL],
      "kda_layers": [n for n, one in enumerate(kinds, 1) if one != FULL],
    },
  }


KIMI_LINEAR = (
  Part((*_KIMI_LAYERS.keys, *_KIMI_SIZES, _NESTED, _DENSE, _KINDS), _read_kimi, _write_kimi),
  field("num_experts", "experts"),
  number("routed_scaling_factor", "router_scale"),
  field("num_experts_per_token", "experts_per_token"),
  field("moe_intermediate_size", "expert_feedforward_size"),
  Part(
    ("num_shared_experts",),
    lambda theirs: {
      "shared_feedforward_size": value_of(theirs, "moe_intermediate_size")
      * value_of(theirs, "num_shared_experts")
    },
    lambda model: {
      "num_shared_experts": model["shared_feedforward_size"] // model["expert_feedforward_size"]
    },
  ),
  *(field("num_expert_group", "router_groups"), field("topk_group", "router_top_groups")),
  flag("moe_renormalize", "router_normalized"),
  *(only("moe_router_activation_func", "sigmoid"), only("mla_use_nope", True)),
  only("moe_layer_freq", 1),
  Part(
    (),
    lambda theirs: {"attention_scale": _latent_head_size(theirs) ** -0.5},
  ),
)

# ------------------------------ of MiniMax-01 ------------------------------

_MINIMAX_PARTS = ("full_attn", "linear_attn", "mlp")
MINIMAX_FACTORS = tuple(f"{x}_{of}_factor" for of in ("alpha", "beta") for x in _MINIMAX_PARTS)
MINIMAX_LAYERS = mixer_layers(
  "linear_attention", "lightning", {}, full=lambda _, layer: layer % 2 == 0
)


def _read_minimax(theirs: Theirs) -> dict[str, Any]:
  """The factors of all parts, and heads of lightning attention, as many as of attention."""
  numbers = [value_of(theirs, key, forms.ABOVE_0) for key in MINIMAX_FACTORS]
  for keys, each in ((MINIMAX_FACTORS[:3], numbers[:3]), (MINIMAX_FACTORS[3:], numbers[3:])):
    if len({*each}) > 1:
      raise ValueError(f"{', '.join(keys)}={short(each)}: those of all parts are equal here")
  heads, size = value_of(theirs, "num_attention_heads"), head_size_of(theirs)
  return {
    **{"normed_residual": float(numbers[0]), "residual_multiplier": float(numbers[3])},
    **dict.fromkeys(("mixer_heads", "mixer_key_heads"), heads),
    **dict.fromkeys(("mixer_head_size", "mixer_value_head_size"), size),
  }


MINIMAX = Part(
  MINIMAX_FACTORS,
  _read_minimax,
  lambda model: {
    key: model["normed_residual" if "alpha" in key else "residual_multiplier"]
    for key in MINIMAX_FACTORS
  },
)

# ------------------------------ rotary positions ------------------------------

UNSCALED = "default"
ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"
_SHARE = "partial_rotary_factor"
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", _SHARE)
# rope_type -> our name of each of its numbers -> their key.
SCALINGS = {
  UNSCALED: {},
  "llama3": {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "original_length": ORIGINAL,
  },
  "linear": {"factor": "factor"},
  "dynamic": {"factor": "factor", "original_length": ORIGINAL},
  "yarn": {
    "factor": "factor",
    "original_length": ORIGINAL,
    **{key: key for key in ("beta_fast", "beta_slow", "attention_factor", "truncate")},
  },
  "longrope": {
    "original_length": ORIGINAL,
    "short_factors": "short_factor",
    "long_factors": "long_factor",
    "attention_factor": "attention_factor",
    "factor": "factor",
  },
}
# Numbers that a file may leave out, and of YaRN those that are read besides.
_OPTIONAL = {
  "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
  "longrope": ("attention_factor", "factor"),
}
_BESIDES = {
  "yarn": ("mscale", "mscale_all_dim"),
  UNSCALED: ("mrope_section", "mrope_interleaved"),  # of images: of text all positions are alike
}


def named_scaling(scaling: tuple) -> tuple[str, dict[str, Any]]:
  """Returns the rope_type of a `model.rotary_scaling`, and its numbers by our names."""
  if not scaling:
    return UNSCALED, {}
  if isinstance(scaling[0], str):
    return scaling[0], dict(scaling[1])
  return "llama3", dict(zip(SCALINGS["llama3"], scaling, strict=True))


def yarn_factor(factor: float, scale: float = 1.0) -> float:
  """Returns YaRN's factor of the attention. Source: arXiv:2309.00071, equation 22."""
  return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _number(rope: Mapping[str, Any], key: str) -> float:
  """Returns the value of a key; raises ValueError where it is no number above 0."""
  if not forms.ABOVE_0.fits(rope.get(key)):
    raise ValueError(f"rope_scaling: {key}={short(rope.get(key))}: a number above 0 is needed")
  return rope[key]


def _completed(kind: str, rope: Mapping[str, Any], theirs: Theirs) -> dict[str, Any]:
  """Returns the numbers of an object with those that follow from others."""
  found = {key: value for key, value in rope.items() if value is not None}
  if kind == "llama3":
    return {ORIGINAL: theirs.get(LONGEST), **found}
  if kind == "dynamic":  # scales beyond the longest row, whatever the object says
    return {**found, ORIGINAL: theirs.get(LONGEST)}
  if kind not in _OPTIONAL:
    return found
  found[ORIGINAL] = theirs.get(ORIGINAL) or found.get(ORIGINAL) or theirs.get(LONGEST)
  if kind == "yarn":
    if "factor" not in found:
      found["factor"] = _number(theirs, LONGEST) / _number(found, ORIGINAL)
    one, every = found.get("mscale"), found.get("mscale_all_dim")
    if one and every and "attention_factor" not in found:
      factor = _number(found, "factor")
      found["attention_factor"] = yarn_factor(factor, one) / yarn_factor(factor, every)
  elif "attention_factor" in found:
    found.pop("factor", None)
  elif "factor" not in found or theirs.get(ORIGINAL):  # of the two lengths beside the object
    found["factor"] = _number(theirs, LONGEST) / _number(found, ORIGINAL)
  return found


def _read_scaling(kind: str, rope: Mapping[str, Any], theirs: Theirs) -> tuple:
  """Returns model.rotary_scaling of an object."""
  given, numbers = _completed(kind, rope, theirs), {}
  for name, key in SCALINGS[kind].items():
    if key not in given and key in _OPTIONAL.get(kind, ()):
      continue
    value = given.get(key)
    if name.endswith("_factors"):
      if not isinstance(value, (list, tuple)):
        raise ValueError(f"rope_scaling: {key}={short(value)}: a list is needed")
      every = dict(enumerate(value))
      numbers[name] = tuple(float(_number(every, one)) for one in every)
    elif name == "truncate":
      numbers[name] = value
    else:
      numbers[name] = _number(given, key)
      if name != "original_length":
        numbers[name] = float(numbers[name])
  if kind == "llama3":
    return tuple(map(float, numbers.values()))
  return (kind, numbers) if numbers else ()


def _base_and_scaling(
  given: Mapping[str, Any] | None, theirs: Theirs, theta: Any
) -> tuple[float, tuple]:
  """Returns (base, model.rotary_scaling) of one object; null: no scaling."""
  rope = given or {}
  kind = rope.get("rope_type", rope.get("type", UNSCALED))
  if kind not in SCALINGS:
    raise ValueError(
      f"rope_type={short(kind)}: known are {', '.join(SCALINGS)}{nearest(str(kind), SCALINGS)}"
    )
  known = {"rope_type", "type", "rope_theta", _SHARE, *SCALINGS[kind].values()}
  known |= {*_BESIDES.get(kind, ())}
  if unknown := sorted(key for key in {*rope} - known if rope[key] is not None):
    raise ValueError(f"rope_scaling: {', '.join(unknown)}: not known for rope_type {kind!r}")
  base = _number({"rope_theta": rope.get("rope_theta", theta)}, "rope_theta")
  return float(base), _read_scaling(kind, rope, theirs)


def _both(theirs: Theirs, new: Any, default: float) -> tuple[float, tuple]:
  """Returns (base, model.rotary_scaling) of a file that has one of the notations, or both.

  Args:
    theirs: the file.
    new: the object of version 5; None: there is none.
    default: the base where the file names none.
  """
  theta, old = theirs.get("rope_theta"), theirs.get("rope_scaling")
  base = default if theta is None else theta
  if new is None:
    return _base_and_scaling(old, theirs, base)
  found = _base_and_scaling(new, theirs, base)
  again = found if old is None else _base_and_scaling(old, theirs, found[0])
  if again != found or theta not in (None, found[0]):
    raise ValueError("rope_theta or rope_scaling contradicts rope_parameters")
  return found


def _require_whole_heads(theirs: Theirs, *objects: Any) -> None:
  """Raises ValueError where a file, or an object in it, rotates a part of each head."""
  for given in (theirs, *objects):
    share = given.get(_SHARE) if given else None
    if share not in (None, 1, 1.0):
      raise ValueError(
        f"partial_rotary_factor={short(share)}: transformers rotates whole heads in this family; "
        f"given such a factor version 4.57 fails, and 5 fails or ignores it, so the model's own "
        f"logits are not known. Delete it if whole heads are meant"
      )


def rope(
  default: float = 10_000.0,
  *,
  partial: bool | float = False,
  older: bool = False,
  unstated: Mapping[str, Any] | None = None,
) -> Part:
  """Returns the part of one kind of rotary positions for all layers.

  Args:
    default: the base where a file names none.
    partial: whether the family can rotate a part of each head; or the part that it always does.
    older: whether version 4.57 wants `type` in place of `rope_type` from the family.
    unstated: rope_scaling of a file that says nothing of it.
  """

  def read(theirs: Theirs) -> dict[str, Any]:
    new = theirs.get("rope_parameters")
    if unstated and new is None and theirs.get("rope_scaling") is None:
      theirs = {**theirs, "rope_scaling": unstated}
    base, scaling = _both(theirs, new, default)
    found = {"rotary_base": base, "rotary_scaling": scaling}
    if partial is True:
      return {**found, "rotary_size": _rotary_size(theirs, new)}
    if partial:
      for share in ((one or {}).get(_SHARE) for one in (theirs, new)):
        if share not in (None, partial):
          raise ValueError(f"{_SHARE}={short(share)}: it is {partial} in this family")
      return {**found, "rotary_size": int(head_size_of(theirs) * partial)}
    _require_whole_heads(theirs, new, theirs.get("rope_scaling"))
    return found

  def write(model: Ours) -> dict[str, Any]:
    found = _write_rotary(model)
    if partial:
      share = (model["rotary_size"] or model["head_size"]) / model["head_size"]
      share = share if partial is True else partial
      found[_SHARE] = found["rope_parameters"][_SHARE] = share
    if older and found["rope_scaling"]:
      scaling = dict(found["rope_scaling"])
      if scaling["rope_type"] == "longrope":  # of which it wants three keys alone
        scaling.pop("factor", None)
      found["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    return found

  return Part((*ROPE_KEYS, ORIGINAL), read, write)


def _rotary_size(theirs: Theirs, new: Any) -> int:
  share = (new or {}).get(_SHARE, theirs.get(_SHARE))
  return 0 if share in (None, 1) else int(head_size_of(theirs) * _number({_SHARE: share}, _SHARE))


def _write_rotary(model: Ours) -> dict[str, Any]:
  base, (kind, ours) = model["rotary_base"], named_scaling(tuple(model["rotary_scaling"]))
  scaling = {"rope_type": kind}
  for name, key in SCALINGS[kind].items():
    # Lengths of the others are read beside the object.
    if name in ours and (name != "original_length" or kind in ("llama3", "yarn")):
      value = int(ours[name]) if name == "original_length" else ours[name]
      scaling[key] = [*value] if isinstance(value, tuple) else value
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
    objects = [(new or {}).get(kind) for kind in (FULL, SLIDING)]
    _require_whole_heads(theirs, *objects, theirs.get("rope_scaling"))
    base, scaling = _both(theirs, objects[0], default)
    local = theirs.get(local_key or "rope_theta")
    found, local_scaling = _base_and_scaling(
      objects[1], theirs, local_default if local is None else local
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


_STRENGTH = "llama_4_scaling_beta"


def tempered(part: Part, unstated: Mapping[str, Any], share: Callable[[Theirs], float]) -> Part:
  """Returns the part of rotary positions of Mistral's models, whose scores grow with the position.

  Version 4.57 does not know these models.

  Args:
    part: of the positions.
    unstated: rope_parameters of a file that says nothing of them.
    share: the part of a head that is rotated.
  """

  def read(theirs: Theirs) -> dict[str, Any]:
    given = {key: theirs.get(key) for key in ("rope_parameters", "rope_scaling")}
    found = {key: dict(one) for key, one in given.items() if one}
    found = found or {"rope_parameters": dict(unstated)}
    for one in found.values():
      strength, length = one.pop(_STRENGTH, None), one.get(ORIGINAL)
      one.pop(LONGEST, None)
      if one.get(_SHARE) == share(theirs):
        del one[_SHARE]
    for key, value in ((_STRENGTH, strength), (ORIGINAL, length)):
      if not forms.ABOVE_0.fits(value):
        raise ValueError(f"rope_parameters: {key}={short(value)}: a number above 0 is needed")
    return {**part.read({**theirs, **found}), "attention_temperature": ("all", strength, length)}

  def write(model: Ours) -> dict[str, Any]:
    found = part.write(model)
    _, strength, length = model["attention_temperature"] or ("all", None, None)
    more = {_STRENGTH: strength, ORIGINAL: length}
    found["rope_parameters"] = {**found["rope_parameters"], **more}
    return {key: found[key] for key in found if key not in ("rope_scaling", "rope_theta")}

  return Part(part.keys, read, write)


# ------------------------------ multi-head latent attention ------------------------------


def _latent_head_size(theirs: Theirs) -> int:
  return sum(value_of(theirs, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))


def latent_rotary_share(theirs: Theirs) -> float:
  """Returns the part of a head that is rotated."""
  return value_of(theirs, "qk_rope_head_dim") / _latent_head_size(theirs)


def _read_latent_heads(theirs: Theirs) -> dict[str, Any]:
  heads, size = value_of(theirs, "num_attention_heads"), _latent_head_size(theirs)
  if theirs.get("num_key_value_heads") not in (None, heads):
    raise ValueError(
      f"num_key_value_heads={short(theirs['num_key_value_heads'])}: each of the {heads} heads has "
      f"keys and values of its own"
    )
  # Of a file that transformers has written: that of the rotated dims, or the sum.
  for key, *follows in (("head_dim", theirs["qk_rope_head_dim"], size), ("qk_head_dim", size)):
    if theirs.get(key) not in (None, *follows):
      raise ValueError(
        f"{key}={short(theirs[key])}: it would be {follows[0]}, by qk_rope_head_dim and "
        f"qk_nope_head_dim; delete it"
      )
  return {"heads": heads, "kv_heads": heads, "head_size": size}


LATENT = (
  Part(
    (
      *("num_attention_heads", "num_key_value_heads", "qk_nope_head_dim"),
      *("head_dim", "qk_head_dim"),
    ),
    _read_latent_heads,
    lambda model: {
      "num_attention_heads": model["heads"],
      "num_key_value_heads": model["heads"],
      "qk_nope_head_dim": model["head_size"] - model["rotary_size"],
    },
  ),
  field("q_lora_rank", "query_latent_size", null=lambda theirs: 0, write=_or_null),
  field("kv_lora_rank", "latent_size"),
  field("qk_rope_head_dim", "rotary_size"),
  field("v_head_dim", "value_head_size"),
)
INTERLEAVE = field(
  "rope_interleave",
  "rotary_pairs",
  forms.FLAG,
  read=lambda value: "adjacent" if value else "halves",
  write=lambda pairs: pairs == "adjacent",
)

_PLAIN_ROPE = rope()


def _read_latent_rope(theirs: Theirs) -> dict[str, Any]:
  """With YaRN, scores are also scaled by the square of a factor that mscale_all_dim gives."""
  found = _PLAIN_ROPE.read(theirs)
  given = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
  share = given.get("mscale_all_dim") if found["rotary_scaling"] else None
  factor = yarn_factor(_number(given, "factor"), share) if share else 1.0
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

EXPERTS_PER_TOKEN = field("num_experts_per_tok", "experts_per_token")
ROUTER_NORMALIZED = flag("norm_topk_prob", "router_normalized")
EXPERT_WIDTH = field("moe_intermediate_size", "expert_feedforward_size")
# The experts have the one width that the file names.
EXPERT_WIDTH_OF_ALL = dataclasses.replace(
  field("intermediate_size", "expert_feedforward_size"), keys=()
)
# All layers have experts.
NO_DENSE_WIDTH = dataclasses.replace(
  field("moe_intermediate_size", "feedforward_size"), keys=(), write=lambda model: {}
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
  pattern = SimpleNamespace(**model)
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
  return {"sparse_every": step, "mlp_only_layers": tuple(n for n in listed if n < layers)}


def _write_sparse_layers(model: Ours) -> dict[str, Any]:
  if not model["dense_layers"]:
    return {_STEP: model["sparse_every"], _LISTED: [*model["mlp_only_layers"]]}
  return {_STEP: 1, _LISTED: [layer for layer, one in enumerate(sparse_of(model)) if not one]}


SPARSE_LAYERS = Part((_STEP, _LISTED), _read_sparse_layers, _write_sparse_layers)

_SPARSE, _INTERLEAVED = "moe_layers", "interleave_moe_layer_step"


def _read_llama_4_experts(theirs: Theirs) -> dict[str, Any]:
  """The experts and a shared one have the same width; layers with experts are listed."""
  layers, listed = value_of(theirs, "num_hidden_layers"), theirs.get(_SPARSE)
  if listed is None:
    step = value_of(theirs, _INTERLEAVED)
    listed = range(step - 1, layers, step)
  if not (sparse := {*listed} & {*range(layers)}):
    raise ValueError(f"{_SPARSE}={short([*listed])}: none of the {layers} layers has experts")
  dense, width = {*range(layers)} - sparse, value_of(theirs, "intermediate_size")
  widths = {"expert_feedforward_size": width, "shared_feedforward_size": width}
  return {**widths, "mlp_only_layers": tuple(sorted(dense))}


LLAMA_4_EXPERTS = Part(
  ("intermediate_size", _SPARSE, _INTERLEAVED),
  _read_llama_4_experts,
  lambda model: {
    "intermediate_size": model["expert_feedforward_size"],
    _SPARSE: [layer for layer, sparse in enumerate(sparse_of(model)) if sparse],
  },
)

# ------------------------------ mixtures of DeepSeek ------------------------------

_FIRST_SPARSE = "first_k_dense_replace"


def behind_dense_layers(*parts: Part, **fixed: Any) -> Part:
  """Returns DeepSeek's parts of experts as one; a model may also have dense layers alone.

  Args:
    *parts: of models with experts.
    **fixed: keys of `model` that are the same in all of these.
  """

  def read(theirs: Theirs) -> dict[str, Any]:
    dense = value_of(theirs, _FIRST_SPARSE, forms.whole(0))
    if dense >= value_of(theirs, "num_hidden_layers"):
      return {}
    found = {**fixed, "dense_layers": dense}
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
ROUTER_GROUPS = (field("n_group", "router_groups"), field("topk_group", "router_top_groups"))
_METHODS = ("greedy", "group_limited_greedy")


def _read_method(theirs: Theirs) -> dict[str, Any]:
  if (method := theirs.get("topk_method")) not in _METHODS:
    raise ValueError(f"topk_method={short(method)}: {' or '.join(_METHODS)} is needed")
  groups, top = ROUTER_GROUPS
  return {} if method == _METHODS[0] else {**groups.read(theirs), **top.read(theirs)}


# Groups in one of two methods.
GROUPS_BY_METHOD = Part(
  ("topk_method", "n_group", "topk_group"),
  _read_method,
  lambda model: {
    "topk_method": _METHODS[model["router_groups"] > 1],
    "n_group": model["router_groups"],
    "topk_group": model["router_top_groups"],
  },
)
