"""The open decoder families: the published sizes, and which keys of a decoder go together."""

import math
from collections.abc import Iterable, Iterator, Mapping

from ml_collections import ConfigDict

from configs.schema import attention_checks, expert_checks, latent_checks
from runtime.suggest import nearest

LANES = 128  # of a TPU

# Of `model.biases`: one of the first, or a list of the others.
BIASES = ("none", "qkv", "attention", "mlp", "all")
LINEARS = ("query", "key", "value", "out", "gate", "up", "down")
LAYER_TYPES = ("full", "sliding", "full_unrotated", "sliding_unrotated")
# Kinds of `model.rotary_scaling` -> the numbers that each needs, and those that it may have.
ROTARY_SCALINGS = {
  "linear": (("factor",), ()),
  "dynamic": (("factor", "original_length"), ()),
  "llama3": (("factor", "low", "high", "original_length"), ()),
  "yarn": (
    ("factor", "original_length"),
    ("attention_factor", "beta_fast", "beta_slow", "truncate"),
  ),
  "longrope": (
    ("original_length", "short_factors", "long_factors"),
    ("factor", "attention_factor"),
  ),
}
GPT_2 = {
  "positions": "learned",
  "norm": "layer",
  "norm_epsilon": 1e-5,
  "biases": "all",
  "activation": "gelu",
  "gated": False,
  "tied_embeddings": True,
}


def wrong(config: ConfigDict, sizes: Mapping[str, int]) -> Iterator[str]:
  """Yields a line for each key of a decoder that does not go with the others.

  Args:
    config: finalized.
    sizes: mesh axis -> size.
  """
  model, length = config.model, config.data.sequence_length
  if model.kv_heads > 0 and model.heads % model.kv_heads:
    near = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
    yield (
      f"model.heads={model.heads} is not a multiple of model.kv_heads={model.kv_heads}; set "
      f"model.kv_heads to one of {', '.join(map(str, near))}"
    )
  if model.positions == "rotary" and (model.rotary_size or model.head_size) % 2:
    name = "rotary_size" if model.rotary_size else "head_size"
    yield f"model.{name}={model[name]} is odd; rotary positions turn pairs"
  if model.rotary_size > model.head_size > 0:
    yield f"model.rotary_size={model.rotary_size} is beyond model.head_size={model.head_size}"
  if model.rotary_size and model.positions != "rotary":
    yield (
      f"model.rotary_size={model.rotary_size}: model.positions={model.positions!r} turns nothing"
    )
  if model.positions == "learned" and length > model.max_positions > 0:
    yield (
      f"data.sequence_length={length} is beyond model.max_positions={model.max_positions}; "
      f"make data.sequence_length {model.max_positions} or less: later positions are not learned"
    )
  if model.positions == "rotary" and model.max_positions != length:
    yield (
      f"model.max_positions={model.max_positions}: model.positions='rotary' learns none; leave it "
      f"out, or set model.positions=learned"
    )
  for name in ("embedding_multiplier", "residual_multiplier", "logits_divisor"):
    if not 0 < model[name] < math.inf:
      yield f"model.{name}={model[name]}: above 0, and finite"
  if not 0 <= model.dropout_rate < 1:
    yield f"model.dropout_rate={model.dropout_rate}: at least 0 and below 1"
  if model.window > length and "folder" not in model:  # a folder's model has the window it has
    yield (
      f"model.window={model.window} is beyond data.sequence_length={length}: no token would see "
      f"less than all; make data.sequence_length {model.window} or more, or set model.window=0"
    )
  yield from latent_checks.wrong(config)
  yield from _layer_types(model)
  yield from _biases(model)
  if not model.pre_norms and not model.post_norms:
    yield "model.pre_norms=False: layers without any norm do not train; set model.post_norms=True"
  if model.query_key_norm_across_heads and not model.query_key_norm:
    yield "model.query_key_norm_across_heads=True is about the norms of model.query_key_norm=True"
  yield from attention_checks.wrong(config)
  for key in ("rotary_scaling", "local_rotary_scaling"):
    yield from _scaling(model, key)
  yield from _context(config, sizes["context"])
  yield from _chunks(config, sizes)
  yield from _unrolled(config)
  yield from expert_checks.wrong(config, sizes)


def own_logits(config: ConfigDict, sizes: Mapping[str, int]) -> int:
  """Returns how many logits of a token a device has; 0 where its axes do not divide them.

  The vocabulary is padded to a multiple first.
  """
  multiple = max(1, config.model.vocabulary_multiple)
  padded = -(-config.model.vocabulary_size // multiple) * multiple
  parts = math.prod(sizes.get(axis, 1) for axis in config.partitioning.activations.vocabulary)
  return 0 if padded % parts else padded // parts


def _chunks(config: ConfigDict, sizes: Mapping[str, int]) -> Iterator[str]:
  """Yields why the logits cannot be cut into the chunks of the loss."""
  count, own = config.training.loss_chunks, own_logits(config, sizes)
  if count < 1 or own % count == 0:  # where they cannot be sharded, the layout's verdict says so
    return
  near = [max(size for size in range(1, count) if own % size == 0)]
  near += [size for size in range(count + 1, own + 1) if own % size == 0][:1]
  yield (
    f"training.loss_chunks={count} does not divide the {own} logits that a device has of each "
    f"token; make it {' or '.join(map(str, near))}"
  )


def _unrolled(config: ConfigDict) -> Iterator[str]:
  count, layers = config.training.scan_unroll, config.model.layers
  if count > 0 and layers % count:
    near = [size for size in range(1, layers + 1) if layers % size == 0]
    yield (
      f"training.scan_unroll={count} does not divide model.layers={layers}; make it one of "
      f"{', '.join(map(str, near))}"
    )


def _biases(model: ConfigDict) -> Iterator[str]:
  parts = model.biases.split(",")
  for part in parts:
    if part not in (*BIASES, *LINEARS):
      yield (
        f"model.biases={model.biases!r}: one of {', '.join(BIASES)}, or some of "
        f"{', '.join(LINEARS)}, separated by commas{nearest(part, (*BIASES, *LINEARS))}"
      )
  if "gate" in parts and not model.gated:
    yield f"model.biases={model.biases!r}: with model.gated=False there is no gate"


def _layer_types(model: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the window, and with which layers have it."""
  types = model.layer_types
  if unknown := [one for one in types if one not in LAYER_TYPES]:
    known = ", ".join(LAYER_TYPES)
    yield f"model.layer_types: {unknown[0]!r} is none of {known}{nearest(unknown[0], LAYER_TYPES)}"
    return
  if len(types) > model.layers > 0:
    yield f"model.layer_types has {len(types)} types for model.layers={model.layers}"
  if types and model.global_every:
    yield (
      f"model.layer_types and model.global_every={model.global_every} both say which layers see a "
      f"window; set model.global_every=0"
    )
  sliding = any(one.startswith("sliding") for one in types) if types else bool(model.window)
  if types and sliding != bool(model.window):
    yield (
      f"model.window={model.window}: "
      + ("no layer is of the type sliding" if model.window else "the type sliding needs a window")
    )
  unrotated = [one.endswith("unrotated") for one in types]
  if any(unrotated) and (model.positions != "rotary" or all(unrotated)):
    yield (
      f"model.layer_types: layers without rotary positions need others with them; with "
      f"model.positions={model.positions!r}, {'all' if all(unrotated) else 'some'} are unrotated"
    )
  if not sliding and (model.global_every or model.local_rotary_base):
    yield (
      f"model.global_every={model.global_every} and "
      f"model.local_rotary_base={model.local_rotary_base} are about layers that see a window; set "
      f"model.window, or both to 0"
    )
  if model.local_rotary_scaling and not model.local_rotary_base:
    yield (
      f"model.local_rotary_scaling={model.local_rotary_scaling} scales "
      f"model.local_rotary_base=0.0; set that, to model.rotary_base={model.rotary_base} if it is "
      f"the same"
    )


def _context(config: ConfigDict, context: int) -> Iterator[str]:
  """Yields what a ring needs; what `context` itself must divide, the layout's verdict says."""
  length, pieces = config.data.sequence_length, 2 * context
  if context == 1 or config.model.context_attention != "ring" or length % pieces == 0:
    return
  below = length - length % pieces
  near = " or ".join(str(size) for size in (below, below + pieces) if size)
  yield (
    f"data.sequence_length={length} is not divisible by 2 x mesh.context = {pieces}: in a ring "
    f"each device has an early and a late piece; make it {near}, or set "
    f"model.context_attention=gather"
  )


def _scaling(model: ConfigDict, key: str) -> Iterator[str]:
  """Yields what is wrong with rotary scaling, `rotary_scaling` or `local_rotary_scaling`."""
  scaling = tuple(model[key])
  if model.positions == "learned" and scaling:
    yield f"model.{key}={scaling}: model.positions='learned' turns nothing"
  elif scaling and isinstance(scaling[0], str):
    for wrong in _named_scaling(model, scaling):
      yield f"model.{key}={scaling}: {wrong}"
  elif scaling:
    numbers = all(type(value) in (int, float) and value > 0 for value in scaling)
    if len(scaling) != 4 or not numbers or scaling[1] >= scaling[2]:
      yield (
        f"model.{key}={scaling}: (factor, low, high, length), all above 0 and low below "
        f"high, such as (8.0, 1.0, 4.0, 8192.0), or a kind with its numbers by name: "
        f"('yarn', {{'factor': 4.0, 'original_length': 32768}})"
      )


def _named_scaling(model: ConfigDict, scaling: tuple) -> Iterator[str]:
  """Yields what is wrong with rotary scaling that is given by name."""
  kind, *rest = scaling
  if kind not in ROTARY_SCALINGS:
    yield f"one of {', '.join(ROTARY_SCALINGS)}{nearest(kind, ROTARY_SCALINGS)}"
    return
  needed, optional = ROTARY_SCALINGS[kind]
  if len(rest) != 1 or not isinstance(rest[0], Mapping):
    yield f"its numbers by name, such as ('linear', {{'factor': 4.0}}); it needs {_names(needed)}"
    return
  numbers = rest[0]
  if missing := [name for name in needed if name not in numbers]:
    yield f"it lacks {_names(missing)}"
  if "factor" in optional and not {"factor", "attention_factor"} & {*numbers}:
    yield "it lacks 'factor' or 'attention_factor'"
  for name, value in numbers.items():
    if name not in (*needed, *optional):
      known = (*needed, *optional)
      yield f"{kind} has no {name!r}; it has {_names(known)}{nearest(name, known)}"
    elif name in ("short_factors", "long_factors"):
      pairs = (model.rotary_size or model.head_size) // 2
      listed = isinstance(value, (tuple, list)) and len(value) == pairs
      if not listed or not all(type(x) in (int, float) and x > 0 for x in value):
        yield f"{name!r}: {pairs} numbers above 0, one for each pair that is rotated"
    elif name == "truncate":
      if type(value) is not bool:
        yield f"{name!r}: True or False"
    elif type(value) not in (int, float) or not value > 0:
      yield f"{name!r}: a number above 0"
  for low, high in (("low", "high"), ("beta_slow", "beta_fast")):
    both = {"beta_slow": 1.0, "beta_fast": 32.0, **numbers}
    if low in (*needed, *optional) and low in both and high in both and both[low] >= both[high]:
      yield f"{low!r}: below {high!r}"


def _names(names: Iterable[str]) -> str:
  return ", ".join(map(repr, names))
