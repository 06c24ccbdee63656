"""Trains a model over a device mesh: `python main.py --config=configs/dp4_tp2.py`.

python main.py [VERB] --config=configs/STRATEGY.py[:RECIPE] [--workdir=DIR] [--config.key=value ...]

VERB    train (default): train, evaluating on the held-out split
        evaluate: a checkpoint on the whole held-out split, on the mesh that the config names
        sample: continue --prompt=TEXT (repeatable) or the lines of --prompt_file=FILE
        layout: print where every array lies; --against=CONFIG compares two strategies,
          --html=FILE writes it as a page with drawings and what each mesh axis costs
        compare: whether --config and --against train alike: every raw gradient and three steps,
          in float64 where the hardware has it; --set key=value sets a key on both sides
        plan: what a run on --topology=v5p:4x4x4 or h100:8 will need, send and take, told here
        tour: see what sharding does, by small examples; --chapter=NAME tells one. Without a config
RECIPE  lm (default), mlp, mlp_tutorial; or model=NAME,data=NAME

The same command again goes on where the run was stopped.

On several machines, or as several processes on one, every process runs the same command; see
docs/running.md.

Exit codes: 0 done; 1 failed; 2 refused before anything started or was changed; 3 compare: they
differ, plan: it does not fit; 75 stopped by SIGTERM or Ctrl-C after saving.
"""

import hashlib
import json
import sys
import traceback
from collections.abc import Callable

import jax
from absl import app, flags, logging
from etils import epath
from ml_collections import config_flags

from configs import base, command_line
from partitioning import layout
from planning import launching
from processes import group as groups
from processes.lockstep import Lockstep
from processes.preflight import DifferenceError, NotComeError
from processes.rollcall import MissingError, RollCallError
from processes.stopping import EXIT_CODE, StopRequest
from processes.watchdog import SAVING, Watchdog
from tour import chapters
from tour import run as tour
from training import (
  agreement,
  comparison,
  compilation_cache,
  devices,
  job,
  loop,
  opening,
  page,
  resuming,
  running,
  sampling,
)
from training.evaluation import Evaluator
from training.reporting import replace_text, say

REFUSED, NO = 2, 3
VERBS = ("train", "evaluate", "sample", "layout", "compare", "plan", "tour")

_CONFIG = config_flags.DEFINE_config_file("config", None, "A strategy, and after a colon a recipe.")
_AGAINST = config_flags.DEFINE_config_file("against", None, "layout, compare: the other config.")
_SET = flags.DEFINE_multi_string("set", [], "compare: key=value for both configs; repeatable.")
_HTML = flags.DEFINE_string("html", None, "layout: the file for a page with drawings.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "plan: the devices, v5p:4x4x4; those at hand.")
_CHAPTER = flags.DEFINE_string("chapter", None, "tour: one chapter instead of all.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept; runs/CONFIG_RECIPE.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "evaluate, sample: DIR[/STEP] to read.")
_ACCEPT = flags.DEFINE_list("accept_changes", [], "train: keys that may differ from before.")
_SIMULATE = flags.DEFINE_bool("simulate", False, "Simulated CPU devices, even beside a GPU or TPU.")
_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of a refusal.")

_PROMPT = flags.DEFINE_multi_string("prompt", [], "sample: a text to continue; repeatable.")
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "sample: a file with a prompt per line.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "sample: the most tokens per prompt.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "sample: 0 takes the likeliest token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "sample: draw among the k likeliest; 0 is off.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "sample: among the likeliest of this probability.")
_SEED = flags.DEFINE_integer("seed", 0, "sample: seed of the draws.")
_STOP = flags.DEFINE_multi_string("stop", [], "sample: a text that ends a row; repeatable.")

SAMPLE_FLAGS = (_PROMPT, _PROMPT_FILE, _MAX_NEW_TOKENS, _TEMPERATURE, _TOP_K, _TOP_P, _SEED, _STOP)
# The flags that not every verb takes.
OWNERS = [
  (_CONFIG, ("train", "evaluate", "sample", "layout", "compare", "plan")),
  (_WORKDIR, ("train", "evaluate", "sample", "layout", "compare", "plan")),
  (_TOPOLOGY, ("plan",)),
  (_CHAPTER, ("tour",)),
  (_AGAINST, ("layout", "compare")),
  (_SET, ("compare",)),
  (_HTML, ("layout",)),
  (_ACCEPT, ("train",)),
  (_CHECKPOINT, ("evaluate", "sample")),
  *((flag, ("sample",)) for flag in SAMPLE_FLAGS),
]


def main(argv: list[str]) -> int:
  """Runs the verb and returns the exit code."""
  if not _DEBUG.value:
    logging.set_verbosity(logging.WARNING)  # the libraries' own news is not the user's
  try:
    verb = _verb(argv[1:])
  except ValueError as error:
    return _refuse(error)
  if verb == "tour":
    return _tour()
  if verb == "plan":
    return _plan()
  try:
    keys = _CONFIG.value.processes
    on_tpu = not _SIMULATE.value and devices.hardware() == "tpu"
    group = groups.connect(
      start_timeout_seconds=keys.start_timeout_seconds,
      heartbeat_seconds=keys.heartbeat_seconds,
      on_tpu=on_tpu,
    )
  except (ValueError, OSError, RuntimeError) as error:
    return _refuse(error)
  watch = Watchdog(
    group,
    StopRequest(),
    deadline_seconds=keys.deadline_seconds,
    start_timeout_seconds=keys.start_timeout_seconds,
  )
  try:
    with watch:
      code = _run_verb(verb, watch)
      watch.part()
  except (Exception, KeyboardInterrupt) as error:
    if group.alone:
      raise
    print(f"{groups.label()}{traceback.format_exc()}", file=sys.stderr, flush=True)
    groups.leave(130 if isinstance(error, KeyboardInterrupt) else 1, patience_seconds=3)
  return code


def _run_verb(verb: str, watch: Watchdog) -> int:
  try:
    configs = {"config": _CONFIG.value, "against": _AGAINST.value}
    configs = {name: config for name, config in configs.items() if config is not None}
    agreement.about_to_start(configs, _told(verb))
    # What a verb returns runs outside of this block: from there on, errors are no refusals.
    run = RUNS[verb](watch)
  except (ValueError, OSError, RuntimeError) as error:
    return _refuse(error, watch)
  return running.to_its_end(run, watch)


def _tour() -> int:
  """Tells the tour: of one process, which starts others itself, and has no config."""
  try:
    told = chapters.chosen(_CHAPTER.value)
    tour.start(simulate=_SIMULATE.value)
  except (ValueError, OSError, RuntimeError) as error:
    return _refuse(error)
  tour.tell(told)
  return 0


def _plan() -> int:
  """Tells what a run on devices that need not be here will need: in a process of its own."""
  try:
    return launching.run(
      _CONFIG.value,
      _TOPOLOGY.value,
      _workdir(),
      title=command_line.name(_CONFIG),
      simulate=_SIMULATE.value,
      debug=_DEBUG.value,
    )
  except (ValueError, OSError, RuntimeError) as error:
    return _refuse(error)


def _told(verb: str) -> dict[str, object]:
  """Returns what the command line says besides the config: the same on every process."""
  values = {flag.name: flag.value for flag in SAMPLE_FLAGS}
  values |= {flag.name: flag.value for flag in (_CHECKPOINT, _ACCEPT, _SIMULATE)}
  return {"verb": verb, "workdir": str(_workdir()), **values}


def _train(watch: Watchdog) -> Callable[[], int]:
  [ready] = _prepare(_CONFIG)
  data = opening.open_data(ready)
  workdir = _workdir()
  record = resuming.judge(ready, data.train.source, workdir, _ACCEPT.value)
  sources = {"train": data.train.source, "held out": data.held_out.source}
  agreement.about_to_run(ready, sources, workdir, writes=True)
  start = resuming.begin(ready, workdir, record)
  if groups.current().first:
    config_text = json.dumps(resuming.plain(ready.config), indent=2) + "\n"
    replace_text(workdir / "config.json", config_text)
    replace_text(workdir / "layout.txt", ready.layout_text() + "\n")
    running.write_bad_records(ready, data, workdir)
  return lambda: running.run(ready, data, start, workdir, watch)


def _evaluate(watch: Watchdog) -> Callable[[], int]:
  """Evaluates a checkpoint on the whole held-out split."""
  [ready] = _prepare(_CONFIG)
  held_out = opening.open_held_out(ready)
  agreement.about_to_run(ready, {"held out": held_out.source}, _workdir(), writes=False)
  step, params = resuming.parameters(ready, _CHECKPOINT.value or str(_workdir()))

  def run() -> int:
    running.announce_bad(held_out.source)
    lockstep = Lockstep(watch.group, watch.stop)
    compiled = ready.compile_eval_step().function
    metrics = Evaluator(ready, held_out, compiled, watch, lockstep)(params)
    if metrics is None:
      return EXIT_CODE
    say(loop.evaluation_text(step, metrics, whole=True))
    return 0

  return run


def _sample(watch: Watchdog) -> Callable[[], int]:
  """Continues prompts with a checkpoint's model."""
  del watch  # nothing is lost by a stop, and no step is due
  if _PROMPT.value and _PROMPT_FILE.value:
    raise ValueError("--prompt and --prompt_file: give one of the two")
  prompts = _PROMPT.value
  if _PROMPT_FILE.value:
    prompts = epath.Path(_PROMPT_FILE.value).read_bytes().splitlines()
  [ready] = _prepare(_CONFIG)
  request = sampling.Request(
    tuple(prompts or [""]),
    max_new_tokens=_MAX_NEW_TOKENS.value,
    temperature=_TEMPERATURE.value,
    top_k=_TOP_K.value,
    top_p=_TOP_P.value,
    seed=_SEED.value,
    stop=tuple(_STOP.value),
  )
  sampling.check(ready.config, request)
  digest = hashlib.sha256(repr(request.tokens).encode()).hexdigest()[:16]
  agreement.about_to_run(ready, {}, _workdir(), writes=False, more={"prompts": digest})
  _, params = resuming.parameters(ready, _CHECKPOINT.value or str(_workdir()))

  def run() -> int:
    sampling.show(ready, params, request)
    return 0

  return run


def _workdir() -> epath.Path:
  return epath.Path(_WORKDIR.value or f"runs/{command_line.name(_CONFIG)}")


def _prepare(*config_flags_given, proof: bool = False) -> list[job.Job]:
  """Finalizes and checks the configs, starts the devices, judges the layouts."""
  configs = [flag.value for flag in config_flags_given]
  started = devices.start(
    *(config.mesh.to_dict() for config in configs),
    slices=[config.mesh_dcn.to_dict() for config in configs],
    simulate=_SIMULATE.value,
  )
  jobs = []
  for config, its_devices in zip(configs, started, strict=True):
    if proof:
      comparison.prove(config, its_devices.platform, keep=command_line.set_keys(_SET.value))
    config = base.finalize(config, its_devices.platform)
    base.check(config, its_devices.sizes)
    _configure_jax(config)
    jobs.append(job.prepare(config, its_devices))
  return jobs


def _configure_jax(config) -> None:
  if config.training.parameter_dtype == "float64":
    jax.config.update("jax_enable_x64", True)
  if config.compilation_cache_dir:
    compilation_cache.use(config.compilation_cache_dir)


def _layout(watch: Watchdog) -> Callable[[], int]:
  """Prints the layout, or two side by side, or writes them as a page."""
  del watch
  if _AGAINST.value is None:
    jobs, titles = _prepare(_CONFIG), (command_line.name(_CONFIG), "")
    text = jobs[0].layout_text()
  else:
    jobs = _prepare(_CONFIG, _AGAINST)
    sections = [
      {name: p for section in one.placements.values() for name, p in section.items()}
      for one in jobs
    ]
    titles = (command_line.name(_CONFIG), command_line.name(_AGAINST))
    text = layout.against_text(*sections, tuple(one.devices.sizes for one in jobs), titles)
  file = _HTML.value and epath.Path(_HTML.value)
  if file and (file.is_dir() or not file.parent.is_dir()):
    raise ValueError(f"--html={file}: give a file in a folder that exists")

  def run() -> int:
    if file is None:
      say(text)
      return 0
    written = page.html(*jobs, titles=titles)
    try:
      if groups.current().first:
        replace_text(file, written)
    except OSError as error:
      print(f"error: --html={file}: {error}", file=sys.stderr, flush=True)
      return 1
    say(f"wrote {file}, {layout.size_text(len(written.encode()))}")
    return 0

  return run


def _compare(watch: Watchdog) -> Callable[[], int]:
  """Trains both configs for three steps, and tells how far every tensor is from the other's."""
  if _AGAINST.value is None:
    raise ValueError("compare needs a second config: --against=configs/single.py")
  ours, wanted = jobs = _prepare(_CONFIG, _AGAINST, proof=True)
  data = comparison.bring_together(jobs)
  sources = {"config": data[0].train.source, "against": data[1].train.source}
  agreement.about_to_run(
    ours, sources, _workdir(), writes=False, more={"mesh, against": wanted.devices.sizes}
  )

  def run() -> int:
    watch.at("comparing", SAVING)
    found = comparison.compare(jobs, data)
    titles = (command_line.name(_CONFIG), command_line.name(_AGAINST))
    say(comparison.text(jobs, titles, found))
    bound = comparison.BOUNDS[ours.config.training.parameter_dtype]
    return NO if comparison.beyond(found, bound) else 0

  return run


def _verb(words: list[str]) -> str:
  verb = words[0] if words else "train"
  if verb not in VERBS:
    near = base.nearest(verb, VERBS)
    raise ValueError(f"unknown verb {verb!r}; there are {', '.join(VERBS)}{near}")
  if len(words) > 1:
    raise ValueError(f"unexpected {words[1]!r} after the verb; options begin with --")
  if _CONFIG.value is None and verb != "tour":
    raise ValueError("no config; for example: python main.py --config=configs/dp4_tp2.py")
  for flag, owners in OWNERS:
    if flags.FLAGS[flag.name].present and verb not in owners:
      raise ValueError(f"--{flag.name} belongs to the verb {' or '.join(owners)}, not to {verb}")
  return verb


def _refuse(error: Exception, watch: Watchdog | None = None) -> int:
  """Prints one message, and tells the other processes; returns exit code 2.

  Where processes have only not come in time, it is 1: the same again may go well.
  """
  if flags.FLAGS.is_parsed() and _DEBUG.value:
    raise error
  missing = isinstance(error, (MissingError, NotComeError))
  text, word, code = str(error), *(("error", 1) if missing else ("refused", REFUSED))
  if watch is None or watch.group.alone:
    print(f"{word}: {text}", file=sys.stderr, flush=True)
    if watch is None and not isinstance(error, RollCallError):
      groups.refuse(text)
    return code
  if watch.refusing(text, "failed" if missing else "refused"):
    label = "" if isinstance(error, DifferenceError) else groups.label()
    print(f"{label}{word}: {text}", file=sys.stderr, flush=True)
  return groups.leave(code)


RUNS = {
  "train": _train,
  "evaluate": _evaluate,
  "sample": _sample,
  "layout": _layout,
  "compare": _compare,
}


def parse_flags(argv: list[str]) -> list[str]:
  """Parses the flags; what absl and ml_collections raise is a refusal like any other."""
  try:
    sys.argv = command_line.with_settings(argv, ("config", "against"))  # ml_collections reads it
    return command_line.parse(sys.argv, ("config", "against"))
  except ValueError as error:
    if "--debug" in argv:
      raise
    print(f"refused: {error}", file=sys.stderr, flush=True)
    groups.refuse(str(error))
    sys.exit(REFUSED)


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)
