"""Distillation: a model learns the distributions of a frozen teacher, beside the data.

Sources: arXiv:1503.02531 (temperature, and a loss mixed with the data's), arXiv:2306.08543 (the
reverse divergence), arXiv:2503.16870 (a stored teacher's likeliest tokens, and one class for the
rest).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.losses import Batch, Sums, TokenNumbers, in_chunk, weighted_sum
from models.spec import STORED_TEACHER
from partitioning.constraints import current_layout, layout_in_force
from partitioning.parallel import chunked_vocabulary, collectives
from partitioning.parallel.sharded_function import Residual
from partitioning.rules import Axes

FORWARD, REVERSE = "forward", "reverse"  # distillation.divergence
RESIDUAL = Residual(between="BRd", inside="BTd")  # the teacher's, in the student's legend
REST = -1  # among the ids of a stored teacher: all tokens that are not


def loss_sums(student: Any, x_BRD: Float[Array, "B R D"], batch: Batch) -> Sums:
  """Returns the sums of a student's tokens: the loss, and its parts.

  The loss is (1 - w) times the cross-entropy of the data plus w t**2 times the divergence of the
  distributions at temperature t, so that w means the same at each temperature.

  Args:
    student: a `Transformer` with a teacher, or whose batches have what is stored of one.
    x_BRD: its residual after the last layer.
    batch: of its `ordered`.

  Raises:
    ValueError: their attention splits the sequence in different ways.
  """
  keys, more = student.spec.distillation, []
  heads = [student.unembedded(student.final_norm(x_BRD))]
  if keys.top:
    numbers = TopDivergence(keys.temperature, student.finished)
    more = [(letters, batch[name]) for name, (letters, _) in STORED_TEACHER.items()]
  else:
    heads.append(_teacher_head(student, batch))
    finished = student.finished, student.teacher.finished
    numbers = Divergence(keys.divergence, keys.temperature, finished)
  given = batch["targets"], numbers, student.spec.loss_chunks
  found = chunked_vocabulary.chunked_logits(heads, *given, more)
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


@dataclasses.dataclass(frozen=True)
class TopDivergence:
  """The cross-entropy of each token, and the divergence from a teacher of which the top is stored.

  A reduction as `Divergence` is, of the student's logits alone. The forward divergence of K + 1
  classes: the teacher's K likeliest tokens, and all others as one. It is at most the divergence of
  the tokens (the log-sum inequality), and that itself where K is the vocabulary. What is stored was
  rounded, and is normalized again.

  Attributes:
    temperature: divides the logits; that of what is stored.
    finished: of the student, see `losses.TokenNumbers`.
  """

  temperature: float
  finished: Callable[[jax.Array, jax.Array | int], jax.Array]
  results = 2

  @property
  def _numbers(self) -> tuple[TokenNumbers, ...]:
    """Returns those of the cross-entropy, of all classes, and of those that are not stored."""
    tempered = TokenNumbers(("normalizer",), self.finished, self.temperature)
    return TokenNumbers(("loss",), self.finished), tempered, TokenNumbers(("normalizer",), _as_is)

  def start(self, of_tokens: tuple, dtype: jnp.dtype) -> tuple:
    """Returns what is known of each token before the first chunk."""
    targets, *_ = of_tokens
    found = (numbers.start(targets, dtype) for numbers in self._numbers)
    return *found, jnp.zeros(targets.shape, dtype)

  def add(
    self,
    found: tuple,
    heads: Sequence[Float[Array, "*X V"]],
    of_tokens: tuple,
    first: jax.Array | int,
  ) -> tuple:
    """Returns what is known with the logits for classes from `first` on, not finished.

    The last is the mean of the logits by the teacher's probabilities of what is stored.
    """
    *before, mean = found
    [logits], (targets, ids, log_p) = heads, of_tokens
    every = self._numbers[1]
    tempered, places = every.chunk(logits, first), ids - first
    here = (places >= 0) & (places < logits.shape[-1])
    picked = jnp.take_along_axis(tempered, jnp.where(here, places, 0), axis=-1)
    mean += jnp.sum(jnp.where(here, _probabilities(log_p, mean.dtype) * picked, 0), axis=-1)
    least = in_chunk(jnp.finfo(tempered.dtype).min, tempered.dtype, first)
    others = jnp.where(stored_among(places, logits.shape[-1]), least, tempered)
    pairs = zip(self._numbers, before, (logits, logits, others), strict=True)
    return *(numbers.add(x, [one], targets, first) for numbers, x, one in pairs), mean

  def finish(self, found: tuple, of_tokens: tuple, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers; `axes` split the classes, each device having seen its own part."""
    *known, mean = found
    targets, _, log_p = of_tokens
    pairs = zip(self._numbers, known, strict=True)
    loss, every, rest = (one.finish(x, targets, axes)[0] for one, x in pairs)
    mean = collectives.total(mean, axes) if axes else mean
    p = _probabilities(log_p, mean.dtype)
    entropy = jnp.sum(jax.scipy.special.entr(p), axis=-1)
    return loss, every - mean - p[..., -1] * rest - entropy


def _as_is(logits: jax.Array, first: jax.Array | int) -> jax.Array:
  del first
  return logits


def _probabilities(log_p: jax.Array, dtype: jnp.dtype) -> jax.Array:
  return jax.nn.softmax(log_p.astype(dtype), axis=-1)


def stored_among(places: Int[Array, "*X K"], classes: int) -> jax.Array:
  """Returns which of the classes are among the places of each token, bool [*X, classes].

  Places outside of these are passed over.
  """
  here = (places >= 0) & (places < classes)
  rows = jnp.where(here, places, classes).reshape(-1, places.shape[-1])
  none = jnp.zeros((rows.shape[0], classes), bool)
  found = jax.vmap(lambda one, at: one.at[at].set(True, mode="drop"))(none, rows)
  return found.reshape(*places.shape[:-1], classes)


def likeliest(
  model: Any, batch: Batch, top: int, temperature: float
) -> tuple[Int[Array, "B T t"], Float[Array, "B T t"], Int[Array, "B T"]]:
  """Returns what of a teacher is stored, in the order of layers, and the place of each token.

  Args:
    model: a `Transformer`, the teacher.
    batch: of `loss_sums`.
    top: K, at most the vocabulary.
    temperature: divides the logits.
  """
  places_T = jnp.arange(batch["tokens"].shape[1], dtype=jnp.int32)
  places_BT = jnp.broadcast_to(places_T[None], batch["tokens"].shape)
  batch = model.ordered({**batch, "places": places_BT})
  x_BRD, *_ = model.run_layers(model.enter(batch), batch, None)
  log_p_BTV = jax.nn.log_softmax(model.head(x_BRD) / temperature, axis=-1)
  found_BTK, ids_BTK = jax.lax.top_k(log_p_BTV, top)
  others_BTV = jnp.where(stored_among(ids_BTK, log_p_BTV.shape[-1]), -jnp.inf, log_p_BTV)
  rest_BT1 = jax.nn.logsumexp(others_BTV, axis=-1, keepdims=True)
  ids = jnp.concatenate([ids_BTK, jnp.full_like(ids_BTK[..., :1], REST)], axis=-1)
  return ids, jnp.concatenate([found_BTK, rest_BT1], axis=-1), batch["places"]
