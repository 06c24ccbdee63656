"""The verb `export`: a checkpoint as a folder that transformers and others load."""

from collections.abc import Callable

from etils import epath
from ml_collections import ConfigDict

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
from training import restore, run_tokenizer
from training.metrics.console import say


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
  dtype = _dtype(config)
  encoder = tokenizer.load(config.data.tokenizer)
  ids = {"end": encoder.end, "start": encoder.start if encoder.has_bos else None}
  described = export.model_config(config, dtype, **ids, source={})
  copies = run_tokenizer.contents(config)
  plan = export.planned(
    config, described, dtype, tokenizer_files(copies, **ids, special=encoder.special)
  )
  folder = export_folder.ExportFolder(export_folder.check(flags.TO.value, _checkpoints(location)))
  free_space.require(folder.path, plan.bytes, "the export", "give another --to")
  more = {"to": str(folder.final), "dtype": dtype}
  preflight_facts.about_to_run(ready, {}, flags.workdir(), writes=False, more=more)
  step, params, _ = restore.model_state(ready, location)
  seconds = config.processes.start_timeout_seconds
  preflight.same_folder(watch.group, folder.path, timeout_seconds=seconds)

  def run() -> int:
    watch.at("exporting", STARTING)
    together = Together(watch.group, timeout_seconds=seconds)
    with preemption.undone(folder.remove):
      export.write(folder, plan, export.Fetcher(params, dtype), together)
    what = f"{described['model_type']}, {dtype}, {size_text(plan.bytes)}"
    say(f"exported step {step} of {location} to {folder.final} ({what})")
    return exit_codes.DONE

  return run


def _location() -> str:
  """Returns where the parameters are: the run that is named, else checkpoint.initialize_from."""
  named = flags.CHECKPOINT.value or flags.WORKDIR.value
  return named or flags.CONFIG.value.checkpoint.initialize_from or str(flags.workdir())


def _dtype(config: ConfigDict) -> str:
  """Returns the dtype of the weights."""
  dtype = flags.DTYPE.value or config.training.parameter_dtype
  if dtype not in DTYPES:
    near = nearest(dtype, DTYPES)
    raise ValueError(f"--dtype={dtype!r}: one of {', '.join(DTYPES)} is needed{near}")
  return dtype


def _checkpoints(location: str) -> epath.Path:
  """Returns the folder of a run's checkpoints."""
  return checkpoints.parse_location(location)[0]
