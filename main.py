"""Trains a model over a device mesh: `python main.py --config=configs/dp4_tp2.py`.

python main.py [VERB] --config=configs/STRATEGY.py[:RECIPE] [--workdir=DIR] [--config.key=value ...]

VERB    train (default): train, evaluating on the held-out split
        layout: print where every array lies; --against=CONFIG compares two strategies
RECIPE  lm (default), mlp, mlp_tutorial; or model=NAME,data=NAME

Exit codes: 0 done; 1 failed; 2 refused before anything started or was changed.
"""

import os
import sys

import jax
import psutil
from absl import app, flags, logging
from etils import epath
from ml_collections import config_flags

from configs import base, command_line
from partitioning import layout
from partitioning.mesh import product_text
from training import devices, job, loop
from training.reporting import say

REFUSED = 2
VERBS = ("train", "layout")

_CONFIG = config_flags.DEFINE_config_file("config", None, "A strategy, and after a colon a recipe.")
_AGAINST = config_flags.DEFINE_config_file("against", None, "layout: the config to compare with.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept; runs/CONFIG_RECIPE.")
_SIMULATE = flags.DEFINE_bool("simulate", False, "Simulated CPU devices, even beside a GPU or TPU.")
_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of a refusal.")


def main(argv: list[str]) -> int:
  """Runs the verb and returns the exit code."""
  if not _DEBUG.value:
    logging.set_verbosity(logging.WARNING)  # the libraries' own news is not the user's
  try:
    verb = _verb(argv[1:])
    if verb == "layout":
      return _layout()
    [ready] = _prepare(_CONFIG)
    data = loop.open_data(ready)
    workdir = epath.Path(_WORKDIR.value or f"runs/{command_line.name(_CONFIG)}")
    workdir.mkdir(parents=True, exist_ok=True)
  except (ValueError, OSError, RuntimeError) as error:
    return _refuse(error)
  return _train(ready, data, workdir)


def _prepare(*config_flags_given) -> list[job.Job]:
  """Finalizes and checks the configs, starts the devices, judges the layouts."""
  configs = [flag.value for flag in config_flags_given]
  started = devices.start(*(c.mesh.to_dict() for c in configs), simulate=_SIMULATE.value)
  jobs = []
  for config, its_devices in zip(configs, started, strict=True):
    config = base.finalize(config, its_devices.platform)
    base.check(config, its_devices.sizes)
    _configure_jax(config)
    jobs.append(job.prepare(config, its_devices))
  return jobs


def _configure_jax(config) -> None:
  if config.training.parameter_dtype == "float64":
    jax.config.update("jax_enable_x64", True)
  if config.compilation_cache_dir:
    folder = os.path.expanduser(config.compilation_cache_dir)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _train(ready: job.Job, data: loop.Data, workdir: epath.Path) -> int:
  _announce(ready, data, workdir)
  (workdir / "config.json").write_text(ready.config.to_json_best_effort(indent=2) + "\n")
  (workdir / "layout.txt").write_text(ready.layout_text() + "\n")
  try:
    loop.train(ready, data, workdir, started=psutil.Process().create_time())
  except loop.TrainingStoppedError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  say(f"metrics in {workdir / 'metrics.jsonl'}")
  return 0


def _layout() -> int:
  """Prints the layout, or two side by side."""
  if _AGAINST.value is None:
    [ready] = _prepare(_CONFIG)
    say(ready.layout_text())
    return 0
  jobs = _prepare(_CONFIG, _AGAINST)
  sections = [{n: p for section in j.placements.values() for n, p in section.items()} for j in jobs]
  titles = (command_line.name(_CONFIG), command_line.name(_AGAINST))
  say(layout.against_text(*sections, tuple(j.devices.sizes for j in jobs), titles))
  return 0


def _announce(ready: job.Job, data: loop.Data, workdir: epath.Path) -> None:
  """Prints what is about to run: devices, mesh, layout, sizes, data."""
  device = ready.mesh.devices.flat[0]
  kind = (
    "simulated CPU devices, made for this run" if ready.devices.simulated else device.device_kind
  )
  say(f"devices: {ready.mesh.size} x {kind}; mesh: {product_text(ready.devices.sizes)}")
  say(ready.layout_text(whole=False))
  say(
    f"train: {data.train.source.name}, {len(data.train.source):,} rows; "
    f"held out: {data.held_out.source.name}, {len(data.held_out.source):,} rows"
  )
  say(f"workdir: {workdir}")


def _verb(words: list[str]) -> str:
  verb = words[0] if words else "train"
  if verb not in VERBS:
    near = base.nearest(verb, VERBS)
    raise ValueError(f"unknown verb {verb!r}; there are {', '.join(VERBS)}{near}")
  if len(words) > 1:
    raise ValueError(f"unexpected {words[1]!r} after the verb; options begin with --")
  if _CONFIG.value is None:
    raise ValueError("no config; for example: python main.py --config=configs/dp4_tp2.py")
  if _AGAINST.value is not None and verb != "layout":
    raise ValueError("--against belongs to the verb layout")
  return verb


def _refuse(error: Exception) -> int:
  """Prints one message; returns exit code 2."""
  if flags.FLAGS.is_parsed() and _DEBUG.value:
    raise error
  print(f"refused: {error}", file=sys.stderr)
  return REFUSED


def parse_flags(argv: list[str]) -> list[str]:
  """Parses the flags; what absl and ml_collections raise is a refusal like any other."""
  try:
    return command_line.parse(argv, ("config", "against"))
  except ValueError as error:
    if "--debug" in argv:
      raise
    print(f"refused: {error}", file=sys.stderr)
    sys.exit(REFUSED)


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)
