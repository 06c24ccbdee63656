"""Derived values, filled in after all overrides.

They follow from other keys, from a model folder (`model=hf`), and from platform and mesh: the best
configuration known for them, by `RULES`. docs/performance.md says in words what each of the last
follows from, why, and what was measured. Compiler options have a table of their own in
training/compiler_options.py.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

from etils import epy
from ml_collections import ConfigDict

from configs.keys import table
from configs.keys.model import WITH_STATES
from configs.schema import (
  axis_tables,
  data_checks,
  model_checks,
  model_sizes,
  optimizer_checks,
  recipes,
  step_checks,
)
from configs.schema.model_checks import divisors
from input_pipeline import catalog
from input_pipeline.text import tokenizer
from runtime.extensions import kind_of_model
from training.optimizer import optimizer_row
from training.tasks import GRPO, TASKS

with epy.lazy_imports():  # of GRPO, and of runs with a teacher, or with a model folder
  from configs.schema import grpo_checks, teachers
  from input_pipeline.text import tokenizer_files
  from interop import hf_folder


@dataclasses.dataclass(frozen=True)
class Choice:
  """A default that follows from config, platform and mesh: the value of a key left unset.

  Attributes:
    key: dotted.
    value: chosen.
    why: in a few words.
    of_devices: whether it follows from platform and mesh, too, not from the config alone.
    plain: whether it is what a program has that does nothing special for its devices.
  """

  key: str
  value: object
  why: str
  of_devices: bool = True
  plain: bool = False


# ------------------------------ a model folder ------------------------------

FOLDER_KEY = "model.folder"
LONGEST_ROW = 2048  # tokens of a row by default, where the model takes as many
LEARNING_RATES = {False: 1e-5, True: 2e-4}  # of AdamW, of all parameters and of adapters


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
    data.tokenizer = str(tokenizer_files.find(folder).parent)
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
# What the logits of a chunk may take on a device, in the compute dtype. On GPUs, whose memory is
# larger, more chunks than one cost a matmul of all logits and a copy of their gradients' sum.
CHUNK_BYTES, GPU_CHUNK_BYTES = 256 * 2**20, 4 * 2**30
# Layers of the longest iteration of a scan that is chosen; on CPUs compilation takes longer.
UNROLLED = {"cpu": 8, "gpu": 32}
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


def choose(config: ConfigDict, target: Target) -> tuple[Choice, ...]:
  """Fills in the keys of `RULES` that are unset; `config` is unlocked.

  Args:
    config: with everything else filled in.
    target: the devices.

  Returns:
    What was chosen, except what the config has no use for.
  """
  tokens = functools.partial(table.with_sections, own_tokens, config, sizes=target.sizes)
  found = []
  for dotted, rule in RULES.items():
    section, key = dotted.split(".")
    if config[section][key] is None:
      value, why = table.with_sections(rule, config, target=target, tokens=tokens)
      config[section][key] = value
      if why:
        found.append(Choice(dotted, value, why, plain=str(value) in PLAIN))
  return tuple(found)


def _kernel(
  model: ConfigDict,
  training: ConfigDict,
  data: ConfigDict,
  mesh: ConfigDict,
  tokens: Callable[[], int],
  target: Target,
) -> tuple[str, str]:
  platform, length = target.platform, data.sequence_length
  if kind_of_model(model.name) != "transformer":
    return "xla", ""
  if length < (least := LONG_ROWS.get(platform, LONG_ROW)):
    return "xla", f"rows of {length} tokens are shorter than {least}"
  never = "never has all scores in memory"
  if platform == "gpu":
    why = model_checks.no_cudnn(model, training, mesh)
    why = why or model_checks.too_old(target.capability)
    return ("blockwise", f"{never}; of cudnn: {why}") if why else ("cudnn", never)
  why = "it is a kernel for TPUs"
  if platform == "tpu":
    why = model_checks.no_splash(model, training, data, mesh.context)
  if not why:
    return "splash", never
  context = target.sizes.get("context", 1)
  if platform == "tpu" and context > 1:
    # In a ring half of the scores of one device's keys, else those of all keys; in float32.
    own = length // context
    keys = own // 2 if model.context_attention in ("auto", "ring") else length
    heads = -(-model.heads // target.sizes.get("tensor", 1))
    size = 4 * tokens() * heads * keys
    if size <= SCORES_BYTES:
      limit = f"{SCORES_BYTES / 2**30:g} GiB"
      size = f"{size / 2**30:.2f} GiB of scores at once, at most {limit}: it is faster than blocks"
      return "xla", f"{size}; of splash: {why}"
  return "blockwise", f"{never}; of splash: {why}"


def _loss_chunks(
  model: ConfigDict,
  training: ConfigDict,
  partitioning: ConfigDict,
  task: str,
  tokens: Callable[[], int],
  target: Target,
) -> tuple[int, str]:
  own = 0
  if kind_of_model(model.name) == "transformer" and TASKS[task].of_tokens:
    own = model_checks.own_logits(model, partitioning, target.sizes)
  if not own:
    return 1, ""
  each = tokens() * _BYTES.get(training.compute_dtype, 4)
  # At least as many columns as a TPU's lanes: narrower products waste them.
  fits = [n for n in divisors(own) if n <= max(1, own // model_checks.LANES)]
  limit_bytes = GPU_CHUNK_BYTES if target.platform == "gpu" else CHUNK_BYTES
  most = limit_bytes / each
  count = next((n for n in fits if own // n <= most), fits[-1])
  limit = f"{limit_bytes // 2**20:,} MiB"
  size = f"{each * own // count / 2**20:,.1f} MiB of logits per device"
  if own // count > most:
    return count, f"{size}: the {own} columns of a device have no finer parts for {limit}"
  if count == 1:
    return 1, f"{size}, at most {limit}"
  return count, f"{size} at a time instead of {each * own / 2**20:,.0f}, at most {limit}"


def _scan_unroll(model: ConfigDict, training: ConfigDict, target: Target) -> tuple[int, str]:
  # One device of a CPU: it was measured there. In one iteration XLA merges what is computed again
  # with the first computation, and keeps it: of all layers, with `full`.
  axes = ("fsdp", "stage") if target.platform == "gpu" else target.sizes
  split = max((target.sizes.get(axis, 1) for axis in axes), default=1)
  recomputes = training.rematerialization not in ("none", "elementwise")
  if target.platform not in UNROLLED or split > 1 or recomputes:
    return 1, ""
  if kind_of_model(model.name) != "transformer":
    return 1, ""
  most = UNROLLED[target.platform]
  count = max((n for n in divisors(model.layers) if n <= most), default=1)
  return count, "a loop copies what its iterations save into arrays of all layers"


def _grouped_matmul(model: ConfigDict, target: Target) -> tuple[str, str]:
  if kind_of_model(model.name) != "transformer" or not model.experts:
    return "tiles", ""
  if target.platform == "tpu":
    return "ragged", "a grouped kernel on TPUs"
  return "tiles", "ragged_dot multiplies all rows by all experts here"


def _microbatches(
  training: ConfigDict, data: ConfigDict, partitioning: ConfigDict, target: Target
) -> tuple[int, str]:
  stages = target.sizes.get("stage", 1)
  if stages == 1:
    return 1, ""
  batch = data_checks.parts(partitioning.activations.batch, target.sizes)
  rows = data.global_batch_size // (batch * max(1, training.gradient_accumulation_steps))
  most = MICROBATCHES * stages
  fits = [n for n in range(1, min(rows, most) + 1) if rows % n == 0] or [1]
  if training.pipeline == "interleaved":
    fits = [n for n in fits if n % stages == 0] or fits
  chunks = training.pipeline_chunks if training.pipeline == "interleaved" else 1
  bubble = (stages - 1) / (fits[-1] * chunks + stages - 1)
  return fits[-1], f"of {rows} rows per device; {bubble:.0%} of a step is the pipeline's bubble"


def own_tokens(
  data: ConfigDict,
  training: ConfigDict,
  partitioning: ConfigDict,
  task: str,
  sizes: Mapping[str, int],
) -> int:
  """Returns how many tokens of a microbatch a device has inside a block."""
  activations = partitioning.activations
  parts = data_checks.parts((*activations.batch, *activations.sequence), sizes)
  rows = data.global_batch_size * TASKS[task].sequences
  microbatches = max(1, training.gradient_accumulation_steps)
  if sizes.get("stage", 1) > 1:
    microbatches *= max(1, training.microbatches)
  return max(1, -(-rows * data.sequence_length // (parts * microbatches)))


def _sequence_parallel(
  model: ConfigDict, data: ConfigDict, partitioning: ConfigDict, target: Target
) -> tuple[bool, str]:
  platform, sizes = target.platform, target.sizes
  tensor = sizes.get("tensor", 1)
  if kind_of_model(model.name) != "transformer" or tensor == 1:
    return False, ""
  if platform not in ACCELERATORS:
    return False, "simulated devices take longer with it"
  given = tuple(partitioning.activations.residual_sequence)
  usual = axis_tables.AXIS_TABLES["transformer"]["activations"]["residual_sequence"]
  if given != tuple(usual):
    return False, f"partitioning.activations.residual_sequence={given} is set"
  parts, length = data_checks.parts(("tensor", *given), sizes), data.sequence_length
  if length % parts:
    return False, f"data.sequence_length={length} is not a multiple of {parts}"
  return True, f"mesh.tensor={tensor}: what lies between blocks takes 1/{tensor} of the memory"


def _collective_matmul(
  model: ConfigDict,
  training: ConfigDict,
  partitioning: ConfigDict,
  lora: ConfigDict,
  tokens: Callable[[], int],
  target: Target,
) -> tuple[bool, str]:
  tensor = target.sizes.get("tensor", 1)
  if kind_of_model(model.name) != "transformer" or tensor == 1:
    return False, ""
  if target.platform != "tpu":
    return False, "measured for TPUs alone"
  if why := step_checks.no_ring(training, partitioning, lora):
    return False, why
  part = tokens() // tensor
  if part < RING_TOKENS:
    return False, f"{part} tokens per device and part of the sequence, under {RING_TOKENS}"
  return True, f"{part} tokens are multiplied while as many are sent"


# Values of these keys with which nothing special is done.
PLAIN = ("False", "1", "xla", "tiles")
# Dotted key -> a function that returns its value and why, from the sections that its parameters
# name, in which the keys before it are set, the devices (`target`), and what returns `own_tokens`
# (`tokens`). Why is "" where the key has nothing to say about a config.
RULES: Mapping[str, Callable[..., tuple[object, str]]] = {
  "training.microbatches": _microbatches,
  "training.attention_kernel": _kernel,
  "training.loss_chunks": _loss_chunks,
  "training.scan_unroll": _scan_unroll,
  "training.grouped_matmul": _grouped_matmul,
  "partitioning.sequence_parallel": _sequence_parallel,
  "partitioning.collective_matmul": _collective_matmul,
}


# ------------------------------ data and model ------------------------------

# Data sets whose sizes are known here: (values per image, classes).
IMAGE_SIZES = {"digits": (64, 10), "mnist": (784, 10), "fashion_mnist": (784, 10)}


def _data(model: ConfigDict, data: ConfigDict, task: str, accelerated: bool) -> None:
  """Fills in what follows from the data set, and the sizes of a batch of random numbers.

  Raises:
    ValueError: a data set of images of unknown size.
  """
  rows = TASKS[task].rows
  if rows == "random":
    width = 8192 if accelerated else 512
    default(model, "model_size", width)
    default(data, "global_batch_size", width)
    data.examples = data.global_batch_size
  if rows == "image":
    known = IMAGE_SIZES.get(data.name, (None, None))
    for key, value in zip(("input_size", "output_size"), known, strict=True):
      if model.get(key, value) is None and value is None and key in model:
        raise ValueError(
          f"data.name={data.name!r}: set model.{key} (values per image, or classes); it is known "
          f"for {', '.join(IMAGE_SIZES)} only"
        )
      default(model, key, value)
  of_files = data.name in catalog.OF_FILES
  alone = data.name in (catalog.PREFERENCES, catalog.PROMPTS)
  default(data, "packing", "none" if alone else "best_fit" if of_files else "concatenate")
  if rows == "text" and (of_files or data.tokenizer == tokenizer.CHARACTERS):
    data.tokenizer = tokenizer.resolve(data)
  data.tokenizer = data.tokenizer or "bytes"
  if model.get("vocabulary_size", 0) is None:
    # A layout or plan may come before the text; a run always knows its characters.
    unknown = data.tokenizer == tokenizer.CHARACTERS
    size = tokenizer.USUAL_CHARACTERS if unknown else tokenizer.load(data.tokenizer).size
    model.vocabulary_size = size
  default(model, "separate_documents", of_files)
  if not TASKS[task].of_tokens and "input_size" in model and "output_size" in model:
    data.input_size, data.target_size = model.input_size, model.output_size


def _sizes(model: ConfigDict, data: ConfigDict) -> None:
  """Fills in the sizes of a model that follow from others.

  Raises:
    ValueError: heads do not divide the width.
  """
  default(model, "feedforward_size", model.get("model_size"))
  default(model, "expert_feedforward_size", model.get("feedforward_size"))
  kind = kind_of_model(model.name)
  if kind == "vit" and model.image_size is None:  # of a square with as many pixels
    model.image_size = math.isqrt(max(0, model.input_size) // max(1, model.channels))
  if kind != "transformer":
    return
  width = model.base_width or model.model_size
  default(model, "embedding_standard_deviation", width**-0.5 if model.tied_embeddings else 1.0)
  if model.head_size is None and model.heads > 0 and model.model_size % model.heads:
    raise ValueError(
      f"model.model_size={model.model_size} is not a multiple of model.heads={model.heads}; "
      f"change one, or set model.head_size"
    )
  default(model, "head_size", model.model_size // max(1, model.heads))
  default(model, "value_head_size", model.head_size)
  if model.mixer in WITH_STATES:
    for key, other in (
      *(("mixer_heads", "heads"), ("mixer_key_heads", "mixer_heads")),
      *(("mixer_head_size", "head_size"), ("mixer_value_head_size", "mixer_head_size")),
    ):
      model[key] = model[key] or model[other]
  default(model, "max_positions", data.sequence_length)
  default(model, "base_head_size", model.head_size)
  default(model, "attention_scale", _attention_scale(model.head_size, model.base_head_size))


def _attention_scale(head_size: int, base: int) -> float:
  """Returns the scale of scores: 1 / head size for larger heads than muP's base model has.

  It is as much at the base as without muP. Source: arXiv:2203.03466, definition 4.1.
  """
  if head_size < 1 or base < 1:  # refused
    return 1.0
  return head_size**-0.5 if head_size == base else base**0.5 / head_size


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
  too_large = [
    f"  {name}={value:,}: at most {row.most:,}"  # so that others could not be derived
    for name, row, value in table.rows(config)
    if isinstance(value, int) and value > row.most
  ]
  if too_large:
    raise ValueError("\n".join(["the config is refused:", *too_large]))
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
  accelerated = platform in ACCELERATORS
  if sizes is None:
    sizes = {axis: max(1, size) for axis, size in config.mesh.items()}
  config = copy.deepcopy(config)
  with config.unlocked():
    step_checks.finalize_precision(config.training, config.optimizer, accelerated)
    default(config.training, "matmul_precision", "default")
    followed = _by_width(config.model, config.optimizer, recipe, config.argument)
    if "folder" in config.model:
      finalize_folder(config)
    _data(config.model, config.data, config.task, accelerated)
    _sizes(config.model, config.data)
    if config.task == GRPO:
      table.with_sections(grpo_checks.finalize_grpo, config)
    model_checks.finalize_lora(config.model, config.lora, config.training)
    choices = choose(config, Target(platform, sizes, capability))
    table.with_sections(_schedule, config, recipe=recipe)
    table.with_sections(_final_evaluation, config)
    _rows_to_skip(config.data)
    for section, key in (("metrics", "sinks"), ("training", "metrics"), ("evaluation", "metrics")):
      # --config.metrics.sinks=csv,wandb is one name for the parser of flags.
      names = ",".join(map(str, config[section][key]))
      config[section][key] = tuple(name for name in names.split(",") if name)
    tables = config.partitioning
    if tables.sequence_parallel and "residual_sequence" in tables.activations:
      given = tables.activations.residual_sequence
      if "tensor" not in given:
        tables.activations.residual_sequence = (*given, "tensor")
    for name in tables.parameters:
      default(tables.optimizer, name, tables.parameters[name])
    if config.distillation.teacher:
      teachers.finalize_teacher(config, lambda theirs: finalize(theirs, platform, sizes))
  return config, (*followed, *choices)


def _by_width(
  model: ConfigDict, optimizer: ConfigDict, recipe: ConfigDict, argument: str
) -> list[Choice]:
  """Fills in the sizes of the model, and the keys of the optimizer that have the recipe's values.

  Returns:
    What is not the recipe's, as model.depth, model.model_size or model.heads was set.
  """
  found = {
    f"model.{key}": one for key, one in model_sizes.finalize_sizes(model, recipe.model).items()
  }
  rule, unset = optimizer_row(optimizer.name).width_rule, optimizer.learning_rate is None
  factor, why = model_sizes.rate_factor(model, recipe.model, rule)
  optimizer_checks.finalize_optimizer(optimizer, recipe.optimizer, argument, factor)
  if unset and why:
    found["optimizer.learning_rate"] = (optimizer.learning_rate, why)
  return [Choice(key, value, why, of_devices=False) for key, (value, why) in found.items()]


def _schedule(
  training: ConfigDict, optimizer: ConfigDict, data: ConfigDict, task: str, recipe: ConfigDict
) -> None:
  """Turns tokens into steps, and fills in what the schedule's name implies.

  Raises:
    ValueError: a number of tokens and of steps for the same thing, or tokens of a task without.
  """
  given = {"training.tokens": training.tokens}
  given |= {f"optimizer.{key}": optimizer[key] for key in ("warmup_tokens", "decay_tokens")}
  for key, tokens in given.items():
    steps = key.replace("tokens", "steps")
    section, name = steps.split(".")
    was = training.steps if section == "training" else optimizer[name]
    if tokens and was != (recipe.training.steps if section == "training" else None):
      raise ValueError(f"{key}={tokens} and {steps}={was}: set one of the two")
    if tokens and not TASKS[task].of_tokens:
      raise ValueError(f"{key}={tokens}: {task} has no tokens; set steps")
  ramp = data_checks.ramp_of(data)
  rows = {key: -(-tokens // max(1, data.sequence_length)) for key, tokens in given.items()}
  if training.tokens:
    training.steps = max(1, ramp.steps(rows["training.tokens"]))
  if optimizer.warmup_tokens:
    optimizer.warmup_steps = max(1, ramp.steps(rows["optimizer.warmup_tokens"]))
  if optimizer.decay_tokens:  # the last ones: `before` is what the steps before may take
    before = ramp.taken(training.steps) - rows["optimizer.decay_tokens"]
    last_before = ramp.steps(before + 1) - 1 if before >= 0 else -1
    optimizer.decay_steps = training.steps - last_before
  default(optimizer, "warmup_steps", training.steps // 20)
  default(optimizer, "final_fraction", FINAL_FRACTIONS.get(optimizer.schedule, 1.0))
  decays = optimizer.schedule == "wsd"
  default(optimizer, "decay_steps", max(1, training.steps // 5) if decays else 0)
  optimizer.schedule_changes = _schedule_changes(optimizer, training.steps)


def _schedule_changes(keys: ConfigDict, steps: int) -> tuple:
  """Returns the changes of training.steps that the schedule depends on.

  `training.restore.adopt_schedule` has added the last one, of the start that resumes.

  Raises:
    ValueError: the schedule has ended at 0, and would stay there.
  """
  if not keys.schedule_changes:
    return ()

  def is_change(one: object) -> bool:
    return (
      isinstance(one, tuple | list)
      and [*map(type, one)] == [int, int, str]
      and one[2] in ("stretch", "restart")
    )

  if not all(map(is_change, keys.schedule_changes)):
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


def _final_evaluation(evaluation: ConfigDict, training: ConfigDict, data: ConfigDict) -> None:
  """Limits the final evaluation of a short run, whose split may take longer than its steps.

  A batch, of which only the forward pass is computed, takes a third of a step or less.
  """
  few = max(evaluation.steps or _LEAST_BATCHES, training.steps // (3 * max(1, len(data.sources))))
  whole = evaluation.every_steps and not evaluation.steps
  default(evaluation, "final_steps", 0 if whole else few)


def _rows_to_skip(data: ConfigDict) -> None:
  """Turns batches that are skipped into rows, which stay the same where the batch size changes."""
  given, batch = data.skip_batches, data.global_batch_size
  if data.batch_size_ramp:  # `check` refuses them together
    return
  if all(type(number) is int and number >= 0 for number in given):  # else `check` refuses it
    ranges = ((number * batch, (number + 1) * batch) for number in sorted(given))
    data.skip_rows = (*data.skip_rows, *ranges)
    data.skip_batches = ()


def default(section: ConfigDict, key: str, value: object) -> None:
  """Sets a key that is there and still unset."""
  if key in section and section[key] is None:
    section[key] = value
