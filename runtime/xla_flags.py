"""Checks XLA_FLAGS before this process starts a backend.

XLA aborts its process (SIGABRT, a core dump, pages of help) over a flag that it does not know, so
another process tries them first. There is no list of the flags to compare with.
"""

import os
import re
import subprocess
import sys

VARIABLE = "XLA_FLAGS"
_TRY = "from jaxlib import xla_client; xla_client.make_cpu_client()"
_SECONDS = 120


def check() -> None:
  """Finds flags that XLA does not accept; takes no time where the variable is not set.

  Raises:
    ValueError: with XLA's own words.
  """
  value = os.environ.get(VARIABLE, "")
  if not value.strip():
    return
  try:
    tried = subprocess.run(
      [sys.executable, "-c", _TRY],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      timeout=_SECONDS,
      check=False,
    )
  except subprocess.TimeoutExpired as error:
    raise ValueError(f"{VARIABLE}={value}: XLA did not start within {_SECONDS} s") from error
  if tried.returncode:
    said = tried.stderr.decode(errors="replace")
    raise ValueError(f"{VARIABLE}={value}: XLA does not start with it: {_reason(said)}")


def _reason(said: str) -> str:
  """Returns the line of XLA's output that says what is wrong, without its time and place."""
  fatal = re.search(r"^F\d+ .*?\] (.*)$", said, re.MULTILINE)
  lines = [line for line in said.splitlines() if line.strip()]
  return fatal[1] if fatal else lines[0][:300] if lines else "no message"
