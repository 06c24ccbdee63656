"""Which attention kernels can run a config, and on which devices."""

from collections.abc import Iterator

from ml_collections import ConfigDict

KERNELS = ("xla", "blockwise", "splash", "cudnn")
LANES = 128  # of a TPU
LEAST_CAPABILITY = 9.0  # of a GPU for cuDNN's kernel: Hopper
_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8  # of cuDNN's kernel on Hopper


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields why the config's kernel cannot run it.

  Args:
    config: finalized, of a decoder.
  """
  kernel = config.training.attention_kernel
  reasons = {"splash": no_splash, "cudnn": no_cudnn}
  if kernel in reasons and (why := reasons[kernel](config)):
    yield f"training.attention_kernel={kernel}: {why}; set it to blockwise"


def no_splash(config: ConfigDict) -> str:
  """Returns why the kernel of models/splash_attention.py cannot run a config; "" where it can."""
  if config.training.compute_dtype == "float64":
    return "it computes in float32"
  context, data = config.mesh.context, config.data
  if context == 1 or config.model.context_attention == "gather":  # gathered rows are padded
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


def no_cudnn(config: ConfigDict) -> str:
  """Returns why the kernel of models/cudnn_attention.py cannot run a config; "" where it can."""
  model, dtype = config.model, config.training.compute_dtype
  if config.mesh.context != 1:
    return f"mesh.context={config.mesh.context} splits the rows"
  if dtype not in ("bfloat16", "float16"):
    return f"training.compute_dtype={dtype}, and it takes bfloat16"
  if model.head_size % _HEAD_MULTIPLE or model.head_size > _LARGEST_HEAD:
    most = f"multiples of {_HEAD_MULTIPLE} up to {_LARGEST_HEAD}"
    return f"model.head_size={model.head_size}, and it takes {most}"
  if model.value_head_size != model.head_size:
    return f"model.value_head_size={model.value_head_size}, and it takes model.head_size's"
  if model.separate_documents:
    return "model.separate_documents=True, and it masks no documents"
  if model.attention_soft_cap:
    return f"model.attention_soft_cap={model.attention_soft_cap}, and it has no soft cap"
  if model.attention_sinks:
    return "model.attention_sinks=True, and its softmax has no sinks"
  return ""


def too_old(capability: float) -> str:
  """Returns why cuDNN's kernel is not for GPUs of a compute capability; "" where it is."""
  if capability >= LEAST_CAPABILITY:
    return ""
  found = f"{capability:.1f}" if capability else "unknown"
  return f"the GPU's compute capability is {found}, and it needs {LEAST_CAPABILITY} or more"


def check_device(config: ConfigDict, platform: str, capability: float) -> None:
  """Refuses cuDNN's kernel on devices that do not have it.

  Args:
    config: finalized.
    platform: `cpu`, `gpu` or `tpu`.
    capability: the compute capability of NVIDIA's GPUs; 0: of others, or unknown.

  Raises:
    ValueError: the devices are no GPUs, or older ones.
  """
  if config.training.attention_kernel != "cudnn":
    return
  why = too_old(capability) if platform == "gpu" else f"it is for GPUs, and these are {platform}s"
  if why:
    raise ValueError(f"training.attention_kernel=cudnn: {why}; set it to blockwise")
