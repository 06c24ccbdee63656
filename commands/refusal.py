"""A refusal: one message, passed on to the other processes, and its exit code."""

import re
import sys
import traceback

from absl import flags
from etils import epy

from processes import coordination as groups
from processes.watchdog import Watchdog
from runtime import exit_codes
from runtime.printable import printable

with epy.lazy_imports():  # which a single process does not need
  from processes import preflight


def refuse(error: Exception, watch: Watchdog | None = None, *, debug: bool = False) -> int:
  """Prints one message, and notifies the other processes; returns exit code 2, or 1.

  It returns 1 where a retry may succeed: processes did not arrive in time, the coordinator's port
  is in use, a disk is full. It also returns 1 if only another process reported the refusal: a
  supervisor must not give up because of a message from the network. The process that refused exits
  with 2.
  """
  if debug or (flags.FLAGS.is_parsed() and flags.FLAGS.debug):
    lines = traceback.format_exception(error)
    print(printable("".join(lines)), file=sys.stderr, flush=True)
  failed = exit_codes.retryable(error)
  # A quoted value with a line break must not look like a separate message.
  text = re.sub(r"\n(?! )", "\n  ", printable(error))
  word = "error" if failed else "refused"
  code = exit_codes.FAILED if failed else exit_codes.REFUSED
  if watch is None or watch.group.alone:
    print(f"{word}: {text}", file=sys.stderr, flush=True)
    if watch is None:
      groups.refuse(text)
    return code
  if watch.refusing(text, "failed" if failed else "refused"):
    label = "" if isinstance(error, preflight.DifferenceError) else groups.label()
    print(f"{label}{word}: {text}", file=sys.stderr, flush=True)
  return groups.leave(code)
