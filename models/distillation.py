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

from models.losses import Batch, Sums, TokenNumbers, weighted_sum
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

  @property
  def _numbers(self) -> tuple[TokenNumbers, ...]:
    """Returns those of the student's cross-entropy, of its distribution, and of the teacher's."""
    student, teacher = self.finished
    data = TokenNumbers(("loss",), student)
    tempered = (TokenNumbers(("normalizer",), x, self.temperature) for x in (student, teacher))
    return data, *tempered

  @property
  def _sides(self) -> tuple[int, int]:
    """Returns which numbers are of the distribution that is averaged over, and of the other."""
    return (2, 1) if self.direction == FORWARD else (1, 2)

  def start(self, targets: Int[Array, "*X"], dtype: jnp.dtype) -> tuple:
    """Returns what is known of each token before the first chunk."""
    found = (numbers.start(targets, dtype) for numbers in self._numbers)
    return *found, jnp.zeros(targets.shape, dtype)

  def add(
    self,
    found: tuple,
    heads: Sequence[Float[Array, "*X V"]],
    targets: Int[Array, "*X"],
    first: jax.Array | int,
  ) -> tuple:
    """Returns what is known with the logits of both for classes from `first` on, not finished.

    The last is the sum of the differences of logits by the exponentials of the distribution that
    the divergence is an expectation of, relative to its largest logit so far.
    """
    *before, difference = found
    given, (one, other) = (heads[0], *heads), self._sides
    known = [
      numbers.add(x, [logits], targets, first)
      for numbers, x, logits in zip(self._numbers, before, given, strict=True)
    ]
    of, rest = (self._numbers[n].chunk(given[n], first) for n in (one, other))
    largest = known[one]["largest"]
    more = jnp.sum(jnp.exp(of - largest[..., None]) * (of - rest), axis=-1)
    return *known, difference * jnp.exp(before[one]["largest"] - largest) + more

  def finish(
    self, found: tuple, targets: Int[Array, "*X"], axes: Axes
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers; `axes` split the classes, each device having seen its own part."""
    *known, difference = found
    pairs = zip(self._numbers, known, strict=True)
    numbers = [one.finish(x, targets, axes)[0] for one, x in pairs]
    one, other = self._sides
    share = difference * jnp.exp(known[one]["largest"] - numbers[one])
    expected = collectives.total(share, axes) if axes else share
    return numbers[0], expected - numbers[one] + numbers[other]
