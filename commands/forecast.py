"""The verb `forecast`: small runs, a scaling law, and what a budget will have learned."""

import contextlib
import copy
import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from commands import config_flag, flags, forecast_target, sweep, sweep_axes
from commands.forecast_target import TOKENS, Budget
from configs.schema import finalize, validate
from planning import ladder, scaling_laws
from planning.scaling_laws import Fit, Observation
from processes.preemption import StopRequest
from reports import forecast_report
from reports.sweep_report import DONE, Entry
from runtime import exit_codes, files
from training import splits
from training.metrics.console import say

CHECK, DATA, PAGE = "coordcheck.json", "forecast.json", "forecast.html"
METRIC = "eval_bits_per_byte"
SEED = sweep_axes.SEED
# Of the runs of a ladder, where the command line does not set them. Each evaluates all of the split
# once: a part of it is another part for another number of steps.
_OF_RUNS = {
  "evaluation.every_steps": "0",
  "evaluation.final_steps": "0",
  "evaluation.sample_tokens": "0",
}
_CHECKED = 4  # times the least width, at which a coordinate check is made, too
_SAVES = 4  # of a run of a ladder, at least
_RUNG = 0.8  # of the largest compute: runs above it are the last rung, which is left out at once


@dataclasses.dataclass(frozen=True)
class Ladder:
  """What is trained, and for what.

  Attributes:
    family: of the models.
    runs: name of the run -> what it is, the values of further keys, and its seed.
    entries: of the sweep.
    unique_tokens: of the training split.
    left_out: how many runs had too few steps.
  """

  family: ladder.Family
  runs: Mapping[str, tuple[ladder.Rung, Mapping[str, str], int]]
  entries: Sequence[Entry]
  unique_tokens: float
  left_out: int

  def measured(self, entries: Sequence[Entry]) -> list[ladder.Measured]:
    """Returns the runs that are done."""
    return [
      ladder.Measured(one.name, *self.runs[one.name], one.run.points(METRIC)[-1][1])
      for one in entries
      if one.state == DONE and one.run.points(METRIC)
    ]


def run() -> int:
  """Trains the ladder, fits it, and writes forecast.json and forecast.html."""
  budget = forecast_target.read_budget()
  folder = sweep.folder_of("forecast")
  plan = _ladder(budget)
  say(forecast_report.ladder_text([rung for rung, *_ in plan.runs.values()], plan.left_out))
  folder.mkdir(parents=True, exist_ok=True)
  if not _check_widths(plan, folder):
    return exit_codes.CHECK_FAILED
  runs = sweep.Runs(folder, plan.entries, flags.PARALLEL.value, flags.HOURS.value)
  with runs, StopRequest() as runs.stop:
    runs.advance()
  runs.write(shown=False)
  if code := sweep.exit_code(runs):
    return code
  measured = plan.measured(runs.entries)
  observed = ladder.observations(measured, plan.unique_tokens)
  fit = scaling_laws.fit_law(observed)
  checked = _fit_as_json(fit, observed)
  found = forecast_target.of_budget(fit, plan.family, budget, plan.unique_tokens)
  parts = {
    "command": flags.command_line(),
    "title": config_flag.name(flags.CONFIG),
    "budget": budget.text,
    "currency": budget.sign,
    "unique_tokens": plan.unique_tokens if math.isfinite(plan.unique_tokens) else None,
    "nats_per_bit": _nats_per_bit(runs.entries),
    "runs": [_as_json(one, fit, plan.unique_tokens) for one in measured],
    **checked,
    **_best_values(measured, found),
    "targets": [one.as_json() for one in found],
  }
  files.replace(folder / DATA, json.dumps(parts, indent=2) + "\n")
  files.replace(folder / PAGE, forecast_report.html(parts))
  say(forecast_report.text(parts))
  say(f"page: {folder / PAGE}; numbers: {folder / DATA}; runs: {folder / sweep.PAGE}")
  return exit_codes.DONE if all(one.fits for one in found) else exit_codes.CHECK_FAILED


# ------------------------------ the ladder ------------------------------


def _ladder(budget: Budget) -> Ladder:
  """Returns the ladder of the command line; raises ValueError for one that cannot be."""
  config = copy.deepcopy(flags.CONFIG.value)
  if config.task != "causal_lm":
    raise ValueError(f"forecast predicts bits per byte of text, and the task is {config.task}")
  values = dict(config_flag.leaves(config))
  ramps = ("data.batch_size_ramp", "data.sequence_length_ramp", "training.tokens")
  if given := [key for key in ramps if values[key]]:
    raise ValueError(f"{given[0]}: each run of a ladder has its own number of tokens; leave it out")
  splits.train_missing_tokenizer(config)
  family = ladder.Family(config)
  widths = family.widths(flags.WIDTHS.value, most=1 / 2 if budget.unit == TOKENS else 1)
  sizes = [family.of_width(width) for width in widths]
  settings = sweep_axes.read(flags.AXES.value) if flags.AXES.value else [{}]
  taken = {*sizes[0].setting, "training.steps"} - {ladder.LEARNING_RATE}
  if wrong := sorted(taken & {*settings[0]}):
    raise ValueError(f"--axes: {wrong[0]} follows from --widths and --flops; leave it out")
  runs, left_out = [], 0
  for setting in settings:
    data = sweep.with_setting(config, setting).data
    some, short = ladder.rungs(sizes, _flops(), data.global_batch_size * data.sequence_length)
    runs += [(one, setting) for one in some]
    left_out += short
  settled = len({(one.size.width, one.compute) for one, _ in runs})
  if settled < scaling_laws.LEAST_SETTINGS:
    raise ValueError(
      f"--widths, --flops: {settled} pairs of a width and its tokens have at least "
      f"{ladder.FEWEST_STEPS} steps, and a scaling law needs {scaling_laws.LEAST_SETTINGS}; give "
      f"more of them, or a smaller batch to the ladder: --axes='data.global_batch_size=8'"
    )
  named = _entries(runs, settings)
  resolved = finalize.finalize(sweep.with_setting(config, named[0].setting), "cpu")
  validate.check(resolved, {axis: abs(size) for axis, size in resolved.mesh.items()})
  report = splits.training_batches(resolved).source.report
  unique = sum(value for key, value in report.items() if key.partition("/")[0] == "tokens")
  of_name = {
    entry.name: (rung, {k: v for k, v in setting.items() if k != SEED}, _seed(setting))
    for entry, (rung, setting) in zip(named, runs, strict=True)
  }
  return Ladder(family, of_name, named, float(unique or math.inf), left_out)


def _seed(setting: Mapping[str, str]) -> int:
  return int(setting[SEED]) if SEED in setting else flags.CONFIG.value.seed


def _flops() -> list[float]:
  """Returns --flops; raises ValueError for what is no number above 0."""
  for text in flags.FLOPS.value:
    if not re.fullmatch(r"(\d+\.?\d*|\.\d+)(e\+?\d{1,2})?", text) or not float(text):
      raise ValueError(f"--flops: {text!r} is no number above 0, such as --flops=1e11,4e11")
  return [*map(float, flags.FLOPS.value)]


def _entries(
  runs: Sequence[tuple[ladder.Rung, sweep_axes.Setting]], settings: Sequence[sweep_axes.Setting]
) -> list[Entry]:
  """Returns the runs as those of a sweep, named by width, steps and what else differs."""
  differs = [key for key in settings[0] if len({one[key] for one in settings}) > 1]
  short = [
    {"model.model_size": str(rung.size.width), "training.steps": str(rung.steps)}
    | {key: setting[key] for key in differs}
    for rung, setting in runs
  ]
  overridden = {*flags.CONFIG.overridden}
  entries = []
  for name, (rung, setting) in zip(sweep_axes.names(short), runs, strict=True):
    every = max(flags.CONFIG.value.checkpoint.every_steps, math.ceil(rung.steps / _SAVES))
    own = {**_OF_RUNS, "checkpoint.every_steps": str(every)}
    own = {key: value for key, value in own.items() if key not in overridden}
    steps = {"training.steps": str(rung.steps)}
    entries.append(Entry(name, {**own, **rung.size.setting, **steps, **setting}))
  return entries


def _check_widths(plan: Ladder, folder: epath.Path) -> bool:
  """Returns whether a coordinate check of the ladder's widths is flat; it is made once."""
  sizes = {rung.size.width: rung.size for rung, *_ in plan.runs.values()}
  widths = sorted(sizes)
  same = {"model.base_width", "model.head_size", ladder.LEARNING_RATE}
  keys = [f"--config.{k}={v}" for k, v in sizes[widths[-1]].setting.items() if k in same]
  # Over less than a factor of 4, chance has slopes of its own.
  ends = widths[0], max(widths[-1], _CHECKED * widths[0])
  chosen = ",".join(map(str, sorted({ends[0], 2 * ends[0], ends[1]})))
  words = ["coordcheck", *flags.words_to_train(), *keys, f"--widths={chosen}"]
  record, log = folder / CHECK, folder / sweep.LOGS / "coordcheck.txt"
  if record.exists() and files.read_json(record) == sorted(words):
    return True
  say(f"coordinate check at widths {chosen}; its output: {log}")
  log.parent.mkdir(exist_ok=True)
  with open(log, "wb") as output:
    code = subprocess.run(
      [sys.executable, sys.argv[0], *words],
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=subprocess.STDOUT,
      check=False,
    ).returncode
  said = log.read_bytes().decode(errors="replace").strip().rpartition("\n\n")[2]
  if code == exit_codes.DONE:
    say(said)
    files.replace(record, json.dumps(sorted(words)))
  elif code == exit_codes.CHECK_FAILED:
    say(f"{said}\nso the learning rate of these small models says nothing of a large one")
  else:
    raise RuntimeError(f"the coordinate check has ended with exit code {code}: {said}; see {log}")
  return code == exit_codes.DONE


# ------------------------------ what follows from it ------------------------------


def _nats_per_bit(entries: Sequence[Entry]) -> float:
  """Returns the loss in nats per token over that in bits per byte, of the evaluation split."""
  one = next(one.run for one in entries if one.state == DONE)
  return one.points("eval_loss")[-1][1] / one.points(METRIC)[-1][1]


def _as_json(one: ladder.Measured, fit: Fit, unique_tokens: float) -> dict[str, Any]:
  """Returns a run of the ladder, with what the law says of it."""
  size, tokens = one.rung.size, one.rung.tokens
  return {
    "name": one.name,
    "width": size.width,
    "layers": size.layers,
    "parameters": size.parameters,
    "tokens": tokens,
    "seed": one.seed,
    **one.others,
    "flops": ladder.observation(one, unique_tokens).compute,
    "bits_per_byte": one.bits_per_byte,
    "by_the_law": float(fit.law.loss(size.parameters, tokens, unique_tokens)),
  }


def _fit_as_json(fit: Fit, observed: Sequence[Observation]) -> dict[str, Any]:
  """Returns coefficients, noise, and the error on the largest runs, left out of the fit."""
  held_out: Sequence[scaling_laws.HeldOut] = ()
  rung = {one.setting for one in observed if one.compute > _RUNG * fit.largest_compute}
  for count in range(len(rung), 0, -1):
    with contextlib.suppress(ValueError):  # the rest are too few
      held_out = scaling_laws.held_out(observed, settings=count)
      break
  return {
    "coefficients": {name: vars(one) for name, one in fit.coefficients.items()},
    "noise": fit.noise,
    "largest_flops": fit.largest_compute,
    "held_out": [
      {
        **{"parameters": one.prediction.parameters, "tokens": one.prediction.tokens},
        **{"predicted": vars(one.prediction.loss), "measured": one.measured},
        **{"error": one.error, "inside": one.inside},
        "times_largest": one.prediction.times_largest,
      }
      for one in held_out
    ],
  }


def _best_values(
  measured: Sequence[ladder.Measured], found: Sequence[forecast_target.Target]
) -> dict[str, Any]:
  """Returns learning rate and batch size at the targets, where the ladder has swept them."""
  points = [ladder.observation(one, math.inf) for one in measured]
  best: dict[str, Any] = {}
  for name in ("learning_rate", "batch_size"):
    if len({getattr(one, name) for one in points}) < 3:
      continue
    try:
      law = scaling_laws.fit_best(points, name)
    except ValueError as error:
      best[name] = {"unknown": str(error)}
      continue
    sizes = [(one.prediction.parameters, one.prediction.tokens) for one in found]
    best[name] = {
      "exponents": {key: vars(one) for key, one in law.exponents.items()},
      "at_targets": [vars(law.at(*one)) for one in sizes],
    }
  return {"best": best}
