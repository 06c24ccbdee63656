"""Which values and which combinations of keys a config may have.

What can be said of a single key is in its row (`configs/keys`): its range, its words, who reads it,
and which others may not be on beside it. What else does not go together is found by the functions
of `CHECKS`, whose parameters name the sections that they read.

`readers` of a row are words:

  text, image, random: tasks whose rows are of this kind
  tokens: tasks of tokens
  dpo, grpo: the task DPO or GRPO alone; plain: any other
  decoder, layers (decoders and encoders), regions (models whose sequence can be split between
    blocks), logits (of a vocabulary): models
  optimizer: optimizers whose row in `training.optimizer` names the key

A registered model reads what its READS names, and the keys of regions if its axis table has
`residual_sequence`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from etils import epy
from ml_collections import ConfigDict

from configs.keys import table
from configs.keys.row import Key
from configs.schema import data_checks, model_checks, optimizer_checks, recipes, step_checks
from runtime import extensions
from runtime.suggest import nearest
from training.callbacks import CALLBACKS
from training.optimizer import optimizer_keys
from training.tasks import DPO, GRPO, METRICS, TASKS

with epy.lazy_imports():  # of runs that have any
  from configs.schema import grpo_checks, teachers
  from training.metrics import sinks


def check(config: ConfigDict, sizes: Mapping[str, int]) -> None:
  """Finds keys that do not go together, before any device is touched.

  Args:
    config: finalized.
    sizes: mesh axis -> size, -1 filled in.

  Raises:
    ValueError: with all that is wrong, a line each.
  """
  wrong = [*_values(config), *unread_errors(config, sizes)]
  wrong += _excluded([*table.rows(config)], _values_of(config, sizes))
  of_model = OF_MODELS.get(extensions.kind_of_model(config.model.name), ())
  for check_errors in (*CHECKS, *of_model):
    wrong += table.with_sections(check_errors, config, sizes=sizes)
  if config.task == GRPO:
    wrong += table.with_sections(grpo_checks.grpo_errors, config)
  if config.distillation.model and not wrong:
    wrong += teachers.teacher_errors(config, of_model, sizes)
  if wrong:
    raise ValueError("the config is refused:\n" + "\n".join(f"  {line}" for line in wrong))


# ------------------------------ single keys ------------------------------


def choices_of(config: ConfigDict) -> dict[str, tuple[str, ...]]:
  """Returns dotted key -> its words, of a config's model and task: others are refused."""
  task = TASKS[config.task]
  return {
    **{key: row.words for key, row, _ in table.rows(config) if row.choices},
    "training.attention_kernel": model_checks.ATTENTION_KERNELS if task.of_tokens else ("xla",),
    "checkpoint.keep_best": ("", *task.metrics),
  }


def _values(config: ConfigDict) -> Iterator[str]:
  """Yields each value that is outside of its key's range, or none of its words."""
  choices, of_tokens = choices_of(config), TASKS[config.task].of_tokens
  own = {
    f"model.{key}": (Key(1), value) for key, value in config.model.items() if type(value) is int
  }
  rows = own | {key: (row, value) for key, row, value in table.rows(config)}
  for key, (row, value) in rows.items():
    yield from (f"{key}={value}: {error}" for error in row.range_errors(value))
    if key == "data.sequence_length" and of_tokens and value == 0:
      yield f"{key}={value}: at least 1"
    if key in choices and value not in choices[key]:
      yield f"{key}={value!r}: one of {', '.join(choices[key])}{nearest(value, choices[key])}"


# ------------------------------ keys that nothing reads ------------------------------

# Kind of model -> the words of `readers` that it is.
_OF_MODELS = {
  "transformer": {"decoder", "layers", "regions", "logits"},
  # Tasks without tokens have checks of their own for keys of logits.
  "vit": {"layers", "regions", "logits"},
  "mlp": {"logits"},
}
_READABLE = {"decoder", "layers", "logits"}  # what a registered model may name in its READS
_ROWS = {"text", "image", "random"}


def unread(config: ConfigDict) -> dict[str, str]:
  """Returns dotted key -> who does not read it: the config's model, or its task."""
  name, task = config.model.name, TASKS[config.task]
  registered, kind = extensions.registered("model", name), extensions.kind_of_model(name)
  of_task = {config.task if config.task in (DPO, GRPO) else "plain"}
  of_task |= {"tokens"} if task.of_tokens else set()
  of_task |= {task.rows} if task.rows in _ROWS else _ROWS
  found = {}
  for key, row, _ in table.rows(config):
    of_model = {*row.readers} & _OF_MODELS["transformer"]
    if registered is None or kind in _OF_MODELS:
      reads = not of_model or bool(of_model & _OF_MODELS.get(kind, of_model))
    elif "regions" in of_model:
      reads = "residual_sequence" in config.partitioning.activations
    else:
      reads = not of_model or (key in getattr(registered, "READS", ()) and of_model & _READABLE)
      reads = reads or (of_model == {"logits"} and not task.of_tokens)
    needed = row.needs.partition("=")[0]
    if needed.startswith("model.") and needed.partition(".")[2] not in config.model:
      reads = False
    kinds = {*row.readers} & _ROWS
    others = {*row.readers} & {"tokens", DPO, GRPO, "plain"}
    if not reads:
      found[key] = f"the model {name}"
    elif not others <= of_task or (kinds and not kinds & of_task):
      found[key] = f"the task {config.task}"
  return found


def unread_errors(config: ConfigDict, sizes: Mapping[str, int]) -> Iterator[str]:
  """Yields a line for each key that is set, and that nothing reads.

  A key counts as set where its value is neither the recipe's nor the one that turns it off.

  Args:
    config: finalized.
    sizes: mesh axis -> size.
  """
  recipe, name = recipes.base(config.argument), config.optimizer.name
  for key in _of_other_optimizers(config.optimizer):
    row, value = table.find(f"optimizer.{key}") or Key(None), config.optimizer[key]
    if value not in (row.unread, recipe.optimizer.get(key)):
      yield (
        f"optimizer.{key}={value!r}: {name} does not use it; of those keys it uses "
        f"{', '.join(optimizer_keys(name))}; its own arguments are given by optimizer.arguments"
      )
  values, nobody = _values_of(config, sizes), unread(config)
  registered = extensions.registered("model", config.model.name)
  for key, row, value in table.rows(config):
    section, _, last = key.rpartition(".")
    if value in (row.unread, recipe.get(section, {}).get(last, row.unread)):
      continue
    if key in nobody:
      named = registered and {*row.readers} & _READABLE
      hint = ", or name it in the model's READS" if named else ""
      yield f"{key}={value!r}: {nobody[key]} does not use it; leave it at {row.unread!r}{hint}"
    elif row.needs:
      yield from _unmet(f"{key}={value!r}", row, values)


def _values_of(config: ConfigDict, sizes: Mapping[str, int]) -> dict[str, Any]:
  """Returns dotted key -> its value, of those that have a row; of the mesh the sizes."""
  values = {key: value for key, _, value in table.rows(config)}
  return values | {f"mesh.{axis}": size for axis, size in sizes.items()}


def _on(what: str, values: Mapping[str, Any]) -> tuple[str, Any, bool]:
  """Returns the key that a row's `needs` or `excludes` names, its value, and whether it is on."""
  key, _, wanted = what.partition("=")
  if key not in values:  # of another kind of model
    return key, None, False
  now = values[key]
  return key, now, str(now) in wanted.split("|") if wanted else now != table.find(key).unread


def _unmet(given: str, row: Key, values: Mapping[str, Any]) -> Iterator[str]:
  """Yields what has to be set for a key to be read, where it is not."""
  needed, now, on = _on(row.needs, values)
  own = extensions.registered(table.find(needed).registry, str(now))
  if on or given.partition("=")[0] in getattr(own, "READS", ()):
    return
  wanted = row.needs.partition("=")[2].replace("|", " or ")
  about = f"{needed}={wanted}, and it is {now!r}" if wanted else f"{needed}, which is {now!r}"
  yield f"{given} is about {about}; set that, or leave the key at {row.unread!r}"


def _excluded(rows: Iterable[tuple[str, Key, Any]], values: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each key that is on beside one that its row excludes."""
  for key, row, value in rows:
    for what, why in row.excludes.items() if value not in (row.unread, None) else ():
      other, now, on = _on(what, values)
      if on:
        yield f"{key}={value!r} with {other}={now!r}: {why}; leave {key} at {row.unread!r}"


def _of_other_optimizers(optimizer: ConfigDict) -> list[str]:
  """Returns the keys of `optimizer` that the optimizer does not read."""
  used = optimizer_keys(optimizer.name)
  rows = {key: table.find(f"optimizer.{key}") for key in optimizer if key not in used}
  # None: a recipe's own key, for an optimizer of its own.
  return [key for key, row in rows.items() if row is None or "optimizer" in row.readers]


def reset_optimizer(config: ConfigDict) -> None:
  """Sets the optimizer's keys that it does not use to the recipe's; `compare` exchanges it."""
  recipe = recipes.base(config.argument)
  for key in _of_other_optimizers(config.optimizer):
    config.optimizer[key] = recipe.optimizer[key]


# ------------------------------ keys that do not go together ------------------------------


def _clipping(optimizer: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the keys of clipping."""
  if optimizer.clip_quantile and optimizer.clip_norm:
    yield (
      f"optimizer.clip_quantile={optimizer.clip_quantile} takes the place of optimizer.clip_norm="
      f"{optimizer.clip_norm}; set that to 0"
    )
  groups = [one for one in optimizer.groups if isinstance(one, Mapping)]  # others: group_errors
  own = [group["clip_norm"] for group in groups if "clip_norm" in group]
  clips = any([optimizer.clip_norm, optimizer.clip_quantile, *own])
  if optimizer.clip_groups and groups and not clips:
    yield (
      "optimizer.clip_groups: optimizer.clip_norm=0 clips no group; set that, a clip_norm of a "
      "group, or optimizer.clip_quantile"
    )


def _averages(optimizer: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the decays of averages of the parameters."""
  decays = optimizer.ema_decays
  if wrong := [one for one in decays if not (isinstance(one, float) and 0 < one < 1)]:
    yield f"optimizer.ema_decays: {wrong[0]!r} is not between 0 and 1, such as (0.999,)"
  elif len({*decays}) < len(decays):
    yield f"optimizer.ema_decays={decays}: each may be there once"


def _schedule(optimizer: ConfigDict, training: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the keys of the learning-rate schedule."""
  steps = training.steps
  if optimizer.schedule_changes:
    steps = optimizer.schedule_changes[0][1]  # for which the schedule was made
  name, warmup, decay = optimizer.schedule, optimizer.warmup_steps, optimizer.decay_steps
  if warmup > steps:
    yield f"optimizer.warmup_steps={warmup}: at most {steps} steps"
  final = optimizer.final_fraction
  if final > 1:
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
  if name == "inverse_sqrt" and not warmup:
    yield (
      "optimizer.schedule=inverse_sqrt: it falls from the warm-up on; set optimizer.warmup_steps"
    )
  if optimizer.independent_weight_decay and not optimizer.learning_rate > 0:
    yield "optimizer.independent_weight_decay needs optimizer.learning_rate above 0"


def _task(model: ConfigDict, training: ConfigDict, task: str) -> Iterator[str]:
  """Yields what a task cannot have."""
  if task in (DPO, GRPO) and extensions.kind_of_model(model.name) in ("mlp", "vit"):
    yield f"model.name={model.name!r}: {task} takes a transformer"
  if training.loss_chunks != 1 and not TASKS[task].of_tokens:
    yield f"training.loss_chunks={training.loss_chunks}: {task} has no vocabulary to cut"


def _registered(training: ConfigDict, evaluation: ConfigDict, metrics: ConfigDict) -> Iterator[str]:
  """Yields the names of callbacks, sinks and metrics that nobody has registered."""
  for key, given, known_ones in (
    ("training.callbacks", training.callbacks, CALLBACKS),
    ("metrics.sinks", metrics.sinks, sinks.SINKS if metrics.sinks else {}),
    ("training.metrics", training.metrics, METRICS),
    ("evaluation.metrics", evaluation.metrics, METRICS),
  ):
    if not given:
      continue
    names = [name for name, value in known_ones.items() if value is not None]
    known = f"registered are {', '.join(names)}" if names else "none is registered"
    for one in (one for one in given if one not in names):
      yield f"{key}: unknown {known_ones.what} {one!r}; {known}{nearest(str(one), names)}"


def _forms(partitioning: ConfigDict, training: ConfigDict, compiler_options: str) -> Iterator[str]:
  """Yields what tuples and texts hold of another form, which a config's types do not see."""
  for title in ("parameters", "activations", "optimizer"):
    for name, axes in partitioning[title].items():
      if not all(isinstance(axis, str) for axis in axes):
        yield f"partitioning.{title}.{name}={axes!r}: names of mesh axes, such as ('fsdp',)"
  for entry in partitioning.overrides:
    pair = isinstance(entry, tuple) and len(entry) == 2
    if not (pair and isinstance(entry[0], str) and isinstance(entry[1], tuple)):
      yield (
        f"partitioning.overrides: {entry!r} is not a name with the entries of a PartitionSpec, "
        f"such as ('layers/mlp/up/kernel', (None, 'fsdp', 'tensor'))"
      )
  for pattern in training.trainable:
    if not isinstance(pattern, str):
      yield f"training.trainable: {pattern!r} is not a pattern, such as 'layers/attention/*'"
  for option in filter(None, compiler_options.split(",")):
    if "=" not in option:
      yield f"compiler_options: {option!r} is not name=value"


def _timeouts(processes: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with when processes count as dead or slow."""
  deadline, heartbeat = processes.deadline_seconds, processes.heartbeat_seconds
  if deadline >= heartbeat:
    yield (
      f"processes.deadline_seconds={deadline}: below processes.heartbeat_seconds={heartbeat}, "
      f"after which JAX ends all processes without naming the one that is behind; 0 learns it from "
      f"the run"
    )
  if 0 < processes.slow_ratio <= 1:
    yield f"processes.slow_ratio={processes.slow_ratio}: above 1, or 0 to turn it off"


CHECKS = (
  *(_clipping, _averages, _schedule),
  *(optimizer_checks.group_errors, optimizer_checks.optimizer_errors),
  optimizer_checks.outer_errors,
  *(_task, _registered, _forms, _timeouts),
  *(step_checks.precision_errors, step_checks.memory_errors, step_checks.matmul_errors),
  step_checks.quantized_errors,
  *(step_checks.pipeline_errors, step_checks.local_dir_errors, step_checks.elastic_errors),
  *(data_checks.batch_errors, data_checks.skip_errors, data_checks.file_errors),
  *(data_checks.mixture_errors, data_checks.ramp_errors),
  model_checks.mup_errors,
)
OF_MODELS = {
  "transformer": (
    *(model_checks.decoder_errors, model_checks.latent_errors, model_checks.expert_errors),
    model_checks.mixer_errors,
    *(model_checks.attention_kernel_errors, model_checks.split_errors),
  ),
  "vit": (model_checks.vit_errors,),
}
