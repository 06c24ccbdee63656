"""Distillation: a model learns the distributions of a frozen teacher, beside the data.

Sources: arXiv:1503.02531 (temperature, and a loss mixed with the data's), arXiv:2306.08543 (the
reverse divergence).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.losses import Batch, Sums, picked_logits, weighted_sum
from partitioning.constraints import current_layout, layout_in_force
from partitioning.parallel import chunked_vocabulary, collectives
from partitioning.parallel.sharded_function import Residual
from partitioning.rules import Axes

FORWARD, REVERSE = "forward", "reverse"  # distillation.divergence
RESIDUAL = Residual(between="BRd", inside="BTd")  # the teacher's, in the student's legend


def loss_sums(student: Any, x_BRD: Float[Array, "B R D"], batch: Batch) -> Sums:
  """Returns the sums of a student's tokens: the loss, and its parts.

  The loss is (1 - w) times the cross-entropy of the data plus w t**2 times the divergence of the
  distributions at temperature t, so that w means the same at each temperature.

  Args:
    student: a `Transformer` with a teacher.
    x_BRD: its residual after the last layer.
    batch: of its `ordered`.

  Raises:
    ValueError: their attention splits the sequence in different ways.
  """
  keys = student.spec.distillation
  heads = [student.unembedded(student.final_norm(x_BRD)), _teacher_head(student, batch)]
  numbers = Divergence(
    keys.divergence, keys.temperature, (student.finished, student.teacher.finished)
  )
  given = batch["targets"], numbers, student.spec.loss_chunks
  found = chunked_vocabulary.chunked_logits(heads, *given)
  data, divergence = (weighted_sum(x_BT, batch["weights"]) for x_BT in found)
  loss = (1 - keys.weight) * data + keys.weight * keys.temperature**2 * divergence
  return {"loss": loss, "data_loss": data, "teacher_divergence": divergence}


def _teacher_head(student: Any, batch: Batch) -> chunked_vocabulary.Head:
  """Returns what the teacher's logits are made of, without gradients."""
  teacher, (layout, _) = student.teacher, current_layout()
  ways = {one.way(batch["tokens"].shape[1]) for one in (student, teacher)}
  if len(ways) > 1:
    raise ValueError(
      f"distillation.teacher: where mesh.context splits the sequence, attention of the model and "
      f"of its teacher runs by {' and '.join(sorted(ways))}; set model.context_attention=ring"
    )
  with layout_in_force(dataclasses.replace(layout, legend=teacher.spec.legend)):
    x_BRD, *_ = teacher.run_layers(teacher.enter(batch), batch, None)
    head = teacher.unembedded(teacher.final_norm(x_BRD), RESIDUAL)
  x, kernel = map(jax.lax.stop_gradient, (head.x, head.kernel))
  return dataclasses.replace(head, x=x, kernel=kernel)


@dataclasses.dataclass(frozen=True)
class Divergence:
  """The cross-entropy and the divergence of each token, by the logits of two models in chunks.

  A reduction of `chunked_vocabulary.chunked_logits`, as `losses.TokenNumbers` is. With p and q the
  teacher's and the student's distributions at a temperature, the forward divergence is
  KL(p, q), the reverse one KL(q, p).

  Attributes:
    direction: FORWARD or REVERSE.
    temperature: divides the logits.
    finished: of the student and of the teacher, see `losses.TokenNumbers`.
  """

  direction: str
  temperature: float
  finished: tuple[Callable[[jax.Array, jax.Array | int], jax.Array], ...]
  results = 2

  def start(self, targets: Int[Array, "*X"], dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Returns what is known of each token before the first chunk."""
    names = ("picked", "total", "student_total", "teacher_total", "difference")
    found = {name: jnp.zeros(targets.shape, dtype) for name in names}
    least = jnp.full(targets.shape, jnp.finfo(dtype).min, dtype)
    return {**found, "student_largest": least, "teacher_largest": least}

  def add(
    self,
    found: dict[str, jax.Array],
    heads: Sequence[Float[Array, "*X V"]],
    targets: Int[Array, "*X"],
    first: jax.Array | int,
  ) -> dict[str, jax.Array]:
    """Returns what is known with the logits of both for classes from `first` on, not finished.

    `difference` is the sum of the differences of logits by the exponentials of the distribution
    that the divergence is an expectation of.
    """
    logits = [finished(x, first) for finished, x in zip(self.finished, heads, strict=True)]
    classes = first + jnp.arange(logits[0].shape[-1], dtype=targets.dtype)
    known = {"picked": found["picked"] + picked_logits(logits[0], targets, classes)}
    rescaled, powers = {}, {}
    for name, x in zip(("student", "teacher"), logits, strict=True):
      before = found[f"{name}_largest"]
      largest = jnp.maximum(before, jnp.max(jax.lax.stop_gradient(x), axis=-1))
      below, moved = x - largest[..., None], before - largest
      rescaled[name] = jnp.exp(moved / self.temperature)
      powers[name] = jnp.exp(below / self.temperature)
      total = found[f"{name}_total"] * rescaled[name] + jnp.sum(powers[name], axis=-1)
      known |= {f"{name}_largest": largest, f"{name}_total": total}
      if name == "student":  # at temperature 1, of the cross-entropy
        own = found["total"] * jnp.exp(moved)
        known["total"] = own + jnp.sum(jnp.exp(below), axis=-1)
    name, of, other = self._sides(*logits)
    more = jnp.sum(powers[name] * (of - other), axis=-1)
    return {**known, "difference": found["difference"] * rescaled[name] + more}

  def _sides(self, student: Any, teacher: Any) -> tuple[str, Any, Any]:
    """Returns which distribution the divergence is an expectation of, its part, and the other's."""
    if self.direction == FORWARD:
      return "teacher", teacher, student
    return "student", student, teacher

  def finish(
    self, found: dict[str, jax.Array], targets: Int[Array, "*X"], axes: Axes
  ) -> tuple[jax.Array, ...]:
    """Returns the numbers; `axes` split the classes, each device having seen its own part."""
    del targets
    largest, factors = {}, {}
    for name in ("student", "teacher"):
      own = found[f"{name}_largest"]
      largest[name] = jax.lax.pmax(own, axes) if axes else own
      factors[name] = own - largest[name]

    def whole(value: jax.Array, below: jax.Array, temperature: float) -> jax.Array:
      return collectives.total(value * jnp.exp(below / temperature), axes) if axes else value

    at = self.temperature
    totals = {name: whole(found[f"{name}_total"], factors[name], at) for name in largest}
    picked = collectives.total(found["picked"], axes) if axes else found["picked"]
    loss = jnp.log(whole(found["total"], factors["student"], 1.0)) + largest["student"] - picked
    student, teacher = (jnp.log(totals[name]) + largest[name] / at for name in largest)
    name, of, other = self._sides(student, teacher)
    expected = whole(found["difference"], factors[name], at) / (totals[name] * at)
    return loss, expected - of + other
