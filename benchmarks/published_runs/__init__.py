"""Published training speeds as data: a file per source, each run with its settings.

A file names its `source`, its `version` (a commit or a date) and the `folder` there; `[shared]` has
the fields of all its runs, and each `[[run]]` has its own. What a row cannot say with our settings
is in `differs`.
"""

import dataclasses
import functools
import math
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.schema import recipes
from planning.topology import Topology, parse
from runtime.chips import overridden

FOLDER = pathlib.Path(__file__).parent
MEASURED = FOLDER.parent / "measured_runs.toml"  # by this application, not published


@dataclasses.dataclass(frozen=True)
class PublishedRun:
  """A published speed, and the settings of the run.

  Attributes:
    source: where it is published.
    version: its commit or date.
    where: the file, and the row of its table.
    software: versions, as far as they are published.
    model: preset.
    topology: as `plan` takes it.
    rows: of the global batch.
    length: tokens of a row.
    rematerialization: of `training.rematerialization`.
    tokens_per_second: of a chip; 0: `tflops` is published.
    tflops: model TFLOP/s of a chip, attention's scores in full; 0: `tokens_per_second` is.
    mesh: axis -> devices, of a slice.
    slices: axis -> slices.
    sizes: keys of `model` that differ from the preset's.
    accumulation: microbatches of a step, one after another.
    microbatches: of pipeline stages; 0: as by default.
    chunks: of the layers of a pipeline stage; 1: 1F1B.
    matmuls: dtype of the layers' matmuls: bfloat16, float8 or int8.
    parameters: dtype of the parameters.
    state_over_data: the optimizer's state is sharded over data, too (ZeRO-1).
    fused: elementwise operations are fused; an eager framework runs them one by one.
    settings: further keys of the config.
    constants: of hardware that is not the usual one, as of `planning.constants`.
    memory_gib: peak of a device; 0: not published.
    pytorch_loss: `float32` or `compiled`, of a run by PyTorch's FSDP2; "": of another framework.
    differs: how the published run differs from ours with these settings.
  """

  source: str
  version: str
  where: str
  software: str
  model: str
  topology: str
  rows: int
  length: int
  rematerialization: str
  tokens_per_second: float = 0.0
  tflops: float = 0.0
  mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
  slices: Mapping[str, int] = dataclasses.field(default_factory=dict)
  sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  accumulation: int = 1
  microbatches: int = 0
  chunks: int = 1
  matmuls: str = "bfloat16"
  parameters: str = "float32"
  state_over_data: bool = False
  fused: bool = True
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  constants: str = ""
  memory_gib: float = 0.0
  pytorch_loss: str = ""
  differs: str = ""

  @functools.cached_property
  def place(self) -> Topology:
    """Returns the topology, of one slice."""
    return parse(self.topology, overridden(self.constants)[0])

  @property
  def has_experts(self) -> bool:
    """Returns whether its model is a mixture of experts."""
    return bool({**recipes.PRESETS[self.model].model, **self.sizes}.get("experts"))

  @property
  def devices(self) -> int:
    """Returns the number of devices, as JAX counts them."""
    return self.place.devices * math.prod(self.slices.values())

  @property
  def overrides(self) -> dict[str, Any]:
    """Returns dotted key -> value of the config, for a preset on one device."""
    found = {f"mesh.{axis}": size for axis, size in self.mesh.items()}
    found |= {f"mesh_dcn.{axis}": size for axis, size in self.slices.items()}
    found |= {f"model.{key}": value for key, value in self.sizes.items()}
    found |= {
      "data.global_batch_size": self.rows,
      "data.sequence_length": self.length,
      "training.rematerialization": self.rematerialization,
      "training.gradient_accumulation_steps": self.accumulation,
      "training.parameter_dtype": self.parameters,
    }
    if self.matmuls != "bfloat16":
      found["training.matmul_dtype"] = self.matmuls
    if self.microbatches:  # of stages, of which only the ends compute embeddings and losses
      found["training.microbatches"] = self.microbatches
      found |= {"training.pipeline_ends": "conditional", "training.pipeline_gather": "step"}
    if self.chunks > 1:
      found |= {"training.pipeline": "interleaved", "training.pipeline_chunks": self.chunks}
    if self.state_over_data and "data" in self.mesh:
      found["partitioning.optimizer.model"] = ("fsdp", "data")
    if self.constants:
      found["planning.constants"] = self.constants
    return {**found, **self.settings}


@functools.cache
def read() -> tuple[PublishedRun, ...]:
  """Returns all published runs, by file.

  Raises:
    TypeError: a run lacks a field, or has one that there is not.
  """
  return tuple(run for path in sorted(FOLDER.glob("*.toml")) for run in runs_of(path))


def runs_of(path: pathlib.Path) -> Iterator[PublishedRun]:
  """Yields the runs of a file."""
  text = tomllib.loads(path.read_text())
  source = {"source": text["source"], "version": text["version"]}
  for run in text["run"]:
    given = {**source, **text.get("shared", {}), **run}
    given["where"] = f"{text['folder']}: {given['where']}"
    yield PublishedRun(**given)


def error(ratio: float) -> float:
  """Returns how far a prediction is off: 0.25 of 1.25 and of 1 / 1.25."""
  return max(ratio, 1 / ratio) - 1


def bound(ratios: Sequence[float]) -> float:
  """Returns the error that nine of ten are within, of n runs the one in place 0.9 (n + 1).

  All, if they are fewer than nine. Source: split conformal prediction (arXiv:1604.04173).
  """
  errors = sorted(map(error, ratios))
  return errors[min(len(errors), math.ceil(0.9 * (len(errors) + 1))) - 1]
