"""Runs main.py or a script as several processes, each a fork of one that has imported everything.

Reads a JSON object per line: `processes`, a list of {arguments, environment}, and `seconds`, after
which all are killed; `script` names a file to run instead of main.py. Answers with a list of
{code, out, err, seconds}. A fork has no backend started and no flag parsed: what a fresh process
has.
"""

import contextlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time

import main
from commands import compare, evaluate, layout, plan, sample, tour, train

IMPORTED = (compare, evaluate, layout, plan, sample, tour, train)  # main imports them by name


def run(processes: list[dict], seconds: float, script: str | None) -> list[dict]:
  """Forks all at once and returns what became of each."""
  began, results = time.monotonic(), [{} for _ in processes]
  with contextlib.ExitStack() as stack:
    running = {}
    for index, process in enumerate(processes):
      out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
      child = os.fork()
      if child == 0:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.environ.update(process["environment"])
        os._exit(_run_here(process["arguments"], script))
      running[child] = (index, out, err)
    while running:
      child, status = os.waitpid(-1, os.WNOHANG)
      if child:
        index, out, err = running.pop(child)
        results[index] = {
          "code": os.waitstatus_to_exitcode(status),
          "seconds": time.monotonic() - began,
          "out": _whole(out),
          "err": _whole(err),
        }
        continue
      if time.monotonic() - began > seconds:
        for late in running:
          os.kill(late, signal.SIGKILL)
      time.sleep(0.02)
  return results


def _whole(file) -> str:
  file.seek(0)
  return file.read()


def _run_here(arguments: list[str], script: str | None) -> int:
  sys.argv = [script or "main.py", *arguments]
  sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
  try:
    if script:
      runpy.run_path(script, run_name="__main__")
    else:
      main.app.run(main.main, flags_parser=main.parse_flags)
  except SystemExit as end:
    return end.code if isinstance(end.code, int) else int(end.code is not None)
  except BaseException:  # a forked child must reach os._exit, not unwind the server's frames
    sys.excepthook(*sys.exc_info())
    return 1
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
  return 0


if __name__ == "__main__":
  for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps(run(asked["processes"], asked["seconds"], asked.get("script"))), flush=True)
