"""Multi-head latent attention in a config.json: the sizes of DeepSeek, and its scale under YaRN."""

import math
from typing import Any

from interop import hf_parts as parts
from interop.hf_family import Ours, Part, Theirs, short, yarn_factor
from interop.hf_rope import KEYS, ORIGINAL, numbers, rope

_SIZES = {
  "kv_lora_rank": "latent_size",
  "qk_rope_head_dim": "rotary_size",
  "v_head_dim": "value_head_size",
}


def _read(config: Theirs) -> dict[str, Any]:
  heads = parts.value_of(config, "num_attention_heads")
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
    "query_latent_size": 0 if rank is None else parts.value_of(config, "q_lora_rank"),
    "head_size": size,
    **{ours: parts.value_of(config, theirs) for theirs, ours in _SIZES.items()},
  }


def _head_size(config: Theirs) -> int:
  return sum(parts.value_of(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))


def _write(model: Ours) -> dict[str, Any]:
  heads = model["heads"]
  return {
    "num_attention_heads": heads,
    "num_key_value_heads": heads,
    "q_lora_rank": model["query_latent_size"] or None,
    "qk_nope_head_dim": model["head_size"] - model["rotary_size"],
    **{theirs: model[ours] for theirs, ours in _SIZES.items()},
  }


LATENT = Part(
  (
    *("num_attention_heads", "num_key_value_heads", "q_lora_rank", "qk_nope_head_dim", *_SIZES),
    *("head_dim", "qk_head_dim"),
  ),
  _read,
  _write,
)


def _read_interleave(config: Theirs) -> dict[str, Any]:
  adjacent = parts.value_of(config, "rope_interleave", bool)
  return {"rotary_pairs": "adjacent" if adjacent else "halves"}


INTERLEAVE = Part(
  ("rope_interleave",),
  _read_interleave,
  lambda model: {"rope_interleave": model["rotary_pairs"] == "adjacent"},
)

# ------------------------------ rotary positions and the scale ------------------------------

_ROPE = rope()
# With YaRN, scores are also scaled by the square of a factor that follows from this number.
_ALL, _ONE = "mscale_all_dim", "mscale"


def _read_rope(config: Theirs) -> dict[str, Any]:
  found = _ROPE.read(config)
  given = config.get("rope_parameters") or config.get("rope_scaling") or {}
  share = given.get(_ALL) if found["rotary_scaling"] else None
  factor = yarn_factor(*numbers(given, ("factor",)), share) if share else 1.0
  return {**found, "attention_scale": _head_size(config) ** -0.5 * factor**2}


def _write_rope(model: Ours) -> dict[str, Any]:
  found, scaling = _ROPE.write(model), tuple(model["rotary_scaling"])
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


ROPE = Part((*KEYS, ORIGINAL), _read_rope, _write_rope)
