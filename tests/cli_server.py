"""Runs command lines of main.py, each in a fork of a process that has imported everything.

Reads a JSON list of arguments per line from standard input; answers with a JSON object of
code, out, err. A fork has no backend started and no flag parsed: what a fresh command has.
"""

import json
import os
import sys
import tempfile

import main


def run(arguments: list[str]) -> dict:
  """Runs one command line in a fork and returns its exit code and output."""
  with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
    child = os.fork()
    if child == 0:
      os.dup2(out.fileno(), 1)
      os.dup2(err.fileno(), 2)
      os._exit(_run_here(arguments))
    _, status = os.waitpid(child, 0)
    out.seek(0)
    err.seek(0)
    return {"code": os.waitstatus_to_exitcode(status), "out": out.read(), "err": err.read()}


def _run_here(arguments: list[str]) -> int:
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
    print(json.dumps(run(json.loads(line))), flush=True)
