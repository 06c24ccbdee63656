"""The `config.json` of a model folder -> the keys of `config.model` that it determines, and back.

A family (`hf_family.py`) is a table of parts. Each part reads some keys of config.json and gives
some of ours, and writes them back. Every key of a config.json is either read by a part of its
family, or must have one of the values that the family can express (ONLY), or has no effect on what
the model computes (IGNORED); any other is refused by name. Nothing here imports JAX.
"""

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any

from interop.hf_family import Family, Ours, Theirs, bias_names, short, types_of, yarn_factor
from runtime import forms
from runtime.forms import COUNT, SIZE, TEXT, OrNull
from runtime.layer_kinds import is_sparse
from runtime.suggest import nearest

# ------------------------------ quantized weights ------------------------------

BLOCK = (128, 128)  # as DeepSeek-V3 has it
UNQUANTIZED = (
  "take the folder of the unquantized model (usually the one that base_model in the README names)"
)


def block_shape(given: Any) -> tuple[int, int]:
  """Returns the rows and columns of a block of scales.

  Args:
    given: `quantization_config` of a config.json.

  Raises:
    ValueError: weights that are quantized in this way are not read.
  """
  if given is None:
    return BLOCK
  keys = given if isinstance(given, Mapping) else {}
  method, block = keys.get("quant_method"), keys.get("weight_block_size")
  if method == "mxfp4":
    return BLOCK
  sizes = (
    isinstance(block, list | tuple)
    and len(block) == 2
    and all(type(one) is int and one > 0 for one in block)
  )
  if method == "fp8" and sizes and keys.get("fmt") in ("e4m3", None):
    return block[0], block[1]
  raise ValueError(
    f"the weights are quantized; {UNQUANTIZED}, or one in 'mxfp4', or in 'fp8' (e4m3) with a "
    f"weight_block_size of two numbers"
  )


# ------------------------------ keys that no family reads ------------------------------

# About training, generation, files and classes; nothing of it changes a model's logits.
IGNORED = (
  *("architectures", "_name_or_path", "transformers_version", "auto_map", "name_or_path"),
  *("torch_dtype", "dtype", "use_cache", "initializer_range", "tokenizer_class", "use_bfloat16"),
  *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
  *("unk_token_id", "prefix", "task_specific_params", "finetuning_task", "problem_type"),
  *("id2label", "label2id", "num_labels", "return_dict", "torchscript", "tf_legacy_loss"),
  *("output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate"),
  *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset"),
  *("_experts_implementation", "experts_implementation"),
  *("chunk_size_feed_forward", "cross_attention_hidden_size", "is_decoder", "pretraining_tp"),
  # Dropout: that of training here is model.dropout_rate.
  *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
  # Generation, of versions that kept it in this file.
  *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
  *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id"),
  *("forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size"),
  *("num_beam_groups", "num_beams", "num_return_sequences", "remove_invalid_values"),
  *("repetition_penalty", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p"),
  *("max_new_tokens", "max_window_size"),
  # Tools that leave a note.
  *("unsloth_version", "unsloth_fixed", "transformers.js_config", "model_name"),
)

# Key -> (the values that it may have, why no other).
ONLY: dict[str, tuple[tuple, str]] = {
  "compression_config": (
    (None,),
    f"the weights are quantized; {UNQUANTIZED}",
  ),
  "is_encoder_decoder": ((False, None), "only decoders are read"),
  "tie_encoder_decoder": ((False, None), "only decoders are read"),
  "add_cross_attention": ((False, None), "only decoders without cross-attention are read"),
  "use_bidirectional_attention": ((False, None), "only causal attention is read"),
  "attention_bias": ((False, None), "models of this type are read without"),
  "mlp_bias": ((False, None), "models of this type are read without"),
  "pruned_heads": (({}, None), "heads that were pruned are not read"),
}


# ------------------------------ reading and writing ------------------------------

# The keys of `model` that a folder determines and that turn something off where a family does not
# mention them; a test compares them with the recipe's. SIZES have no such value.
NEUTRAL: dict[str, Any] = {
  "positions": "rotary",
  "max_positions": None,  # of learned positions
  "rotary_base": 10_000.0,
  "rotary_size": 0,
  "rotary_pairs": "halves",
  "attention": "grouped_query",
  "latent_size": 0,
  "query_latent_size": 0,
  "latent_norm_epsilon": 1e-6,
  "value_head_size": None,  # as head_size
  "rotary_scaling": (),
  "local_rotary_base": 0.0,
  "local_rotary_scaling": (),
  "window": 0,
  "global_every": 0,
  "layer_types": (),
  "norm": "rms",
  "norm_scale_from_one": False,
  "pre_norms": True,
  "post_norms": False,
  "query_key_norm": False,
  "query_key_norm_across_heads": False,
  "clip_qkv": 0.0,
  "biases": "none",
  "gated": True,
  "attention_scale_by_inverse_layer": False,
  "attention_soft_cap": 0.0,
  "attention_sinks": False,
  "logits_soft_cap": 0.0,
  "scaled_embeddings": False,
  "embedding_multiplier": 1.0,
  "residual_multiplier": 1.0,
  "logits_divisor": 1.0,
  "experts": 0,
  "experts_per_token": 2,
  "expert_feedforward_size": None,  # as feedforward_size
  "shared_feedforward_size": 0,
  "dense_layers": 0,
  "sparse_every": 1,
  "mlp_only_layers": (),
  "router_scores": "softmax",
  "router_normalized": True,
  "router_scale": 1.0,
  "router_groups": 1,
  "router_top_groups": 1,
  "router_group_score": "max",
  "router_bias": False,
  "router_correction": False,
  "expert_biases": False,
  "gate_limit": 0.0,
  "up_offset": 0.0,
}
_NO_LOCAL = {"local_rotary_base": 0.0, "local_rotary_scaling": ()}
_OF_EXPERTS = tuple(NEUTRAL)[tuple(NEUTRAL).index("experts") :]
SIZES = (
  *("layers", "model_size", "feedforward_size", "heads", "kv_heads", "head_size"),
  *("vocabulary_size", "norm_epsilon", "activation", "attention_scale", "tied_embeddings"),
)
KEYS = (*SIZES, *NEUTRAL)
# Those that determine which parameters there are, and their shapes.
SHAPES = (
  *("layers", "model_size", "feedforward_size", "heads", "kv_heads", "head_size"),
  *("vocabulary_size", "positions", "max_positions", "norm", "pre_norms", "post_norms", "biases"),
  *("query_key_norm", "query_key_norm_across_heads", "attention_sinks", "gated"),
  "tied_embeddings",
  *("attention", "latent_size", "query_latent_size", "value_head_size"),
  *("experts", "expert_feedforward_size", "shared_feedforward_size", "dense_layers"),
  *("sparse_every", "mlp_only_layers", "router_bias", "router_correction", "expert_biases"),
)

# model_type of a model with images -> (the key with its decoder's config, that one's model_type).
TEXT_PARTS = {"gemma3": ("text_config", "gemma3_text")}
_QUANTIZATION = "quantization_config"
_OUTER = (
  *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"),
  _QUANTIZATION,
)

# Forms of those keys of a config.json whose values are more than one number, or decide how long it
# takes to read the others; parts check the rest of them.
_LAYERS, _TEXTS = OrNull(forms.whole(1, forms.MOST_LAYERS)), OrNull(TEXT)
_ROPE = {"rope_type": _TEXTS, "type": _TEXTS, "truncate": OrNull(forms.FLAG)}
_ROPE |= dict.fromkeys(("mscale", "mscale_all_dim"), OrNull(forms.AT_LEAST_0))
_ROPE["factor"] = OrNull(forms.ABOVE_0)
_ROPES = OrNull({**_ROPE, "full_attention": OrNull(_ROPE), "sliding_attention": OrNull(_ROPE)})
FORM = {
  **dict.fromkeys(("num_hidden_layers", "n_layer"), _LAYERS),
  **dict.fromkeys(("model_type", "hidden_act", "hidden_activation", "activation_function"), _TEXTS),
  **dict.fromkeys(("scoring_func", "topk_method"), _TEXTS),
  **dict.fromkeys(("rope_scaling", "rope_parameters"), _ROPES),
  "layer_types": OrNull([TEXT]),
  **dict.fromkeys(("no_rope_layers", "mlp_only_layers"), OrNull([COUNT])),
  "n_shared_experts": OrNull(forms.whole(0)),
  "original_max_position_embeddings": OrNull(SIZE),
}
_MOST_LINES = 20  # of a message


@dataclasses.dataclass(frozen=True)
class Described:
  """What a config.json says.

  Attributes:
    model_type: the family's name.
    model: key of `config.model` -> value; all of KEYS.
    positions: the longest row that the model was trained for, in tokens.
    block: rows and columns of a block of FP8 weights, if it has any.
  """

  model_type: str
  model: dict[str, Any]
  positions: int
  block: tuple[int, int] = BLOCK


def read(theirs: Any, where: str, families: Mapping[str, Family] | None = None) -> Described:
  """Returns what a config.json says of its model.

  Args:
    theirs: its content.
    where: its path, for messages.
    families: model_type -> Family; None: all that are known.

  Raises:
    ValueError: an unknown model_type; or every key that cannot be expressed, in one message.
  """
  families = _all() if families is None else families
  if not isinstance(theirs, Mapping):
    raise ValueError(f"{where} holds a {type(theirs).__name__}, not a JSON object")
  theirs = text_part(theirs)
  if wrong := [*forms.wrong(theirs, FORM)]:
    raise ValueError(_cannot(where, wrong))
  model_type = theirs.get("model_type")
  if model_type not in families:
    raise ValueError(_unknown_type(where, theirs, families))
  family = families[model_type]
  values = {**family.defaults, **theirs}
  only = {**ONLY, **family.only}
  read_keys = {key for part in family.parts for key in part.keys}
  wrong = []
  for key in theirs:
    if key in only and key not in read_keys and theirs[key] not in only[key][0]:
      wrong.append(f"{key}={short(theirs[key])}: {only[key][1]}")
  known = {*read_keys, *only, *IGNORED, *family.ignored, "model_type", family.positions}
  known.add(_QUANTIZATION)
  unknown = [key for key in theirs if key not in known and theirs[key] is not None]
  ours = sorted(read_keys)
  wrong += [
    f"{forms.shortened(key)}={short(theirs[key])}: not known for model_type {model_type!r}"
    f"{nearest(key, ours)}; if it has no effect on the logits, delete it from the file"
    for key in unknown[:_MOST_LINES]
  ] + unknown[_MOST_LINES:]
  model = {**NEUTRAL, **family.fixed}
  for part in family.parts:
    try:
      model.update(part.read(values))
    except ValueError as error:
      wrong.append(str(error))
  try:
    block = block_shape(theirs.get(_QUANTIZATION))
  except ValueError as error:
    wrong.append(f"{_QUANTIZATION}={short(theirs[_QUANTIZATION])}: {error}")
  positions = values.get(family.positions)
  if not SIZE.fits(positions):
    wrong.append(f"{family.positions}={short(positions)}: {SIZE.name} is needed")
  if wrong:
    raise ValueError(_cannot(where, [*dict.fromkeys(wrong)]))
  return Described(model_type, model, positions, block)


def text_part(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the config.json of the decoder in a model that also sees; of others, the same."""
  found = TEXT_PARTS.get(str(theirs.get("model_type")))
  if found is None or not isinstance(theirs.get(found[0]), Mapping):
    return theirs
  key, model_type = found
  outer = {name: theirs[name] for name in (*_OUTER, *ONLY) if name in theirs}
  return {**outer, **theirs[key], "model_type": model_type}


def write(
  ours: Ours, positions: int, model_type: str = "", families: Mapping[str, Family] | None = None
) -> dict[str, Any]:
  """Returns a config.json from which `read` gives the same keys of `model`.

  Args:
    ours: `config.model`, finalized.
    positions: the longest row that the model was trained for, in tokens.
    model_type: the family to write; "": the first that can express the model.
    families: model_type -> Family; None: all that are known.

  Raises:
    ValueError: no family, or not this one, can express the model; with the keys that differ.
  """
  families = _all() if families is None else families
  chosen = {model_type: families[model_type]} if model_type else families
  nearest_miss: tuple[str, list[str]] | None = None
  for name, family in chosen.items():
    found = {
      "architectures": [family.architecture],
      "model_type": name,
      family.positions: positions,
    }
    for part in family.parts:
      found.update(part.write(ours))
    differing = _differing(ours, found, families)
    if not differing:
      return found
    if nearest_miss is None or len(differing) < len(nearest_miss[1]):
      nearest_miss = name, differing
  name, differing = nearest_miss
  lines = "\n".join(f"  {line}" for line in differing)
  raise ValueError(
    f"no model_type of transformers is this model; the nearest, {name!r}, cannot express:\n{lines}"
  )


def _differing(ours: Ours, found: Theirs, families: Mapping[str, Family]) -> list[str]:
  """Returns a line for each key of `model` that does not come back from what was written."""
  family, lines = families[found["model_type"]], []
  values, back = {**family.defaults, **found}, {**NEUTRAL, **family.fixed}
  for part in family.parts:
    try:
      back.update(part.read(values))
    except ValueError as error:
      lines.append(str(error))
  one = {key: ours[key] for key in KEYS}
  one, two = canonical(one), canonical({**one, **back})
  lines += [
    f"model.{key}={one[key]!r} (it would be {two[key]!r})"
    for key in KEYS
    if not same_value(one[key], two[key])
  ]
  if not lines:
    read(found, "what was written", families)
  return lines


def canonical(ours: Ours) -> dict[str, Any]:
  """Returns keys of `model` in which those without effect are off, and lists are written out."""
  found = dict(ours)
  if found["positions"] == "rotary":
    found["max_positions"] = None
    if found["rotary_size"] == found["head_size"]:
      found["rotary_size"] = 0
    for key in ("rotary_scaling", "local_rotary_scaling"):
      found[key] = _canonical_scaling(tuple(found[key]))
  else:
    found.update(rotary_base=NEUTRAL["rotary_base"], rotary_scaling=(), **_NO_LOCAL)
  if found["attention"] == NEUTRAL["attention"]:
    found.update(value_head_size=None, latent_norm_epsilon=NEUTRAL["latent_norm_epsilon"])
  layer_types = types_of(found)
  if not any(one.startswith("sliding") for one in layer_types):
    found["window"] = 0
  found.update(layer_types=layer_types, global_every=0, biases=",".join(bias_names(found)))
  one, two = ([found[f"{of}rotary_{key}"] for key in ("base", "scaling")] for of in ("", "local_"))
  if not found["window"] or not found["local_rotary_base"] or same_value(one, two):
    found.update(_NO_LOCAL)
  return found | _canonical_experts(found)


def _canonical_experts(ours: Ours) -> dict[str, Any]:
  """Returns the keys about experts as `canonical`; `dense_layers` has the layers without."""
  if not ours["experts"]:
    return {key: NEUTRAL[key] for key in _OF_EXPERTS}
  pattern = types.SimpleNamespace(**ours)
  dense = tuple(layer for layer in range(ours["layers"]) if not is_sparse(pattern, layer))
  found: dict[str, Any] = {"dense_layers": dense, "sparse_every": 1, "mlp_only_layers": ()}
  if not dense:
    found["feedforward_size"] = ours["expert_feedforward_size"]
  if ours["router_groups"] == 1:
    found.update(router_top_groups=1, router_group_score=NEUTRAL["router_group_score"])
  if ours["router_scores"] == "softmax_of_chosen":
    found["router_normalized"] = True
  return found


def _canonical_scaling(scaling: tuple) -> tuple:
  """Returns rotary scaling by name, with the factor of the attention written out."""
  if scaling and not isinstance(scaling[0], str):
    names = ("factor", "low", "high", "original_length")
    return "llama3", dict(zip(names, map(float, scaling), strict=True))
  if not scaling:
    return ()
  kind, given = scaling
  numbers = {name: float(x) if type(x) is int else x for name, x in given.items()}
  if kind == "yarn":
    numbers = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, **numbers}
    numbers.setdefault("attention_factor", yarn_factor(numbers["factor"]))
  if kind == "longrope":
    factor, original = numbers.pop("factor", 1.0), numbers["original_length"]
    above = math.log(factor) / math.log(original) if factor > 1 else 0.0
    numbers.setdefault("attention_factor", math.sqrt(1 + above))
  return kind, numbers


def same_value(one: Any, two: Any) -> bool:
  """Returns whether two values of a key are the same, up to the rounding of a power."""
  if isinstance(one, float) and isinstance(two, float):
    return math.isclose(one, two, rel_tol=1e-12)
  if isinstance(one, tuple | list) and isinstance(two, tuple | list):
    return len(one) == len(two) and all(map(same_value, one, two))
  if isinstance(one, Mapping) and isinstance(two, Mapping):
    return {*one} == {*two} and all(same_value(one[key], two[key]) for key in one)
  return one == two


def _cannot(where: str, wrong: list[str]) -> str:
  lines = "\n".join(f"  {line}" for line in forms.first(wrong, _MOST_LINES))
  return f"{where} describes a model that cannot be built:\n{lines}"


def _unknown_type(where: str, theirs: Theirs, families: Mapping[str, Family]) -> str:
  model_type = theirs.get("model_type")
  if model_type is None:
    return f"{where} has no model_type, so it is not the config.json of a model"
  near = nearest(model_type[:99], [*families, *TEXT_PARTS])
  known = ", ".join([*families, *TEXT_PARTS])
  return f"{where}: unknown model_type {short(model_type)}; known are {known}{near}"


def _all() -> Mapping[str, Family]:
  from interop.hf_families import FAMILIES  # where no folder is read or written, not imported

  return FAMILIES
