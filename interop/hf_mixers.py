"""The parts and tensors of families with mixers, beside those of `hf_parts.py`."""

from collections.abc import Callable, Mapping
from typing import Any

from interop.hf_parts import (
  CORRECTED,
  EXPERT_WIDTH_OF_ALL,
  EXPERTS_PER_TOKEN,
  FULL,
  ROUTER_GROUPS,
  ROUTER_NORMALIZED,
  Ours,
  Part,
  Theirs,
  all_of,
  field,
  flag,
  head_size_of,
  named_layers,
  number,
  of_types,
  only,
  rope,
  short,
  sparse_of,
  types_of,
  value_of,
  when,
)
from runtime import forms
from runtime.layer_kinds import MIXER, MLP, WITH_MIXER

# ------------------------------ which layers have a mixer ------------------------------


def layers_of(names: Mapping[str, str], full: Callable[[Theirs, int], bool], *keys: str) -> Part:
  """Returns the part of `layer_types`.

  Args:
    names: of types there -> ours; of several for ours, the first is written. The first name is of
      layers with mixers, the last of those with attention.
    full: whether a layer has attention where a file does not list the types.
    *keys: that `full` reads.
  """
  named = {ours: theirs for theirs, ours in reversed(names.items())}
  mixed, *_, attention = names

  def read(theirs: Theirs) -> dict[str, Any]:
    kinds = (mixed, attention)
    return of_types(named_layers(theirs, names, lambda layer: kinds[full(theirs, layer)]))

  def write(model: Ours) -> dict[str, Any]:
    return {"layer_types": [named.get(one, one) for one in types_of(model)]}

  return Part(("layer_types", *keys), read, write)


def mixer(kind: str, layers: Part, *parts: Part) -> tuple[Part, Part]:
  """Returns the part of the layers' types, and those of their mixers where there are any."""

  def has_mixers(theirs: Theirs) -> bool:
    return bool({MIXER, WITH_MIXER} & {*layers.read(theirs)["layer_types"]})

  named = Part((), lambda theirs: {"mixer": kind})
  return layers, when(has_mixers, lambda model: model["mixer"] == kind, named, *parts)


def _sizes(*pairs: tuple[str, str]) -> tuple[Part, ...]:
  """Returns the parts of sizes, from pairs of a key of config.json and ours."""
  return tuple(field(*pair) for pair in pairs)


_KINDS = {"linear_attention": MIXER, FULL: "full"}
LFM_2 = mixer(
  "short_convolution",
  layers_of(
    {"conv": MIXER, FULL: "full"},
    lambda theirs, n: theirs.get("full_attn_idxs") is None or n in theirs["full_attn_idxs"],
    "full_attn_idxs",
  ),
  field("conv_L_cache", "convolution_size"),
)
GATED_DELTA = mixer(
  "gated_delta",
  layers_of(
    _KINDS,
    lambda theirs, layer: (layer + 1) % value_of(theirs, "full_attention_interval") == 0,
    "full_attention_interval",
  ),
  *_sizes(
    ("linear_conv_kernel_dim", "convolution_size"),
    ("linear_num_value_heads", "mixer_heads"),
    ("linear_num_key_heads", "mixer_key_heads"),
    ("linear_key_head_dim", "mixer_head_size"),
    ("linear_value_head_dim", "mixer_value_head_size"),
  ),
)

# ------------------------------ Olmo Hybrid ------------------------------

_LINEAR, _ROPE = "linear_attention", "rope_parameters"


def _rotates(theirs: Theirs) -> bool:
  """Returns whether attention has positions: not where the object has null as its base."""
  return (theirs.get(_ROPE) or {}).get("rope_theta", theirs) is not None


def _read_olmo_layers(theirs: Theirs) -> dict[str, Any]:
  """Returns the layers' types; where they are not listed, the last of each four has attention."""
  full = "full" if _rotates(theirs) else "full_unrotated"
  kinds, layers = {_LINEAR: MIXER, FULL: full}, value_of(theirs, "num_hidden_layers")
  attends = {*range(3, layers, 4)} or {layers - 1}
  return of_types(named_layers(theirs, kinds, lambda n: FULL if n in attends else _LINEAR))


def _write_olmo_layers(model: Ours) -> dict[str, Any]:
  types = types_of(model)
  none = {_ROPE: {"rope_type": "default", "rope_theta": None}}
  kinds = [_LINEAR if one == MIXER else FULL for one in types]
  return {"layer_types": kinds, **({} if "full" in types else none)}


def _olmo_key_size(theirs: Theirs) -> int:
  """Returns the size of a key where a file does not say it."""
  heads = theirs.get("linear_num_key_heads") or value_of(theirs, "num_attention_heads")
  return int(0.75 * value_of(theirs, "hidden_size") / heads)


_OLMO_HEADS = {"null": lambda theirs: value_of(theirs, "num_attention_heads")}
OLMO_HYBRID = (
  when(_rotates, lambda model: "full" in types_of(model), rope()),
  *mixer(
    "gated_delta",
    Part(("layer_types",), _read_olmo_layers, _write_olmo_layers),
    field("linear_conv_kernel_dim", "convolution_size"),
    field("linear_num_value_heads", "mixer_heads", **_OLMO_HEADS),
    field("linear_num_key_heads", "mixer_key_heads", **_OLMO_HEADS),
    field("linear_key_head_dim", "mixer_head_size", null=_olmo_key_size),
    field(
      *("linear_value_head_dim", "mixer_value_head_size"),
      null=lambda theirs: 2 * (theirs.get("linear_key_head_dim") or _olmo_key_size(theirs)),
    ),
    flag("linear_allow_neg_eigval", "mixer_negative_eigenvalues"),
  ),
)
# Of how parameters are drawn.
OLMO_IGNORED = (
  *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
  "linear_dt_init_floor",
)

# ------------------------------ Kimi Linear ------------------------------

_NESTED, _DENSE = "linear_attn_config", "first_k_dense_replace"
# Their keys in the object of published files -> those of transformers.
_KIMI_NESTED = {
  "head_dim": "linear_head_dim",
  "num_heads": "linear_num_heads",
  "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def _has_attention(theirs: Theirs, layer: int) -> bool:
  """Returns whether a layer is in the published list, which counts from 1."""
  if listed := (theirs.get(_NESTED) or {}).get("full_attn_layers"):
    return layer + 1 in listed
  return layer > 0 and layer % 4 == 0


def _read_kimi_sparse(theirs: Theirs) -> dict[str, Any]:
  dense, key = value_of(theirs, _DENSE, forms.whole(0)), "mlp_layer_types"
  names = {"sparse": "sparse", "dense": "dense"}
  kinds = named_layers(theirs, names, lambda n: "dense" if n < dense else "sparse", key)
  return {"mlp_only_layers": tuple(n for n, one in enumerate(kinds) if one == "dense")}


def _write_kimi_sparse(model: Ours) -> dict[str, Any]:
  kinds = ["sparse" if one else "dense" for one in sparse_of(model)]
  return {"mlp_layer_types": kinds, _DENSE: (*kinds, "sparse").index("sparse")}


_KIMI = all_of(
  *mixer(
    "kimi_delta",
    layers_of({"linear_attention": MIXER, FULL: "full_unrotated"}, _has_attention),
    *_sizes(
      ("linear_head_dim", "mixer_head_size"),
      ("linear_head_dim", "mixer_value_head_size"),
      ("linear_num_heads", "mixer_heads"),
      ("linear_num_heads", "mixer_key_heads"),
      ("linear_conv_kernel_dim", "convolution_size"),
    ),
  ),
  Part((_DENSE, "mlp_layer_types"), _read_kimi_sparse, _write_kimi_sparse),
)


def _read_kimi(theirs: Theirs) -> dict[str, Any]:
  """In the notation of the published files, or of transformers."""
  nested = theirs.get(_NESTED) or {}
  found = {name: nested[key] for key, name in _KIMI_NESTED.items() if key in nested}
  return _KIMI.read({**theirs, **found})


def _write_kimi(model: Ours) -> dict[str, Any]:
  found = _KIMI.write(model)
  kinds, listed = found["layer_types"], {"full_attn_layers": [], "kda_layers": []}
  for layer, one in enumerate(kinds, 1):
    listed["full_attn_layers" if one == FULL else "kda_layers"].append(layer)
  nested = {key: found[name] for key, name in _KIMI_NESTED.items() if name in found}
  return {**found, _NESTED: {**nested, **listed}}


KIMI_LINEAR = Part((*_KIMI.keys, _NESTED), _read_kimi, _write_kimi)

# ------------------------------ MiniMax-01 ------------------------------

_MINIMAX_PARTS = ("full_attn", "linear_attn", "mlp")
MINIMAX_FACTORS = tuple(f"{x}_{of}_factor" for of in ("alpha", "beta") for x in _MINIMAX_PARTS)


def _read_factors(theirs: Theirs) -> dict[str, Any]:
  """Returns the factors, which all parts share."""
  numbers = [value_of(theirs, key, forms.ABOVE_0) for key in MINIMAX_FACTORS]
  for keys, each in ((MINIMAX_FACTORS[:3], numbers[:3]), (MINIMAX_FACTORS[3:], numbers[3:])):
    if len({*each}) > 1:
      raise ValueError(f"{', '.join(keys)}={short(each)}: those of all parts are equal here")
  return {"normed_residual": float(numbers[0]), "residual_multiplier": float(numbers[3])}


def _read_lightning(theirs: Theirs) -> dict[str, Any]:
  """Returns the heads of lightning attention, as many and as large as of attention."""
  heads, size = value_of(theirs, "num_attention_heads"), head_size_of(theirs)
  return {
    **dict.fromkeys(("mixer_heads", "mixer_key_heads"), heads),
    **dict.fromkeys(("mixer_head_size", "mixer_value_head_size"), size),
  }


MINIMAX = (
  *mixer(
    "lightning",
    layers_of(_KINDS, lambda theirs, layer: layer % 2 == 0),
    Part((), _read_lightning),
  ),
  Part(
    MINIMAX_FACTORS,
    _read_factors,
    lambda model: {
      key: model["normed_residual" if "alpha" in key else "residual_multiplier"]
      for key in MINIMAX_FACTORS
    },
  ),
)

# ------------------------------ Mamba-2 ------------------------------

MAMBA = "mamba2"  # model.mixer


def mamba_tensors(start: str, ours: str = "layers/attention/") -> dict[str, tuple[str, ...]]:
  """Returns the rows of a mixer whose names begin so, there and here; see `hf_families`."""
  channels = [f"{ours}{name}_taps" for name in ("value", "key", "query")]
  return {
    f"{start}in_proj.weight": (
      "Au+Au+Gh+Gh+A D",
      *(f"{ours}{name}/kernel" for name in ("gate", "value", "key", "query", "decay")),
    ),
    f"{start}conv1d.weight": ("Au+Gh+Gh 1 w", *channels),
    f"{start}conv1d.bias": ("Au+Gh+Gh", *(f"{name}_bias" for name in channels)),
    f"{start}dt_bias": ("A", f"{ours}step_bias"),
    f"{start}A_log": ("A", f"{ours}log_factor"),
    f"{start}D": ("A", f"{ours}skip"),
    f"{start}norm.weight": ("Au", f"{ours}norm/scale"),
    f"{start}out_proj.weight": ("D Au", f"{ours}out/kernel"),
  }


_LIMITS, _HEAD, _EXPAND, _WIDTH = "time_step_limit", "mamba_d_head", "mamba_expand", "mamba_d_ssm"


def _read_limits(theirs: Theirs) -> dict[str, Any]:
  """Returns the smallest and the largest step; transformers writes infinity as an object."""
  given = theirs.get(_LIMITS)
  found = [
    float("inf") if x == {"__float__": "Infinity"} else x for x in given or [0, float("inf")]
  ]
  if given == [] or not (
    len(found) == 2 and all(type(x) in (int, float) for x in found) and found[0] >= 0
  ):
    raise ValueError(f"{_LIMITS}={short(given)}: the smallest and the largest step are needed")
  return {"mixer_step_limits": () if found == [0, float("inf")] else tuple(map(float, found))}


STEP_LIMITS = Part(
  (_LIMITS,),
  _read_limits,
  lambda model: {_LIMITS: [*model["mixer_step_limits"]]} if model["mixer_step_limits"] else {},
)


def _read_head_size(theirs: Theirs) -> dict[str, Any]:
  """Returns the size of a head; Falcon-H1 names the width of all heads."""
  heads = value_of(theirs, "mamba_n_heads")
  if theirs.get(_WIDTH) is None:
    width = value_of(theirs, _EXPAND) * value_of(theirs, "hidden_size")
  else:
    width = value_of(theirs, _WIDTH)
  if theirs.get(_HEAD) in (None, "auto"):
    theirs = {**theirs, _HEAD: width // heads}
  size = value_of(theirs, _HEAD)
  if size * heads != width:
    raise ValueError(
      f"{_HEAD}={size}, mamba_n_heads={heads}: their product would be {_WIDTH}, or {_EXPAND} * "
      f"hidden_size: {width}"
    )
  return {"mixer_value_head_size": size}


def _write_expand(model: Ours) -> dict[str, Any]:
  width, size = model["mixer_heads"] * model["mixer_value_head_size"], model["model_size"]
  # A fraction is not read.
  return {_EXPAND: width / size if width % size else width // size}


def _mamba(*keys: str, write: Callable[[Ours], dict[str, Any]] = _write_expand) -> tuple[Part, ...]:
  """Returns the parts of the sizes of Mamba-2; `write` gives the width of all heads."""
  return (
    *_sizes(
      ("mamba_n_heads", "mixer_heads"),
      ("mamba_n_groups", "mixer_key_heads"),
      ("mamba_d_state", "mixer_head_size"),
      ("mamba_d_conv", "convolution_size"),
    ),
    Part(
      (_HEAD, _EXPAND, *keys),
      _read_head_size,
      lambda model: {_HEAD: model["mixer_value_head_size"], **write(model)},
    ),
    STEP_LIMITS,
  )


# `mamba_chunk_size` is a matter of rounding.
PLAIN = (only("mamba_conv_bias", True), only("mamba_proj_bias", False))
IGNORED = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")

_LISTED = "attn_layer_indices"


def _read_listed(theirs: Theirs) -> dict[str, Any]:
  layers, listed = value_of(theirs, "num_hidden_layers"), theirs.get(_LISTED) or ()
  return of_types(["full" if layer in listed else MIXER for layer in range(layers)])


BAMBA = mixer(
  MAMBA,
  Part(
    (_LISTED,),
    _read_listed,
    lambda model: {_LISTED: [n for n, one in enumerate(types_of(model)) if one != MIXER]},
  ),
  *_mamba(),
)

# ------------------------------ Granite 4 ------------------------------

_POSITIONS, _SHARED, _COUNT = (
  *("position_embedding_type", "shared_intermediate_size", "num_local_experts"),
)
# In the notation of version 4.57 as of 5.
_GRANITE_KINDS = {"mamba": MIXER, "linear_attention": MIXER, "attention": "full", FULL: "full"}


def _read_granite(theirs: Theirs) -> dict[str, Any]:
  """Attention has no positions unless the file says so."""
  full = "full" if theirs.get(_POSITIONS) == "rope" else "full_unrotated"
  types = named_layers(theirs, _GRANITE_KINDS, lambda layer: "mamba")
  return of_types([full if one == "full" else one for one in types])


def _write_granite(model: Ours) -> dict[str, Any]:
  types = types_of(model)
  kinds = ["mamba" if one == MIXER else "attention" for one in types]
  return {"layer_types": kinds, _POSITIONS: "rope" if "full" in types else None}


# Without experts the MLP of all tokens is what others have beside them.
_DENSE_GRANITE = field(_SHARED, "feedforward_size")
_GRANITE_EXPERTS = (
  Part((), lambda theirs: {"router_scores": "softmax_of_chosen"}),
  *(field(_COUNT, "experts"), field(_SHARED, "shared_feedforward_size"), EXPERTS_PER_TOKEN),
  *(field("intermediate_size", "feedforward_size"), EXPERT_WIDTH_OF_ALL),
)


def _has_experts(theirs: Theirs) -> bool:
  return value_of(theirs, _COUNT, forms.whole(0)) > 0


GRANITE = (
  *mixer(MAMBA, Part(("layer_types", _POSITIONS), _read_granite, _write_granite), *_mamba()),
  when(_has_experts, lambda model: model["experts"], *_GRANITE_EXPERTS),
  when(
    lambda theirs: not _has_experts(theirs),
    lambda model: not model["experts"],
    Part((), lambda theirs: {}, lambda model: {_COUNT: 0}),
    _DENSE_GRANITE,
  ),
)

# ------------------------------ Falcon-H1 ------------------------------

# Their keys -> ours in `model.multipliers`.
_FACTORS = {
  "ssm_in_multiplier": "mixer",
  "ssm_out_multiplier": "mixer/out",
  "attention_in_multiplier": "attention",
  "key_multiplier": "attention/key",
  "attention_out_multiplier": "attention/out",
}
# Those that are lists; of the mixer's projections in the order in which they are joined.
_LISTS = {
  "ssm_multipliers": tuple(f"mixer/{name}" for name in ("gate", "value", "key", "query", "decay")),
  "mlp_multipliers": ("mlp/gate", "mlp/down"),
}


def _read_multipliers(theirs: Theirs) -> dict[str, Any]:
  found = {ours: value_of(theirs, key, forms.ABOVE_0) for key, ours in _FACTORS.items()}
  for key, names in _LISTS.items():
    given = [1.0] * len(names) if theirs.get(key) is None else theirs[key]
    if len(given) != len(names) or not all(map(forms.ABOVE_0.fits, given)):
      raise ValueError(f"{key}={short(given)}: {len(names)} numbers above 0 are needed")
    found |= zip(names, given, strict=True)
  return {"multipliers": tuple((name, float(one)) for name, one in found.items() if one != 1)}


def _write_multipliers(model: Ours) -> dict[str, Any]:
  ours = dict(model["multipliers"])
  lists = {key: [ours.get(name, 1.0) for name in names] for key, names in _LISTS.items()}
  return {**lists, **{key: ours.get(name, 1.0) for key, name in _FACTORS.items()}}


_NORMS = ("mamba_rms_norm", "mamba_norm_before_gate")


def _read_norm(theirs: Theirs) -> dict[str, Any]:
  normed, before = (value_of(theirs, key, forms.FLAG) for key in _NORMS)
  return {"mixer_norm": ("before_gate" if before else "after_gate") if normed else "none"}


def _write_norm(model: Ours) -> dict[str, Any]:
  norm = model["mixer_norm"]
  return dict(zip(_NORMS, (norm != "none", norm == "before_gate"), strict=True))


FALCON_H1 = (
  *mixer(
    MAMBA,
    Part((), lambda theirs: {"layer_types": (WITH_MIXER,)}),
    *_mamba(
      _WIDTH,
      write=lambda model: {_WIDTH: model["mixer_heads"] * model["mixer_value_head_size"]},
    ),
  ),
  Part(_NORMS, _read_norm, _write_norm),
  Part((*_FACTORS, *_LISTS), _read_multipliers, _write_multipliers),
  only("projectors_bias", False),
)

# ------------------------------ Nemotron-H ------------------------------

_BLOCKS, _PATTERN, _LAYERS = "layers_block_type", "hybrid_override_pattern", "num_hidden_layers"
# In the notation of transformers 5.23, of earlier ones, and of the published files -> ours.
_BLOCK_KINDS = {"linear_attention": MIXER, "full_attention": "full_unrotated", "mlp": MLP}
_BLOCK_KINDS |= {"mamba": MIXER, "attention": "full_unrotated"}
_LETTERS = {"M": MIXER, "*": "full_unrotated", "-": MLP}
_OF_EXPERTS = ("moe", "E")


def _read_nemotron(theirs: Theirs) -> dict[str, Any]:
  """Each layer has one part; attention has no positions."""
  kinds = theirs.get(_BLOCKS) or [*(theirs.get(_PATTERN) or "")]
  names = _BLOCK_KINDS | _LETTERS | dict.fromkeys(_OF_EXPERTS, MLP)
  if unknown := [one for one in kinds if one not in names]:
    why = "linear_attention (M), full_attention (*), mlp (-) and moe (E) are read"
    raise ValueError(f"layers of the type {short(unknown[0])}: {why}")
  if len({one in _OF_EXPERTS for one in kinds if names[one] == MLP}) > 1:
    raise ValueError(f"{short(kinds)}: layers of the types mlp (-) and moe (E) in one model")
  if not kinds or theirs.get(_LAYERS) not in (None, len(kinds)):
    raise ValueError(
      f"{_BLOCKS}, or {_PATTERN}: a type for each of {_LAYERS}={theirs.get(_LAYERS)} layers "
      f"is needed, and there are {len(kinds)}"
    )
  return {"layers": len(kinds), "layer_types": tuple(names[one] for one in kinds)}


def _write_nemotron(model: Ours) -> dict[str, Any]:
  types = types_of(model)
  named = {ours: theirs for theirs, ours in reversed(_BLOCK_KINDS.items())}
  letters = {ours: theirs for theirs, ours in _LETTERS.items()}
  if model["experts"]:
    named[MLP], letters[MLP] = _OF_EXPERTS
  return {
    _LAYERS: len(types),
    _BLOCKS: [named.get(one, one) for one in types],
    _PATTERN: "".join(letters.get(one, "?") for one in types),
  }


def _has_moe(theirs: Theirs) -> bool:
  return not {*_OF_EXPERTS}.isdisjoint(theirs.get(_BLOCKS) or theirs.get(_PATTERN) or ())


NEMOTRON_EXPERTS = when(
  _has_moe,
  lambda model: model["experts"],
  Part((), lambda theirs: CORRECTED),
  *_sizes(
    ("n_routed_experts", "experts"),
    ("moe_intermediate_size", "expert_feedforward_size"),
    ("moe_shared_expert_intermediate_size", "shared_feedforward_size"),
  ),
  *(EXPERTS_PER_TOKEN, *ROUTER_GROUPS, ROUTER_NORMALIZED),
  number("routed_scaling_factor", "router_scale"),
  *(only("mlp_bias", False), only("moe_latent_size", None)),
)
NEMOTRON_H = (
  *mixer(
    MAMBA,
    Part((_BLOCKS, _PATTERN, _LAYERS), _read_nemotron, _write_nemotron),
    *_sizes(
      ("mamba_num_heads", "mixer_heads"),
      ("n_groups", "mixer_key_heads"),
      ("ssm_state_size", "mixer_head_size"),
      ("mamba_head_dim", "mixer_value_head_size"),
      ("conv_kernel", "convolution_size"),
    ),
    STEP_LIMITS,
  ),
  *(only("use_conv_bias", True), only("use_bias", False), only("mamba_proj_bias", False)),
  *(only("mamba_hidden_act", "silu"), only("sliding_window", None)),
)
# Of how parameters are drawn, and of kernels and caches.
NEMOTRON_IGNORED = (
  *("expand", "chunk_size", "time_step_min", "time_step_max", "time_step_floor"),
  *("residual_in_fp32", "rescale_prenorm_residual", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
  *("n_shared_experts", "moe_shared_expert_overlap", "output_router_logits"),
  *("norm_eps", "partial_rotary_factor", "rope_theta", "rope_scaling"),  # of other code
  *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
  "num_logits_to_keep",
)
