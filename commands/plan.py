"""The verb `plan`: predicts a run on devices that need not be attached."""

import json
import sys

from commands import config_flag, flags, plan_process
from planning.topology import parse
from runtime import exit_codes, files
from runtime.chips import overridden


def run() -> int:
  """Prints the plan, writes plan.json and plan.html, and returns 0 (fits), 3 (not), 1 (failed)."""
  config, topology, workdir = flags.CONFIG.value, flags.TOPOLOGY.value, flags.workdir()
  chips, _ = overridden(config.planning.constants)  # before anything is waited for
  if topology is not None:
    parse(topology, chips)
  try:
    found = plan_process.made(
      config,
      topology,
      title=config_flag.name(flags.CONFIG),
      simulate=flags.SIMULATE.value,
      debug=flags.DEBUG.value,
      command=flags.command_line(),
    )
  except plan_process.WorkerError as error:
    sys.stderr.write(error.printed)
    return exit_codes.FAILED
  workdir.mkdir(parents=True, exist_ok=True)
  files.replace(workdir / "plan.json", json.dumps(found["plan"], indent=2) + "\n")
  files.replace(workdir / "plan.html", found["html"])
  more = [found["memory"]] if flags.MEMORY.value else []
  print(found["report"], *more, f"page: {workdir / 'plan.html'}", *found["remarks"], sep="\n")
  return exit_codes.DONE if found["plan"]["fits"] else exit_codes.CHECK_FAILED
