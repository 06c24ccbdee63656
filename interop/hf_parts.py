"""The parts that families are made of: keys of a config.json, read and written back.

Rotary positions stand in a file in one of two notations: transformers 4.57 reads `rope_theta` and
`rope_scaling`; version 5 reads `rope_parameters`, which has the base in it and, in families with
two kinds of layers, an object for each kind. A file with both must say the same twice; both are
written.

`hf_config.FORM` is checked before any part reads: lists, objects and texts are what they are.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from runtime import forms
from runtime.layer_kinds import BIASES, is_sparse, layer_type
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


def all_of(*parts: Part) -> Part:
  """Returns parts as one."""

  def read(theirs: Theirs) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.read(theirs).items()}

  def write(model: Ours) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.write(model).items()}

  return Part(tuple(key for part in parts for key in part.keys), read, write)


def when(reads: Callable[[Theirs], bool], writes: Callable[[Ours], bool], *parts: Part) -> Part:
  """Returns parts as one, of models and files of which these functions say so."""
  one = all_of(*parts)
  return Part(
    one.keys,
    lambda theirs: one.read(theirs) if reads(theirs) else {},
    lambda model: one.write(model) if writes(model) else {},
  )


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

# ------------------------------ layer types and windows ------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"


def types_of(ours: Ours) -> tuple[str, ...]:
  """Returns the type of each layer, as in `model.layer_types`."""
  model = SimpleNamespace(**ours)
  return tuple(layer_type(model, layer) for layer in range(ours["layers"]))


def named_layers(
  theirs: Theirs,
  names: Mapping[str, str],
  unlisted: Callable[[int], str],
  key: str = "layer_types",
) -> list[str]:
  """Returns our type of each layer.

  Args:
    theirs: a config.json.
    names: of types there -> ours.
    unlisted: gives the name of a layer's type, counted from 0, where the file does not list them.
    key: of the list.

  Raises:
    ValueError: a name that is not known, or not one for each layer.
  """
  layers = value_of(theirs, "num_hidden_layers")
  kinds = theirs.get(key)
  if kinds is None:
    kinds = [unlisted(layer) for layer in range(layers)]
  if len(kinds) != layers or not {*kinds} <= {*names}:
    raise ValueError(
      f"{key}={short(kinds)}: one of {', '.join(names)} for each of the {layers} layers is needed"
    )
  return [names[one] for one in kinds]


def of_types(types: Sequence[str], window: int = 0) -> dict[str, Any]:
  """Returns the keys of `model` for layers of these types; without a window all are full."""
  if not window:
    types = [one.replace("sliding", "full") for one in types]
  window *= any(one.startswith("sliding") for one in types)
  every = types.index("full") + 1 if window and "full" in types else 0
  found = {"window": window, "global_every": every, "layer_types": ()}
  if types_of({**found, "layers": len(types)}) == (*types,):
    return found
  return {**found, "global_every": 0, "layer_types": (*types,)}


# All layers have the window, or none.
WINDOW = field("sliding_window", "window", null=lambda theirs: 0, write=_or_null)


def _window(theirs: Theirs) -> int:
  """Returns the window of the layers that have one; 0: none has."""
  used = value_of(theirs, "use_sliding_window", forms.FLAG) if "use_sliding_window" in theirs else 1
  return WINDOW.read(theirs)["window"] if used else 0


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


def _windows(read: Callable[[Theirs], dict[str, Any]], *keys: str) -> Part:
  """Returns the part of windows, with some keys besides that of the window."""
  keys = ("sliding_window", *keys)
  return Part(
    keys, read, lambda model: {k: v for k, v in _write_by_layer(model).items() if k in keys}
  )


# All layers, as WINDOW: mixtures of Qwen 3, unlike its dense models.
QWEN_3_MOE_WINDOW = _windows(lambda theirs: {"window": _window(theirs)}, "use_sliding_window")


def _windowed(theirs: Theirs, full: Callable[[int], bool]) -> list[str]:
  """Returns the types of layers; where they are not listed, `full` says which have no window."""
  names = {FULL: "full", SLIDING: "sliding"}
  return named_layers(theirs, names, lambda layer: FULL if full(layer) else SLIDING)


def _read_qwen(theirs: Theirs) -> dict[str, Any]:
  """In the layers from max_window_layers on."""
  window = _window(theirs)
  first = value_of(theirs, "max_window_layers", forms.COUNT) if window else 0
  return of_types(_windowed(theirs, lambda layer: layer < first), window)


QWEN_WINDOW = _windows(_read_qwen, "layer_types", "use_sliding_window", "max_window_layers")


def alternating(every: int, *names: str) -> Part:
  """Returns the part of models with full attention in every n-th layer, and windows in the others.

  Args:
    every: n where a file has none of these names.
    *names: keys with n, of files that do not list the layers.
  """

  def read(theirs: Theirs) -> dict[str, Any]:
    given = next((value_of(theirs, name) for name in names if name in theirs), every)
    return of_types(_windowed(theirs, lambda layer: (layer + 1) % given == 0), _window(theirs))

  return _windows(read, "layer_types", *names)


_ROTATED = "no_rope_layers"  # 1: it has rotary positions


def _rotated(theirs: Theirs) -> list[bool]:
  """Returns whether each layer has rotary positions."""
  rotated, layers = theirs.get(_ROTATED), value_of(theirs, "num_hidden_layers")
  if rotated is None:
    every = value_of(theirs, "no_rope_layer_interval")
    return [layer % every != 0 for layer in range(1, layers + 1)]
  if len(rotated) != layers or not {*rotated} <= {0, 1}:
    raise ValueError(
      f"{_ROTATED}={short(rotated)}: 0 or 1 for each of the {layers} layers is needed"
    )
  return [bool(one) for one in rotated]


def _unrotated(types: list[str], rotated: list[bool]) -> list[str]:
  """Returns types of layers, some of which have no rotary positions."""
  pairs = zip(types, rotated, strict=True)
  return [one if rope else f"{one}_unrotated" for one, rope in pairs]


def _read_smollm_3(theirs: Theirs) -> dict[str, Any]:
  """SmolLM 3: layers without rotary positions, which may have a window."""
  rotated = _rotated(theirs)
  types = _windowed(theirs, lambda layer: rotated[layer])
  return of_types(_unrotated(types, rotated), _window(theirs))


SMOLLM_3 = _windows(
  *(_read_smollm_3, "layer_types", "use_sliding_window", _ROTATED, "no_rope_layer_interval")
)

# ------------------------------ of Llama 4 ------------------------------

_CHUNKED, _CHUNK = "chunked_attention", "attention_chunk_size"
_TEMPERED, _TEMPERATURE = "attn_temperature_tuning", ("attn_scale", "floor_scale")


def _read_llama_4_layers(theirs: Theirs) -> dict[str, Any]:
  """Returns which layers rotate, which see chunks, and how scores of the others grow."""
  rotated = _rotated({**theirs, _ROTATED: theirs.get(_ROTATED) or None})
  names = {_CHUNKED: "sliding", FULL: "full"}
  types = named_layers(theirs, names, lambda layer: _CHUNKED if rotated[layer] else FULL)
  window = value_of(theirs, _CHUNK) if "sliding" in types else 0
  found = {**of_types(_unrotated(types, rotated), window), "window_chunks": bool(window)}
  if not all(rotated) and theirs.get(_TEMPERED):
    strength = value_of(theirs, "attn_scale", forms.ABOVE_0)
    found["attention_temperature"] = "unrotated", strength, value_of(theirs, "floor_scale")
  return found


def _write_llama_4_layers(model: Ours) -> dict[str, Any]:
  found = _write_by_layer(model)
  layers, *numbers = model["attention_temperature"] or ("",)
  return {
    _ROTATED: found[_ROTATED],
    "layer_types": [_CHUNKED if kind == SLIDING else kind for kind in found["layer_types"]],
    **({_CHUNK: model["window"]} if model["window_chunks"] else {}),
    _TEMPERED: layers == "unrotated",
    **dict(zip(_TEMPERATURE, numbers, strict=False)),
  }


LLAMA_4_LAYERS = Part(
  (_ROTATED, "no_rope_layer_interval", "layer_types", _CHUNK, _TEMPERED, *_TEMPERATURE),
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


# ------------------------------ rotary positions ------------------------------

UNSCALED = "default"
ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"
_SHARE = "partial_rotary_factor"
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", _SHARE)
_YARN = ("beta_fast", "beta_slow", "attention_factor", "truncate")
# rope_type -> our names of its numbers.
SCALINGS = {
  UNSCALED: (),
  "llama3": ("factor", "low", "high", "original_length"),
  "linear": ("factor",),
  "dynamic": ("factor", "original_length"),
  "yarn": ("factor", "original_length", *_YARN),
  "longrope": ("original_length", "short_factors", "long_factors", "attention_factor", "factor"),
}
# Of those that have another name there.
_KEYS = {"low": "low_freq_factor", "high": "high_freq_factor", "original_length": ORIGINAL}
_KEYS |= {"short_factors": "short_factor", "long_factors": "long_factor"}
# Numbers that a file may leave out, and those that are read besides.
_OPTIONAL = {"yarn": _YARN, "longrope": ("attention_factor", "factor")}
_BESIDES = {
  "yarn": ("mscale", "mscale_all_dim"),
  UNSCALED: ("mrope_section", "mrope_interleaved"),  # of images: of text all positions are alike
}


def _numbers_of(kind: str) -> dict[str, str]:
  """Returns our name -> their key of each number of a rope_type."""
  return {name: _KEYS.get(name, name) for name in SCALINGS[kind]}


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
  for name, key in _numbers_of(kind).items():
    value = given.get(key)
    if key not in given and key in _OPTIONAL.get(kind, ()):
      continue
    if name.endswith("_factors"):
      if not isinstance(value, (list, tuple)):
        raise ValueError(f"rope_scaling: {key}={short(value)}: a list is needed")
      value = tuple(float(_number({key: one}, key)) for one in value)
    elif name != "truncate":
      value = _number(given, key)
    whole = name in ("original_length", "truncate") or isinstance(value, tuple)
    numbers[name] = value if whole else float(value)
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
  known = {"rope_type", "type", "rope_theta", _SHARE, *_numbers_of(kind).values()}
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
  for name, key in _numbers_of(kind).items():
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


def latent_head_size(theirs: Theirs) -> int:
  return sum(value_of(theirs, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))


def latent_rotary_share(theirs: Theirs) -> float:
  """Returns the part of a head that is rotated."""
  return value_of(theirs, "qk_rope_head_dim") / latent_head_size(theirs)


def _read_latent_heads(theirs: Theirs) -> dict[str, Any]:
  heads, size = value_of(theirs, "num_attention_heads"), latent_head_size(theirs)
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

LATENT_SCALE = Part((), lambda theirs: {"attention_scale": latent_head_size(theirs) ** -0.5})

_PLAIN_ROPE = rope()


def _read_latent_rope(theirs: Theirs) -> dict[str, Any]:
  """With YaRN, scores are also scaled by the square of a factor that mscale_all_dim gives."""
  found = _PLAIN_ROPE.read(theirs)
  given = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
  share = given.get("mscale_all_dim") if found["rotary_scaling"] else None
  factor = yarn_factor(_number(given, "factor"), share) if share else 1.0
  return {**found, "attention_scale": latent_head_size(theirs) ** -0.5 * factor**2}


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

# Of V3's routers.
CORRECTED = {
  "router_scores": "sigmoid",
  "router_correction": True,
  "router_group_score": "top2",
}
_FIRST_SPARSE = "first_k_dense_replace"


def behind_dense_layers(*parts: Part, **fixed: Any) -> tuple[Part, Part]:
  """Returns DeepSeek's parts of experts; a model may also have dense layers alone.

  Args:
    *parts: of models with experts.
    **fixed: keys of `model` that are the same in all of these.
  """

  def has_experts(theirs: Theirs) -> bool:
    return dense(theirs) < value_of(theirs, "num_hidden_layers")

  def dense(theirs: Theirs) -> int:
    return value_of(theirs, _FIRST_SPARSE, forms.whole(0))

  count = Part(
    (_FIRST_SPARSE,),
    lambda theirs: {"dense_layers": dense(theirs)} if has_experts(theirs) else {},
    lambda model: {_FIRST_SPARSE: model["dense_layers" if model["experts"] else "layers"]},
  )
  constant = Part((), lambda theirs: fixed)
  return count, when(has_experts, lambda model: model["experts"], constant, *parts)


def shared_experts(key: str) -> Part:
  """Returns the part of how many experts a shared one is as wide as."""
  return Part(
    (key,),
    lambda theirs: {
      "shared_feedforward_size": value_of(theirs, "moe_intermediate_size") * (theirs.get(key) or 0)
    },
    lambda model: {key: model["shared_feedforward_size"] // model["expert_feedforward_size"]},
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
