"""One line for a save or a restore that fails, instead of hundreds of log lines from Orbax.

For each of its files that cannot be written Orbax logs a traceback, and so does asyncio, in which
it runs, for those whose result was never read. SaveError has what they say. Both are recognized
by the code that they come from, not by their wording.
"""

import asyncio
import logging
import os
import sys
import traceback
from typing import Any

import orbax.checkpoint as ocp
from absl import logging as absl_logging

_ORBAX = os.path.dirname(ocp.__file__) + os.sep
# What a TensorStore thread calls at the end of a write that a coroutine waits for.
_TO_A_LOOP = asyncio.BaseEventLoop.call_soon_threadsafe.__code__
_installed = False


class _Quiet(logging.Filter):
  """Lets through everything except errors of Orbax."""

  def filter(self, record: logging.LogRecord) -> bool:
    """Returns whether a line is to be printed."""
    if record.levelno < logging.ERROR or absl_logging.get_verbosity() >= absl_logging.INFO:
      return True
    raised = record.exc_info[2] if record.exc_info else None
    if record.name == "asyncio" and record.exc_info and raised is None:
      return False  # never raised in Python: TensorStore has set it, and it was never read
    files = [record.pathname, *(frame.filename for frame in traceback.extract_tb(raised))]
    return not any(file.startswith(_ORBAX) for file in files)


def quiet() -> None:
  """Silences Orbax's logs of failures that our own errors report, unless --debug is set."""
  global _installed
  if _installed:
    return
  _installed = True
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_Quiet())
  hook = sys.unraisablehook

  def unless_late(unraisable: Any) -> None:
    raised = unraisable.exc_traceback
    code = None if raised is None else raised.tb_frame.f_code
    # A write, or an open, that ends after another has failed, when its event loop is closed.
    late = code is _TO_A_LOOP
    # A read that is given up since another has failed: Orbax makes an error of the closing.
    given_up = isinstance(getattr(unraisable.exc_value, "__cause__", None), GeneratorExit)
    if not late and not (given_up and code is not None and code.co_filename.startswith(_ORBAX)):
      hook(unraisable)

  sys.unraisablehook = unless_late
