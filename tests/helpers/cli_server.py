"""Runs command lines of main.py, each in a fork of a process that has imported everything.

Reads a line of JSON per command line from standard input: a list of arguments, or an object with
`arguments`, `environment` (variables to set; null removes one) and `timeout_seconds`. Answers with
a JSON object of code, out, err; the code of one that was killed at its timeout is -9. A fork has no
backend started and no flag parsed: what a fresh command has. JAX has read its variables before.
"""

import json
import os
import signal
import sys
import tempfile
import time

import main
from commands import compare, evaluate, layout, plan, sample, tour, train

IMPORTED = (compare, evaluate, layout, plan, sample, tour, train)  # main imports them by name
PATIENT_SECONDS = 3600.0


def run(
  arguments: list[str],
  environment: dict[str, str | None] | None = None,
  timeout_seconds: float = PATIENT_SECONDS,
) -> dict:
  """Runs one command line in a fork and returns its exit code and output."""
  with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
    child = os.fork()
    if child == 0:
      os.setsid()  # what it starts ends with it
      os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # not the command lines that follow
      os.dup2(out.fileno(), 1)
      os.dup2(err.fileno(), 2)
      os._exit(_run_here(arguments, environment or {}))
    code = _wait(child, time.monotonic() + timeout_seconds)
    texts = {}
    for name, file in (("out", out), ("err", err)):
      file.seek(0)
      texts[name] = file.read().decode(errors="surrogateescape")
    return {"code": code, **texts}


def _wait(child: int, deadline: float) -> int:
  """Returns the exit code of a process, which is killed with what it has started at a deadline."""
  pause = 0.002
  while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    if time.monotonic() > deadline:
      os.killpg(child, signal.SIGKILL)
      ended = os.waitpid(child, 0)
      break
    time.sleep(pause)
    pause = min(1.5 * pause, 0.05)
  return os.waitstatus_to_exitcode(ended[1])


def _run_here(arguments: list[str], environment: dict[str, str | None]) -> int:
  for name, value in environment.items():
    os.environ.pop(name, None)
    if value is not None:
      os.environ[name] = value
  sys.argv = ["main.py", *arguments]
  sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
  try:
    # The flags stand in the imported module; running the file again would define them twice.
    main.app.run(main.main, flags_parser=main.parse_flags)
  except SystemExit as end:
    return end.code if isinstance(end.code, int) else int(end.code is not None)
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
  return 0


if __name__ == "__main__":
  for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps(run(**asked) if isinstance(asked, dict) else run(asked)), flush=True)
