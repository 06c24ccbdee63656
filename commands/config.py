"""The verb `config`: the finalized config, with the origin, unit and meaning of each value."""

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

from absl import flags as absl_flags
from ml_collections import ConfigDict, config_flags

from commands import config_flag, flags, help
from commands.refusal import refuse
from configs.schema import finalize, model_checks, origins, validate
from partitioning.mesh_sizes import resolve_sizes
from planning import topology
from runtime import chips, devices, exit_codes
from runtime.printable import printable

_COLUMN = 44  # where units and origins begin
_WIDEST = 100


def run(*words: str) -> int:
  """Prints the config, or the keys and sections that are named; returns the exit code.

  A config that is refused is printed, too: its values say why.
  """
  try:
    parsed, flag = flags.CONFIG.value, absl_flags.FLAGS[flags.CONFIG.name]
    platform, sizes, capability = _target(parsed)
    final, choices = finalize.with_choices(parsed, platform, sizes, capability)
    known = [key for key, _ in origins.leaves(final)]
    keys = config_flag.named(words, known) if words else known
    found = origins.find(
      parsed,
      final,
      choices,
      file=config_flags.get_config_filename(flag),
      overridden=config_flags.get_override_values(flag),
      platform=platform,
      sizes=sizes,
    )
    rows = _rows(final, found, keys)
    help.show(_json(rows) if flags.JSON.value else _text(rows))
    validate.check(final, sizes)
    model_checks.check_attention_device(final, platform, capability)
  except (ValueError, OSError, RuntimeError) as error:
    return refuse(error)
  return exit_codes.DONE


def _target(config: ConfigDict) -> tuple[str, Mapping[str, int], float]:
  """Returns platform, sizes of the mesh axes and compute capability of the devices it is for.

  Only attached accelerators need JAX.
  """
  mesh, slices = config.mesh.to_dict(), _slices(config)
  if flags.TOPOLOGY.value is not None:
    there = topology.parse(flags.TOPOLOGY.value)
    slices = _slices(topology.with_slices(config, there))
    count = there.devices * math.prod(slices.values())
    return there.platform, resolve_sizes(mesh, count, slices), chips.compute_capability(there.chip)
  if devices.simulates(flags.SIMULATE.value):
    return "cpu", resolve_sizes(mesh, None, slices), 0.0
  [found] = devices.start(mesh, slices=[slices])
  return found.platform, found.sizes, devices.compute_capability(found)


def _slices(config: ConfigDict) -> dict[str, int]:
  return {axis: size for axis, size in config.mesh_dcn.items() if size != 1}


def _rows(
  final: ConfigDict, found: Mapping[str, origins.Origin], keys: Sequence[str]
) -> list[dict[str, object]]:
  values = dict(origins.leaves(final))
  known = {key: help.key_row(key, final.argument) for key in keys}
  return [
    {
      "key": key,
      "value": values[key],
      "unit": row.unit,
      "origin": found[key].kind,
      "source": found[key].source,
      "meaning": row.meaning,
    }
    for key, row in known.items()
  ]


def _json(rows: Sequence[Mapping[str, object]]) -> str:
  return json.dumps(rows, indent=2, ensure_ascii=False, default=repr)


def _text(rows: Sequence[Mapping[str, object]]) -> str:
  width = min(shutil.get_terminal_size().columns, _WIDEST)
  style = help.styles(sys.stdout)
  lines = []
  for row in rows:
    value = "unset" if row["value"] is None else repr(row["value"])
    assigned = f"{row['key']}={value}"
    origin = " ".join(filter(None, (row["origin"], row["source"])))
    beside = ", ".join(filter(None, (row["unit"], origin)))
    if len(assigned) < _COLUMN and _COLUMN + len(beside) <= width:
      lines.append(f"{style.bold(assigned)}{' ' * (_COLUMN - len(assigned))}{beside}")
    else:
      lines.append(style.bold(assigned))
      lines += textwrap.wrap(beside, width, initial_indent="  ", subsequent_indent="  ")
    indented = {"initial_indent": "  ", "subsequent_indent": "  "}
    lines += [style.dim(line) for line in textwrap.wrap(row["meaning"], width, **indented)]
  return printable("\n".join(lines)) if not style else "\n".join(lines)
