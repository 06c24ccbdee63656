"""What a run calls: callbacks every n steps, and the observer that reports about it.

A config file registers a callback in CALLBACKS, and `training.callbacks` names it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runtime.extensions import Table, error_text

if TYPE_CHECKING:  # configs name callbacks, and are read without JAX
  from runtime.collectives import Row


@dataclasses.dataclass(frozen=True)
class Context:
  """The argument of a callback.

  Attributes:
    step: the steps that are done.
    state: after this step (`training.state.State`). Do not keep a reference: the next step donates
      its buffers.
    metrics: of this step: `loss`, `grad_norm`, `learning_rate` and the model's own.
    job: the run's config, devices and layout (`training.setup.Job`).
    workdir: the run's folder.
  """

  step: int
  state: Any
  metrics: Mapping[str, float]
  job: Any
  workdir: Any


@dataclasses.dataclass(frozen=True)
class Callback:
  """A function, and how often it is called: on all processes alike, as its collectives need.

  Attributes:
    every_steps: the period.
    function: is called after every step that is a multiple of it.
    on_rollback: is called after training has gone back to an earlier state because of a bad step;
      its context has this state, the number of its step, and no metrics.
  """

  every_steps: int
  function: Callable[[Context], None]
  on_rollback: Callable[[Context], None] | None = None

  def __post_init__(self):
    """Raises ValueError for a period below one step."""
    if self.every_steps < 1:
      raise ValueError(f"a callback: every_steps={self.every_steps}: at least 1")


CALLBACKS: Table = Table("callback", {}, numerics=False)  # name -> Callback


class CallbackError(RuntimeError):
  """A callback has raised; the run ends."""


def due(callbacks: Mapping[str, Callback], step: int) -> bool:
  """Returns whether a callback is due after a step."""
  return any(step % callback.every_steps == 0 for callback in callbacks.values())


def call(callbacks: Mapping[str, Callback], context: Context, *, rollback: bool = False) -> None:
  """Calls those that are due, or on a rollback those that have `on_rollback`.

  Raises:
    CallbackError: one has raised, with its name and the place in its file.
  """
  for name, callback in callbacks.items():
    function = callback.on_rollback if rollback else callback.function
    if function is None or (not rollback and context.step % callback.every_steps):
      continue
    try:
      function(context)
    except Exception as error:
      when = "on the rollback to" if rollback else "after"
      said = f"the callback {name!r} fails {when} step {context.step}: {error_text(error)}"
      raise CallbackError(said) from error


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """A compiled train step.

  Attributes:
    program: as JAX has it (`jax.stages.Compiled`).
    collectives: that it exchanges, by mesh axis.
  """

  program: Any
  collectives: "Sequence[Row]"


class Observer:
  """Is called by a run on every process alike; this one ignores everything.

  Methods may hold collectives. What they raise ends the run.

  Attributes:
    sampler: compiled for `evaluation.sample_tokens`, once a sample was drawn.
  """

  sampler: Any = None

  def compiled(self, step: int, found: CompiledStep) -> None:
    """The train step is compiled, of the last shape of batches; `step` steps are done."""

  def evaluated(self, step: int, state: Any) -> None:
    """The state after a step is evaluated, and the result is in `metrics.jsonl`."""

  def saved(self, step: int) -> None:
    """The checkpoint of a step is committed."""

  def rolled_back(self, step: int) -> None:
    """Training has gone back to a step, and the line about it is in `metrics.jsonl`."""

  def sampled(self, drawn: bytes) -> None:
    """The newest state that was evaluated has continued a prompt."""

  def end(self, *, stopped: bool = False) -> None:
    """The run ends, having done its steps or stopped."""

  def failed(self, error: Exception) -> None:
    """An error ends the run."""
