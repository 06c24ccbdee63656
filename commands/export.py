"""The verb `export`: a checkpoint as a folder that transformers and others load."""

import json
from collections.abc import Callable

from etils import epath

from checkpointing import restore as checkpoints
from checkpointing.consensus import Together
from commands import build, flags, preflight_facts
from input_pipeline.text import tokenizer
from interop import export, export_folder
from interop.safetensors_writer import DTYPES
from interop.tokenizer_export import tokenizer_files
from partitioning.shardings import size_text
from processes import preemption, preflight
from processes.watchdog import STARTING, Watchdog
from runtime import exit_codes, free_space
from runtime.suggest import nearest
from training import base_parameters, restore, run_tokenizer
from training.base_parameters import Base
from training.metrics.console import say
from training.setup import Job


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Exports the model of a checkpoint, or of checkpoint.initialize_from where no run is named."""
  if flags.TO.value is None:
    raise ValueError("export: name the folder to write with --to=FOLDER")
  location = _location()
  run_tokenizer.adopt(flags.CONFIG.value, location)
  [ready] = build.prepare(flags.CONFIG)
  config = ready.config
  if config.model.name != "transformer":
    raise ValueError(
      f"model.name={config.model.name!r}: other programs have no such model; decoders are exported "
      f"(the recipe lm, and the presets)"
    )
  if flags.MERGE.value and not config.lora.rank:
    raise ValueError("--merge: the model has no adapters (lora.rank=0); leave it out")
  plan, what = _planned(ready, None)
  folder = export_folder.ExportFolder(export_folder.check(flags.TO.value, _checkpoints(location)))
  free_space.require(folder.path, plan.bytes, "the export", "give another --to")
  more = {"to": str(folder.final), "files": [file.header().hex()[:64] for file in plan.files]}
  preflight_facts.about_to_run(ready, {}, flags.workdir(), writes=False, more=more)
  step, params, _ = restore.model_state(ready, location)
  if config.lora.rank and not flags.MERGE.value:
    plan, what = _planned(ready, Base.of_step(location, step))
  seconds = config.processes.start_timeout_seconds
  preflight.same_folder(watch.group, folder.path, timeout_seconds=seconds)

  def run() -> int:
    watch.at("exporting", STARTING)
    together = Together(watch.group, timeout_seconds=seconds)
    with preemption.undone(folder.remove):
      export.write(folder, plan, export.Fetcher(params, config), together)
    say(f"exported {what} of {location}, step {step}, to {folder.final} ({size_text(plan.bytes)})")
    return exit_codes.DONE

  return run


def _location() -> str:
  """Returns where the parameters are: the run that is named, else checkpoint.initialize_from."""
  named = flags.CHECKPOINT.value or flags.WORKDIR.value
  return named or flags.CONFIG.value.checkpoint.initialize_from or str(flags.workdir())


def _planned(ready: Job, base: Base | None) -> tuple[export.Plan, str]:
  """Returns what is written, and what it is called.

  Args:
    ready: the job.
    base: where the frozen parameters were, for adapters.

  Raises:
    ValueError: other programs have no such model, or the dtype is not known.
  """
  config = ready.config
  dtype = _dtype(config.training.parameter_dtype)
  encoder = tokenizer.load(config.data.tokenizer)
  ids = {"end": encoder.end, "start": encoder.start if encoder.has_bos else None}
  copies = run_tokenizer.contents(config)
  source = json.loads(copies.pop(export_folder.CONFIG_FILE, b"{}"))
  described = export.model_config(config, dtype, **ids, source=source)
  model_type = described["model_type"]
  if config.lora.rank and not flags.MERGE.value:
    return _adapter(ready, base, model_type, dtype)
  small = tokenizer_files(copies, **ids, special=encoder.special)
  return export.planned(config, described, dtype, small), f"a {model_type} model in {dtype}"


def _adapter(ready: Job, base: Base | None, model_type: str, dtype: str) -> tuple[export.Plan, str]:
  """Returns the plan of the adapters alone; raises ValueError where more than they was trained."""
  adapters = {*base_parameters.adapters(ready)}
  if others := sorted(ready.program.trained - adapters):
    raise ValueError(
      f"training.trainable: besides the adapters {len(others)} parameters were trained (such as "
      f"{others[0]}), which an adapter's files do not hold; write the model with --merge"
    )
  metadata = {} if base is None else {"base_digest": base.digest, "base_dtype": base.dtype}
  name = base.folder if base is not None and base.step is None else None
  plan = export.planned_adapter(ready.config, model_type, dtype, name, metadata)
  return plan, f"the adapters of a {model_type} model in {dtype}"


def _dtype(default: str) -> str:
  """Returns the dtype of the weights."""
  dtype = flags.DTYPE.value or default
  if dtype not in DTYPES:
    near = nearest(dtype, DTYPES)
    raise ValueError(f"--dtype={dtype!r}: one of {', '.join(DTYPES)} is needed{near}")
  return dtype


def _checkpoints(location: str) -> epath.Path:
  """Returns the folder of a run's checkpoints."""
  return checkpoints.parse_location(location)[0]
