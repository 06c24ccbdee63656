"""A refusal: one message, passed on to the other processes, and its exit code."""

import re
import sys
import traceback

from absl import flags

from processes import coordination as groups
from processes.preflight import DifferenceError, NotComeError
from processes.rendezvous import MissingError, RollCallError, ToldError
from processes.watchdog import Watchdog
from runtime import exit_codes
from runtime.printable import printable


def refuse(error: Exception, watch: Watchdog | None = None, *, debug: bool = False) -> int:
  """Prints one message, and tells the other processes; returns exit code 2.

  Where processes have only not come in time, it is 1: the same again may go well. It is 1 as well
  where only another process says so: a supervisor must not give up because of what came over the
  network. The process that has seen it itself ends with 2.
  """
  if debug or (flags.FLAGS.is_parsed() and flags.FLAGS.debug):
    lines = traceback.format_exception(error)
    print(printable("".join(lines)), file=sys.stderr, flush=True)
  missing = isinstance(error, (MissingError, ToldError, NotComeError))
  # Of values that are quoted, a line after a line break would pass for a message of its own.
  text = re.sub(r"\n(?! )", "\n  ", printable(error))
  word = "error" if missing else "refused"
  code = exit_codes.FAILED if missing else exit_codes.REFUSED
  if watch is None or watch.group.alone:
    print(f"{word}: {text}", file=sys.stderr, flush=True)
    if watch is None and not isinstance(error, RollCallError):
      groups.refuse(text)
    return code
  if watch.refusing(text, "failed" if missing else "refused"):
    label = "" if isinstance(error, DifferenceError) else groups.label()
    print(f"{label}{word}: {text}", file=sys.stderr, flush=True)
  return groups.leave(code)
