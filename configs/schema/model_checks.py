"""Which keys of a model go together, and what follows from them."""

from collections.abc import Iterable, Iterator, Mapping

from etils import epy
from ml_collections import ConfigDict

from configs.keys.model import DECODER
from configs.schema.data_checks import parts
from runtime.extensions import kind_of_model
from runtime.forms import ABOVE_0
from runtime.layer_kinds import MIXER, MLP, WITH_MIXER, layer_type
from runtime.suggest import nearest

with epy.lazy_imports():  # of experts and latent attention, and of a model folder
  from configs.schema import expert_checks
  from interop import hf_folder

# ------------------------------ attention kernels ------------------------------

ATTENTION_KERNELS = ("xla", "blockwise", "splash", "cudnn")
LANES = 128  # of a TPU
LEAST_CAPABILITY = 9.0  # of a GPU for cuDNN's kernel: Hopper
_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8  # of cuDNN's kernel on Hopper


def attention_kernel_errors(
  model: ConfigDict, training: ConfigDict, data: ConfigDict, mesh: ConfigDict
) -> Iterator[str]:
  """Yields why the kernel of a decoder's attention cannot run it."""
  kernel, why = training.attention_kernel, ""
  if kernel == "splash":
    why = no_splash(model, training, data, mesh.context)
  if kernel == "cudnn":
    why = no_cudnn(model, training, mesh)
  if why:
    yield f"training.attention_kernel={kernel}: {why}; set it to blockwise"


def no_splash(model: ConfigDict, training: ConfigDict, data: ConfigDict, context: int) -> str:
  """Returns why partitioning/parallel/splash_kernel.py cannot run a decoder; "" where it can."""
  if training.compute_dtype == "float64":
    return "it computes in float32"
  if context == 1 or model.context_attention in ("gather", "ulysses"):  # such rows are padded
    return ""
  # A ring, which may be the cost formula's choice, passes two pieces.
  pieces = 2 * context * LANES
  needed = (
    f"{pieces}, two pieces of whole blocks of {LANES} tokens for each of mesh.context={context}"
  )
  if data.sequence_length % pieces:
    return f"data.sequence_length={data.sequence_length} is not a multiple of {needed}"
  ramp = [pair for pair in data.sequence_length_ramp if isinstance(pair, (tuple, list))]
  lengths = [pair[-1] for pair in ramp if pair and type(pair[-1]) is int]  # others are refused
  if shorter := [length for length in lengths if length % pieces]:
    return f"data.sequence_length_ramp has rows of {shorter[0]} tokens, no multiple of {needed}"
  return ""


def no_cudnn(model: ConfigDict, training: ConfigDict, mesh: ConfigDict) -> str:
  """Returns why cuDNN's kernel cannot run a decoder; "" where it can."""
  dtype, kind, context = training.compute_dtype, model.context_attention, mesh.context
  if context != 1 and kind not in ("auto", "ulysses"):
    return f"mesh.context={context} splits the rows, with model.context_attention={kind}"
  if context != 1 and (why := _no_ulysses(model.heads, context, mesh.tensor)):
    return f"mesh.context={context} splits the rows, and {why}"
  if dtype not in ("bfloat16", "float16"):
    return f"training.compute_dtype={dtype}, and it takes bfloat16"
  most = f"it takes multiples of {_HEAD_MULTIPLE} up to {_LARGEST_HEAD}"
  for key, unfit, why in (
    ("head_size", model.head_size % _HEAD_MULTIPLE or model.head_size > _LARGEST_HEAD, most),
    ("value_head_size", model.value_head_size != model.head_size, "it takes model.head_size's"),
    ("separate_documents", model.separate_documents, "it masks no documents"),
    ("window_chunks", model.window_chunks, "it masks no chunks"),
    ("attention_soft_cap", model.attention_soft_cap, "it has no soft cap"),
    ("attention_sinks", model.attention_sinks, "its softmax has no sinks"),
  ):
    if unfit:
      return f"model.{key}={model[key]}, and {why}"
  return ""


def _no_ulysses(heads: int, context: int, tensor: int) -> str:
  """Returns why heads cannot be exchanged for the sequence; "" where they can."""
  parts = context * tensor
  uneven = f"model.heads={heads} is not a multiple of mesh.context x mesh.tensor = {parts}"
  return uneven if heads % parts else ""


def too_old(capability: float) -> str:
  """Returns why cuDNN's kernel is not for GPUs of a compute capability; "" where it is."""
  if capability >= LEAST_CAPABILITY:
    return ""
  found = f"{capability:.1f}" if capability else "unknown"
  return f"the GPU's compute capability is {found}, and it needs {LEAST_CAPABILITY} or more"


def check_attention_device(training: ConfigDict, platform: str, capability: float) -> None:
  """Refuses cuDNN's kernel on devices that do not have it.

  Args:
    training: the section of a finalized config.
    platform: `cpu`, `gpu` or `tpu`.
    capability: the compute capability of NVIDIA's GPUs; 0: of others, or unknown.

  Raises:
    ValueError: the devices are no GPUs, or older ones.
  """
  if training.attention_kernel != "cudnn":
    return
  why = too_old(capability) if platform == "gpu" else f"it is for GPUs, and these are {platform}s"
  if why:
    raise ValueError(f"training.attention_kernel=cudnn: {why}; set it to blockwise")


# ------------------------------ latent attention ------------------------------


def latent_errors(model: ConfigDict) -> Iterator[str]:
  """Yields what does not go with latent attention."""
  if model.attention == "latent":
    yield from expert_checks.latent_errors(model)
  elif model.value_head_size != model.head_size:
    yield (
      f"model.value_head_size={model.value_head_size} is about model.attention=latent; set that, "
      f"or leave the key at {model.head_size}"
    )


# ------------------------------ mixers ------------------------------


def mixer_errors(model: ConfigDict, data: ConfigDict, sizes: Mapping[str, int]) -> Iterator[str]:
  """Yields what does not go with layers that have a mixer in place of attention."""
  types = tuple(model.layer_types)
  if model.mixer == "none":
    if {MIXER, WITH_MIXER} & {*types}:
      yield f"model.layer_types={types}: model.mixer is 'none'; set it, such as to gated_delta"
    return
  kinds = [layer_type(model, layer) for layer in range(max(0, model.layers))]
  if WITH_MIXER in kinds:
    if {*kinds} != {WITH_MIXER}:
      yield f"model.layer_types={types}: all layers are of the type {WITH_MIXER}, or none is"
  elif MIXER not in kinds or {*kinds} <= {MIXER, MLP}:
    every = "no layer is" if MIXER not in kinds else f"all layers are {' or '.join({*kinds})},"
    yield (
      f"model.mixer={model.mixer!r}: {every} of the type mixer; a decoder with mixers also has "
      f"layers with attention, such as model.layer_types={(*(MIXER,) * 3, 'full')}"
    )
  if model.mixer_key_heads and model.mixer_heads % model.mixer_key_heads:
    yield (
      f"model.mixer_heads={model.mixer_heads} is not a multiple of "
      f"model.mixer_key_heads={model.mixer_key_heads}; set model.mixer_key_heads to one of "
      f"{listed(divisors(model.mixer_heads))}"
    )
  limits = tuple(model.mixer_step_limits)
  if limits and (len(limits) != 2 or not 0 <= limits[0] < limits[1]):
    yield f"model.mixer_step_limits={limits}: two numbers, the smaller first, or () for any"
  parts, length = sizes.get("context", 1), data.sequence_length
  ring = model.context_attention in ("auto", "ring")
  piece, most = length // (parts * (2 if ring else 1)), model.convolution_size - 1
  if parts > 1 and piece < most:
    yield (
      f"model.convolution_size={model.convolution_size}: a device's piece of "
      f"data.sequence_length={length} over mesh.context={parts} is {piece} tokens, and the next "
      f"one needs {most} of them; make rows longer, or mesh.context smaller"
    )


# ------------------------------ mixtures of experts ------------------------------


def expert_errors(model: ConfigDict, sizes: Mapping[str, int]) -> Iterator[str]:
  """Yields what does not go with a decoder's experts; their keys say themselves what they need."""
  devices = sizes.get("expert", 1)
  if model.experts < 1:
    if devices > 1:
      yield (
        f"mesh.expert={devices}: no layer has experts, so it would be a second axis of data; set "
        f"mesh.data={sizes.get('data', 1) * devices} and mesh.expert=1, or set model.experts"
      )
    return
  yield from expert_checks.layer_errors(model)
  yield from expert_checks.router_errors(model, listed(divisors(model.experts)))
  if model.experts % devices:
    near = sorted(divisors(model.experts), key=lambda n: abs(n - devices))[:3]
    yield (
      f"model.experts={model.experts} is not divisible by mesh.expert={devices}; set mesh.expert "
      f"to one of {listed(sorted(near))}"
    )


def divisors(number: int) -> list[int]:
  """Returns the numbers that divide another one, ascending."""
  return [n for n in range(1, number + 1) if number % n == 0]


def listed(values: Iterable[object]) -> str:
  """Returns values with commas between them."""
  return ", ".join(map(str, values))


# ------------------------------ decoders ------------------------------

# Of `model.biases`: one of the first, or a list of the others.
BIASES = DECODER["biases"].usual
LINEARS = ("query", "key", "value", "out", "gate", "up", "down")
LAYER_TYPES = (*("full", "sliding", "full_unrotated", "sliding_unrotated", MIXER, WITH_MIXER, MLP),)
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


def decoder_errors(model: ConfigDict, data: ConfigDict) -> Iterator[str]:
  """Yields what of a decoder's sizes, norms and positions does not go together."""
  length = data.sequence_length
  if model.kv_heads > 0 and model.heads % model.kv_heads:
    yield (
      f"model.heads={model.heads} is not a multiple of model.kv_heads={model.kv_heads}; set "
      f"model.kv_heads to one of {listed(divisors(model.heads))}"
    )
  if model.positions == "rotary" and (model.rotary_size or model.head_size) % 2:
    name = "rotary_size" if model.rotary_size else "head_size"
    yield f"model.{name}={model[name]} is odd; rotary positions turn pairs"
  if model.rotary_size > model.head_size > 0:
    yield f"model.rotary_size={model.rotary_size} is beyond model.head_size={model.head_size}"
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
  if model.mtp_layers > 0 and length <= model.mtp_layers:
    yield (
      f"data.sequence_length={length}: no row has a target for the last of "
      f"model.mtp_layers={model.mtp_layers}, which is as many tokens further; make rows longer"
    )
  if model.window > length and "folder" not in model:  # a folder's model has the window it has
    yield (
      f"model.window={model.window} is beyond data.sequence_length={length}: no token would see "
      f"less than all; make data.sequence_length {model.window} or more, or set model.window=0"
    )
  yield from _layer_types(model)
  yield from _temperature(model)
  yield from _biases(model)
  yield from _multipliers(model)
  if not model.pre_norms and not model.post_norms:
    yield "model.pre_norms=False: layers without any norm do not train; set model.post_norms=True"
  for key in ("rotary_scaling", "local_rotary_scaling"):
    yield from _scaling(model, key)


def own_logits(model: ConfigDict, partitioning: ConfigDict, sizes: Mapping[str, int]) -> int:
  """Returns how many logits of a token a device has; 0 where its axes do not divide them.

  The vocabulary is padded to a multiple first.
  """
  multiple = max(1, model.vocabulary_multiple)
  padded = -(-model.vocabulary_size // multiple) * multiple
  count = parts(partitioning.activations.vocabulary, sizes)
  return 0 if padded % count else padded // count


def split_errors(
  model: ConfigDict,
  training: ConfigDict,
  data: ConfigDict,
  partitioning: ConfigDict,
  sizes: Mapping[str, int],
) -> Iterator[str]:
  """Yields what chunks of the loss, unrolled layers and a ring of pieces of rows do not divide.

  What mesh axes themselves have to divide, the layout's verdict says.
  """
  count, own = training.loss_chunks, own_logits(model, partitioning, sizes)
  if count > 0 and own % count:
    near = [max(size for size in range(1, count) if own % size == 0)]
    near += [size for size in range(count + 1, own + 1) if own % size == 0][:1]
    yield (
      f"training.loss_chunks={count} does not divide the {own} logits that a device has of each "
      f"token; make it {' or '.join(map(str, near))}"
    )
  count, layers = training.scan_unroll, model.layers
  if count > 0 and layers % count:
    yield (
      f"training.scan_unroll={count} does not divide model.layers={layers}; make it one of "
      f"{listed(divisors(layers))}"
    )
  if sizes["context"] > 1 and model.context_attention == "ulysses":
    why = _no_ulysses(model.heads, sizes["context"], sizes["tensor"])
    if why:
      yield f"model.context_attention=ulysses: {why}; set it to ring or gather"
  length, pieces = data.sequence_length, 2 * sizes["context"]
  if pieces > 2 and model.context_attention == "ring" and length % pieces:
    below = length - length % pieces
    near = " or ".join(str(size) for size in (below, below + pieces) if size)
    yield (
      f"data.sequence_length={length} is not divisible by 2 x mesh.context = {pieces}: in a ring "
      f"each device has an early and a late piece; make it {near}, or set "
      f"model.context_attention=gather"
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


def _multipliers(model: ConfigDict) -> Iterator[str]:
  for one in model.multipliers:
    pair = isinstance(one, tuple | list) and len(one) == 2 and isinstance(one[0], str)
    if not pair or not ABOVE_0.fits(one[1]):
      yield (
        f"model.multipliers: {one!r}: the name of a linear layer and a number above 0 are needed, "
        f"such as ('attention/key', 0.5)"
      )


def _layer_types(model: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the window, and with which layers have it."""
  types = model.layer_types
  if unknown := [one for one in types if one not in LAYER_TYPES]:
    known = ", ".join(LAYER_TYPES)
    yield f"model.layer_types: {unknown[0]!r} is none of {known}{nearest(unknown[0], LAYER_TYPES)}"
    return
  if len(types) > model.layers > 0:
    yield f"model.layer_types has {len(types)} types for model.layers={model.layers}"
  sliding = any(one.startswith("sliding") for one in types) if types else bool(model.window)
  if types and sliding != bool(model.window):
    yield (
      f"model.window={model.window}: "
      + ("no layer is of the type sliding" if model.window else "the type sliding needs a window")
    )
  if MLP in types and ({*types} <= {MLP, MIXER} or WITH_MIXER in types):
    yield (
      f"model.layer_types={tuple(types)}: beside layers of the type mlp, which are MLPs alone, "
      f"others have attention alone; add the type full"
    )
  if MLP in types and model.mtp_layers:
    yield (
      f"model.mtp_layers={model.mtp_layers}: layers of the type mlp have one part, and those that "
      f"predict further tokens two; set it to 0, or take the type out of model.layer_types"
    )
  unrotated = [one.endswith("unrotated") for one in types if one not in (MIXER, MLP)]
  lost = all(unrotated) and MIXER not in types  # a recurrence has an order of its own
  if any(unrotated) and (model.positions != "rotary" or lost):
    yield (
      f"model.layer_types: layers without rotary positions need others with them; with "
      f"model.positions={model.positions!r}, {'all' if lost else 'some'} are unrotated"
    )
  if not sliding and (model.global_every or model.local_rotary_base):
    yield (
      f"model.global_every={model.global_every} and "
      f"model.local_rotary_base={model.local_rotary_base} are about layers that see a window; set "
      f"model.window, or both to 0"
    )


def _temperature(model: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with scores that grow with the position."""
  if not (given := tuple(model.attention_temperature)):
    return
  layers, *numbers = given
  fits = len(numbers) == 2 and all(type(x) in (int, float) and x > 0 for x in numbers)
  if layers not in ("all", "unrotated") or not fits or type(numbers[1]) is not int:
    yield (
      f"model.attention_temperature={given}: (layers, strength, length): all or unrotated, a "
      f"number above 0, and a whole number of tokens, such as ('all', 0.1, 16384)"
    )
  elif layers == "unrotated" and not any("unrotated" in one for one in model.layer_types):
    yield (
      f"model.attention_temperature={given}: no layer is unrotated; add the type full_unrotated to "
      f"model.layer_types={tuple(model.layer_types)}, or take all for unrotated"
    )


def _scaling(model: ConfigDict, key: str) -> Iterator[str]:
  """Yields what is wrong with rotary scaling, `rotary_scaling` or `local_rotary_scaling`."""
  scaling = tuple(model[key])
  if model.positions == "learned":  # refused by its row
    return
  if scaling and isinstance(scaling[0], str):
    for wrong in _named_scaling(model, scaling):
      yield f"model.{key}={scaling}: {wrong}"
  elif scaling:
    numbers = all(type(value) in (int, float) and value > 0 for value in scaling)
    if len(scaling) != 4 or not numbers or scaling[1] > scaling[2]:
      yield (
        f"model.{key}={scaling}: (factor, low, high, length), all above 0 and low at most "
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
    if low in (*needed, *optional) and low in both and high in both and both[low] > both[high]:
      yield f"{low!r}: at most {high!r}"


def _names(names: Iterable[str]) -> str:
  return ", ".join(map(repr, names))


# ------------------------------ low-rank adapters ------------------------------

ADAPTERS = "*/lora_*"  # the names of their parameters


def finalize_lora(model: ConfigDict, lora: ConfigDict, training: ConfigDict) -> None:
  """Includes the adapters in `training.trainable`; the config is unlocked."""
  given = training.trainable
  if lora.rank <= 0 or kind_of_model(model.name) != "transformer":
    training.trainable = ("*",) if given is None else given
    return
  given = given or ()
  training.trainable = given if ADAPTERS in given else (ADAPTERS, *given)


# ------------------------------ muP ------------------------------


def mup_errors(model: ConfigDict, checkpoint: ConfigDict) -> Iterator[str]:
  """Yields what muP does not go with."""
  base, head = (model.get(key) or 0 for key in ("base_width", "base_head_size"))
  if base == 0 and head != (model.get("head_size") or 0):
    yield (
      f"model.base_head_size={head} is about muP, which is off; set model.base_width, or leave it "
      f"out"
    )
  if base < 1:
    return
  if "folder" in model or hf_folder.is_model(checkpoint.initialize_from):
    which = model.get("folder") or checkpoint.initialize_from
    yield (
      f"model.base_width={base}: the parameters of {which} are a trained model's, and muP would "
      f"divide its logits; set it to 0. muP is for models that are trained from the start"
    )


# ------------------------------ vision transformers ------------------------------


def vit_errors(model: ConfigDict) -> Iterator[str]:
  """Yields what of the sizes of a vision transformer does not go together."""
  side, channels, patch = model.image_size, model.channels, model.patch_size
  if min(side, channels, patch, model.heads) < 1:
    return  # refused as such
  if side**2 * channels != model.input_size:
    yield (
      f"model.input_size={model.input_size}: an image of {side} x {side} pixels with "
      f"model.channels={channels} has {side**2 * channels} values; images are square, and "
      f"coloured ones have model.channels=3"
    )
  elif side % patch:
    yield (
      f"model.patch_size={patch}: it does not divide model.image_size={side}; "
      f"take one of {listed(divisors(side))}"
    )
  if model.model_size % model.heads:
    yield f"model.heads={model.heads}: model.model_size={model.model_size} is no multiple of it"
