"""What the files of a workdir say about its run; read without JAX, while the run may write them."""

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from partitioning.parallel.pipeline_schedule import KINDS
from reports import grid
from runtime import files, forms
from runtime.forms import (
  FLAG,
  NUMBER,
  STEP,
  TEXT,
  Each,
  Exactly,
  Kind,
  Needs,
  OrNull,
  is_number,
  whole,
)
from training import history, workdir_files
from training.metrics import log_lines
from training.metrics.log_lines import MOST_BYTES

METRICS, CONFIG, CHECKPOINTS = "metrics.jsonl", "config.json", "checkpoints"
TOKENIZER = "tokenizer"  # a folder of files, where the tokens are not bytes
Points = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Run:
  """The files of a run.

  Attributes:
    name: of its folder.
    folder: the workdir.
    config: the resolved config by dotted key; {} without one.
    steps: the lines of metrics.jsonl about steps, in their order.
    evaluations: those about evaluations.
    rollbacks: those about rollbacks.
    times: the newest line about goodput, or None.
    history: the events of history.jsonl.
    layout: of layout.json, or None.
    on_disk: the steps of the checkpoints.
    damaged: lines of metrics.jsonl that are not valid.
  """

  name: str
  folder: str
  config: Mapping[str, Any]
  steps: Sequence[Mapping[str, Any]]
  evaluations: Sequence[Mapping[str, Any]]
  rollbacks: Sequence[Mapping[str, Any]]
  times: Mapping[str, Any] | None
  history: Sequence[Mapping[str, Any]]
  layout: Mapping[str, Any] | None
  on_disk: Sequence[int]
  damaged: int

  def points(self, key: str) -> Points:
    """Returns (step, value) of a metric where it is a finite number."""
    lines = self.evaluations if key.startswith("eval_") else self.steps
    return [(one["step"], value) for one in lines if (value := number(one.get(key))) is not None]

  def curves(self, key: str) -> list[tuple[str, Points]]:
    """Returns (what it is over, points) of a metric; of an evaluation's, only the first is a curve.

    See `log_lines.by_examples`.
    """
    if not key.startswith("eval_"):
      return [("", points)] if (points := self.points(key)) else []
    return [
      (over, [(one["step"], float(one[key])) for one in lines])
      for over, lines in log_lines.by_examples(self.evaluations, key)
    ]

  @functools.cached_property
  def keys(self) -> list[str]:
    """Returns the names of all metrics with a number, in the order of their appearance."""
    found = {}
    for one in (*self.steps, *self.evaluations):
      found.update(dict.fromkeys(one))
    return [key for key in found if key != "step"]

  @property
  def done(self) -> int:
    """Returns the newest step that is logged, evaluated or saved."""
    lines = [*self.steps[-1:], *self.evaluations[-1:], *([self.times] if self.times else [])]
    return max([one["step"] for one in lines], default=0)

  @property
  def total(self) -> int:
    """Returns `training.steps`; 0 where it is unknown."""
    steps = self.config.get("training.steps")
    return steps if isinstance(steps, int) else 0

  @property
  def starts(self) -> list[Mapping[str, Any]]:
    """Returns the events of its starts."""
    return self.events(history.START)

  def events(self, kind: str) -> list[Mapping[str, Any]]:
    """Returns the events of a kind."""
    return [one for one in self.history if one["event"] == kind]

  def of_steps(self, kind: str) -> list[Mapping[str, Any]]:
    """Returns the events of a kind that still hold, one for each step, in the order of steps.

    A start or a rollback at a step undoes what was after it.
    """
    found: dict[int, Mapping[str, Any]] = {}
    for one in self.history:
      if one["event"] in (history.START, history.ROLLED_BACK):
        found = {step: event for step, event in found.items() if step <= one["step"]}
      elif one["event"] == kind:
        found[one["step"]] = one
    return [found[step] for step in sorted(found)]

  @property
  def saved(self) -> list[int]:
    """Returns the steps that were saved, and not undone; they may have been removed since."""
    known = {one["step"] for one in self.of_steps(history.SAVED)}
    resumed = {one["step"] for one in self.starts if 0 < one["step"] <= self.done}
    return sorted(known | resumed | set(self.on_disk))

  @property
  def end(self) -> Mapping[str, Any] | None:
    """Returns how the newest start has ended; None if it runs, or was killed."""
    last = [one for one in self.history if one["event"] in (history.START, history.END)]
    return last[-1] if last and last[-1]["event"] == history.END else None

  @property
  def unit(self) -> str:
    """Returns `tokens` or `examples`."""
    return "examples" if "examples_per_second" in self.keys else "tokens"

  def median_of_last_start(self, key: str) -> float | None:
    """Returns the median of a metric over the steps since the newest start; None without one."""
    since = self.starts[-1]["step"] if self.starts else 0
    values = [value for step, value in self.points(key) if step > since]
    return statistics.median(values) if values else None


def number(value: Any) -> float | None:
  """Returns a finite number; None for anything else."""
  return float(value) if is_number(value) else None


def is_run(workdir: epath.Path) -> bool:
  """Returns whether a folder is the workdir of a run."""
  return any((workdir / name).exists() for name in (METRICS, CONFIG))


def in_folder(folder: epath.Path) -> list[epath.Path]:
  """Returns the workdirs in a folder that is none itself, or in its folders, by their names."""
  if not folder.is_dir() or is_run(folder):
    return []
  found = []
  for child in sorted(path for path in folder.iterdir() if path.is_dir()):
    inside = [child] if is_run(child) else sorted(path for path in child.iterdir() if path.is_dir())
    found += [path for path in inside if is_run(path)]
  return found


def read(workdir: epath.PathLike) -> Run:
  """Returns the run of a workdir; files that are missing or unreadable count as empty.

  Raises:
    ValueError: the folder has neither metrics nor a config: it is no run's.
  """
  folder = epath.Path(workdir)
  metrics, config = _content(folder / METRICS), _json(folder / CONFIG)
  if metrics is None and not isinstance(config, dict):
    what = "is not a run's folder: it" if folder.is_dir() else "does not exist, or"
    raise ValueError(
      f"{folder} {what} has neither {METRICS} nor {CONFIG}; give a workdir of `train`"
    )
  sound, damaged = log_lines.split(metrics or b"")
  lines = [line.values for line in sound]
  times = [one for one in lines if log_lines.TIMES in one]
  return Run(
    name=folder.name,
    folder=str(folder),
    config=forms.flat(config) if isinstance(config, dict) else {},
    steps=[one for one in lines if "loss" in one],
    evaluations=[one for one in lines if "eval_loss" in one],
    rollbacks=[one for one in lines if log_lines.ROLLED_BACK in one],
    times=times[-1] if times else None,
    history=[*history.events(_content(folder / workdir_files.HISTORY) or b"")],
    layout=_layout(folder / workdir_files.DRAWINGS),
    on_disk=_on_disk(folder / CHECKPOINTS),
    damaged=len(damaged),
  )


def _content(path: epath.Path) -> bytes | None:
  try:
    return files.read_bytes(path, most_bytes=MOST_BYTES)
  except OSError:
    return None


def _json(path: epath.Path) -> Any:
  try:
    return files.read_json(path)
  except (OSError, ValueError):
    return None


def _layout(path: epath.Path) -> dict[str, Any] | None:
  """Returns what `layout.json` says, with its drawings; None if it is damaged."""
  try:
    values = files.read_json(path)
    forms.check(values, _LAYOUT, str(path))
    values["mesh"] = values["mesh"] and grid.from_json(values["mesh"])
    for one in values["drawings"]:
      one["sheet"] = grid.from_json(one["sheet"])
  except (OSError, ValueError):
    return None
  return values


_EDGE = Exactly({"title": TEXT, "under": TEXT, "labels": [TEXT]})
_CELL = Exactly({"devices": [STEP], "text": OrNull(TEXT), "hatch": STEP})
_SHEET = Exactly(
  {
    **{"title": TEXT, "rows": _EDGE, "columns": _EDGE, "notes": [TEXT], "turnable": FLAG},
    "panels": Each([_CELL]),
  }
)
_COUNT = whole(1, 2**20)
_LAYOUT = Needs(
  {
    **{"caption": TEXT, "mesh": OrNull(_SHEET), "parameters": STEP, "replicated_bytes": NUMBER},
    "bytes_per_device": Each(NUMBER),
    "drawings": [Needs({"names": [TEXT], "sheet": _SHEET})],
  },
  {
    "pipeline": OrNull(
      Exactly(
        {
          "kind": Kind(f"one of {', '.join(KINDS)}", lambda value: value in KINDS),
          **dict.fromkeys(("stages", "microbatches", "chunks", "layers"), _COUNT),
        }
      )
    ),
  },
)


def _on_disk(folder: epath.Path) -> list[int]:
  try:
    return sorted(int(child.name) for child in folder.iterdir() if child.name.isdecimal())
  except OSError:
    return []
