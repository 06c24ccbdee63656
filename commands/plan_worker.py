"""Makes a plan in a separate process: `python -m commands.plan_worker`, a request on stdin.

The compiler for TPUs, once loaded, prints on every start and holds a lock; ordinary runs never
load it. Writes report.txt, plan.html and plan.json, and exits with 0; or writes the reason to
`refusal`, and exits with 2. It reports its phases to the pipe that the request names.
"""

import contextlib
import json
import os
import pathlib
import pickle
import signal
import sys
import threading

from runtime import exit_codes


def main() -> int:
  """Reads the request, and answers it."""
  request = pickle.load(sys.stdin.buffer)
  threading.Thread(target=end_with_the_parent, daemon=True).start()
  report(request["phases"], "importing")
  # These import JAX, which takes seconds, while whoever started this may be killed.
  import jax

  from planning import plan
  from reports import plan_page, plan_text
  from runtime import extensions

  # The report names each collective's line of Python, also where the environment turned them off.
  jax.config.update("jax_traceback_in_locations_limit", 30)
  for path in request["extensions"]:
    extensions.load(path)
  try:
    found = plan.make(
      request["config"],
      request["topology"],
      title=request["title"],
      simulate=request["simulate"],
      progress=lambda phase: report(request["phases"], phase),
    )
  except Exception as error:
    named = extensions.placed(error)
    if request["debug"] or not isinstance(named, ValueError):
      raise
    (pathlib.Path(request["folder"]) / "refusal").write_text(str(named))
    return exit_codes.REFUSED
  folder = pathlib.Path(request["folder"])
  report(request["phases"], "writing the page")
  (folder / "report.txt").write_text(plan_text.text(found) + "\n")
  (folder / "plan.html").write_text(plan_page.html(found, command=request["command"]))
  (folder / "plan.json").write_text(json.dumps(found.as_json(), indent=2) + "\n")
  return exit_codes.DONE


def report(pipe: int, phase: str) -> None:
  """Tells the parent what is being done now."""
  with contextlib.suppress(BrokenPipeError):
    os.write(pipe, f"{phase}\n".encode())


def end_with_the_parent() -> None:
  """Kills this process when its standard input ends, which means that its parent is gone.

  This works even inside the compiler, which reacts to no other signal for minutes.
  """
  while os.read(0, 1):
    pass
  os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
  sys.exit(main())
