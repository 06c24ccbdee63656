"""Trains a model over a device mesh: `python main.py --config=configs/dp4_tp2.py`.

python main.py [VERB] --config=configs/STRATEGY.py[:RECIPE] [--workdir=DIR] [--config.key=value ...]

VERB    train (default): train, evaluating on the held-out split
        evaluate: a checkpoint on the held-out split, on the mesh that the config names
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

Exit codes: 0 done; 1 failed; 2 refused before anything started or was changed, or another run has
taken over the workdir; 3 compare: they differ, plan: it does not fit; 75 stopped by SIGTERM or
Ctrl-C after saving; 130 by a second Ctrl-C, without saving.
"""

from processes import stopping
from runtime import jax_variables

if __name__ == "__main__":  # what is imported below takes seconds, and Ctrl-C comes then, too
  stopping.begin()
  jax_variables.load()

import functools
import hashlib
import sys
import traceback
from collections.abc import Callable

from absl import app, logging
from etils import epath

from commands import build, config_flag, flags
from commands.flags import parse_flags
from commands.refusal import refuse
from partitioning import layout
from planning import launching
from processes import group as groups
from processes.lockstep import Lockstep
from processes.printable import printable
from processes.stopping import StopRequest
from processes.watchdog import STARTING, Watchdog
from runtime import exit_codes, files, xla_flags
from tour import chapters
from tour import run as tour
from training import (
  agreement,
  comparison,
  devices,
  opening,
  owning,
  page,
  resuming,
  running,
  sampling,
)
from training.evaluation import Evaluator
from training.reporting import ProgressLine, say


def main(argv: list[str]) -> int:
  """Runs the verb and returns the exit code."""
  if not flags.DEBUG.value:
    logging.set_verbosity(logging.WARNING)  # the libraries' own news is not the user's
  try:
    verb = flags.chosen_verb(argv[1:])
    xla_flags.check()
  except (ValueError, OSError) as error:
    return refuse(error)
  if verb == "tour":
    return _tour()
  if verb == "plan":
    return _plan()
  try:
    keys = flags.CONFIG.value.processes
    on_tpu = not flags.SIMULATE.value and devices.hardware() == "tpu"
    group = groups.connect(
      start_timeout_seconds=keys.start_timeout_seconds,
      heartbeat_seconds=keys.heartbeat_seconds,
      on_tpu=on_tpu,
      workdir=flags.workdir(),
    )
  except (ValueError, OSError, RuntimeError) as error:
    return refuse(error)
  watch = Watchdog(
    group,
    StopRequest(),
    deadline_seconds=keys.deadline_seconds,
    start_timeout_seconds=keys.start_timeout_seconds,
    input_timeout_seconds=keys.input_timeout_seconds,
  )
  try:
    with watch:
      code = _run_verb(verb, watch)
      watch.part()
  except Exception:  # whatever it is, the other processes must not wait for this one
    if group.alone:
      raise
    print(f"{groups.label()}{traceback.format_exc()}", file=sys.stderr, flush=True)
    groups.leave(exit_codes.FAILED, patience_seconds=3)
  return code


def _run_verb(verb: str, watch: Watchdog) -> int:
  try:
    configs = {"config": flags.CONFIG.value, "against": flags.AGAINST.value}
    configs = {name: config for name, config in configs.items() if config is not None}
    agreement.about_to_start(configs, flags.facts(verb))
    # What a verb returns runs outside of this block: from there on, errors are no refusals.
    run = RUNS[verb](watch)
  except stopping.Stopped:
    watch.leave()
  except (ValueError, OSError, RuntimeError) as error:
    return refuse(error, watch)
  return running.to_its_end(run, watch)


def _tour() -> int:
  """Tells the tour: of one process, which starts others itself, and has no config."""
  try:
    told = chapters.chosen(flags.CHAPTER.value)
    tour.start(simulate=flags.SIMULATE.value)
  except (ValueError, OSError, RuntimeError) as error:
    return refuse(error)
  tour.tell(told)
  return exit_codes.DONE


def _plan() -> int:
  """Tells what a run on devices that need not be here will need: in a process of its own."""
  try:
    return launching.run(
      flags.CONFIG.value,
      flags.TOPOLOGY.value,
      flags.workdir(),
      title=config_flag.name(flags.CONFIG),
      simulate=flags.SIMULATE.value,
      debug=flags.DEBUG.value,
    )
  except (ValueError, OSError, RuntimeError) as error:
    return refuse(error)


def _train(watch: Watchdog) -> Callable[[], int]:
  [ready] = build.prepare(flags.CONFIG)
  data = opening.open_data(ready)
  workdir = flags.workdir()
  with owning.owned(ready, workdir, watch) as owner:
    record, newest = resuming.judge(ready, data.train.source, workdir, flags.ACCEPT.value)
    sources = {"train": data.train.source, "held out": data.held_out.source}
    agreement.about_to_run(ready, sources, workdir, writes=True)
    start = resuming.begin(ready, workdir, record, owner, newest)
  return lambda: running.run(ready, data, start, workdir, watch)


def _evaluate(watch: Watchdog) -> Callable[[], int]:
  """Evaluates a checkpoint on the held-out split, or evaluation.final_steps batches of it."""
  [ready] = build.prepare(flags.CONFIG)
  held_out = opening.open_held_out(ready)
  agreement.about_to_run(ready, {"held out": held_out.source}, flags.workdir(), writes=False)
  step, params = resuming.parameters(ready, flags.CHECKPOINT.value or str(flags.workdir()))

  def run() -> int:
    running.announce_bad(held_out.source)
    lockstep = Lockstep(watch.group, watch.stop)
    compiled = ready.compile_eval_step().function
    steps = ready.config.evaluation.final_steps
    with ProgressLine(min(steps or len(held_out), len(held_out))) as progress:
      shown = functools.partial(progress.evaluating, alone=True)
      evaluator = Evaluator(ready, held_out, compiled, watch, lockstep, shown)
      found = evaluator(params, steps=steps)
    if found is None:
      return exit_codes.STOPPED
    say(found.text(step))
    return exit_codes.DONE

  return run


def _sample(watch: Watchdog) -> Callable[[], int]:
  """Continues prompts with a checkpoint's model."""
  if flags.PROMPT.value and flags.PROMPT_FILE.value:
    raise ValueError("--prompt and --prompt_file: give one of the two")
  prompts = flags.PROMPT.value
  if flags.PROMPT_FILE.value:
    prompts = epath.Path(flags.PROMPT_FILE.value).read_bytes().splitlines()
  [ready] = build.prepare(flags.CONFIG)
  request = sampling.Request(
    tuple(prompts or [""]),
    max_new_tokens=flags.MAX_NEW_TOKENS.value,
    temperature=flags.TEMPERATURE.value,
    top_k=flags.TOP_K.value,
    top_p=flags.TOP_P.value,
    seed=flags.SEED.value,
    stop=tuple(flags.STOP.value),
  )
  sampling.check(ready.config, request)
  digest = hashlib.sha256(repr(request.tokens).encode()).hexdigest()[:16]
  agreement.about_to_run(ready, {}, flags.workdir(), writes=False, more={"prompts": digest})
  _, params = resuming.parameters(ready, flags.CHECKPOINT.value or str(flags.workdir()))

  def run() -> int:
    watch.at("sampling", STARTING)
    sampling.show(ready, params, request)
    return exit_codes.DONE

  return run


def _layout(watch: Watchdog) -> Callable[[], int]:
  """Prints the layout, or two side by side, or writes them as a page."""
  del watch
  if flags.AGAINST.value is None:
    jobs, titles = build.prepare(flags.CONFIG), (config_flag.name(flags.CONFIG), "")
    text = jobs[0].layout_text()
  else:
    jobs = build.prepare(flags.CONFIG, flags.AGAINST)
    sections = [
      {name: p for section in one.placements.values() for name, p in section.items()}
      for one in jobs
    ]
    titles = (config_flag.name(flags.CONFIG), config_flag.name(flags.AGAINST))
    text = layout.against_text(*sections, tuple(one.devices.sizes for one in jobs), titles)
  file = flags.HTML.value and epath.Path(flags.HTML.value)
  if file and (file.is_dir() or not file.parent.is_dir()):
    raise ValueError(f"--html={file}: give a file in a folder that exists")

  def run() -> int:
    if file is None:
      say(text)
      return exit_codes.DONE
    written = page.html(*jobs, titles=titles)
    try:
      if groups.current().first:
        files.replace(file, written)
    except OSError as error:
      print(printable(f"error: --html={file}: {error}"), file=sys.stderr, flush=True)
      return exit_codes.FAILED
    say(f"wrote {file}, {layout.size_text(len(written.encode()))}")
    return exit_codes.DONE

  return run


def _compare(watch: Watchdog) -> Callable[[], int]:
  """Trains both configs for three steps, and tells how far every tensor is from the other's."""
  if flags.AGAINST.value is None:
    raise ValueError("compare needs a second config: --against=configs/single.py")
  ours, wanted = jobs = build.prepare(flags.CONFIG, flags.AGAINST, proof=True)
  data = comparison.bring_together(jobs)
  sources = {"config": data[0].train.source, "against": data[1].train.source}
  agreement.about_to_run(
    ours, sources, flags.workdir(), writes=False, more={"mesh, against": wanted.devices.sizes}
  )

  def run() -> int:
    watch.at("comparing", STARTING)  # of which nothing is kept, and which may take long
    found = comparison.compare(jobs, data)
    titles = (config_flag.name(flags.CONFIG), config_flag.name(flags.AGAINST))
    say(comparison.text(jobs, titles, found))
    bound = comparison.BOUNDS[ours.config.training.parameter_dtype]
    return exit_codes.ANSWER_IS_NO if comparison.beyond(found, bound) else exit_codes.DONE

  return run


RUNS = {
  "train": _train,
  "evaluate": _evaluate,
  "sample": _sample,
  "layout": _layout,
  "compare": _compare,
}


if __name__ == "__main__":
  app.run(stopping.ending(main), flags_parser=parse_flags)
