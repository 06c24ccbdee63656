"""The verb `replay`: computes a step of a run again, and finds the first number that is not finite.

It only reads the workdir, so that a live owner of it is not disturbed.
"""

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commands import build, flags, preflight_facts
from input_pipeline.batches import TrainingBatches
from input_pipeline.source import Source
from input_pipeline.text import tokenizer
from partitioning.mesh_sizes import product_text
from processes.coordination import Lockstep
from processes.watchdog import STARTING, Watchdog
from reports import run_files
from runtime import exit_codes
from runtime.printable import printable
from training import replay, restore, run_tokenizer, splits
from training.bad_steps import BadSteps, not_finite
from training.loop import TrainSteps
from training.metrics.console import say
from training.metrics.reader import without_debug_checks
from training.replay import Array, Observed
from training.setup import Job
from training.state import State

_SHOWN_ROWS, _SHOWN_GRADIENTS, _SHOWN_CHARACTERS = 3, 5, 200
# Relative differences of losses that are rounding: in float64, and in any other dtype at least.
_ROUNDING_FLOAT64, _ROUNDING = 1e-12, 1e-5


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Starts from the newest checkpoint before --step, trains up to it, and looks into it."""
  if flags.STEP.value is None:
    raise ValueError("replay needs --step=N, the number of a step as metrics.jsonl counts them")
  config, step, workdir = flags.CONFIG.value, flags.STEP.value, flags.workdir()
  logged = run_files.read(workdir)
  run_tokenizer.adopt(config, str(workdir))
  restore.adopt_schedule(config.optimizer, workdir)
  [job] = build.prepare(flags.CONFIG)
  replay.check(job.config.task, job.devices.sizes, job.config.optimizer.outer_every_steps)
  shared = splits.sharing(job.config.processes.start_timeout_seconds)
  batches = splits.training_batches(job.config, shared)
  preflight_facts.about_to_run(job, {"train": batches.source}, workdir, writes=False)
  state, start, record, origin = restore.RunCheckpoints(job, workdir).before_step(
    batches.source, step, flags.ACCEPT.value
  )
  known = BadSteps(job.config.training, job.config.data, record, start)

  def run() -> int:
    say(f"{origin}; steps before step {step} to train: {step - 1 - start:,}")
    with without_debug_checks():
      return _run(job, batches, logged, known, state, range(start, step), watch)

  return run


def _run(
  job: Job,
  batches: TrainingBatches,
  logged: run_files.Run,
  known: BadSteps,
  state: State,
  before: range,
  watch: Watchdog,
) -> int:
  """Trains, looks into the last step, and returns the exit code.

  Args:
    job: the run.
    batches: of its training split.
    logged: what its files say.
    known: of the state.
    state: to start from.
    before: each step to train, as the number of steps before it.
    watch: of this process.
  """
  lockstep, position = Lockstep(watch.group, watch.stop), known.position
  steps = TrainSteps(job.compile_train_step, job.batches, job.mesh)
  step = before.stop
  for done in before:
    watch.at(f"step {done + 1}: computing", STARTING)
    if not lockstep.enter():
      return exit_codes.STOPPED
    batch = batches.batch(done, job.batch_shardings, position)
    if done == step - 1:
      observed = replay.compile_observer(job, batch)(state, batch)
    state, metrics = steps.after(done)(state, batch)
    metrics = {name: float(x) for name, x in jax.device_get(metrics).items()}
    if done < step - 1 and (why := not_finite(metrics)):
      say(f"step {done + 1}, on the way, is bad: {why}; look into it with --step={done + 1}")
      return exit_codes.CHECK_FAILED
  say(f"step {step}: loss {metrics['loss']:.6g}, grad_norm {metrics['grad_norm']:.6g}")
  kind = job.mesh.devices.flat[0].device_kind
  now = _machine(job.devices.sizes, kind, socket.gethostname())
  rollbacks, dtype = len(known.rollbacks), job.config.training.compute_dtype
  same, compared = _compared(logged, step, metrics["loss"], rollbacks, now, dtype)
  say(compared)
  source, ids_B = batches.rows(step - 1, position)
  coder = job.config.data.get("tokenizer") or tokenizer.BYTES
  bad = _not_finite(observed)
  if bad:
    say("not finite, in the order of computation:\n" + "\n".join(f"  {line}" for line in bad))
    say(_causes(coder, observed, source, ids_B))
  else:
    say("all activations, losses, gradients and updated parameters are finite")
  say(_statistics(observed))
  if not bad:
    largest = np.argsort(-observed.losses, kind="stable")[:_SHOWN_ROWS].tolist()
    say(
      "rows with the largest loss:\n" + _rows_text(coder, source, ids_B, largest, observed.losses)
    )
  say(_largest_gradients(observed.gradients))
  wrong = bad or not same or not_finite(metrics)
  return exit_codes.CHECK_FAILED if wrong else exit_codes.DONE


# ------------------------------ the logged loss ------------------------------


def _compared(
  logged: run_files.Run, step: int, loss: float, rollbacks: int, now: str, dtype: str
) -> tuple[bool, str]:
  """Returns whether the loss is the logged one, and a line about it.

  Losses are the same to the bit on the same mesh and kind of machine; elsewhere they are rounded
  differently.

  Args:
    logged: the run.
    step: whose loss it is.
    loss: as it is now.
    rollbacks: that there had been at the checkpoint.
    now: the machine, of `_machine`.
    dtype: of the computation.
  """
  if len(logged.rollbacks) > rollbacks:
    return True, "the run was rolled back since that checkpoint: the step is as it was before that"
  losses = [one["loss"] for one in logged.steps if one["step"] == step]
  if not losses:
    return True, f"{logged.folder}/{run_files.METRICS} has no loss of step {step} to compare with"
  if losses[-1] == loss:
    return True, f"the loss is the one in {run_files.METRICS}, to the bit"
  difference = abs(loss - losses[-1]) / abs(losses[-1]) if losses[-1] else math.inf
  what = f"the loss is {loss!r} and the one in {run_files.METRICS} {losses[-1]!r}"
  what += f" (relative {difference:.2g})"
  then = [one for one in logged.starts if one["step"] < step and "device_kind" in one][-1:]
  then = [_machine(one.get("mesh") or {}, one["device_kind"], one.get("host")) for one in then]
  if then == [now] and not flags.ACCEPT.value:
    return False, f"{what}: on the same mesh and kind of machine it should be the same to the bit"
  most = _ROUNDING_FLOAT64 if dtype == "float64" else max(_ROUNDING, float(jnp.finfo(dtype).eps))
  where = f"it was computed on {then[0] if then else 'an unknown machine'}, and now on {now}"
  if difference <= most:
    return True, f"{what}: equal to rounding; {where}"
  return False, f"{what}: more than rounding ({most:.2g}); {where}"


def _machine(mesh: Mapping[str, int], kind: str, host: object) -> str:
  """Returns what rounds alike: the mesh and the kind of device; of CPUs one host."""
  return f"{product_text(mesh)} of {kind}" + (f" on {host}" if kind == "cpu" else "")


# ------------------------------ text ------------------------------


def _not_finite(observed: Observed) -> list[str]:
  """Returns lines about the first bad parameter, activation, loss, gradient, updated parameter."""
  rows = np.flatnonzero(~np.isfinite(observed.losses)).tolist()
  text = f"loss of {len(rows)} of {len(observed.losses)} rows, the first at {rows[:1]}"
  return [
    *_first_bad("parameter", observed.parameters),
    *_first_bad("activation", observed.activations),
    *([text] if rows else []),
    *_first_bad("gradient of", observed.gradients),
    *_first_bad("updated parameter", observed.updated),
  ]


def _first_bad(what: str, arrays: Sequence[Array]) -> list[str]:
  """Returns a line about the first array that is not finite; [] where all are."""
  bad = [one for one in arrays if not one.finite]
  if not bad:
    return []
  first, more = bad[0], f"; {len(bad) - 1} more follow" if len(bad) > 1 else ""
  count = f"{int(first.bad.sum()):,} of {first.elements:,} elements"
  where = f"the first at {list(first.first)}: {first.value}"
  return [f"{what} {first.name}: {count}, {where}{more}"]


def _causes(coder: str, observed: Observed, source: Source, ids_B: np.ndarray) -> str:
  """Returns the rows in which the first bad number is, or that all have it."""
  bad = [one.bad > 0 for one in observed.activations if not one.finite]
  rows = np.flatnonzero(bad[0] if bad else ~np.isfinite(observed.losses)).tolist()
  if not rows:
    return "no row has a bad number in its forward pass"
  if len(rows) == len(ids_B):
    return f"all {len(rows)} rows have it: the parameters are the cause, or the model's code"
  found = _rows_text(coder, source, ids_B, rows, observed.losses)
  return f"rows that cause it, {len(rows)} of {len(ids_B)}:\n{found}"


def _rows_text(
  coder: str, source: Source, ids_B: np.ndarray, rows: Sequence[int], losses_B: np.ndarray
) -> str:
  """Returns lines about the first of some rows of the batch: where they are from, and their text.

  Args:
    coder: the run's tokenizer.
    source: of the batch.
    ids_B: the numbers of its rows in the source.
    rows: which of them.
    losses_B: the mean loss of each row.
  """
  lines: list[str] = []
  for row in rows[:_SHOWN_ROWS]:
    number = int(ids_B[row])
    lines.append(
      f"  row {row} of the batch: row {number} of {source.name}, loss {losses_B[row]:.4g}"
    )
    lines += [f"    {printable(place)}" for place in source.origins(number)]
    if "tokens" in source.fields:
      fields: Any = source.read(np.array([number]))
      decode = tokenizer.load(coder).decode
      text = decode(fields["tokens"][0].tolist()).decode(errors="replace")
      lines.append(f"    {printable(repr(text), newlines=False, longest=_SHOWN_CHARACTERS)}")
  if len(rows) > _SHOWN_ROWS:
    lines.append(f"  and the rows {', '.join(map(str, rows[_SHOWN_ROWS:]))} of the batch")
  return "\n".join(lines)


def _statistics(observed: Observed) -> str:
  """Returns a table of the sizes of activations and gradients."""
  lines = [f"  {'':46} {'rms':>12} {'largest':>12}"]
  for title, arrays in (("", observed.activations), ("gradient of ", observed.gradients)):
    lines += [f"  {title + x.name:46} {x.rms:12.4g} {x.largest:12.4g}" for x in arrays]
  return "activations in forward order, gradients in backward order:\n" + "\n".join(lines)


def _largest_gradients(gradients: Sequence[Array]) -> str:
  """Returns the parameters whose gradients have the largest elements, not finite ones first."""
  order = sorted(gradients, key=lambda x: (x.finite, -x.largest if x.finite else 0))
  named = [f"  {x.name}: largest {x.largest:.4g}, rms {x.rms:.4g}" for x in order]
  return "parameters with the largest gradients:\n" + "\n".join(named[:_SHOWN_GRADIENTS])
