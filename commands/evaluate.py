"""The verb `evaluate`: a checkpoint on the validation split, or on the tasks of --tasks."""

import functools
from collections.abc import Callable

from commands import build, flags, preflight_facts, score_tasks
from processes.coordination import Lockstep
from processes.watchdog import Watchdog
from runtime import exit_codes
from training import reference, restore, run_tokenizer, splits
from training.evaluation import Evaluator
from training.metrics.console import ProgressLine, say


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Evaluates a checkpoint on the evaluation split, or evaluation.final_steps batches of it."""
  keys = flags.CONFIG.value.evaluation
  if keys.final_steps is None:
    keys.final_steps = 0  # what is derived is for the end of a run
  if flags.TASKS.value is not None:
    return score_tasks.prepare(watch)
  location = flags.CHECKPOINT.value or str(flags.workdir())
  run_tokenizer.adopt(flags.CONFIG.value, location)
  [ready] = build.prepare(flags.CONFIG)
  evaluation = splits.open_evaluation(ready)
  preflight_facts.about_to_run(
    ready, {"held out": evaluation.source}, flags.workdir(), writes=False
  )
  step, params, variables = restore.model_state(ready, location)
  evaluation = reference.attached_to_evaluation(ready, evaluation, location, watch)

  def run() -> int:
    splits.announce_bad(evaluation.source)
    lockstep = Lockstep(watch.group, watch.stop)
    compiled = ready.compile_eval_step().function
    steps = ready.config.evaluation.final_steps
    with ProgressLine(evaluation.count(steps)) as progress:
      shown = functools.partial(progress.evaluating, alone=True)
      evaluator = Evaluator(ready, evaluation, compiled, watch, lockstep, shown)
      found = evaluator(params, variables, steps=steps)
    if found is None:
      return exit_codes.STOPPED
    say(found.text(step))
    return exit_codes.DONE

  return run
