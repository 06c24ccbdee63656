"""The verb `config`: the finalized config, with the origin, unit and meaning of each value.

Where a value comes from is found by comparison with the configs that it could come from.
"""

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence

from ml_collections import ConfigDict

from commands import config_flag, flags, help
from configs import base
from configs.schema import finalize, model_checks, recipes, validate
from partitioning.mesh_sizes import resolve_sizes
from planning import topology
from runtime import devices, exit_codes
from runtime.printable import printable

_COLUMN = 44  # where units and origins begin
_WIDEST = 100


def run(*words: str) -> int:
  """Prints the config, or the keys and sections that are named; returns the exit code.

  A config that is refused is printed, too: its values say why.
  """
  parsed, given = flags.CONFIG.value, flags.CONFIG.location
  platform, sizes, capability = target(parsed)
  final, choices = finalize.with_choices(parsed, platform, sizes, capability)
  values = dict(config_flag.leaves(final))
  origin = origins(
    *(parsed, final, choices),
    file=config_flag.run_in(given) or given,
    overridden=flags.CONFIG.overridden,
    elsewhere=[finalize.finalize(parsed, other, sizes) for other in PLATFORMS if other != platform],
    platform=platform,
  )
  rows = []
  for key in config_flag.named(words, [*values]) if words else values:
    row, (kind, source) = help.key_row(key, final.argument), origin[key]
    known = {"key": key, "value": values[key], "unit": row.unit}
    rows.append({**known, "origin": kind, "source": source, "meaning": row.meaning})
  changed = [row for row in rows if _is_changed(row)]
  if flags.CHANGED.value:
    rows = changed
  if flags.JSON.value:
    help.show(_json(rows))
  elif words or flags.CHANGED.value:
    help.show(_text(rows) or f"nothing is changed from the recipe {final.argument}")
  else:
    others = [row for row in rows if row not in changed]
    help.show(_parts_text(changed, others, final.argument))
  validate.check(final, sizes)
  model_checks.check_attention_device(final.training, platform, capability)
  return exit_codes.DONE


def target(config: ConfigDict) -> tuple[str, Mapping[str, int], float]:
  """Returns platform, sizes of the mesh axes and compute capability of the devices it is for.

  Only attached accelerators need JAX.
  """
  if flags.TOPOLOGY.value is not None:
    there = topology.parse(flags.TOPOLOGY.value)
    config = topology.with_slices(config, there)
  mesh = config.mesh.to_dict()
  slices = config.mesh_dcn.to_dict()
  if flags.TOPOLOGY.value is not None:
    count = there.devices * math.prod(slices.values())
    return there.platform, resolve_sizes(mesh, count, slices), there.chip.compute_capability
  if devices.simulates(flags.SIMULATE.value):
    return "cpu", resolve_sizes(mesh, None, slices), 0.0
  [found] = devices.start(mesh, slices=[slices])
  return found.platform, found.sizes, devices.compute_capability(found)


# ------------------------------ where a value comes from ------------------------------

# The default of the key; the recipe; the config file; an override of the command line; derived from
# other keys; derived for the platform.
DEFAULT, RECIPE, FILE = "default", "recipe", "file"
OVERRIDE, DERIVED, PLATFORM = "override", "derived", "platform"
KINDS = (DEFAULT, RECIPE, FILE, OVERRIDE, DERIVED, PLATFORM)
PLATFORMS = ("cpu", "gpu", "tpu")


def origins(
  parsed: ConfigDict,
  final: ConfigDict,
  choices: Sequence[finalize.Choice],
  *,
  file: str,
  overridden: Collection[str],
  elsewhere: Sequence[ConfigDict],
  platform: str,
) -> dict[str, tuple[str, str]]:
  """Returns dotted key -> (one of `KINDS`, which recipe, file or platform), of a finalized config.

  Args:
    parsed: with overrides, not finalized.
    final: what `finalize.with_choices` made of it.
    choices: what that returned beside.
    file: the config's, as given.
    overridden: the keys that the command line sets.
    elsewhere: the configs that it becomes on other platforms.
    platform: `final` is for.
  """

  def of_recipe(key: str, value: object) -> tuple[str, str]:
    """Returns the origin of a value that neither a file nor a command line has changed."""
    is_recipes = key in recipe and value != help.key_row(key, parsed.argument).default
    return (RECIPE, parsed.argument) if is_recipes or key == "argument" else (DEFAULT, "")

  before = dict(config_flag.leaves(parsed))
  plain = dict(config_flag.leaves(base.get_config(parsed.argument)))
  recipe = dict(config_flag.leaves(recipes.base(parsed.argument)))
  whys = {choice.key: f": {choice.why}" for choice in choices if choice.of_devices}
  derived = {choice.key: choice.why for choice in choices if not choice.of_devices}
  others = [dict(config_flag.leaves(one)) for one in elsewhere]
  found = {}
  for key, value in config_flag.leaves(final):
    if key in before and before[key] == value and type(before[key]) is type(value):
      if key in overridden:
        found[key] = (OVERRIDE, "")
      elif key not in plain or plain[key] != value:
        found[key] = (FILE, file)
      else:
        found[key] = of_recipe(key, value)
    elif key in whys or any(other.get(key, value) != value for other in others):
      found[key] = (PLATFORM, platform + whys.get(key, ""))
    elif before.get(key, "") is None and value is not None and value == recipe.get(key):
      found[key] = of_recipe(key, value)
    else:
      found[key] = (DERIVED, derived.get(key, ""))
  return found


# ------------------------------ what is shown ------------------------------


def _is_changed(row: Mapping[str, object]) -> bool:
  """Returns whether a value is not the recipe's because of what the file or a command line set."""
  return row["origin"] in (FILE, OVERRIDE) or (row["origin"] == DERIVED and row["source"] != "")


def _parts_text(
  changed: Sequence[Mapping[str, object]], others: Sequence[Mapping[str, object]], recipe: str
) -> str:
  """Returns what is changed, then the other keys: a line for each, and for each axis table."""
  style, folded, rest = help.styles(sys.stdout), {}, []
  for row in others:
    table_name, _, dim = str(row["key"]).rpartition(".")
    if table_name.count("."):
      folded.setdefault(table_name, []).append(dim)
    else:
      rest.append(row)
  parts = [style.bold(f"changed from the recipe {recipe}:"), _text(changed)] if changed else []
  parts += ["", style.bold("not changed:")] if changed else []
  parts.append(_text([{**row, "meaning": ""} for row in rest]))
  for table_name, dims in folded.items():
    parts.append(f"{style.bold(table_name)}: {len(dims)} dims; `config {table_name}` lists them")
  return "\n".join(parts)


def _json(rows: Sequence[Mapping[str, object]]) -> str:
  return json.dumps(rows, indent=2, ensure_ascii=False, default=repr)


def _text(rows: Sequence[Mapping[str, object]]) -> str:
  width = min(shutil.get_terminal_size().columns, _WIDEST)
  style = help.styles(sys.stdout)
  lines = []
  for row in rows:
    value = "unset" if row["value"] is None else repr(row["value"])
    assigned = f"{row['key']}={value}"
    between = ": " if row["origin"] == DERIVED else " "
    origin = between.join(filter(None, (row["origin"], row["source"])))
    beside = ", ".join(filter(None, (row["unit"], origin)))
    if len(assigned) < _COLUMN and _COLUMN + len(beside) <= width:
      lines.append(f"{style.bold(assigned)}{' ' * (_COLUMN - len(assigned))}{beside}")
    else:
      lines.append(style.bold(assigned))
      lines += textwrap.wrap(beside, width, initial_indent="  ", subsequent_indent="  ")
    indented = {"initial_indent": "  ", "subsequent_indent": "  "}
    lines += [style.dim(line) for line in textwrap.wrap(row["meaning"], width, **indented)]
  return printable("\n".join(lines)) if not style else "\n".join(lines)
