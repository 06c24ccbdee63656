"""Makes a plan in a process of its own: `python -m planning.worker`, a request on stdin.

The compiler for TPUs, once loaded, prints on every start and holds a lock; ordinary runs never
load it. Writes report.txt, plan.html and plan.json, and exits with 0; or writes the reason to
`refusal`, and exits with 2.
"""

import json
import pathlib
import pickle
import sys

from planning import page, plan, report


def main() -> int:
  """Reads the request, and answers it."""
  request = pickle.load(sys.stdin.buffer)
  try:
    found = plan.make(
      request["config"], request["topology"], title=request["title"], simulate=request["simulate"]
    )
  except ValueError as error:
    if request["debug"]:
      raise
    (pathlib.Path(request["folder"]) / "refusal").write_text(str(error))
    return 2
  folder = pathlib.Path(request["folder"])
  (folder / "report.txt").write_text(report.text(found) + "\n")
  (folder / "plan.html").write_text(page.html(found))
  (folder / "plan.json").write_text(json.dumps(found.as_json(), indent=2) + "\n")
  return 0


if __name__ == "__main__":
  sys.exit(main())
