"""The part of a search that needs JAX, in a separate process: `python -m commands.search_worker`.

As `commands.plan_worker`: a request on stdin, results in files of its folder. The tasks are
`formulas` (memory and time of settings by formula), `measure` (short runs on the attached devices)
and `nearest` (what would fit, where nothing does).
"""

import dataclasses
import json
import pathlib
import pickle
import sys
import threading
from collections.abc import Mapping
from typing import Any

from commands.plan_worker import end_with_the_parent, report
from runtime import exit_codes

RESULT = "result.json"


def main() -> int:
  """Reads the request, and answers it."""
  request = pickle.load(sys.stdin.buffer)
  threading.Thread(target=end_with_the_parent, daemon=True).start()
  report(request["phases"], "importing")
  # These import JAX, which takes seconds, while whoever started this may be killed.
  from analysis.chips import overridden
  from planning import aot, search
  from planning.topology import of_devices, parse
  from runtime import extensions

  folder, config = pathlib.Path(request["folder"]), request["config"]
  for path in request["extensions"]:
    extensions.load(path)
  try:
    chips, rates = overridden(config.planning.constants)
    here, name = None, request["topology"]
    if name is None:
      here = aot.attached(config, simulate=request["simulate"])
      name = of_devices(here.attached)
    topology = parse(name, chips)
    here = here or aot.simulated(config, topology)
    limit = search.limit_of(config, topology)
    formulas = search.Formulas(config, topology, here, rates, limit)
    answer = {"formulas": _formulas, "measure": _measure, "nearest": _nearest}[request["task"]]
    found = answer(request, formulas)
  except Exception as error:
    named = extensions.placed(error)
    if request["debug"] or not isinstance(named, ValueError):
      raise
    (folder / "refusal").write_text(str(named))
    return exit_codes.REFUSED
  (folder / RESULT).write_text(json.dumps(found))
  return exit_codes.DONE


def _formulas(request: Mapping[str, Any], formulas: Any) -> dict[str, Any]:
  """Returns the estimates, after those of an earlier search that was stopped."""
  from configs.schema import finalize
  from planning import aot, search, search_space
  from planning.search_choice import Estimate

  topology, config = formulas.topology, formulas.config
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
  resolved = finalize.finalize(config, topology.platform)  # a folder says what a model has
  looked = search.Search(
    formulas,
    search_space.axes(resolved, request["axes"]),
    tuple(request["batches"]),
    request["most"],
    progress=lambda phase: report(request["phases"], f"{topology.name}: {phase}"),
  )
  given, estimates = looked.given, looked.run()
  return {
    "topology": f"{topology.slices}x{topology.name}" if topology.slices > 1 else topology.name,
    "note": topology.note,
    "chip": topology.chip.name,
    "chips": looked.devices / topology.chip.devices_per_chip,
    "devices": looked.devices,
    "limit": formulas.limit,
    "compiled": aot.compiled_here(topology, formulas.here),
    "over": looked.over,
    "budget": looked.budget,
    "unit": looked.unit,
    "given": given,
    "refused": search.refusals(formulas.used),
    "estimates": [dataclasses.asdict(one) for one in estimates],
  }


def _measure(request: Mapping[str, Any], formulas: Any) -> list[dict[str, Any]]:
  """Returns memory and time of settings by short runs."""
  from planning import short_runs
  from runtime import compilation_cache

  if formulas.config.compilation_cache_dir:
    compilation_cache.use(formulas.config.compilation_cache_dir)
  jobs = [formulas.job(setting) for setting in request["settings"]]

  def progress(number: int) -> None:
    report(request["phases"], f"running setting {number + 1} of {len(jobs)}")

  runs = short_runs.measure(jobs, formulas.limit, request["rounds"], progress)
  return [dataclasses.asdict(one) for one in runs]


def _nearest(request: Mapping[str, Any], formulas: Any) -> list[tuple[dict[str, Any], str, int]]:
  """Returns what would fit."""
  from planning import search

  report(request["phases"], "looking for what would fit")
  return search.nearest(formulas, request["setting"], request["scale"])


if __name__ == "__main__":
  sys.exit(main())
