"""Where each value of a finalized config comes from."""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence

from ml_collections import ConfigDict

from configs import base
from configs.keys import table
from configs.schema import finalize, recipes
from configs.schema.presets import EXPERT_PRESETS, PRESETS

DEFAULT, RECIPE, PRESET, FILE = "default", "recipe", "preset", "file"
OVERRIDE, DERIVED, PLATFORM = "override", "derived", "platform"
KINDS = (DEFAULT, RECIPE, PRESET, FILE, OVERRIDE, DERIVED, PLATFORM)
PLATFORMS = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where a value comes from.

  Attributes:
    kind: one of `KINDS`: a default that all recipes share; the recipe; the preset of the model; the
      config file; an override of the command line; derived from other keys; derived for the
      platform.
    source: the recipe, preset, file or platform; why, of what was chosen for the platform.
  """

  kind: str
  source: str = ""


def leaves(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, object]]:
  """Yields every (dotted key, value)."""
  for key in config:
    value = config.get(key)
    if isinstance(value, ConfigDict):
      yield from leaves(value, f"{prefix}{key}.")
    else:
      yield prefix + key, value


def find(
  parsed: ConfigDict,
  final: ConfigDict,
  choices: Sequence[finalize.Choice],
  *,
  file: str,
  overridden: Collection[str],
  platform: str,
  sizes: Mapping[str, int],
) -> dict[str, Origin]:
  """Returns dotted key -> origin, of every key of a finalized config.

  Args:
    parsed: with overrides, not finalized.
    final: what `finalize.with_choices` made of it.
    choices: what that returned beside.
    file: the config's, as given.
    overridden: the keys that the command line sets.
    platform: `final` is for.
    sizes: mesh axis -> size, of `final`.
  """
  before = dict(leaves(parsed))
  plain = dict(leaves(base.get_config(parsed.argument)))
  whys = {choice.key: choice.why for choice in choices}
  elsewhere = [*_elsewhere(parsed, platform, sizes)]
  found = {}
  for key, value in leaves(final):
    if key in before and before[key] == value and type(before[key]) is type(value):
      if key in overridden:
        found[key] = Origin(OVERRIDE)
      elif key not in plain or plain[key] != value:
        found[key] = Origin(FILE, file)
      else:
        found[key] = _of_recipe(key, value, parsed.argument)
    elif key in whys or any(other.get(key, value) != value for other in elsewhere):
      why = f": {whys[key]}" if key in whys else ""
      found[key] = Origin(PLATFORM, f"{platform}{why}")
    else:
      found[key] = Origin(DERIVED)
  return found


def _elsewhere(
  parsed: ConfigDict, platform: str, sizes: Mapping[str, int]
) -> Iterator[dict[str, object]]:
  """Yields the values that a config has on the other platforms."""
  for other in PLATFORMS:
    if other != platform:
      yield dict(leaves(finalize.finalize(parsed, other, sizes)))


def _of_recipe(key: str, value: object, argument: str) -> Origin:
  """Returns the origin of a value that neither a file nor a command line has changed."""
  section, _, name = key.rpartition(".")
  parts = dict(part.partition("=")[::2] for part in argument.split(","))
  model = parts.get("model", "lm") if "=" in argument else argument
  if key == "argument" or (key in ("data.name", "task") and "data" in parts):
    return Origin(RECIPE, argument)
  recipe = model
  if model in PRESETS or model in EXPERT_PRESETS:
    if key in _preset_keys(model):
      return Origin(PRESET, model)
    if section == "model":
      return Origin(DEFAULT)
    recipe = "lm"
  own = section == "model" or key == "task"
  if section in ("data", "training", "optimizer", "evaluation"):  # whose defaults recipes replace
    shared = table.section(section)
    own = name not in shared or shared[name] != value
  return Origin(RECIPE, recipe) if own else Origin(DEFAULT)


@functools.cache
def _preset_keys(model: str) -> frozenset[str]:
  """Returns the keys that a preset sets: of its table, and those that differ from the recipe."""
  _, sizes, *_ = EXPERT_PRESETS.get(model) or PRESETS[model]
  usual = dict(leaves(recipes.base("lm")))
  differ = {key for key, value in leaves(recipes.base(model)) if usual.get(key) != value}
  return frozenset({f"model.{key}" for key in sizes} | differ)
