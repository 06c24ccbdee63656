"""What the processes compare before the first collective; see processes/preflight.py."""

from collections.abc import Mapping
from typing import Any

import jax
from etils import epath, epy

from input_pipeline.source import Source
from processes.coordination import current
from training.checkpointing import integrity
from training.setup import Job

with epy.lazy_imports():  # which a single process does not need
  from processes import preflight
with epy.lazy_imports():  # of runs with a model folder
  from interop import hf_folder


def about_to_run(
  job: Job,
  sources: Mapping[str, Source],
  workdir: epath.Path,
  *,
  writes: bool,
  more: Mapping[str, Any] | None = None,
) -> None:
  """Compares what each process sees: devices, batch, data, checkpoints, and the workdir.

  Args:
    job: prepared.
    sources: split -> what was opened.
    workdir: of the run.
    writes: whether the run writes to it: process 0 does, and all must see it.
    more: name -> further values that must be the same, as JSON.

  Raises:
    DifferenceError: with what differs, and on which processes; or which do not see the workdir.
    OSError: the workdir cannot be written.
  """
  group = current()
  seconds = job.config.processes.start_timeout_seconds
  facts: dict[str, Any] = {
    "devices": len(jax.devices()),
    "devices of each process": len(jax.local_devices()),
    "kind of device": job.mesh.local_devices[0].device_kind,
    "mesh": job.devices.sizes,
    "checkpoints": integrity.steps(workdir / integrity.FOLDER),
    **(more or {}),
  }
  if "folder" in job.config.model:
    folder = hf_folder.local(job.config.model.folder, "model.folder")
    facts["config.json of model.folder"] = hf_folder.digest(folder)
  source = job.config.checkpoint.initialize_from
  if writes and source and not facts["checkpoints"] and hf_folder.is_model(source):
    from interop import read_weights  # of runs that begin with a model folder alone

    folder = hf_folder.local(source, "checkpoint.initialize_from", weights=True)
    facts["weights of checkpoint.initialize_from"] = read_weights.digest(folder)
  for name, array in job.batch.items():
    facts[f"batch/{name}"] = f"{array.dtype.name}{list(array.shape)}"
  for split, source in sources.items():
    facts[f"data, {split}"] = f"{source.name}, {len(source)} rows, digest {source.fingerprint}"
    if source.bad:
      facts[f"bad records, {split}"] = f"{len(source.bad)}, digest {source.bad.digest}"
  if group.alone:
    return
  preflight.agree(group, "run", facts, timeout_seconds=seconds)
  if writes:
    preflight.same_folder(group, workdir, timeout_seconds=seconds)
