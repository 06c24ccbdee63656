"""The verb `search`: the fastest settings of a config on devices that need not be attached."""

import dataclasses
import json
from collections.abc import Mapping
from contextlib import nullcontext

from ml_collections import ConfigDict

from commands import config_flag, flags, search_process
from configs.keys.data import DATA
from planning import search_results
from planning.topology import parse
from processes import preemption
from reports import search_report
from runtime import exit_codes, files
from runtime.chips import overridden
from training.metrics.console import say


def run() -> int:
  """Searches on each topology, prints the result and writes search.json and search.html."""
  config, workdir = flags.CONFIG.value, flags.workdir()
  names, prices = _asked(config.planning)
  workdir.mkdir(parents=True, exist_ok=True)
  command, title = flags.command_line(), config_flag.name(flags.CONFIG)
  asked = search_process.Asked(
    config,
    title,
    tuple(flags.AXES.value.split(",")) if flags.AXES.value else (),
    tuple(map(int, flags.BATCH_SIZES.value)),
    flags.COMPILATIONS.value,
    flags.SIMULATE.value,
    flags.DEBUG.value,
    command,
  )
  found = []
  with preemption.undone(_say_what_is_kept) if config.planning.cache_dir else nullcontext():
    for name in names:
      one = search_process.of_topology(asked, name)
      found.append(dataclasses.replace(one, price=prices.get(one.chip, prices.get("", 0.0))))
  say(search_report.text(found, flags.command_to_train()))
  parts = {"command": command, "topologies": [one.as_json() for one in found]}
  files.replace(workdir / "search.json", json.dumps(parts, indent=2) + "\n")
  page = search_report.html(found, title=f"Search: {title}", command=command)
  files.replace(workdir / "search.html", page)
  say(f"page: {workdir / 'search.html'}")
  return exit_codes.DONE if any(one.fits for one in found) else exit_codes.CHECK_FAILED


def _say_what_is_kept() -> None:
  preemption.tell("search: the same command takes what was found so far and computes the rest")


def _asked(planning: ConfigDict) -> tuple[list[str | None], Mapping[str, float]]:
  """Returns the topologies and the prices of their chips; raises ValueError for bad ones."""
  if flags.COMPILATIONS.value < 0:
    raise ValueError(f"--compilations={flags.COMPILATIONS.value}: at least 0")
  batches = flags.BATCH_SIZES.value
  if wrong := [text for text in batches if not (text.isascii() and text.isdigit() and int(text))]:
    raise ValueError(f"--global_batch_sizes: {wrong[0]!r} is no number of rows, such as 64,128")
  most = DATA["global_batch_size"].most
  if wrong := [text for text in batches if int(text) > most]:
    raise ValueError(f"--global_batch_sizes: {wrong[0]} is too many rows; at most {most:,}")
  chips, _ = overridden(planning.constants)
  default = planning.price_per_chip_hour
  if flags.TOPOLOGY.value is None:
    if any("=" in text for text in flags.PRICE.value):
      raise ValueError(
        "--price=CHIP=PRICE goes with --topology; of attached devices give --price=PRICE"
      )
    return [None], search_results.prices(flags.PRICE.value, default, [""])
  names = flags.TOPOLOGY.value.split(",")
  kinds = [parse(name, chips).chip.name for name in names]
  if len(set(names)) < len(names):
    raise ValueError(f"--topology={flags.TOPOLOGY.value}: a topology is given twice")
  return names, search_results.prices(flags.PRICE.value, default, list(dict.fromkeys(kinds)))
