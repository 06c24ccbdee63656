"""The application from Python, in one process: for notebooks; docs/quickstart.ipynb uses it.

  job = interactive.build(dp4_tp2.get_config("lm"))
  result = interactive.train(job, "runs/notebook", callbacks=[Callback(5, show)])
  texts = interactive.sample(job, result.state, ["def "])

JAX chooses its devices once: the first `build` of a process decides how many there are.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from commands import build as building
from commands import train as verb
from inference.request import TEMPERATURE, TOP_K, Request, text_spec
from inference.sampler import Sampler
from partitioning.mesh_sizes import product_text, resolve_sizes
from processes.coordination import current
from processes.preemption import StopRequest
from processes.watchdog import Watchdog
from runtime import devices
from training import base_parameters, loop, restore, run_tokenizer, splits
from training.callbacks import Callback
from training.metrics import log_lines
from training.metrics.log_lines import FILE
from training.setup import Job
from training.state import State

_started: devices.Devices | None = None  # of the first `build`; later ones share them


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of training.

  Attributes:
    state: the last one.
    metrics: the lines of metrics.jsonl, in their order: each with its `step`.
    stopped: whether it was interrupted, after saving; the same call resumes.
  """

  state: State
  metrics: list[Mapping[str, Any]]
  stopped: bool


def build(config: ConfigDict, simulate: bool = True) -> Job:
  """Returns the job of a config, its tokenizer trained: finalized, checked, its layout checked.

  Args:
    config: as a strategy's `get_config` returns it, with any keys changed.
    simulate: use simulated CPU devices, even if there is an accelerator.

  Raises:
    ValueError: what the command line would refuse.
    RuntimeError: JAX has started with fewer devices than the mesh asks for, or on another platform.
  """
  config = copy.deepcopy(config)  # the caller's does not get the name of the trained tokenizer
  splits.train_missing_tokenizer(config)
  return building.job(config, _devices(config, simulate=simulate))


def load(config: ConfigDict, location: str, simulate: bool = True) -> tuple[Job, Any, Any]:
  """Returns the job of a config, and the parameters and variables of a checkpoint, placed as its.

  Args:
    config: as of `build`; it reads the tokenizer that the checkpoint was trained with.
    location: `DIR[/STEP]`, DIR a workdir or its folder of checkpoints.
    simulate: as of `build`.

  Raises:
    ValueError: as `build`; no such checkpoint, or one of another model.
  """
  run_tokenizer.adopt(config, location)
  job = building.job(config, _devices(config, simulate=simulate))
  _, params, variables = base_parameters.model_state(job, location)
  return job, params, variables


def _devices(config: ConfigDict, *, simulate: bool) -> devices.Devices:
  global _started
  slices = {axis: size for axis, size in config.mesh_dcn.items() if size != 1}
  if _started is None:
    try:
      [_started] = devices.start(config.mesh.to_dict(), slices=[slices], simulate=simulate)
    except RuntimeError as error:
      raise RuntimeError(
        f"{error}; JAX chooses its devices once: restart the kernel, and build before anything "
        f"else uses JAX"
      ) from error
    return _started
  there = None if _started.simulated else jax.device_count()
  sizes = resolve_sizes(config.mesh.to_dict(), there, slices)
  if math.prod(sizes.values()) > jax.device_count():
    raise RuntimeError(
      f"the mesh {product_text(sizes)} asks for {math.prod(sizes.values())} devices, and JAX has "
      f"started with {jax.device_count()} in this process, for the first build; restart the "
      f"kernel, and build the largest mesh first"
    )
  if simulate and not _started.simulated:
    raise RuntimeError(
      f"simulate=True: JAX has started on {_started.platform} in this process; restart the kernel"
    )
  return dataclasses.replace(_started, sizes=sizes, slices=slices)


def train(job: Job, workdir: str | epath.Path, callbacks: Sequence[Callback] = ()) -> Result:
  """Trains, or resumes from the newest checkpoint in the workdir, as the verb `train` does.

  Args:
    job: of `build`.
    workdir: of the run.
    callbacks: called every n steps, besides those that the config names.

  Raises:
    ValueError: the workdir is of another run, or the data does not fit the model.
    CallbackError: a callback has raised.
    TrainingStoppedError: a step with bad numbers.
  """
  began, folder = time.monotonic(), epath.Path(workdir)
  given = copy.deepcopy(job.given)
  if restore.adopt_schedule(given.optimizer, folder):
    job = building.job(given, job.devices)
  keys = job.config.processes
  watch = Watchdog(
    current(),
    StopRequest(),
    deadline_seconds=keys.deadline_seconds,
    start_timeout_seconds=keys.start_timeout_seconds,
    input_timeout_seconds=keys.input_timeout_seconds,
  )
  with watch:
    data, start = verb.open_run(job, folder, watch)
    with start.owner:
      verb.write_files(data, start)
      start.start_writing()
      if verb.finished(start):
        start.checkpointer.close()
        end = loop.End(start.state, stopped=False)
      else:
        named = {f"callback {number}": one for number, one in enumerate(callbacks, 1)}
        report = verb.report_of(start, verb.wanted_sample(job, data))
        try:
          end = loop.train(data, start, watch, started=began, more_callbacks=named, observer=report)
        except Exception as error:
          report.failed(error)
          raise
        report.end(stopped=end.stopped)
  sound, _ = log_lines.split((folder / FILE).read_bytes())
  return Result(end.state, [line.values for line in sound], end.stopped)


def sample(job: Job, state: State, prompts: Sequence[str | bytes], **settings: Any) -> list[str]:
  """Returns the model's continuation of each prompt.

  Args:
    job: of `build`.
    state: as `train` returns it.
    prompts: texts.
    **settings: fields of `inference.request.Request`, by default those of `sample`.

  Raises:
    ValueError: the model does not generate tokens, or a prompt is too long.
  """
  spec = text_spec(job.config)
  usual = {"temperature": TEMPERATURE, "top_k": min(TOP_K, spec.drawable)}
  usual["max_new_tokens"] = spec.fitting(prompts)
  request = Request(tuple(prompts), **{**usual, **settings})
  drawn = Sampler(job, request)(state.params, request, variables=state.variables)
  return [one.decode(errors="replace") for one in drawn]
