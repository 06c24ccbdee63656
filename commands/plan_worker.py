"""What plans and searches need JAX and a compiler for: `python -m commands.plan_worker`.

The compiler for TPUs, once loaded, prints on every start and holds a lock; ordinary runs never
load it. A request comes on stdin, the answer goes to a file of its folder. The tasks are `plan`,
and of a search `formulas` (memory and time of settings by formula), `measure` (short runs on the
attached devices) and `nearest` (what would fit, where nothing does). Exits with 0; or with 2, where
the answer is why it refuses. It reports its phases to the pipe that the request names.
"""

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import pickle
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from runtime import exit_codes

ANSWER = "answer.json"  # in the folder of a request
SAID = "said: "  # begins what is said once, not only as the phase


def main() -> int:
  """Reads the request, and answers it."""
  gc.set_threshold(100_000)  # as main.py: of the time for 16,384 devices garbage took a third
  request = pickle.load(sys.stdin.buffer)
  threading.Thread(target=end_with_the_parent, daemon=True).start()
  report(request["phases"], "importing")
  # What follows imports JAX, which takes seconds, while whoever started this may be killed.
  from runtime import extensions

  for path in request["extensions"]:
    extensions.load(path)
  folder = pathlib.Path(request["folder"])
  try:
    answer = _plan(request) if request["task"] == "plan" else _search(request)
    (folder / ANSWER).write_text(json.dumps(answer))
  except Exception as error:
    named = extensions.placed(error)
    if request["debug"] or not isinstance(named, ValueError):
      raise
    (folder / ANSWER).write_text(str(named))
    return exit_codes.REFUSED
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


def _plan(request: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the report, what it has on memory, the page, and what plan.json has."""
  import jax

  from planning import buffers, plan
  from reports import plan_report

  # The report names each collective's line of Python, also where the environment turned them off.
  jax.config.update("jax_traceback_in_locations_limit", 30)
  dumped = pathlib.Path(request["folder"], "xla")
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {buffers.xla_flags(dumped)}"
  found = plan.make(
    request["config"],
    request["topology"],
    title=request["title"],
    simulate=request["simulate"],
    progress=lambda phase: report(request["phases"], phase),
    dumped=dumped,
    kept=request["programs"],
  )
  report(request["phases"], "writing the page")
  page = plan_report.html(found, command=request["command"])
  texts = {"report": plan_report.text(found), "memory": plan_report.buffers_text(found)}
  return {**texts, "html": page, "plan": found.as_json()}


def _search(request: Mapping[str, Any]) -> Any:
  """Returns the answer to a search's task."""
  from planning import aot, search

  target = aot.target_of(request["config"], request["topology"], simulate=request["simulate"])
  formulas = search.Formulas(target, search.limit_of(target))
  answer = {"formulas": _formulas, "measure": _measure, "nearest": _nearest}[request["task"]]
  return answer(request, formulas)


def _formulas(request: Mapping[str, Any], formulas: Any) -> dict[str, Any]:
  """Returns the estimates, after those of an earlier search that was stopped."""
  from configs.schema import finalize
  from planning import aot, search, search_space
  from planning.search_results import Estimate

  topology, config = formulas.target.topology, formulas.target.keys
  file = request["cache"] and pathlib.Path(f"{request['cache']}.{topology.name}.search.jsonl")
  kept = []
  if file:
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = file.read_text().splitlines() if file.exists() else []
  for line in kept:
    try:
      one = Estimate(**json.loads(line))
    except (ValueError, TypeError):  # half a line: the process was killed
      continue
    formulas.known[one.key] = one

  def note(one: Estimate) -> None:
    if file:
      with file.open("a") as out:
        out.write("\n" * (not note.begun) + json.dumps(dataclasses.asdict(one)) + "\n")
      note.begun = True

  note.begun = not kept
  formulas.note = note
  then, count = "", request["compilations"]
  if count and request["topology"] is None:
    then = f"; then {count} short runs, the best of them again"
  elif count and aot.compiled_here(topology, ()):
    then = f"; then at most {count} compilations"
  resolved = finalize.finalize(config, topology.platform)  # a folder says what a model has
  looked = search.Search(
    formulas,
    search_space.Space(resolved).axes(request["axes"]),
    tuple(request["batches"]),
    request["most"],
    progress=lambda phase: report(request["phases"], f"{topology.name}: {phase}"),
    tell=lambda text: report(request["phases"], f"{SAID}{topology.name}: {text}{then}"),
  )
  given, estimates = looked.given, looked.run()
  return {
    "topology": topology.name_with_slices,
    "note": topology.note,
    "chip": topology.chip.name,
    "chips": looked.devices / topology.chip.devices_per_chip,
    "devices": looked.devices,
    "limit": formulas.limit,
    "compiled": aot.compiled_here(topology, formulas.target.here),
    "over": looked.over,
    "budget": looked.budget,
    "unit": looked.unit,
    "given": given,
    "refused": search.refusals(formulas.used),
    "estimates": [dataclasses.asdict(one) for one in estimates],
  }


def _measure(request: Mapping[str, Any], formulas: Any) -> list[dict[str, Any]]:
  """Returns memory and time of settings by short runs."""
  from planning import search
  from runtime import compilation_cache

  if folder := formulas.target.keys.compilation_cache_dir:
    compilation_cache.use(folder)
  jobs = [formulas.job(setting) for setting in request["settings"]]

  def progress(number: int) -> None:
    report(request["phases"], f"running setting {number + 1} of {len(jobs)}")

  runs = search.measure(jobs, formulas.limit, request["rounds"], progress)
  return [dataclasses.asdict(one) for one in runs]


def _nearest(request: Mapping[str, Any], formulas: Any) -> list[tuple[dict[str, Any], str, int]]:
  """Returns what would fit."""
  from planning import search

  report(request["phases"], "looking for what would fit")
  return search.nearest(formulas, request["setting"], request["scale"])


if __name__ == "__main__":
  try:
    code = main()
  except Exception:  # as Python ends a process, which `os._exit` would not
    sys.excepthook(*sys.exc_info())
    code = exit_codes.FAILED
  sys.stderr.flush()
  os._exit(code)  # not waiting for a compiler whose program is known already
