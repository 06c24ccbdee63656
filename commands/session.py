"""A command from its flags to its exit code: processes, watchdog, refusals.

Each verb (commands/verbs.py) is a module of this package. `prepare(watch)` does everything that may
be refused, and returns the function to run; of verbs that are one process without a run (`alone`)
`run(*words)` does, or returns the exit code itself.
"""

import copy
import gc
import importlib
import io
import sys
import traceback
from collections.abc import Callable

from absl import logging
from etils import epath
from ml_collections import ConfigDict

from commands import flags, start_facts
from commands.refusal import refuse
from commands.verbs import VERBS
from input_pipeline.source import UnreadableError
from processes import coordination as groups
from processes import preemption
from processes.preemption import StopRequest
from processes.watchdog import Watchdog
from runtime import devices, exit_codes, extensions, files
from runtime.printable import printable


def main(argv: list[str]) -> int:
  """Runs the verb and returns the exit code."""
  if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr: what has no code is escaped, no error
    sys.stdout.reconfigure(errors="backslashreplace")
  if not flags.DEBUG.value:
    logging.set_verbosity(logging.WARNING)  # info of libraries is not of interest
  try:
    verb = flags.chosen_verb(argv[1:])
    preemption.wait_for_place(lambda: _warm_up(verb))
    if VERBS[verb].jax:
      importlib.import_module("jax")  # which raises over wrong values of its variables
    devices.check_xla_flags()
    if verb != "doctor":  # which says what else is wrong
      for location in (flags.WORKDIR.value, flags.CHECKPOINT.value, *argv[2:]):
        files.require_library(location or "")
  except (ValueError, OSError) as error:
    return refuse(error)
  command = importlib.import_module(f"commands.{verb}")  # the others' imports take time
  gc.freeze()  # what was imported stays: tracing would look for garbage in it again and again
  if VERBS[verb].alone:
    try:
      done = command.run(*argv[2:])
    except (ValueError, OSError, RuntimeError) as error:
      return refuse(error)
    return done() if callable(done) else done
  return with_others(
    flags.CONFIG.value.processes, flags.workdir(), lambda watch: _run(command.prepare, verb, watch)
  )


def _warm_up(verb: str) -> None:
  """Imports what a run imports on its way to its first step."""
  for name in ("jax", f"commands.{verb}"):
    importlib.import_module(name)


def with_others(keys: ConfigDict, workdir: epath.Path, act: Callable[[Watchdog], int]) -> int:
  """Joins the other processes of the run, and returns what `act` does, the exit code.

  Where a process that dies is replaced, this one joins again, with the new one, and begins anew.

  Args:
    keys: the config's section `processes`.
    workdir: of the run.
    act: what this process does with them, under a watchdog.
  """
  given = copy.deepcopy(flags.CONFIG.value)
  while (code := _once_with_others(keys, workdir, act)) is None:
    print(f"{groups.label()}abandons the step in flight: another process has died", flush=True)
    groups.abandon()
    flags.CONFIG.value = copy.deepcopy(given)
  return code


def _once_with_others(
  keys: ConfigDict, workdir: epath.Path, act: Callable[[Watchdog], int]
) -> int | None:
  """Returns the exit code; None where another process has died, and is replaced."""
  try:
    on_tpu = not flags.SIMULATE.value and devices.hardware() == "tpu"
    group = groups.connect(
      start_timeout_seconds=keys.start_timeout_seconds,
      heartbeat_seconds=keys.heartbeat_seconds,
      on_tpu=on_tpu,
      workdir=workdir,
    )
  except (ValueError, OSError, RuntimeError) as error:
    return refuse(error)
  watch = Watchdog(
    group,
    StopRequest(),
    deadline_seconds=keys.deadline_seconds,
    start_timeout_seconds=keys.start_timeout_seconds,
    input_timeout_seconds=keys.input_timeout_seconds,
  )
  try:
    with watch:
      code = act(watch)
      watch.part()
  except Exception as error:  # whatever it is, the other processes must not wait for this one
    if watch.survives(error):
      _release(error)
      return None
    named = extensions.placed(error)
    told = isinstance(named, extensions.UserCodeError) and not flags.DEBUG.value
    if group.alone and not told:
      raise
    text = f"error: {printable(named)}" if told else traceback.format_exc()
    from processes import crash_output  # which a single process does not need

    label = "" if crash_output.is_of_a_peer(error) else groups.label()
    crash_output.print_error(f"{label}{text}", error)
    if group.alone:
      return exit_codes.FAILED
    groups.leave(exit_codes.FAILED, patience_seconds=3)
  return code


def _release(error: BaseException | None) -> None:
  """Lets go of what the frames of an error and of its causes refer to, such as arrays."""
  while error is not None:
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    error = error.__context__


def _run(prepare: Callable[[Watchdog], Callable[[], int]], verb: str, watch: Watchdog) -> int:
  try:
    configs = {"config": flags.CONFIG.value, "against": flags.AGAINST.value}
    configs = {name: config for name, config in configs.items() if config is not None}
    start_facts.about_to_start(configs, flags.facts(verb))
    # What a verb returns runs outside this block: its errors are not refusals.
    run = prepare(watch)
  except preemption.Stopped:
    watch.leave()
  except Exception as error:
    if watch.survives(error):
      raise
    named = extensions.placed(error)
    if not isinstance(named, (ValueError, OSError, RuntimeError)):
      raise
    return refuse(named, watch)
  return to_its_end(run, watch)


def to_its_end(run: Callable[[], int], watch: Watchdog) -> int:
  """Runs what a verb has prepared.

  Unreadable data and an export that fails give one message and exit code 1.
  """
  try:
    return run()
  except (UnreadableError, exit_codes.ExportError) as error:
    if watch.group.alone:
      print(f"error: {printable(error)}", file=sys.stderr, flush=True)
      return exit_codes.FAILED
    if watch.refusing(str(error), "failed"):
      print(f"error: {groups.label()}{printable(error)}", file=sys.stderr, flush=True)
    return groups.leave(exit_codes.FAILED, patience_seconds=3)
