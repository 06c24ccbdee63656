"""How fast the steps are: tokens or examples per second, and MFU."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import psutil
from jax.sharding import Mesh

from models.spec import ModelSpec
from runtime.chips import peak_flops
from runtime.units import clock
from training.specs import BatchSpec
from training.tasks import TASKS


class Meter:
  """Seconds per step, rates, MFU and waiting, over the steps since the last lap."""

  def __init__(self, batches: BatchSpec, model: ModelSpec, mesh: Mesh):
    """Takes what a step computes, and on which devices."""
    task, self._steps, self._ramp = TASKS[batches.task], batches.steps, batches.ramp
    self._unit = task.unit
    self._per_row = batches.sequence_length if task.weighs_tokens else 1
    self._flops = {
      pieces: task.sequences * pieces * _of_pieces(model, pieces).train_flops_per_example()
      for _, pieces in self._ramp.pieces
    }
    self._device = mesh.local_devices[0]
    peak = peak_flops(self._device)
    self._peak = peak * mesh.size if peak else None
    self._paused = 0.0
    self._began = self._lap_began = time.monotonic()
    self._first_step = self._lap_step = 0
    self._wait = self._first_wait = 0.0
    self.seconds = 0.0
    self.wait_share = 0.0

  def start(self, step: int, wait_seconds: float, at: float) -> None:
    """Starts to measure after the first step, which includes compilation; `at` as of `lap`."""
    self._began = self._lap_began = at - self._paused
    self._first_step = self._lap_step = step
    self._wait = self._first_wait = wait_seconds

  def back(self, bad_step: int, step: int) -> None:
    """Continues from an earlier step; the time of the undone steps stays counted."""
    self._first_step -= bad_step - step
    self._lap_began, self._lap_step = time.monotonic() - self._paused, step

  def lap(self, step: int, wait_seconds: float, at: float) -> dict[str, float]:
    """Returns the numbers of the steps since the last lap, for `metrics.jsonl`.

    Args:
      step: the newest step that is done.
      wait_seconds: the time that the loop has waited for data so far.
      at: when it was done, on the clock of `time.monotonic`.
    """
    now = at - self._paused
    count = max(1, step - self._lap_step)
    seconds = max(now - self._lap_began, 1e-9) / count
    values = {
      "step_seconds": seconds,
      "data_wait_seconds": (wait_seconds - self._wait) / count,
      f"{self._unit}_per_second": self._per_step(step, count) / seconds,
    }
    if self._peak is not None:
      values["mfu"] = self._flops_per_step(step, count) / self._peak / seconds
    self.seconds = now - self._began
    self.wait_share = (wait_seconds - self._first_wait) / max(self.seconds, 1e-9)
    self._lap_began, self._lap_step, self._wait = now, step, wait_seconds
    stats = self._device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
      values["peak_bytes"] = stats["peak_bytes_in_use"]
    # The first lap has no steps: it marks the start of the measurement.
    return values if step > self._first_step else {}

  def _per_step(self, step: int, count: int) -> float:
    """Returns the tokens or examples per step of the last `count` of the first `step` steps."""
    rows = self._ramp.taken(step) - self._ramp.taken(step - count)
    # Whatever its rows are cut into: the tokens stay, and examples are those of the data set.
    return rows / count * self._per_row

  def _flops_per_step(self, step: int, count: int) -> float:
    """Returns the FLOPs per step, likewise."""
    stages = self._ramp.stages(step, step - count)
    return (
      sum((stop - first) * shape.rows * self._flops[shape.pieces] for first, stop, shape in stages)
      / count
    )

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Stops the clock for a while (evaluation)."""
    began = time.monotonic()
    try:
      yield
    finally:
      self.pause_for(time.monotonic() - began)

  def pause_for(self, seconds: float) -> None:
    """Takes seconds out of the measured time."""
    self._paused += seconds

  def text(self, step: int, values: dict[str, float]) -> tuple[list[str], list[str]]:
    """Returns the parts of the progress line, and those that a narrow terminal can do without."""
    parts = [f"step {step}/{self._steps}", f"loss {values['loss']:.4f}"]
    if "reward" in values:
      parts.append(f"reward {values['reward']:.4f}")
    norm, memory = f"grad_norm {values['grad_norm']:.3f}", self._memory(values)
    parts.append(norm)
    if "step_seconds" in values:
      parts.append(f"{values[f'{self._unit}_per_second']:,.0f} {self._unit}/s")
      if "mfu" in values:
        parts.append(f"MFU {100 * values['mfu']:.1f} %")
      parts.append(memory)
      left = (self._steps - step) * self.seconds / max(1, step - self._first_step)
      parts.append(f"left {clock(left)}")
    return parts, [part for part in (norm, memory) if part in parts]

  def _memory(self, values: dict[str, float]) -> str:
    """Returns the most memory that the device has used, or where it does not say, the process's."""
    if "peak_bytes" not in values:
      return f"memory {psutil.Process().memory_info().rss / 2**30:.1f} GiB"
    limit = (self._device.memory_stats() or {}).get("bytes_limit")
    of = f" of {limit / 2**30:.0f}" if limit else ""
    return f"memory {values['peak_bytes'] / 2**30:.1f}{of} GiB"


def _of_pieces(model: ModelSpec, pieces: int) -> ModelSpec:
  """Returns a model's spec for rows that are cut into pieces."""
  if pieces == 1 or "sequence_length" not in model.__dataclass_fields__:
    return model
  return dataclasses.replace(model, sequence_length=model.sequence_length // pieces)
