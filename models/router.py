"""Routers of mixtures of experts: which experts a token goes to, and with which gates.

From the logits of a linear layer: scores; of those, the top k, maybe within the best groups of
experts, maybe after the addition of a bias; and the gates of the chosen experts. Sources:
arXiv:2401.04088 (Mixtral), 2405.04434 (DeepSeek-V2, groups), 2412.19437 (DeepSeek-V3, sigmoid and
bias), 2508.10925 (gpt-oss).

Dims beside those of the decoder: E experts, k experts of a token, G groups, X any leading dims.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from partitioning.dtypes import wide_dtype

SCORES = ("softmax", "sigmoid", "softmax_of_chosen")
GROUP_SCORES = ("max", "top2")
_EPSILON = 1e-20  # of the sum of sigmoids, as DeepSeek-V3's code has it


@dataclasses.dataclass(frozen=True)
class Router:
  """How experts are chosen and weighted.

  Attributes:
    experts: E.
    top_k: experts of a token.
    scores: `softmax` over all logits; `sigmoid` of each; `softmax_of_chosen`: the logits, and the
      gates are the softmax of the chosen ones alone (gpt-oss): `softmax` with `normalize` but for
      rounding.
    normalize: divide the gates by their sum; without effect on `softmax_of_chosen`, whose sum is 1.
    scale: of the gates, after that.
    groups: G, of E / G experts with adjacent indices; 1: the choice is among all experts.
    top_groups: the groups with the highest scores, among whose experts the choice is.
    group_score: `max`, the highest score in the group (DeepSeek-V2), or `top2`, the sum of its two
      highest (DeepSeek-V3).
    bias_corrects: a bias is added to the scores by which experts and groups are chosen; the gates
      are those of the scores without it.
  """

  experts: int
  top_k: int
  scores: str = "softmax"
  normalize: bool = True
  scale: float = 1.0
  groups: int = 1
  top_groups: int = 1
  group_score: str = "max"
  bias_corrects: bool = False

  def __post_init__(self):
    """Raises ValueError with everything that does not go together."""
    if wrong := problems(self):
      raise ValueError("; ".join(wrong))


def problems(router: Router) -> list[str]:
  """Returns a line for each number of a router that does not fit the others."""
  wrong = []
  for name, known in (("scores", SCORES), ("group_score", GROUP_SCORES)):
    if (value := getattr(router, name)) not in known:
      wrong.append(f"{name}={value!r} is not one of {', '.join(known)}")
  experts, groups, top_groups = router.experts, router.groups, router.top_groups
  if not 1 <= router.top_k <= experts:
    wrong.append(f"top_k={router.top_k} is not between 1 and experts={experts}")
  if groups < 1 or experts % groups:
    return [*wrong, f"experts={experts} are not divisible into groups={groups}"]
  if not 1 <= top_groups <= groups:
    return [*wrong, f"top_groups={top_groups} is not between 1 and groups={groups}"]
  if groups > 1 and router.group_score == "top2" and experts == groups:
    wrong.append(f"group_score='top2' needs two experts in each of the groups={groups}")
  if router.top_k <= experts < router.top_k * groups / top_groups:
    there = top_groups * experts // groups
    wrong.append(
      f"top_k={router.top_k} is more than the {there} experts of top_groups={top_groups}"
    )
  return wrong


class Routed(NamedTuple):
  """Which experts tokens go to.

  Attributes:
    gates: of the chosen experts, in the order of their scores.
    experts: their indices, in int32.
    probabilities: of all experts, their sum is 1: of the balance loss and the router's entropy.
  """

  gates: Float[Array, "*X k"]
  experts: Int[Array, "*X k"]
  probabilities: Float[Array, "*X E"]


def route(
  logits: Float[Array, "*X E"], router: Router, bias_E: Float[Array, " E"] | None = None
) -> Routed:
  """Chooses the experts of each token; of equal scores, the expert with the lower index.

  Computed in float32 or wider. Gradients flow through gates and probabilities, not through the
  choice. Gates are picked by masked sums and not by a gather, whose gradient is a scatter.

  Args:
    logits: of the router's linear layer.
    router: how to choose.
    bias_E: added to the scores for the choice; given if `bias_corrects`.
  """
  logits = logits.astype(wide_dtype(logits.dtype))
  scores = _scores(logits, router)
  experts = jax.lax.top_k(_candidates(scores, router, bias_E), router.top_k)[1]
  picked = _picked(scores, experts)
  if router.scores == "softmax_of_chosen":
    gates = jax.nn.softmax(picked, axis=-1)
  elif router.normalize:
    epsilon = _EPSILON if router.scores == "sigmoid" else 0.0
    gates = picked / (jnp.sum(picked, axis=-1, keepdims=True) + epsilon)
  else:
    gates = picked
  # s / sum(s) for s = sigmoid(logits) is the softmax of log(s), which does not divide by 0.
  sigmoid = router.scores == "sigmoid"
  probabilities = jax.nn.softmax(jax.nn.log_sigmoid(logits) if sigmoid else logits, axis=-1)
  return Routed(gates * router.scale, experts, probabilities)


def smallest_margin(
  logits: Float[Array, "*X E"], router: Router, bias_E: Float[Array, " E"] | None = None
) -> Float[Array, ""]:
  """Returns how far the closest choice is from another one, in units of the scores.

  That is the smallest difference of all tokens between the last chosen score and the first that is
  not, of experts and of groups; infinity where nothing is left out. Two computations of the logits
  that differ by more may choose differently, so a comparison of them says nothing.
  """
  logits = logits.astype(wide_dtype(logits.dtype))
  scores = _scores(logits, router)
  margin = _margin(_candidates(scores, router, bias_E), router.top_k)
  if router.groups > 1:
    groups = _group_scores(_corrected(scores, router, bias_E), router)
    margin = jnp.minimum(margin, _margin(groups, router.top_groups))
  return margin


def chosen(experts: Int[Array, "*X k"], count: int) -> Bool[Array, "*X k E"]:
  """Returns one-hot rows of the chosen experts.

  Args:
    experts: indices.
    count: E.
  """
  indices = jnp.arange(count, dtype=experts.dtype)
  return experts[..., None] == indices.reshape((1,) * experts.ndim + (-1,))


def _scores(logits: jax.Array, router: Router) -> jax.Array:
  match router.scores:
    case "softmax":
      return jax.nn.softmax(logits, axis=-1)
    case "sigmoid":
      return jax.nn.sigmoid(logits)
    case _:
      return logits


def _corrected(scores: jax.Array, router: Router, bias_E: jax.Array | None) -> jax.Array:
  """Returns what experts and groups are chosen by."""
  assert router.bias_corrects == (bias_E is not None), "a bias is given if it corrects the choice"
  scores = jax.lax.stop_gradient(scores)
  if bias_E is None:
    return scores
  bias = jax.lax.stop_gradient(bias_E).astype(scores.dtype)
  return scores + bias.reshape((1,) * (scores.ndim - 1) + bias.shape)


def _candidates(scores: jax.Array, router: Router, bias_E: jax.Array | None) -> jax.Array:
  """Returns what experts are chosen by; -infinity in the groups that are not."""
  corrected = _corrected(scores, router, bias_E)
  if router.groups == 1:
    return corrected
  groups = jax.lax.top_k(_group_scores(corrected, router), router.top_groups)[1]
  allowed = jnp.any(chosen(groups, router.groups), axis=-2)
  allowed = jnp.repeat(allowed, router.experts // router.groups, axis=-1)
  return jnp.where(allowed, corrected, -jnp.inf)


def _group_scores(corrected: jax.Array, router: Router) -> jax.Array:
  """Returns the scores of the groups, [*X, G]."""
  grouped = corrected.reshape(*corrected.shape[:-1], router.groups, -1)
  if router.group_score == "max":
    return jnp.max(grouped, axis=-1)
  return jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)


def _margin(scores: jax.Array, count: int) -> jax.Array:
  """Returns the smallest difference between the last of the `count` highest and the next."""
  if count == scores.shape[-1]:
    return jnp.asarray(jnp.inf, scores.dtype)
  highest = jax.lax.top_k(scores, count + 1)[0]
  return jnp.min(highest[..., -2] - highest[..., -1], initial=jnp.inf)


def _picked(scores: jax.Array, experts: jax.Array) -> jax.Array:
  """Returns the scores of the chosen experts, [*X, k]."""
  hot = chosen(experts, scores.shape[-1])
  return jnp.sum(jnp.where(hot, scores[..., None, :], jnp.zeros((), scores.dtype)), axis=-1)
