"""Derived values, filled in after all overrides."""

import copy
from collections.abc import Mapping

from ml_collections import ConfigDict

from configs.keys import table
from configs.schema import (
  chosen,
  hf_model,
  lora_checks,
  optimizer_defaults,
  precision_checks,
  ramp_checks,
  recipes,
)
from training.choices import Choice
from training.tasks import TASKS

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
    precision_checks.finalize(config, platform in chosen.ACCELERATORS)
    default(training, "matmul_precision", "default")
    optimizer_defaults.finalize(config, recipe)
    if hf_model.is_folder(config):
      hf_model.finalize(config)
    recipes.finalize(config, platform in chosen.ACCELERATORS)
    lora_checks.finalize(config)
    choices = chosen.choose(config, chosen.Target(platform, sizes, capability))
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
  ramp = ramp_checks.ramp_of(config.data)
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
