"""The verb `export`: a checkpoint as a folder that transformers and others load."""

import copy
import json
from collections.abc import Callable

from etils import epath

from commands import build, flags, preflight_facts
from input_pipeline.text import tokenizer
from interop import export, hf_folder, peft_adapter
from interop.export import tokenizer_files
from interop.safetensors_file import NAMES
from models import model_spec, mup
from partitioning.rules import size_text
from processes import preemption, preflight
from processes.watchdog import STARTING, Watchdog
from runtime import exit_codes, files
from runtime.layer_kinds import QUANTIZED
from runtime.suggest import nearest
from training import base_parameters, run_tokenizer
from training.base_parameters import Base
from training.checkpointing import reading
from training.checkpointing.consensus import Together
from training.metrics.console import say
from training.setup import Job


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Exports the model of a checkpoint, or of checkpoint.initialize_from where no run is named."""
  if flags.TO.value is None:
    raise ValueError("export: name the folder to write with --to=FOLDER")
  given = flags.CONFIG.value
  begins = given.checkpoint.initialize_from or given.model.get("folder") or ""
  ready, location = build.of_checkpoint(flags.CHECKPOINT.value or flags.WORKDIR.value or begins)
  config = ready.config
  if config.model.name != "transformer":
    raise ValueError(
      f"model.name={config.model.name!r}: other programs have no such model; decoders are exported "
      f"(the recipe lm, and the presets)"
    )
  if flags.MERGE.value and not config.lora.rank:
    raise ValueError("--merge: the model has no adapters (lora.rank=0); leave it out")
  whole = flags.MERGE.value or not config.lora.rank
  quantized = ready if whole and config.training.frozen_dtype in QUANTIZED else None
  if quantized:
    given = copy.deepcopy(ready.given)
    given.training.frozen_dtype = None
    ready = build.job(given, ready.devices)
    config = ready.config
  plan, what = _planned(ready, location)
  folder = export.ExportFolder(export.check_folder(flags.TO.value, _checkpoints(location)))
  files.require_space(folder.path, plan.bytes, "the export", "give another --to")
  more = {"to": str(folder.final), "files": [file.header().hex()[:64] for file in plan.files]}
  preflight_facts.about_to_run(ready, {}, flags.workdir(), writes=False, more=more)
  if quantized and not hf_folder.is_model(location):
    step, params = base_parameters.unquantized_parameters(quantized, ready, location)
  else:
    step, params, _ = base_parameters.model_state(ready, location)
  if config.lora.rank and not flags.MERGE.value:
    plan, what = _planned(ready, location, _base(location, step))
  seconds = config.processes.start_timeout_seconds
  preflight.same_folder(watch.group, folder.path, timeout_seconds=seconds)

  def run() -> int:
    watch.at("exporting", STARTING)
    together = Together(watch.group, timeout_seconds=seconds)
    with preemption.undone(folder.remove):
      export.write(folder, plan, export.fetcher(params, model_spec(config)), together)
    which = f", step {step}," if step else ""
    say(f"exported {what} of {location}{which} to {folder.final} ({size_text(plan.bytes)})")
    return exit_codes.DONE

  return run


def _planned(ready: Job, location: str, base: Base | None = None) -> tuple[export.Plan, str]:
  """Returns what is written, and what it is called.

  Args:
    ready: the job.
    location: of a run, or of a model folder.
    base: where the frozen parameters were, for adapters.

  Raises:
    ValueError: other programs have no such model, or the dtype is not known.
  """
  config = ready.config
  encoder = tokenizer.load(config.data.tokenizer)
  if encoder.size > config.model.vocabulary_size:
    raise ValueError(
      f"data.tokenizer={encoder.name} has {encoder.size:,} tokens, and the model is for "
      f"{config.model.vocabulary_size:,}; give the model's own tokenizer"
    )
  ids = {"end": encoder.end, "start": encoder.start if encoder.has_bos else None}
  copies = run_tokenizer.contents(config.data, config.model)
  source = json.loads(copies.pop(hf_folder.CONFIG, b"{}"))
  dtype = _dtype(source.get("dtype") or source.get("torch_dtype"), config.training.parameter_dtype)
  ours, length = mup.plain_keys(config.model), config.data.sequence_length
  described = export.model_config(ours, length, dtype, **ids, source=source)
  model_type = described["model_type"]
  if config.lora.rank and not flags.MERGE.value:
    return _adapter(ready, base, model_type, flags.DTYPE.value or config.training.parameter_dtype)
  dtypes = {}
  if hf_folder.is_model(location) and not config.lora.rank and not flags.DTYPE.value:
    dtypes = export.stored_dtypes(location, model_spec(config), "--checkpoint")
  small = tokenizer_files(copies, **ids, special=encoder.special)
  plan = export.planned(model_spec(config), described, dtype, small, dtypes)
  return plan, f"a {model_type} model in {dtype}"


def _adapter(ready: Job, base: Base | None, model_type: str, dtype: str) -> tuple[export.Plan, str]:
  """Returns the plan of the adapters alone; raises ValueError where more than they was trained."""
  adapters = {*base_parameters.ParameterReader(ready).adapters}
  if others := sorted(ready.program.trained - adapters):
    raise ValueError(
      f"training.trainable: besides the adapters {len(others)} parameters were trained (such as "
      f"{others[0]}), which an adapter's files do not hold; write the model with --merge"
    )
  layers = dict.fromkeys(name.rpartition("/")[0] for name in sorted(adapters))
  metadata, name = {peft_adapter.TARGETS: ",".join(layers)}, None
  if base is not None and base.step is None:  # a model folder, which others know
    metadata |= {peft_adapter.DIGEST: base.digest, peft_adapter.DTYPE: base.dtype}
    name = base.folder
  plan = export.planned_adapter(model_spec(ready.config), model_type, dtype, name, metadata)
  return plan, f"the adapters of a {model_type} model in {dtype}"


def _dtype(source: object, own: str) -> str:
  """Returns the dtype of a model's weights: given, of the folder it came from, or its own."""
  if (given := flags.DTYPE.value) and given not in NAMES:
    near = nearest(given, NAMES)
    raise ValueError(f"--dtype={given!r}: one of {', '.join(NAMES)} is needed{near}")
  return given or (source if source in NAMES else own)


def _checkpoints(location: str) -> epath.Path | None:
  """Returns the folder of a run's checkpoints; None of a model folder."""
  return None if hf_folder.is_model(location) else reading.parse_location(location)[0]


def _base(location: str, step: int) -> Base | None:
  """Returns where the frozen parameters of a run were, if it has not saved them."""
  return None if hf_folder.is_model(location) else Base.of_step(location, step)
