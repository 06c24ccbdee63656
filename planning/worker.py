"""Makes a plan in a process of its own: `python -m planning.worker`, a request on stdin.

The compiler for TPUs, once loaded, prints on every start and holds a lock; ordinary runs never
load it. Prints the report; exits with 0 or 3, the verdict, or with 2 and the reason in a file.
"""

import json
import pathlib
import pickle
import sys

from planning import plan, report


def main() -> int:
  """Reads the request, and answers it."""
  request = pickle.load(sys.stdin.buffer)
  try:
    found = plan.make(request["config"], request["topology"])
  except ValueError as error:
    if request["debug"]:
      raise
    pathlib.Path(request["refusal"]).write_text(str(error))
    return 2
  print(report.text(found), flush=True)
  pathlib.Path(request["json"]).write_text(json.dumps(found.as_json(), indent=2) + "\n")
  return 0 if found.fits else 3


if __name__ == "__main__":
  sys.exit(main())
