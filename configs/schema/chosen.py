"""Defaults that follow from config, platform and mesh: the best configuration known for them.

`RULES` says what each follows from; docs/performance.md has the same table, with what was measured.
Compiler options have a table of their own in training/compiler_options.py.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

from ml_collections import ConfigDict

from configs.schema import attention_checks, axis_tables, decoder_checks, matmul_checks
from training.choices import Choice
from training.tasks import TASKS

ACCELERATORS = ("tpu", "gpu")
# What the logits of a chunk may take on a device, in the compute dtype.
CHUNK_BYTES = 256 * 2**20
# Tokens of the shortest rows whose attention is computed block by block. On CPUs it was measured.
LONG_ROWS, LONG_ROW = {"cpu": 256, "tpu": 256}, 1024
_BYTES = {"bfloat16": 2, "float64": 8}
# What scores may take on a TPU where mesh.context splits the rows: there xla is faster than blocks.
SCORES_BYTES = 2**30
# Microbatches per pipeline stage: a bubble of about a fifth of the step.
MICROBATCHES = 4
# A device's part of the sequences, in tokens, that is worth sending in two halves while others are
# multiplied: the rows of a matrix unit for each half.
RING_TOKENS = 2 * 256


@dataclasses.dataclass(frozen=True)
class Target:
  """The devices that a config is for.

  Attributes:
    platform: `cpu`, `gpu` or `tpu`.
    sizes: mesh axis -> size, over all slices.
    capability: the compute capability of NVIDIA's GPUs, such as 9.0; 0: of others, or unknown.
  """

  platform: str
  sizes: Mapping[str, int]
  capability: float = 0.0


@dataclasses.dataclass(frozen=True)
class Rule:
  """How an unset key is filled in.

  Attributes:
    key: dotted.
    default: what it becomes where, in words.
    reason: in words.
    value: returns the value and why, from a config in which the keys of earlier rules are set, and
      the devices. Why is "" where the key has nothing to say about a config.
  """

  key: str
  default: str
  reason: str
  value: Callable[[ConfigDict, Target], tuple[object, str]]


def choose(config: ConfigDict, target: Target) -> tuple[Choice, ...]:
  """Fills in the keys of `RULES` that are unset; `config` is unlocked.

  Args:
    config: with everything else filled in.
    target: the devices.

  Returns:
    What was chosen, except what the config has no use for.
  """
  found = []
  for rule in RULES:
    section, key = rule.key.split(".")
    if config[section][key] is None:
      value, why = rule.value(config, target)
      config[section][key] = value
      if why:
        found.append(Choice(rule.key, value, why))
  return tuple(found)


def _kernel(config: ConfigDict, target: Target) -> tuple[str, str]:
  platform, sizes = target.platform, target.sizes
  if config.model.name != "transformer":
    return "xla", ""
  length = config.data.sequence_length
  if length < (least := LONG_ROWS.get(platform, LONG_ROW)):
    return "xla", f"rows of {length} tokens are shorter than {least}"
  never = "never has all scores in memory"
  if platform == "gpu":
    why = attention_checks.no_cudnn(config) or attention_checks.too_old(target.capability)
    return ("blockwise", f"{never}; of cudnn: {why}") if why else ("cudnn", never)
  why = attention_checks.no_splash(config) if platform == "tpu" else "it is a kernel for TPUs"
  if not why:
    return "splash", never
  if platform == "tpu" and sizes.get("context", 1) > 1:
    size = _scores_at_once(config, sizes)
    if size <= SCORES_BYTES:
      limit = f"{SCORES_BYTES / 2**30:g} GiB"
      size = f"{size / 2**30:.2f} GiB of scores at once, at most {limit}: it is faster than blocks"
      return "xla", f"{size}; of splash: {why}"
  return "blockwise", f"{never}; of splash: {why}"


def _scores_at_once(config: ConfigDict, sizes: Mapping[str, int]) -> int:
  """Returns the bytes of the scores that a device has at once where `context` splits the rows."""
  context = sizes["context"]
  length = config.data.sequence_length // context
  heads = -(-config.model.heads // sizes.get("tensor", 1))
  # In a ring half of the scores of one device's keys, else those of all keys; in float32.
  keys = length * context if config.model.context_attention == "gather" else length // 2
  return 4 * own_tokens(config, sizes) * heads * keys


def _loss_chunks(config: ConfigDict, target: Target) -> tuple[int, str]:
  sizes = target.sizes
  own = decoder_checks.own_logits(config, sizes) if config.model.name == "transformer" else 0
  if not own or not TASKS[config.task].of_tokens:
    return 1, ""
  each = own_tokens(config, sizes) * _BYTES.get(config.training.compute_dtype, 4)
  # At least as many columns as a TPU's lanes: narrower products waste them.
  fits = [n for n in range(1, max(1, own // decoder_checks.LANES) + 1) if own % n == 0]
  most = CHUNK_BYTES / each
  count = next((n for n in fits if own // n <= most), fits[-1])
  limit = f"{CHUNK_BYTES // 2**20} MiB"
  size = f"{each * own // count / 2**20:,.1f} MiB of logits per device"
  if own // count > most:
    return count, f"{size}: the {own} columns of a device have no finer parts for {limit}"
  if count == 1:
    return 1, f"{size}, at most {limit}"
  return count, f"{size} at a time instead of {each * own / 2**20:,.0f}, at most {limit}"


def _grouped_matmul(config: ConfigDict, target: Target) -> tuple[str, str]:
  if config.model.name != "transformer" or not config.model.experts:
    return "tiles", ""
  if target.platform == "tpu":
    return "ragged", "a grouped kernel on TPUs"
  return "tiles", "ragged_dot multiplies all rows by all experts here"


def _microbatches(config: ConfigDict, target: Target) -> tuple[int, str]:
  stages = target.sizes.get("stage", 1)
  if stages == 1:
    return 1, ""
  training, batch = config.training, config.partitioning.activations.batch
  parts = math.prod(target.sizes.get(axis, 1) for axis in batch)
  rows = config.data.global_batch_size // (parts * max(1, training.gradient_accumulation_steps))
  most = MICROBATCHES * stages
  fits = [n for n in range(1, min(rows, most) + 1) if rows % n == 0] or [1]
  if training.pipeline == "interleaved":
    fits = [n for n in fits if n % stages == 0] or fits
  chunks = training.pipeline_chunks if training.pipeline == "interleaved" else 1
  bubble = (stages - 1) / (fits[-1] * chunks + stages - 1)
  return fits[-1], f"of {rows} rows per device; {bubble:.0%} of a step is the pipeline's bubble"


def own_tokens(config: ConfigDict, sizes: Mapping[str, int]) -> int:
  """Returns how many tokens of a microbatch a device has inside a block."""
  activations = config.partitioning.activations
  parts = math.prod(sizes.get(axis, 1) for axis in (*activations.batch, *activations.sequence))
  rows = config.data.global_batch_size * TASKS[config.task].sequences
  microbatches = max(1, config.training.gradient_accumulation_steps)
  if sizes.get("stage", 1) > 1:
    microbatches *= max(1, config.training.microbatches)
  return max(1, -(-rows * config.data.sequence_length // (parts * microbatches)))


def _sequence_parallel(config: ConfigDict, target: Target) -> tuple[bool, str]:
  platform, sizes = target.platform, target.sizes
  tensor, activations = sizes.get("tensor", 1), config.partitioning.activations
  if config.model.name != "transformer" or tensor == 1:
    return False, ""
  if platform not in ACCELERATORS:
    return False, "simulated devices take longer with it"
  given = tuple(activations.residual_sequence)
  table = axis_tables.AXIS_TABLES["transformer"]["activations"]
  if given != tuple(table["residual_sequence"]):
    return False, f"partitioning.activations.residual_sequence={given} is set"
  parts = tensor * math.prod(sizes.get(axis, 1) for axis in given)
  length = config.data.sequence_length
  if length % parts:
    return False, f"data.sequence_length={length} is not a multiple of {parts}"
  return True, f"mesh.tensor={tensor}: what lies between blocks takes 1/{tensor} of the memory"


def _collective_matmul(config: ConfigDict, target: Target) -> tuple[bool, str]:
  platform, sizes = target.platform, target.sizes
  tensor = sizes.get("tensor", 1)
  if config.model.name != "transformer" or tensor == 1:
    return False, ""
  if platform != "tpu":
    return False, "measured for TPUs alone"
  if why := matmul_checks.no_ring(config):
    return False, why
  tokens = own_tokens(config, sizes) // tensor
  if tokens < RING_TOKENS:
    return False, f"{tokens} tokens per device and part of the sequence, under {RING_TOKENS}"
  return True, f"{tokens} tokens are multiplied while as many are sent"


RULES = (
  Rule(
    "training.microbatches",
    "with mesh.stage > 1 the most that divide the rows of a device, up to 4 * mesh.stage; of "
    "interleaved a multiple of mesh.stage; else 1",
    "the bubble of a pipeline is (S - 1) / (M + S - 1) of a step of M microbatches on S stages; "
    "memory does not grow with M",
    _microbatches,
  ),
  Rule(
    "training.attention_kernel",
    "for rows of 256 tokens and more (on GPUs 1024) splash on TPUs, cudnn on GPUs of compute "
    "capability 9.0 (Hopper) or more where it can do what the model asks for, and blockwise "
    "elsewhere; else xla. On TPUs where mesh.context splits rows that splash cannot take: "
    "blockwise, but xla where scores take at most 1 GiB",
    "all scores of a row of 8192 tokens would be the largest arrays of a step",
    _kernel,
  ),
  Rule(
    "training.loss_chunks",
    "the fewest parts of a device's columns of the logits that take at most 256 MiB each, in the "
    "compute dtype",
    "the logits of all tokens are larger than any other activation; one chunk costs nothing",
    _loss_chunks,
  ),
  Rule(
    "training.grouped_matmul",
    "ragged on TPUs, tiles elsewhere",
    "the compilers for CPUs and GPUs multiply all rows of a ragged_dot by the kernels of all "
    "experts",
    _grouped_matmul,
  ),
  Rule(
    "partitioning.sequence_parallel",
    "true where mesh.tensor > 1 on TPUs and GPUs, if tensor (and context) divide "
    "`data.sequence_length`; false on simulated devices",
    "norms and the saved residual are split instead of repeated (arXiv:2205.05198); as many bytes "
    "are sent",
    _sequence_parallel,
  ),
  Rule(
    "partitioning.collective_matmul",
    "true with sequence parallelism on TPUs, where a device's part of the sequence has at least "
    f"{RING_TOKENS} tokens; else false, also with lora.dropout, and with adapters of 8-bit "
    "matmuls",
    "gathers and scatters of activations over `tensor` run while parts of them are multiplied "
    "(Wang et al., ASPLOS 2023)",
    _collective_matmul,
  ),
)
