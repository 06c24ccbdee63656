"""Pipeline schedules: which microbatch each stage works on in each tick.

A tick is the time of one chunk's forward pass, of one chunk's backward pass, or of both: all stages
do the same kind of work in a tick, so that the schedule is one SPMD program without conditionals.
The layers are cut into `chunks` consecutive parts per stage, dealt out in turn: of S stages, stage
d has the chunks d, S + d, 2 S + d, ... in the order of the layers.

- `gpipe` (arXiv:1811.06965): all forward passes, then all backward passes.
- `1f1b` (arXiv:1806.03377, PipeDream-flush): a microbatch's backward pass begins as soon as its
  forward pass is done, so a stage keeps the inputs of few microbatches, however many there are.
- `interleaved` (arXiv:2104.04473, section 2.2.2): 1F1B with several chunks per stage, which divides
  the bubble by their number.

Unit u of the forward passes is done by stage d in tick u + d, unit w of the backward passes in tick
w + (S - 1 - d) + S v - 1 of v chunks. Units go through S microbatches of one chunk, then the same
microbatches of the next chunk.
"""

import dataclasses
import enum
from typing import Any

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved"
KINDS = (GPIPE, ONE_F_ONE_B, INTERLEAVED)


class Work(enum.Enum):
  """What a stage does in a part of a tick."""

  FORWARD = "forward"
  BACKWARD = "backward"


@dataclasses.dataclass(frozen=True)
class Unit:
  """One chunk's pass over one microbatch.

  Attributes:
    work: forward or backward.
    microbatch: counted from 0.
    chunk: counted from 0 among the stage's chunks, in the order of the layers.
  """

  work: Work
  microbatch: int
  chunk: int


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A pipeline schedule.

  Attributes:
    kind: one of KINDS.
    stages: S, the size of the mesh axis.
    microbatches: M, of a pass through the pipeline.
    chunks: v, per stage; 1 unless the kind is `interleaved`. Above 1, M is a multiple of S.
  """

  kind: str
  stages: int
  microbatches: int
  chunks: int = 1

  @property
  def units(self) -> int:
    """Returns the forward passes of a stage; as many backward passes."""
    return self.microbatches * self.chunks

  @property
  def slots(self) -> int:
    """Returns how many inputs of each chunk a stage keeps.

    With one chunk, stage d keeps an input for 2 (S - 1 - d) + 1 ticks, and the first stage's are
    embeddings, which it computes again; with several, two groups of S microbatches are under way.
    """
    return 2 * self.stages - (3 if self.chunks == 1 else 0)

  @property
  def forward_ticks(self) -> int:
    """Returns the ticks with a forward pass, the first ones of a step."""
    return self.units + self.stages - 1

  @property
  def first_backward(self) -> int:
    """Returns the first tick with a backward pass; of `gpipe`, after the last forward pass."""
    if self.kind == GPIPE:
      return self.forward_ticks
    return self.stages * self.chunks - 1

  @property
  def ticks(self) -> int:
    """Returns the ticks of a step."""
    return self.first_backward + self.units + self.stages - 1

  @property
  def bubble(self) -> float:
    """Returns the share of the ticks' work that waits: (S - 1) / (M v + S - 1)."""
    return (self.stages - 1) / (self.units + self.stages - 1)

  def unit(self, number: Any) -> tuple[Any, Any]:
    """Returns (microbatch, chunk) of a unit of the forward passes; of backward ones, reversed.

    Args:
      number: counted from 0; an int, or an integer array.
    """
    if self.chunks == 1:
      return number, number * 0
    in_group = number % (self.stages * self.chunks)
    group = number // (self.stages * self.chunks)
    return group * self.stages + number % self.stages, in_group // self.stages

  def at(self, stage: int, tick: int) -> tuple[Unit, ...]:
    """Returns what a stage does in a tick: at most a forward pass, then a backward pass."""
    found = []
    forward = tick - stage
    if 0 <= forward < self.units:
      found.append(Unit(Work.FORWARD, *self.unit(forward)))
    backward = tick - self.first_backward - (self.stages - 1 - stage)
    if 0 <= backward < self.units:
      microbatch, chunk = self.unit(backward)
      found.append(Unit(Work.BACKWARD, microbatch, self.chunks - 1 - chunk))
    return tuple(found)
