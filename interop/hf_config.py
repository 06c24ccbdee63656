"""The `config.json` of a model folder -> the keys of `config.model` that it determines, and back.

A family is a row of `hf_families.py`, made of parts. Every key of a config.json is either read by a
part of its family, or must have one of the values that the family can express (ONLY), or has no
effect on what the model computes (IGNORED); any other is refused by name. Nothing here imports JAX.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from configs.keys.model import DECODER, MIXER
from configs.keys.row import Unset
from interop.hf_families import FAMILIES, NOT_READ, Family
from interop.hf_parts import (
  Ours,
  Theirs,
  bias_names,
  named_scaling,
  short,
  sparse_of,
  types_of,
  yarn_factor,
)
from runtime import files, forms
from runtime.forms import COUNT, SIZE, TEXT, OrNull
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

# Keys of `model` that are the user's own: no folder determines them.
OWN = (
  *("name", "vocabulary_multiple", "context_attention", "embedding_standard_deviation"),
  *("depth", "dropout_rate", "separate_documents", "base_width", "base_head_size"),
  *("expert_exchange", "expert_capacity", "mtp_layers"),
)
KEYS = tuple(key for key in DECODER if key not in OWN)
# Keys that each config.json has in some form; the defaults of the others turn something off, and
# hold where a family does not mention them.
SIZES = (
  *("layers", "model_size", "feedforward_size", "heads", "kv_heads", "head_size"),
  *("vocabulary_size", "norm_epsilon", "activation", "attention_scale", "tied_embeddings"),
)
NEUTRAL: dict[str, Any] = {
  key: None if isinstance(DECODER[key].default, Unset) else DECODER[key].default
  for key in KEYS
  if key not in SIZES
}
_NO_LOCAL = {"local_rotary_base": 0.0, "local_rotary_scaling": ()}
_OF_EXPERTS = KEYS[KEYS.index("experts") : KEYS.index("up_offset") + 1]
# Those that determine which parameters there are, and their shapes.
SHAPES = (
  *("layers", "model_size", "feedforward_size", "heads", "kv_heads", "head_size"),
  *("vocabulary_size", "positions", "max_positions", "norm", "pre_norms", "post_norms", "biases"),
  *("query_key_norm", "query_key_norm_across_heads", "attention_sinks", "mlp", "gated"),
  *("attention_gate", "shared_gate"),
  "tied_embeddings",
  *("attention", "latent_size", "query_latent_size", "value_head_size"),
  *("mixer", "layer_types", "convolution_size", "mixer_norm", "mixer_pre_norms", *MIXER),
  *("experts", "expert_feedforward_size", "shared_feedforward_size", "dense_layers"),
  *("sparse_every", "mlp_only_layers", "router_bias", "router_correction", "expert_biases"),
)

# model_type of a model with images -> (the key with its decoder's config, that one's model_type
# where it names none).
TEXT_PARTS = {
  "gemma3": ("text_config", "gemma3_text"),
  "gemma4": ("text_config", "gemma4_text"),
  "llama4": ("text_config", "llama4_text"),
  "mistral3": ("text_config", "mistral"),  # where it does not name ministral3 or mistral4
  "qwen3_5": ("text_config", "qwen3_5_text"),
  "qwen3_5_moe": ("text_config", "qwen3_5_moe_text"),
}
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
  **dict.fromkeys(
    ("no_rope_layers", "mlp_only_layers", "moe_layers", "full_attn_idxs"), OrNull([COUNT])
  ),
  "attn_layer_indices": OrNull([COUNT]),
  **dict.fromkeys(("layers_block_type", "mlp_layer_types"), OrNull([TEXT])),
  "hybrid_override_pattern": _TEXTS,
  "linear_attn_config": OrNull(
    {
      **dict.fromkeys(("head_dim", "num_heads", "short_conv_kernel_size"), SIZE),
      **{key: [SIZE] for key in ("full_attn_layers", "kda_layers")},
    }
  ),
  **dict.fromkeys(("time_step_limit", "ssm_multipliers", "mlp_multipliers"), OrNull([forms.ANY])),
  **dict.fromkeys(("n_shared_experts", "num_shared_experts"), OrNull(forms.whole(0))),
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


def read(theirs: Any, where: str) -> Described:
  """Returns what a config.json says of its model.

  Args:
    theirs: its content.
    where: its path, for messages.

  Raises:
    ValueError: an unknown model_type; or every key that cannot be expressed, in one message.
  """
  if not isinstance(theirs, Mapping):
    raise ValueError(f"{where} holds a {type(theirs).__name__}, not a JSON object")
  theirs = text_part(theirs)
  if wrong := [*forms.wrong(theirs, FORM)]:
    raise _refusal(where, wrong)
  model_type = theirs.get("model_type")
  if model_type in NOT_READ:
    keys, why, instead = NOT_READ[model_type]
    given = "".join(f", {key}={short(theirs[key])}" for key in keys if key in theirs)
    raise ValueError(f"{where}: model_type {model_type!r}{given}: {why}; {instead}")
  if model_type not in FAMILIES:
    raise ValueError(_unknown_type(where, model_type))
  family = FAMILIES[model_type]
  only = {**ONLY, **family.only}
  read_keys = {key for part in family.parts for key in part.keys}
  wrong = [
    f"{key}={short(theirs[key])}: {only[key][1]}"
    for key in theirs
    if key in only and key not in read_keys and theirs[key] not in only[key][0]
  ]
  known = {*read_keys, *only, *IGNORED, *family.ignored, "model_type", family.positions}
  known.add(_QUANTIZATION)
  unknown = [key for key in theirs if key not in known and theirs[key] is not None]
  ours = sorted(read_keys)
  wrong += [
    f"{forms.shortened(key)}={short(theirs[key])}: not known for model_type {model_type!r}"
    f"{nearest(key, ours)}; if it has no effect on the logits, delete it from the file"
    for key in unknown[:_MOST_LINES]
  ] + unknown[_MOST_LINES:]
  model, refused = _model_of(family, theirs)
  wrong += refused
  try:
    block = block_shape(theirs.get(_QUANTIZATION))
  except ValueError as error:
    wrong.append(f"{_QUANTIZATION}={short(theirs[_QUANTIZATION])}: {error}")
  positions = {**family.defaults, **theirs}.get(family.positions)
  if not SIZE.fits(positions):
    wrong.append(f"{family.positions}={short(positions)}: {SIZE.name} is needed")
  if wrong:
    raise _refusal(where, [*dict.fromkeys(wrong)])
  return Described(model_type, model, positions, block)


def _model_of(family: Family, theirs: Theirs) -> tuple[dict[str, Any], list[str]]:
  """Returns the keys of `model` that a config.json gives, and why parts of it cannot be read."""
  values, model, wrong = {**family.defaults, **theirs}, {**NEUTRAL, **family.fixed}, []
  for part in family.parts:
    try:
      model.update(part.read(values))
    except ValueError as error:
      wrong.append(str(error))
  return model, wrong


def text_part(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the config.json of the decoder in a model that also sees; of others, the same."""
  found = TEXT_PARTS.get(str(theirs.get("model_type")))
  if found is None or not isinstance(theirs.get(found[0]), Mapping):
    return theirs
  key, model_type = found
  outer = {name: theirs[name] for name in (*_OUTER, *ONLY) if name in theirs}
  return {"model_type": model_type, **outer, **theirs[key]}


def decoder_config(content: bytes) -> bytes:
  """Returns the content of a config.json; of a model with images, that of its decoder."""
  theirs = files.parse_json(content)
  inner = text_part(theirs)
  return content if inner is theirs else f"{files.json_text(inner, indent=2)}\n".encode()


def write(ours: Ours, positions: int, model_type: str = "") -> dict[str, Any]:
  """Returns a config.json from which `read` gives the same keys of `model`.

  Args:
    ours: `config.model`, finalized.
    positions: the longest row that the model was trained for, in tokens.
    model_type: the family to write; "": the first that can express the model.

  Raises:
    ValueError: no family, or not this one, can express the model; with the keys that differ.
  """
  misses: dict[str, list[str]] = {}
  names = [model_type] if model_type else [*FAMILIES]
  # Where none has the model as it is, one may have it with biases, which are written as zeros.
  for name, biased in [*((one, False) for one in names), *((one, True) for one in names)]:
    family, keys = FAMILIES[name], _biased(ours, name) if biased else ours
    found = {
      "architectures": [family.architecture],
      "model_type": name,
      family.positions: positions,
    }
    for part in family.parts:
      found.update(part.write(keys))
    misses[name] = _differing(keys, found)
    if not misses[name]:
      return found
  name = min(misses, key=lambda one: len(misses[one]))
  raise forms.refusal(
    f"no model_type of transformers is this model; the nearest, {name!r}, cannot express:",
    misses[name],
  )


def _biased(ours: Ours, name: str) -> Ours:
  """Returns keys of `model` with all biases of a family, if these are more than the model has."""
  theirs = FAMILIES[name].fixed.get("biases", "none")
  more = {*bias_names(ours)} < {*bias_names({**ours, "biases": theirs})}
  return {**ours, "biases": theirs} if more else ours


def _differing(ours: Ours, found: Theirs) -> list[str]:
  """Returns a line for each key of `model` that does not come back from what was written."""
  back, lines = _model_of(FAMILIES[found["model_type"]], found)
  one = {key: ours[key] for key in KEYS}
  one, two = canonical(one), canonical({**one, **back})
  lines += [
    f"model.{key}={one[key]!r} (it would be {two[key]!r})"
    for key in KEYS
    if not same_value(one[key], two[key])
  ]
  if not lines:
    read(found, "what was written")
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
    found.update(window=0, window_chunks=False)
  found["multipliers"] = tuple(sorted(pair for pair in found["multipliers"] if pair[1] != 1))
  found.update(layer_types=layer_types, global_every=0, biases=",".join(bias_names(found)))
  one, two = ([found[f"{of}rotary_{key}"] for key in ("base", "scaling")] for of in ("", "local_"))
  if not found["window"] or not found["local_rotary_base"] or same_value(one, two):
    found.update(_NO_LOCAL)
  return found | _canonical_experts(found)


def _canonical_experts(ours: Ours) -> dict[str, Any]:
  """Returns the keys about experts as `canonical`; `dense_layers` has the layers without."""
  if not ours["experts"]:
    return {key: NEUTRAL[key] for key in _OF_EXPERTS}
  dense = tuple(layer for layer, sparse in enumerate(sparse_of(ours)) if not sparse)
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
  if not scaling:
    return ()
  kind, given = named_scaling(scaling)
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


def _refusal(where: str, wrong: list[str]) -> ValueError:
  return forms.refusal(f"{where} describes a model that cannot be built:", wrong, _MOST_LINES)


def _unknown_type(where: str, model_type: str | None) -> str:
  if model_type is None:
    return f"{where} has no model_type, so it is not the config.json of a model"
  known = [*FAMILIES, *TEXT_PARTS]
  near = nearest(model_type[:99], known)
  return f"{where}: unknown model_type {short(model_type)}; known are {', '.join(known)}{near}"
