"""Mixtures of experts in a config.json: sizes, the layers that have them, and the router."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from interop import hf_parts as parts
from interop.hf_family import Ours, Part, Theirs, short
from runtime.layer_kinds import is_sparse

# Of training and of what is returned beside the logits.
IGNORED = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
PER_TOKEN = parts.same("num_experts_per_tok", "experts_per_token")
NORMALIZED = parts.same("norm_topk_prob", "router_normalized", bool)
# The experts have the one width that the file names.
ONE_WIDTH = Part(
  (),
  lambda config: {"expert_feedforward_size": parts.value_of(config, "intermediate_size")},
  lambda model: {"intermediate_size": model["expert_feedforward_size"]},
)
WIDTH = parts.same("moe_intermediate_size", "expert_feedforward_size")


_NUMBERS = ("num_experts", "num_local_experts")


def number(default: int, *written: str) -> Part:
  """Returns the part of the number of experts, whose name differs between versions.

  Args:
    default: where a file has none.
    written: names, among `num_experts` and `num_local_experts`.
  """

  def read(config: Theirs) -> dict[str, Any]:
    given = {key: parts.value_of(config, key) for key in _NUMBERS if config.get(key) is not None}
    if len({*given.values()}) > 1:
      raise ValueError(f"num_experts={given[_NUMBERS[0]]} contradicts {_NUMBERS[1]}")
    return {"experts": next(iter(given.values()), default)}

  return Part(_NUMBERS, read, lambda model: dict.fromkeys(written, model["experts"]))


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
  pattern = SimpleNamespace(**{key: model[key] for key in ("experts", *_LAYERS)})
  return [is_sparse(pattern, layer) for layer in range(model["layers"])]


_LAYERS = ("dense_layers", "sparse_every", "mlp_only_layers")

# ------------------------------ Qwen 3 ------------------------------


def _read_qwen(config: Theirs) -> dict[str, Any]:
  """Of every `decoder_sparse_step` layers the last has experts, if it is not listed."""
  layers, step = (parts.value_of(config, key) for key in ("num_hidden_layers", _STEP))
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
QWEN_3 = Part((_STEP, _LISTED), _read_qwen, _write_qwen)


def _read_qwen_window(config: Theirs) -> dict[str, Any]:
  used = parts.value_of(config, "use_sliding_window", bool)
  return parts.WINDOW.read(config) if used else {"window": 0}


# Unlike the dense Qwen 3: all layers have the window, or none.
QWEN_3_WINDOW = Part(
  ("use_sliding_window", "sliding_window"),
  _read_qwen_window,
  lambda model: {"use_sliding_window": bool(model["window"]), **parts.WINDOW.write(model)},
)

# ------------------------------ gpt-oss ------------------------------

_YARN = {
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
    return rope.read({**config, "rope_scaling": _YARN} if plain else config)

  return Part(rope.keys, read, rope.write)


# ------------------------------ DeepSeek ------------------------------

_SHARED, _WIDTH, _FIRST = "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace"
# Keys without effect on the logits, or that name the router that its model_type has.
_NAMED = {
  "deepseek_v2": {"scoring_func": ("softmax",), "norm_topk_prob": (False,)},
  "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
}
DEEPSEEK_IGNORED = (
  *("aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers", "num_nextn_predict_layers"),
  *IGNORED,
)


def deepseek(model_type: str) -> Part:
  """Returns the part of DeepSeek's experts; a model may also have none.

  Args:
    model_type: deepseek_v2 or deepseek_v3.
  """
  named = _NAMED[model_type]

  def read(config: Theirs) -> dict[str, Any]:
    layers, dense = parts.value_of(config, "num_hidden_layers"), config.get(_FIRST)
    if type(dense) is not int or dense < 0:
      raise ValueError(f"{_FIRST}={short(dense)}: a whole number of at least 0 is needed")
    if dense >= layers:
      return {}
    for key, values in {**named, "moe_layer_freq": (1,)}.items():
      if config.get(key) not in (None, *values):
        raise ValueError(f"{key}={short(config[key])}: only {values[0]} is read")
    width = parts.value_of(config, _WIDTH)
    return {
      "experts": parts.value_of(config, "n_routed_experts"),
      "dense_layers": dense,
      **PER_TOKEN.read(config),
      "expert_feedforward_size": width,
      "shared_feedforward_size": width * (config.get(_SHARED) or 0),
      "router_scale": parts.value_of(config, "routed_scaling_factor", float),
      **(_read_v2(config) if model_type == "deepseek_v2" else _read_v3(config)),
    }

  def write(model: Ours) -> dict[str, Any]:
    if not model["experts"]:
      return {_FIRST: model["layers"]}
    shared, width = model["shared_feedforward_size"], model["expert_feedforward_size"]
    return {
      "n_routed_experts": model["experts"],
      _FIRST: model["dense_layers"],
      "moe_layer_freq": 1,
      **PER_TOKEN.write(model),
      _WIDTH: width,
      _SHARED: shared // width,
      "routed_scaling_factor": model["router_scale"],
      **{key: values[0] for key, values in named.items()},
      "n_group": model["router_groups"],
      "topk_group": model["router_top_groups"],
      **(_GREEDY[model["router_groups"] > 1] if model_type == "deepseek_v2" else {}),
      **({} if model_type == "deepseek_v2" else NORMALIZED.write(model)),
    }

  keys = (*(_SHARED, _WIDTH, _FIRST), *PER_TOKEN.keys, *named, "moe_layer_freq", "topk_method")
  more = ("n_routed_experts", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob")
  return Part((*dict.fromkeys((*keys, *more)),), read, write)


_GREEDY: Mapping[bool, dict[str, str]] = {
  False: {"topk_method": "greedy"},
  True: {"topk_method": "group_limited_greedy"},
}


def _read_v2(config: Theirs) -> dict[str, Any]:
  method = config.get("topk_method")
  if not any(method == one["topk_method"] for one in _GREEDY.values()):
    raise ValueError(f"topk_method={short(method)}: greedy or group_limited_greedy is needed")
  groups = _read_groups(config, "max") if method == "group_limited_greedy" else {}
  return {"router_scores": "softmax", "router_normalized": False, **groups}


def _read_v3(config: Theirs) -> dict[str, Any]:
  more = {"router_scores": "sigmoid", "router_correction": True, **NORMALIZED.read(config)}
  return {**more, **_read_groups(config, "top2")}


def _read_groups(config: Theirs, score: str) -> dict[str, Any]:
  return {
    "router_groups": parts.value_of(config, "n_group"),
    "router_top_groups": parts.value_of(config, "topk_group"),
    "router_group_score": score,
  }
