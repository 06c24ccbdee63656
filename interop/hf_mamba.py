"""The parts and tensors of families with Mamba-2, beside those of `hf_parts.py`."""

from typing import Any

from interop.hf_parts import (
  EXPERTS_PER_TOKEN,
  FULL,
  Ours,
  Part,
  Theirs,
  only,
  short,
  types_of,
  value_of,
)
from runtime import forms
from runtime.layer_kinds import MIXER, MLP, WITH_MIXER

MAMBA = "mamba2"  # model.mixer

# ------------------------------ tensors ------------------------------


def tensors(start: str, ours: str = "layers/attention/") -> dict[str, tuple[str, ...]]:
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


# ------------------------------ config.json ------------------------------

_LIMITS, _EXPAND = "time_step_limit", "mamba_expand"
# Their keys -> ours.
_SIZES = {
  "mamba_n_heads": "mixer_heads",
  "mamba_n_groups": "mixer_key_heads",
  "mamba_d_state": "mixer_head_size",
  "mamba_d_head": "mixer_value_head_size",
  "mamba_d_conv": "convolution_size",
}


def _limits(theirs: Theirs) -> tuple[float, ...]:
  """Returns `model.mixer_step_limits`; transformers writes infinity as an object."""
  given = theirs.get(_LIMITS)
  if given is None:
    return ()
  found = [float("inf") if x == {"__float__": "Infinity"} else x for x in given]
  if not (len(found) == 2 and all(type(x) in (int, float) for x in found) and found[0] >= 0):
    raise ValueError(f"{_LIMITS}={short(given)}: the smallest and the largest step are needed")
  return () if found == [0, float("inf")] else (float(found[0]), float(found[1]))


def _read(theirs: Theirs) -> dict[str, Any]:
  """Returns the sizes; Falcon-H1 names the width of all heads."""
  heads = "mamba_n_heads"
  if theirs.get("mamba_d_ssm") is None:
    width = value_of(theirs, _EXPAND) * value_of(theirs, "hidden_size")
  else:
    width = value_of(theirs, "mamba_d_ssm")
  if theirs.get("mamba_d_head") in (None, "auto"):
    theirs = {**theirs, "mamba_d_head": width // value_of(theirs, heads)}
  if value_of(theirs, "mamba_d_head") * value_of(theirs, heads) != width:
    raise ValueError(
      f"mamba_d_head={theirs['mamba_d_head']}, {heads}={theirs[heads]}: their product would be "
      f"mamba_d_ssm, or mamba_expand * hidden_size: {width}"
    )
  sizes = {ours: value_of(theirs, key) for key, ours in _SIZES.items()}
  return {"mixer": MAMBA, **sizes, "mixer_step_limits": _limits(theirs)}


def _write(model: Ours) -> dict[str, Any]:
  width, size = model["mixer_heads"] * model["mixer_value_head_size"], model["model_size"]
  limits = [*model["mixer_step_limits"]]
  return {
    **{key: model[ours] for key, ours in _SIZES.items()},
    _EXPAND: width / size if width % size else width // size,  # a fraction is not read
    **({_LIMITS: limits} if limits else {}),
  }


def _of_mixers(part: Part, layers: Part) -> Part:
  """Returns the part of the layers' types, and that of their mixers where there are any."""

  def read(theirs: Theirs) -> dict[str, Any]:
    found = layers.read(theirs)
    return {**found, **part.read(theirs)} if MIXER in found["layer_types"] else found

  def write(model: Ours) -> dict[str, Any]:
    return layers.write(model) | (part.write(model) if model["mixer"] == MAMBA else {})

  return Part((*layers.keys, *part.keys), read, write)


_MIXER = Part((*_SIZES, _EXPAND, _LIMITS), _read, _write)
# `mamba_chunk_size` is a matter of rounding.
PLAIN = (only("mamba_conv_bias", True), only("mamba_proj_bias", False))
IGNORED = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")

_LISTED = "attn_layer_indices"
BAMBA = _of_mixers(
  _MIXER,
  Part(
    (_LISTED,),
    lambda theirs: {
      "layer_types": tuple(
        "full" if layer in (theirs.get(_LISTED) or ()) else MIXER
        for layer in range(value_of(theirs, "num_hidden_layers"))
      )
    },
    lambda model: {
      _LISTED: [layer for layer, one in enumerate(types_of(model)) if one != MIXER],
    },
  ),
)

# ------------------------------ Granite 4 ------------------------------

_KINDS = {"mamba": MIXER, "linear_attention": MIXER, "attention": "full", FULL: "full"}
_POSITIONS = "position_embedding_type"


def _read_granite(theirs: Theirs) -> dict[str, Any]:
  """In the notation of version 4.57 as of 5; attention has no positions unless the file says so."""
  layers = value_of(theirs, "num_hidden_layers")
  kinds = theirs.get("layer_types") or ["mamba"] * layers
  if len(kinds) != layers or not {*kinds} <= {*_KINDS}:
    raise ValueError(
      f"layer_types={short(kinds)}: one of {', '.join(_KINDS)} for each of the {layers} layers is "
      f"needed"
    )
  full = "full" if theirs.get(_POSITIONS) == "rope" else "full_unrotated"
  types = tuple(full if _KINDS[one] == "full" else MIXER for one in kinds)
  return {"layer_types": () if {*types} == {"full"} else types}


def _write_granite(model: Ours) -> dict[str, Any]:
  types = types_of(model)
  return {
    "layer_types": ["mamba" if one == MIXER else "attention" for one in types],
    _POSITIONS: "rope" if "full" in types else None,
  }


GRANITE = _of_mixers(_MIXER, Part(("layer_types", _POSITIONS), _read_granite, _write_granite))


_WIDTH, _SHARED, _COUNT = "intermediate_size", "shared_intermediate_size", "num_local_experts"


def _read_experts(theirs: Theirs) -> dict[str, Any]:
  """Of a model without experts the MLP of all tokens is what others have beside them."""
  count, shared = value_of(theirs, _COUNT, forms.whole(0)), value_of(theirs, _SHARED)
  if not count:
    return {"feedforward_size": shared}
  return {
    "experts": count,
    "router_scores": "softmax_of_chosen",
    "shared_feedforward_size": shared,
    **EXPERTS_PER_TOKEN.read(theirs),
    **dict.fromkeys(("feedforward_size", "expert_feedforward_size"), value_of(theirs, _WIDTH)),
  }


def _write_experts(model: Ours) -> dict[str, Any]:
  if not model["experts"]:
    return {_COUNT: 0, _SHARED: model["feedforward_size"]}
  found = {_COUNT: model["experts"], _SHARED: model["shared_feedforward_size"]}
  return {**found, _WIDTH: model["expert_feedforward_size"], **EXPERTS_PER_TOKEN.write(model)}


GRANITE_EXPERTS = Part(
  (_WIDTH, _SHARED, _COUNT, *EXPERTS_PER_TOKEN.keys), _read_experts, _write_experts
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


def _read_factors(theirs: Theirs) -> dict[str, Any]:
  found = {ours: value_of(theirs, key, forms.ABOVE_0) for key, ours in _FACTORS.items()}
  for key, names in _LISTS.items():
    given = [1.0] * len(names) if theirs.get(key) is None else theirs[key]
    if len(given) != len(names) or not all(map(forms.ABOVE_0.fits, given)):
      raise ValueError(f"{key}={short(given)}: {len(names)} numbers above 0 are needed")
    found |= zip(names, given, strict=True)
  return {"multipliers": tuple((name, float(one)) for name, one in found.items() if one != 1)}


def _write_factors(model: Ours) -> dict[str, Any]:
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


def _write_width(model: Ours) -> dict[str, Any]:
  found = {key: one for key, one in _write(model).items() if key != _EXPAND}
  return {**found, "mamba_d_ssm": model["mixer_heads"] * model["mixer_value_head_size"]}


FALCON = (
  Part(
    (*_MIXER.keys, "mamba_d_ssm"),
    lambda theirs: {"layer_types": (WITH_MIXER,), **_read(theirs)},
    _write_width,
  ),
  Part(_NORMS, _read_norm, _write_norm),
  Part((*_FACTORS, *_LISTS), _read_factors, _write_factors),
  only("projectors_bias", False),
)

# ------------------------------ Nemotron-H ------------------------------

_KINDS_LISTED, _PATTERN, _LAYERS = (
  "layers_block_type",
  "hybrid_override_pattern",
  "num_hidden_layers",
)
# In the notation of transformers 5.23, of earlier ones, and of the published files -> ours.
_PARTS = {"linear_attention": MIXER, "full_attention": "full_unrotated", "mlp": MLP}
_PARTS |= {"mamba": MIXER, "attention": "full_unrotated"}
_PARTS |= {"M": MIXER, "*": "full_unrotated", "-": MLP}
_NEMOTRON_SIZES = {
  "mamba_num_heads": "mixer_heads",
  "n_groups": "mixer_key_heads",
  "ssm_state_size": "mixer_head_size",
  "mamba_head_dim": "mixer_value_head_size",
  "conv_kernel": "convolution_size",
}


def _read_nemotron(theirs: Theirs) -> dict[str, Any]:
  """Each layer has one part; attention has no positions."""
  kinds = theirs.get(_KINDS_LISTED) or [*(theirs.get(_PATTERN) or "")]
  if unknown := [one for one in kinds if one not in _PARTS]:
    why = "linear_attention (M), full_attention (*) and mlp (-) are read"
    if unknown[0] in ("moe", "E"):
      why = "experts of this family have no gate, and those here have"
    raise ValueError(f"layers of the type {short(unknown[0])}: {why}")
  if not kinds or theirs.get(_LAYERS) not in (None, len(kinds)):
    raise ValueError(
      f"{_KINDS_LISTED}, or {_PATTERN}: a type for each of {_LAYERS}={theirs.get(_LAYERS)} layers "
      f"is needed, and there are {len(kinds)}"
    )
  types = tuple(_PARTS[one] for one in kinds)
  sizes = {ours: value_of(theirs, key) for key, ours in _NEMOTRON_SIZES.items()}
  limits = {"mixer_step_limits": _limits(theirs)}
  return {"layers": len(kinds), "layer_types": types, "mixer": MAMBA, **sizes, **limits}


def _write_nemotron(model: Ours) -> dict[str, Any]:
  found = {key: model[ours] for key, ours in _NEMOTRON_SIZES.items()}
  limits = [*model["mixer_step_limits"]]
  types = types_of(model)
  named = {ours: theirs for theirs, ours in reversed(_PARTS.items()) if len(theirs) > 1}
  letters = {ours: theirs for theirs, ours in _PARTS.items() if len(theirs) == 1}
  return {
    **found,
    **({_LIMITS: limits} if limits else {}),
    _LAYERS: len(types),
    _KINDS_LISTED: [named.get(one, one) for one in types],
    _PATTERN: "".join(letters.get(one, "?") for one in types),
  }


NEMOTRON = (
  Part(
    (*_NEMOTRON_SIZES, _LIMITS, _KINDS_LISTED, _PATTERN, _LAYERS), _read_nemotron, _write_nemotron
  ),
  *(only("use_conv_bias", True), only("use_bias", False), only("mamba_proj_bias", False)),
  *(only("mamba_hidden_act", "silu"), only("sliding_window", None)),
)
# Of how parameters are drawn, of kernels and caches, and of experts, which other files have.
NEMOTRON_IGNORED = (
  *(
    "expand",
    "chunk_size",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "residual_in_fp32",
  ),
  *("rescale_prenorm_residual", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep"),
  *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "num_experts_per_tok"),
  *("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap"),
  *("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "output_router_logits"),
  *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)
