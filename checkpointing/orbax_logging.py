"""One line for a save that fails, not hundreds.

For each of its files that cannot be written Orbax logs a traceback, and so does asyncio, in which
it runs, for those that nobody has asked for. What they say stands in SaveError.
"""

import logging
import sys
from typing import Any

from absl import logging as absl_logging

_installed = False


class _Quiet(logging.Filter):
  """Lets through everything but errors of Orbax."""

  def filter(self, record: logging.LogRecord) -> bool:
    """Tells whether a line is to be printed."""
    if record.levelno < logging.ERROR or absl_logging.get_verbosity() >= absl_logging.INFO:
      return True
    return "/orbax/" not in record.pathname and (
      record.name != "asyncio" or "orbax" not in record.getMessage()
    )


def quiet() -> None:
  """Leaves it to SaveError to say what has failed; with --debug everything is printed."""
  global _installed
  if _installed:
    return
  _installed = True
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_Quiet())
  hook = sys.unraisablehook

  def unless_late(unraisable: Any) -> None:
    # A write of TensorStore that ends after the save has failed finds nobody who waits for it.
    if str(unraisable.exc_value) != "Event loop is closed":
      hook(unraisable)

  sys.unraisablehook = unless_late
