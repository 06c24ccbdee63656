"""Which runs a sweep has: a grid, drawn settings, the lines of a file, or a file of Python."""

import hashlib
import itertools
import math
import pathlib
import random
import re
from collections.abc import Mapping, Sequence

from runtime import extensions, files

SEED = "seed"  # the axis over which a sweep takes means, and whose spread it measures
Setting = Mapping[str, str]  # config key -> its value, as on a command line
MOST_RUNS = 10_000
_MOST_BYTES = 2**24
_LONGEST_NAME = 100
_RANGE = re.compile(r"(.+)\.\.(.+)")
_AXIS = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=(.*)", re.DOTALL)


def read(text: str, *, draw: int = 0, seed: int = 0) -> list[Setting]:
  """Returns the settings of --axes, each of the same keys and once, in a fixed order.

  Args:
    text: `KEY=A,B;KEY=C,D`, whose grid is taken, and where a value may be a range LOW..HIGH to draw
      from; a file of lines `KEY=A KEY=C`; or FILE.py, whose `runs()` returns mappings from keys.
    draw: how many settings are drawn, each of which is taken with every seed of the axis `seed`;
      0: all are taken.
    seed: of the draw.

  Raises:
    ValueError: it is none of these, or names a run twice, or too many or too few.
  """
  if text.endswith(".py"):
    found = _of_module(text)
  elif "=" in text:
    axes = _axes(text)
    found = _drawn(axes, draw, seed) if draw else _grid(axes)
  else:
    found = _of_lines(text)
  if draw and "=" not in text:
    raise ValueError(f"--random={draw} draws from axes, and --axes={text} is a file; leave it out")
  if not found:
    raise ValueError(f"--axes={text}: it has no run")
  if len(found) > MOST_RUNS:
    raise ValueError(f"--axes: {len(found):,} runs are more than {MOST_RUNS:,}; draw with --random")
  for one in found:
    if {*one} != {*found[0]}:
      raise ValueError(
        f"--axes={text}: one run sets {', '.join(found[0]) or 'nothing'} and another "
        f"{', '.join(one) or 'nothing'}; set the same keys in each"
      )
  if twice := [one for place, one in enumerate(found) if one in found[:place]]:
    raise ValueError(f"--axes={text}: {text_of(twice[0])} is there twice")
  return found


def text_of(setting: Setting) -> str:
  """Returns `optimizer.learning_rate=0.001 seed=2`."""
  return " ".join(f"{key}={value}" for key, value in setting.items())


def names(settings: Sequence[Setting]) -> list[str]:
  """Returns a name for the folder of each run; other runs beside it do not change it."""
  keys = [*settings[0]]
  ends = [key.rpartition(".")[2] for key in keys]
  short = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}

  def name(setting: Setting) -> str:
    text = "_".join(f"{short[key]}-{value}" for key, value in setting.items())
    plain = re.sub(r"[^\w.+-]+", "-", text)
    if plain == text and len(text) <= _LONGEST_NAME:
      return text
    digest = hashlib.sha256(text_of(setting).encode()).hexdigest()[:8]
    return f"{plain[:_LONGEST_NAME]}_{digest}"

  return [name(one) for one in settings]


def _axes(text: str) -> dict[str, list[str]]:
  axes: dict[str, list[str]] = {}
  for part in filter(str.strip, text.split(";")):
    if not (found := _AXIS.fullmatch(part)):
      raise ValueError(f"--axes: {part.strip()!r} is not KEY=VALUE,VALUE")
    key, listed = found.groups()
    values = [one.strip() for one in re.split(r",(?![^(]*\))", listed)]  # a tuple is one value
    if key in axes or not all(values) or len({*values}) < len(values):
      raise ValueError(f"--axes: {part.strip()!r}: an axis or a value is there twice, or is empty")
    axes[key] = values
  return axes


def _grid(axes: Mapping[str, Sequence[str]]) -> list[Setting]:
  if ranges := [one for values in axes.values() for one in values if _RANGE.fullmatch(one)]:
    raise ValueError(f"--axes: {ranges[0]} is a range; give values, or draw from it: --random=N")
  if (count := math.prod(map(len, axes.values()))) > MOST_RUNS:
    raise ValueError(f"--axes: a grid of {count:,} runs; draw N of them with --random=N")
  return [dict(zip(axes, one, strict=True)) for one in itertools.product(*axes.values())]


def _drawn(axes: Mapping[str, Sequence[str]], count: int, seed: int) -> list[Setting]:
  drawn = random.Random(seed)
  others = {key: values for key, values in axes.items() if key != SEED}
  if any(_RANGE.fullmatch(one) for values in others.values() for one in values):
    found = []
    for _ in range(100 * count):
      one = {key: _value(drawn, drawn.choice(values)) for key, values in others.items()}
      found += [one] if one not in found else []
      if len(found) == count:
        break
  else:
    grid = _grid(others)
    found = drawn.sample(grid, min(count, len(grid)))
  if len(found) < count:
    raise ValueError(f"--random={count}: the axes have {len(found)} different settings")
  seeds = [{SEED: one} for one in axes.get(SEED, ())] or [{}]
  return [{**one, **of_seed} for one in found for of_seed in seeds]


def _value(drawn: random.Random, text: str) -> str:
  """Returns a value; of a range LOW..HIGH one whose logarithm is drawn evenly."""
  if not (found := _RANGE.fullmatch(text)):
    return text
  try:
    low, high = map(float, found.groups())
  except ValueError:
    low = high = 0.0
  if not 0 < low < high < math.inf:
    raise ValueError(f"--axes: {text}: a range is LOW..HIGH, two numbers above 0")
  value = math.exp(drawn.uniform(math.log(low), math.log(high)))
  whole = all(end.strip().isdecimal() for end in found.groups())
  return str(round(value)) if whole else f"{value:.4g}"


def _of_lines(path: str) -> list[Setting]:
  try:
    text = files.read_bytes(path, most_bytes=_MOST_BYTES, follow=True).decode()
  except (OSError, ValueError) as error:
    raise ValueError(f"--axes={path}: no KEY=VALUE,VALUE, and no file ({error})") from error
  found = []
  for number, line in enumerate(text.splitlines(), start=1):
    words = line.partition("#")[0].split()
    if wrong := [word for word in words if not _AXIS.fullmatch(word)]:
      raise ValueError(f"--axes={path}, line {number}: {wrong[0]!r} is not KEY=VALUE")
    found += [dict(word.split("=", 1) for word in words)] if words else []
  return found


def _of_module(path: str) -> list[Setting]:
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--axes={path}: there is no such file")
  try:
    given = [dict(one) for one in extensions.load(path).runs()]
  except Exception as error:
    why = extensions.error_text(error)
    raise ValueError(f"--axes={path}: runs() of it fails: {why}") from error
  return [{str(key): str(value) for key, value in one.items()} for one in given]
