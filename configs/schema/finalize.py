"""Derived values, filled in after all overrides.

They follow from other keys, from a model folder (`model=hf`), and from platform and mesh: the best
configuration known for them. `RULES` says what each of the last follows from; docs/performance.md
has the same table, with what was measured. Compiler options have a table of their own in
training/compiler_options.py.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping

from ml_collections import ConfigDict

from configs.keys import table
from configs.schema import (
  axis_tables,
  data_checks,
  model_checks,
  optimizer_checks,
  recipes,
  step_checks,
)
from input_pipeline.text import tokenizer
from interop import hf_folder
from training.choices import Choice
from training.optimizer import optimizer_row
from training.tasks import TASKS

# ------------------------------ a model folder ------------------------------

FOLDER_KEY = "model.folder"
LONGEST_ROW = 2048  # tokens of a row by default, where the model takes as many
LEARNING_RATES = {False: 1e-5, True: 2e-4}  # of AdamW, of all parameters and of adapters


def is_folder(config: ConfigDict) -> bool:
  """Returns whether a config's model is that of a folder."""
  return "folder" in config.model


def finalize_folder(config: ConfigDict) -> None:
  """Fills in what a folder's config.json determines; `config` is unlocked.

  A key of `model` that is set stays, where the parameters and their shapes are the same with it.

  Raises:
    ValueError: the folder cannot be read, or describes a model that is not there; or keys of
      `model` that contradict it.
  """
  from interop import hf_config  # of models of a folder alone

  model, data = config.model, config.data
  if not model.folder:
    raise ValueError(
      f"{FOLDER_KEY}='': name the folder of the model, such as --config.{FOLDER_KEY}=Qwen3-0.6B; "
      f"one of the Hugging Face Hub is hf://OWNER/NAME. `sample` and `evaluate` read it from the "
      f"run of --checkpoint, if that has saved a step"
    )
  folder = hf_folder.local(model.folder, FOLDER_KEY)
  described = hf_folder.read_config(folder, FOLDER_KEY)
  wrong = [
    f"model.{key}={model[key]!r}: it is {described.model[key]!r} in {folder / hf_folder.CONFIG}"
    for key in hf_config.SHAPES
    if model[key] is not None and not hf_config.same_value(model[key], described.model[key])
  ]
  if wrong:
    lines = "\n".join(f"  {line}" for line in wrong)
    raise ValueError(
      f"{FOLDER_KEY}={model.folder} has parameters of other shapes; leave unset:\n{lines}"
    )
  for key, value in described.model.items():
    if model[key] is None:
      model[key] = value
  if data.sequence_length is None:
    data.sequence_length = min(LONGEST_ROW, described.positions)
  if not data.tokenizer:
    data.tokenizer = str(tokenizer.find_file(folder).parent)
  if not config.checkpoint.initialize_from and not hf_folder.is_copy(folder):
    config.checkpoint.initialize_from = model.folder
  if hf_folder.is_adapter(config.checkpoint.initialize_from):
    from interop import peft_adapter  # which imports JAX

    peft_adapter.adopt(config.lora, config.checkpoint.initialize_from, described.model_type)
  if config.optimizer.learning_rate is None:
    scale = optimizer_row(config.optimizer.name).default
    config.optimizer.learning_rate = LEARNING_RATES[config.lora.rank > 0] * scale.rate


# ------------------------------ the best configuration known ------------------------------

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
    why = model_checks.no_cudnn(config) or model_checks.too_old(target.capability)
    return ("blockwise", f"{never}; of cudnn: {why}") if why else ("cudnn", never)
  why = model_checks.no_splash(config) if platform == "tpu" else "it is a kernel for TPUs"
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
  own = model_checks.own_logits(config, sizes) if config.model.name == "transformer" else 0
  if not own or not TASKS[config.task].of_tokens:
    return 1, ""
  each = own_tokens(config, sizes) * _BYTES.get(config.training.compute_dtype, 4)
  # At least as many columns as a TPU's lanes: narrower products waste them.
  fits = [n for n in range(1, max(1, own // model_checks.LANES) + 1) if own % n == 0]
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
  if why := step_checks.no_ring(config):
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


# ------------------------------ all derived values ------------------------------

# Schedule -> learning rate at its end over the peak, unless the config says so.
FINAL_FRACTIONS = {"cosine": 0.1, "linear": 0.0, "wsd": 0.0}
_LEAST_BATCHES = 8  # of a final evaluation: enough for a standard error


def finalize(
  config: ConfigDict,
  platform: str,
  sizes: Mapping[str, int] | None = None,
  capability: float = 0.0,
) -> ConfigDict:
  """Returns a copy in which every derived value is filled in; run after all overrides.

  Args:
    config: as parsed, with overrides.
    platform: `cpu`, `gpu` or `tpu`: what the run will use.
    sizes: mesh axis -> size, over all slices; None: the config's, where no devices are known.
    capability: the compute capability of NVIDIA's GPUs; 0: of others, or unknown.

  Raises:
    ValueError: a key that only the recipe may set was overridden.
  """
  return with_choices(config, platform, sizes, capability)[0]


def with_choices(
  config: ConfigDict,
  platform: str,
  sizes: Mapping[str, int] | None = None,
  capability: float = 0.0,
) -> tuple[ConfigDict, tuple[Choice, ...]]:
  """Returns what `finalize` returns, and what it chose by platform and mesh, with reasons."""
  if lines := [*table.too_large(config)]:
    raise ValueError("the config is refused:\n" + "\n".join(f"  {line}" for line in lines))
  recipe = recipes.base(config.argument)
  if config.model.name != recipe.model.name:
    raise ValueError(
      f"model.name={config.model.name!r} was overridden while the sizes are those of "
      f"{recipe.model.name!r}; pick the model with --config=FILE:model=NAME"
    )
  if config.task != recipe.task:
    raise ValueError(
      f"task={config.task!r} was overridden while model and data are those of {recipe.task!r}; "
      f"choose another recipe with --config=FILE:RECIPE"
    )
  if sizes is None:
    sizes = {axis: max(1, size) for axis, size in config.mesh.items()}
  config = copy.deepcopy(config)
  with config.unlocked():
    training = config.training
    step_checks.finalize_precision(config, platform in ACCELERATORS)
    default(training, "matmul_precision", "default")
    optimizer_checks.finalize_optimizer(config, recipe)
    if is_folder(config):
      finalize_folder(config)
    recipes.finalize(config, platform in ACCELERATORS)
    model_checks.finalize_lora(config)
    choices = choose(config, Target(platform, sizes, capability))
    _schedule(config, recipe)
    _final_evaluation(config)
    _rows_to_skip(config.data)
    # --config.metrics.sinks=csv,wandb is one name for the parser of flags.
    names = ",".join(map(str, config.metrics.sinks))
    config.metrics.sinks = tuple(name for name in names.split(",") if name)
    activations = config.partitioning.activations
    if config.partitioning.sequence_parallel and "residual_sequence" in activations:
      given = activations.residual_sequence
      activations.residual_sequence = (*given, *(() if "tensor" in given else ("tensor",)))
    parameters = config.partitioning.parameters
    for name in parameters:
      default(config.partitioning.optimizer, name, parameters[name])
  return config, choices


def _schedule(config: ConfigDict, recipe: ConfigDict) -> None:
  """Turns tokens into steps, and fills in what the schedule's name implies.

  Raises:
    ValueError: a number of tokens and of steps for the same thing, or tokens of a task without.
  """
  keys, training = config.optimizer, config.training
  if training.tokens and training.steps != recipe.training.steps:
    raise ValueError(
      f"training.tokens={training.tokens} and training.steps={training.steps}: set one of the two"
    )
  _steps_of_tokens(config, training, "tokens", "steps")
  _steps_of_tokens(config, keys, "warmup_tokens", "warmup_steps")
  _steps_of_tokens(config, keys, "decay_tokens", "decay_steps", last=True)
  default(keys, "warmup_steps", training.steps // 20)
  default(keys, "final_fraction", FINAL_FRACTIONS.get(keys.schedule, 1.0))
  default(keys, "decay_steps", max(1, training.steps // 5) if keys.schedule == "wsd" else 0)
  keys.schedule_changes = _schedule_changes(keys, training.steps)


def _schedule_changes(keys: ConfigDict, steps: int) -> tuple:
  """Returns the changes of training.steps that the schedule depends on.

  `training.restore.adopt_schedule` has added the last one, of the start that resumes.

  Raises:
    ValueError: the schedule has ended at 0, and would stay there.
  """
  if not keys.schedule_changes:
    return ()
  if not all(len(one) == 3 and one[2] in ("stretch", "restart") for one in keys.schedule_changes):
    raise ValueError(
      f"optimizer.schedule_changes={keys.schedule_changes}: each is (step, training.steps up to "
      f"there, 'stretch' or 'restart'); leave it out, it is filled in where a run resumes"
    )
  *earlier, (done, before, how) = keys.schedule_changes
  if steps == before:
    return tuple(earlier)
  if keys.schedule_on_resume == "recompute" or keys.schedule == "constant":
    return ()
  if how == "stretch" and not earlier:
    # What is left then is that of a run which began with this number of steps.
    begins = min(before, steps) - keys.decay_steps if keys.schedule == "wsd" else keys.warmup_steps
    if keys.schedule == "inverse_sqrt" or done <= begins:
      return ()
  if how == "stretch" and done >= before and keys.final_fraction == 0:
    raise ValueError(
      f"training.steps={steps}, and the {before} steps of before are done: at their end the "
      f"learning rate of optimizer.schedule={keys.schedule} is 0, and further steps would change "
      f"nothing; set optimizer.schedule_on_resume=restart to warm up again and decay over the "
      f"{steps - done} further steps"
    )
  return (*earlier, (done, before, how))


def _final_evaluation(config: ConfigDict) -> None:
  """Limits the final evaluation of a short run, whose split may take longer than its steps.

  A batch, of which only the forward pass is computed, takes a third of a step or less.
  """
  keys, sources = config.evaluation, max(1, len(config.data.sources))
  few = max(keys.steps or _LEAST_BATCHES, config.training.steps // (3 * sources))
  default(keys, "final_steps", 0 if keys.every_steps and not keys.steps else few)


def _steps_of_tokens(
  config: ConfigDict, section: ConfigDict, tokens: str, steps: str, *, last: bool = False
) -> None:
  """Turns tokens into the steps that have them: the first steps, or the last of the run."""
  if not section[tokens]:
    return
  title = "training" if section is config.training else "optimizer"
  if section is not config.training and section[steps] is not None:
    raise ValueError(
      f"{title}.{tokens}={section[tokens]} and {title}.{steps}={section[steps]}: set one of the two"
    )
  if not TASKS[config.task].of_tokens:
    raise ValueError(f"{title}.{tokens}={section[tokens]}: {config.task} has no tokens; set steps")
  ramp = data_checks.ramp_of(config.data)
  rows = -(-section[tokens] // max(1, config.data.sequence_length))
  if last:
    total = config.training.steps
    before = ramp.taken(total) - rows  # that the steps before may take
    section[steps] = total - (ramp.steps(before + 1) - 1) if before >= 0 else total + 1
  else:
    section[steps] = max(1, ramp.steps(rows))


def _rows_to_skip(data: ConfigDict) -> None:
  """Turns batches that are skipped into rows, which stay the same where the batch size changes."""
  given, batch = data.skip_batches, data.global_batch_size
  if data.batch_size_ramp:  # `check` refuses them together
    return
  if all(type(number) is int and number >= 0 for number in given):  # else `check` refuses it
    ranges = ((number * batch, (number + 1) * batch) for number in sorted(given))
    data.skip_rows = (*data.skip_rows, *ranges)
    data.skip_batches = ()


def default(section: ConfigDict, key: str, value) -> None:
  """Sets a key that is still unset."""
  if section[key] is None:
    section[key] = value
