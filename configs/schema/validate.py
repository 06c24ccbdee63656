"""Which values and which combinations of keys a config may have."""

import math
from collections.abc import Iterator, Mapping

from ml_collections import ConfigDict

from configs.keys import table
from configs.keys.optimizer import OPTIMIZER
from configs.keys.row import Key
from configs.schema import data_checks, model_checks, optimizer_checks, recipes, step_checks, unused
from input_pipeline import catalog
from input_pipeline.text.conversations import FORMS, REFUSE
from runtime.suggest import nearest
from training.callbacks import CALLBACKS
from training.metrics.sinks import SINKS
from training.tasks import DPO, TASKS

MOST_NORMS = 64  # that are stored on every device


def check(config: ConfigDict, sizes: Mapping[str, int]) -> None:
  """Finds keys that do not go together, before any device is touched.

  Args:
    config: finalized.
    sizes: mesh axis -> size, -1 filled in.

  Raises:
    ValueError: with all that is wrong, a line each.
  """
  wrong = [
    *_ranges(config),
    *_choices(config),
    *_dpo(config),
    *_tables(config),
    *_batch(config, sizes),
    *_long_rows(config, sizes),
  ]
  wrong += [*_chunks(config), *_registered(config), *unused.wrong(config)]
  if config.processes.deadline_seconds >= config.processes.heartbeat_seconds:
    wrong.append(
      f"processes.deadline_seconds={config.processes.deadline_seconds}: below "
      f"processes.heartbeat_seconds={config.processes.heartbeat_seconds}, after which JAX ends all "
      f"processes without naming the one that is behind; 0 learns it from the run"
    )
  if 0 < config.processes.slow_ratio <= 1:
    ratio = config.processes.slow_ratio
    wrong.append(f"processes.slow_ratio={ratio}: above 1, or 0 to turn it off")
  wrong.extend(step_checks.precision_errors(config))
  wrong.extend(_files(config))
  wrong.extend(data_checks.ramp_errors(config, sizes))
  wrong.extend(model_checks.lora_errors(config))
  wrong.extend(step_checks.memory_errors(config))
  wrong.extend(step_checks.matmul_errors(config))
  wrong.extend(step_checks.pipeline_errors(config, sizes))
  wrong.extend(model_checks.mup_errors(config))
  if config.model.name == "transformer":
    wrong.extend(model_checks.decoder_errors(config, sizes))
  if config.model.name == "vit":
    wrong.extend(model_checks.vit_errors(config))
  if wrong:
    raise ValueError("the config is refused:\n" + "\n".join(f"  {line}" for line in wrong))


def _ranges(config: ConfigDict) -> list[str]:
  """Checks each number by the range of its row."""
  wrong = [
    f"{name}={value}: {error}"
    for name, row, value in table.rows(config)
    for error in row.range_errors(value)
  ]
  positive = [
    (f"model.{name}", value)
    for name, value in config.model.items()
    if type(value) is int and (table.find(f"model.{name}") or Key(0)).least is None
  ]
  if TASKS[config.task].of_tokens:
    positive.append(("data.sequence_length", config.data.sequence_length))
  wrong.extend(f"{name}={value}: at least 1" for name, value in positive if value < 1)
  return [
    *wrong,
    *_schedule(config),
    *_averages(config),
    *_clipping(config.optimizer, recipes.base(config.argument).optimizer.clip_window),
    *optimizer_checks.group_errors(config.optimizer),
    *optimizer_checks.optimizer_errors(config.optimizer),
  ]


MOST_TOKENS = 2**20  # of a row on a device: attention lists the pairs of its blocks of 128


def _long_rows(config: ConfigDict, sizes: Mapping[str, int]) -> Iterator[str]:
  length, parts = config.data.get("sequence_length") or 0, sizes.get("context", 1)
  if length > MOST_TOKENS * parts:
    yield (
      f"data.sequence_length={length:,}: at most {MOST_TOKENS * parts:,} tokens, {MOST_TOKENS:,} "
      f"on each of mesh.context={parts}"
    )


def _clipping(keys: ConfigDict, window: int) -> Iterator[str]:
  """Yields what is wrong with the keys of clipping; `window` is that of the recipe."""
  if keys.clip_groups and not keys.groups:
    yield "optimizer.clip_groups: there are no groups; name them in optimizer.groups"
  if not keys.clip_quantile:
    groups = [group for group in keys.groups if isinstance(group, Mapping)]  # others: group_errors
    own = [group["clip_norm"] for group in groups if "clip_norm" in group]
    if keys.clip_groups and not any([keys.clip_norm, *own]):
      yield (
        "optimizer.clip_groups: optimizer.clip_norm=0 clips no group; set that, a clip_norm of a "
        "group, or optimizer.clip_quantile"
      )
    if keys.clip_window != window:
      yield (
        f"optimizer.clip_window={keys.clip_window} is about optimizer.clip_quantile, which is off; "
        f"set that, or leave it at {window}"
      )
    return
  if keys.clip_quantile >= 1:
    yield f"optimizer.clip_quantile={keys.clip_quantile}: below 1"
  if keys.clip_norm:
    yield (
      f"optimizer.clip_quantile={keys.clip_quantile} takes the place of optimizer.clip_norm="
      f"{keys.clip_norm}; set that to 0"
    )
  if keys.clip_window > MOST_NORMS:
    yield f"optimizer.clip_window={keys.clip_window}: at most {MOST_NORMS}"


def _averages(config: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the decays of averages of the parameters."""
  decays = config.optimizer.ema_decays
  if wrong := [one for one in decays if not (isinstance(one, float) and 0 < one < 1)]:
    yield f"optimizer.ema_decays: {wrong[0]!r} is not between 0 and 1, such as (0.999,)"
  elif len({*decays}) < len(decays):
    yield f"optimizer.ema_decays={decays}: each may be there once"


def _schedule(config: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the keys of the learning-rate schedule."""
  keys, steps = config.optimizer, config.training.steps
  if keys.schedule_changes:
    steps = keys.schedule_changes[0][1]  # for which the schedule was made
  name, warmup, decay = keys.schedule, keys.warmup_steps, keys.decay_steps
  if warmup > steps:
    yield f"optimizer.warmup_steps={warmup}: at most {steps} steps"
  final = keys.final_fraction
  if not 0 <= final <= 1:
    yield f"optimizer.final_fraction={final}: from 0 to 1, of the peak"
  if name in ("constant", "inverse_sqrt") and final != 1:
    yield (
      f"optimizer.final_fraction={final}: schedule={name} has no end; leave it out, "
      f"or choose cosine, linear or wsd"
    )
  if name == "wsd" and not 0 < decay <= steps - warmup:
    yield (
      f"optimizer.decay_steps={decay}: from 1 to {steps - warmup}, the {steps} steps without the "
      f"{warmup} of the warm-up"
    )
  if name != "wsd" and (decay or keys.decay != OPTIMIZER["decay"].default):
    yield (
      f"optimizer.decay_steps={decay} and optimizer.decay={keys.decay!r}: schedule={name} has no "
      f"stable phase; leave them out, or set optimizer.schedule=wsd"
    )
  if name == "inverse_sqrt" and not warmup:
    yield (
      "optimizer.schedule=inverse_sqrt: it falls from the warm-up on; set optimizer.warmup_steps"
    )
  if keys.independent_weight_decay and not keys.learning_rate > 0:
    yield "optimizer.independent_weight_decay needs optimizer.learning_rate above 0"


def _dpo(config: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the keys of DPO."""
  beta, smoothing = config.training.dpo_beta, config.training.dpo_label_smoothing
  if not 0 < beta < math.inf:
    yield f"training.dpo_beta={beta}: above 0"
  if not 0 <= smoothing < 0.5:
    yield f"training.dpo_label_smoothing={smoothing}: from 0 to below 0.5, which prefers neither"
  if config.task == DPO and config.model.name in ("mlp", "vit"):
    yield f"model.name={config.model.name!r}: {DPO} takes a transformer"


def choices_of(config: ConfigDict) -> dict[str, tuple[str, ...]]:
  """Returns dotted key -> its words, of a config's model and task: others are refused."""
  task = TASKS[config.task]
  return {
    **{key: row.choices for key, row, _ in table.rows(config) if row.choices},
    "training.attention_kernel": model_checks.ATTENTION_KERNELS if task.of_tokens else ("xla",),
    "checkpoint.keep_best": ("", *task.metrics),
  }


def _choices(config: ConfigDict) -> list[str]:
  values = {key: value for key, _, value in table.rows(config)}
  return [
    f"{name}={values[name]!r}: one of {', '.join(known)}{nearest(values[name], known)}"
    for name, known in choices_of(config).items()
    if values[name] not in known
  ]


def _registered(config: ConfigDict) -> list[str]:
  """Checks the names of callbacks and sinks."""
  wrong = []
  for key, known_ones in (("training.callbacks", CALLBACKS), ("metrics.sinks", SINKS)):
    section, name = key.split(".")
    for one in config[section][name]:
      if one not in known_ones:
        known = f"registered are {', '.join(known_ones)}" if known_ones else "none is registered"
        wrong.append(
          f"{key}: unknown {known_ones.what} {one!r}; {known}{nearest(str(one), known_ones)}"
        )
  return wrong


def _tables(config: ConfigDict) -> list[str]:
  """Checks the form of what tuples hold, which a config's types do not see."""
  wrong = []
  for title in ("parameters", "activations", "optimizer"):
    for name, axes in config.partitioning[title].items():
      if not all(isinstance(axis, str) for axis in axes):
        wrong.append(f"partitioning.{title}.{name}={axes!r}: names of mesh axes, such as ('fsdp',)")
  for entry in config.partitioning.overrides:
    pair = isinstance(entry, tuple) and len(entry) == 2
    if not (pair and isinstance(entry[0], str) and isinstance(entry[1], tuple)):
      wrong.append(
        f"partitioning.overrides: {entry!r} is not a name with the entries of a PartitionSpec, "
        f"such as ('layers/mlp/up/kernel', (None, 'fsdp', 'tensor'))"
      )
  for pattern in config.training.trainable:
    if not isinstance(pattern, str):
      wrong.append(
        f"training.trainable: {pattern!r} is not a pattern, such as 'layers/attention/*'"
      )
  for batch in config.data.skip_batches:
    if type(batch) is not int or batch < 0:
      wrong.append(f"data.skip_batches: {batch!r} is not the number of a batch, such as (17, 18)")
  for rows in config.data.skip_rows:
    ends = rows if isinstance(rows, tuple) and len(rows) == 2 else (0, 0)
    if not all(type(end) is int for end in ends) or not 0 <= ends[0] < ends[1]:
      wrong.append(
        f"data.skip_rows: {rows!r} is not a range of rows (first, the one behind the last), such "
        f"as ((544, 608),)"
      )
  for option in filter(None, config.compiler_options.split(",")):
    if "=" not in option:
      wrong.append(f"compiler_options: {option!r} is not name=value")
  return wrong


def _chunks(config: ConfigDict) -> list[str]:
  """Checks that a task whose loss is in chunks has logits of a vocabulary."""
  count = config.training.loss_chunks
  if count == 1 or TASKS[config.task].of_tokens:
    return []
  return [f"training.loss_chunks={count}: {config.task} has no vocabulary to cut"]


def _files(config: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the keys of data that are read from files."""
  data = config.data
  given = [key for key in ("files", "evaluation_files", "sources", "stages") if data[key]]
  if TASKS[config.task].rows != "text":
    if data.name in catalog.OF_FILES:
      yield f"data.name={data.name!r}: {config.task} has no rows of text; take the recipe lm"
    return
  if data.name not in catalog.OF_FILES:
    for key in given:
      yield (
        f"data.{key}={data[key]!r}: data.name={data.name!r} is not read from files; choose "
        f"--config=FILE:model=NAME,data={catalog.TEXT}"
      )
    return
  if (config.task == DPO) != (data.name == catalog.PREFERENCES):
    yield (
      f"data.name={data.name!r} with the task {config.task}: preferences and {DPO} go together; "
      f"choose --config=FILE:model=NAME,data={catalog.PREFERENCES}"
    )
  yield from _conversations(data)
  yield from data_checks.mixture_errors(data)
  if not data.files and not data.sources:
    yield (
      f"data.files='': data.name={data.name!r} is read from files; name them, such as "
      f"--config.data.files=corpus"
    )
  if not 0 < data.evaluation_fraction < 1:
    yield f"data.evaluation_fraction={data.evaluation_fraction}: above 0 and below 1"


def _conversations(data: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the keys of conversations."""
  if data.name in catalog.RENDERED:
    if data.name == catalog.PREFERENCES and data.packing != "none":
      yield f"data.packing={data.packing!r}: a row of data={data.name} is one pair; take none"
    if data.name == catalog.PREFERENCES and data.sources:
      yield f"data.sources: data={data.name} is not mixed; name its files with data.files"
    if data.packing == "concatenate":
      yield "data.packing='concatenate': conversations are never split; take best_fit or none"
    sources = [source for source in data.sources if isinstance(source, Mapping)]
    for feature in (data.text_feature, *(source.get("text_feature", "") for source in sources)):
      if feature:
        yield f"data.text_feature={feature!r}: conversations are read from {FORMS}; leave it empty"
    return
  for key, off in (
    ("chat_template", ""),
    ("untrained_conversations", REFUSE),
    ("long_conversations", REFUSE),
  ):
    if data[key] != off:
      yield (
        f"data.{key}={data[key]!r}: data.name={data.name!r} has no conversations; choose "
        f"--config=FILE:model=NAME,data={catalog.CONVERSATIONS}"
      )


def _batch(config: ConfigDict, sizes: Mapping[str, int]) -> list[str]:
  """Checks that the batch axes and the accumulation divide the global batch."""
  size, steps = config.data.global_batch_size, config.training.gradient_accumulation_steps
  if size < 1 or steps < 1:
    return []
  if size % steps:
    return [
      f"data.global_batch_size={size} is not divisible by "
      f"training.gradient_accumulation_steps={steps}; make it {-(-size // steps) * steps}"
    ]
  parts, names = 1, []
  for axis in config.partitioning.activations.batch:
    parts *= sizes.get(axis, 1)
    if sizes.get(axis, 1) > 1:
      names.append(f"{axis}={sizes[axis]}")
  if (size // steps) % parts == 0:
    return []
  whole = parts * steps
  below, above = size // whole * whole, (size // whole + 1) * whole
  near = f"{below} or {above}" if below else f"{above}"
  microbatch = f" / {steps} accumulation steps" if steps > 1 else ""
  return [
    f"data.global_batch_size={size}{microbatch} is not divisible by the batch axes "
    f"{' x '.join(names)}{f' = {parts}' if len(names) > 1 else ''}; make it {near}"
  ]
