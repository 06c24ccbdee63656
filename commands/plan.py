"""The verb `plan`: predicts a run on devices that need not be attached."""

import dataclasses
import json
import sys
from typing import Any

from ml_collections import ConfigDict

from commands import config_flag, flags, plan_process
from planning import goodput
from planning.topology import parse
from runtime import exit_codes, files, units
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
  more = [found["memory"]] if flags.MEMORY.value else []
  if (flags.NODES.value, flags.FAILURES.value) != (None, None):
    more += with_failures(found["plan"], config.planning, config.checkpoint)
  if copies := found["plan"]["memory_copies_bytes"]:
    more.append(
      f"checkpoints in memory: {units.size(copies)} of each node's memory, twice its part of the "
      f"state and what a peer is sent of it"
    )
  workdir.mkdir(parents=True, exist_ok=True)
  files.replace(workdir / "plan.json", json.dumps(found["plan"], indent=2) + "\n")
  files.replace(workdir / "plan.html", found["html"])
  print(found["report"], *more, f"page: {workdir / 'plan.html'}", *found["remarks"], sep="\n")
  return exit_codes.DONE if found["plan"]["fits"] else exit_codes.CHECK_FAILED


def with_failures(plan: dict[str, Any], keys: ConfigDict, saves: ConfigDict) -> list[str]:
  """Returns lines on what failures of nodes cost the run, and adds `goodput` to a plan.

  Args:
    plan: as plan.json has it.
    keys: the section `planning`.
    saves: the section `checkpoint`.

  Raises:
    ValueError: a number is not above zero, or the run would hardly ever reach a save.
  """
  if not plan["fits"]:
    return ["goodput: none, as it does not fit"]
  faults = faults_of(plan, keys)
  nodes, rate = faults.nodes, faults.per_node_day
  step = plan["step_seconds"]["expected"]
  training = step * plan["steps"]
  best = goodput.best(training, step, faults)
  plan["goodput"] = {**dataclasses.asdict(faults), "best": dataclasses.asdict(best)}
  mean, low, high = map(long_text, best.seconds)
  steps = best.interval_seconds / step
  lines = [
    f"goodput of {nodes:,} {'node' if nodes == 1 else 'nodes'}: {100 * best.share:.1f} % with a "
    f"save every {steps:,.0f} steps ({long_text(best.interval_seconds)}; by Daly's formula "
    f"{long_text(goodput.daly(faults))})",
    f"  {plan['steps']:,} steps take {mean} (eight in ten runs {low} to {high}) instead of "
    f"{long_text(training)}",
    f"  a failure every {long_text(faults.between_seconds)} ({rate:.2g} per node and day), "
    f"{best.failures:,.1f} in all; restarts take {100 * best.restarting:.1f} %, steps run again "
    f"{100 * best.again:.1f} %, saves {100 * best.saving:.1f} % of the time",
    f"  a save blocks for {long_text(faults.block_seconds)} and is written in "
    f"{long_text(faults.write_seconds)}, a restart takes {long_text(faults.restart_seconds)}",
  ]
  every_steps, in_memory = saves.every_steps, saves.memory_every_steps
  if not 0 < every_steps < plan["steps"]:
    return lines
  given = goodput.simulate(training, every_steps * step, faults)
  lines.insert(1, f"  {100 * given.share:.1f} % with checkpoint.every_steps={every_steps:,}")
  if in_memory:
    with_memory = dataclasses.replace(
      faults,
      memory_interval_seconds=in_memory * step,
      memory_block_seconds=plan["state_bytes"] / nodes / plan["node_host_bandwidth"],
      memory_covers=keys.memory_covers,
    )
    both = goodput.simulate(training, every_steps * step, with_memory)
    plan["goodput"]["in_memory"] = dataclasses.asdict(both)
    lines.insert(
      2,
      f"  {100 * both.share:.1f} % with checkpoint.memory_every_steps={in_memory:,} beside it: "
      f"{100 * keys.memory_covers:.0f} % of failures resume from memory; steps run again "
      f"{100 * both.again:.1f} %, saves {100 * both.saving:.1f} % of the time",
    )
  return lines


def faults_of(plan: dict[str, Any], keys: ConfigDict) -> goodput.Faults:
  """Returns what failures and saves cost a planned run; see `with_failures`."""
  nodes = plan["nodes"] if flags.NODES.value is None else flags.NODES.value
  rate = flags.FAILURES.value
  rate = goodput.FAILURES_PER_NODE_DAY if rate is None else rate
  if nodes < 1 or rate <= 0:
    raise ValueError(f"--nodes={nodes} --failures-per-node-day={rate:g}: both must be above zero")
  written = plan["state_bytes"] / nodes
  return goodput.Faults(
    nodes,
    rate,
    keys.save_seconds + written / plan["node_host_bandwidth"],
    written / keys.storage_bandwidth,
    keys.restart_seconds,
  )


def long_text(seconds: float) -> str:
  """Returns a time that may be of days: `1.2 ms`, `95 s`, `38.4 h`, `12.1 days`."""
  for unit, name in ((goodput.DAY, "days"), (3600.0, "h")):
    if seconds >= 2 * unit:
      return f"{seconds / unit:,.1f} {name}"
  return units.seconds(seconds)
