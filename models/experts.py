"""A mixture of experts in place of a dense MLP: router, experts, shared experts.

Names carry their dims, besides those of the decoder: E experts, e experts of the router (never
split), k experts of a token, M an expert's hidden dim, X rows in order of their experts.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models import activations, load_balance
from models.layers import ACTIVATIONS, MLP, Linear, clamped_gate
from models.load_balance import BALANCE, Z_LOSS, chosen
from models.losses import COUNTS
from models.positions import Rows
from models.spec import RESIDUAL, DecoderSpec, under
from partitioning.constraints import constrain
from partitioning.dtypes import wide_dtype
from partitioning.parallel import collectives
from partitioning.parallel.expert_exchange import Exchange, Groups, Way, exchanged, grouped_matmul
from partitioning.parallel.sharded_function import (
  SEQUENCE_DIM,
  Operand,
  reduce_partial,
  sequence_axes,
  sharded,
  split_over,
  summed_last,
)
from partitioning.rules import Axes
from runtime.layer_kinds import LAYERS

# ------------------------------ the choice of experts ------------------------------
# From the logits of a linear layer: scores; of those, the top k, maybe within the best groups of
# experts, maybe after the addition of a bias; and the gates of the chosen experts. Sources:
# arXiv:2401.04088 (Mixtral), 2405.04434 (DeepSeek-V2, groups), 2412.19437 (DeepSeek-V3, sigmoid
# and bias), 2508.10925 (gpt-oss). G groups, *X any leading dims.

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


# ------------------------------ the layer ------------------------------

LARGEST_TILE = 128  # rows that a kernel is multiplied with at once
_TOKENS = RESIDUAL.between[:-1]  # letters of a token, between blocks
# As those of load_balance; see `Experts.__call__`.
ENTROPY, ROUNDS, FULLEST = "router_entropy", "exchange_rounds", "fullest_pair"


class RouterLinear(Linear):
  """The router's linear layer, with the bias by which DeepSeek-V3 balances the choice.

  The bias is a parameter that no optimizer updates, see `training.state.ROUTER_BIAS`.
  """

  def __init__(self, name: str, spec: DecoderSpec, *, rngs: nnx.Rngs):
    """Draws the kernel; the bias starts at 0."""
    super().__init__(name, spec, rngs=rngs)
    self.divisor = spec.widths.ratio
    self.correction_letters = spec.optional_letters(f"{name}/correction")
    if self.correction_letters:
      shape = spec.sizes(self.correction_letters)
      self.correction = nnx.Param(jnp.zeros(shape, spec.parameter_dtype))

  def __call__(
    self, x_BRD: Float[Array, "B R D"], choice: Router
  ) -> tuple[Float[Array, "B R e"], Routed]:
    """Returns the logits in float32 or wider, and the experts of each token.

    In one region, each token on one of the devices that split the sequence: XLA's partitioner
    gathers the whole batch for a top_k (as seen on CPUs, jax 0.10.2).

    Args:
      x_BRD: the normalized residual.
      choice: how experts are chosen.
    """
    wide = wide_dtype(x_BRD.dtype)
    inside = summed_last(self.letters, RESIDUAL.width)
    equation = f"{RESIDUAL.between},{inside}->{_TOKENS}e"
    biases = [self.bias[...]] if self.bias_letters else []
    if choice.bias_corrects:
      biases.append(jax.lax.stop_gradient(self.correction[...]))

    def routed(manual: bool, x: jax.Array, kernel: jax.Array, *biases: jax.Array):
      del manual
      logits = jnp.einsum(equation, x, kernel, precision=jax.lax.Precision.HIGHEST)
      if self.divisor != 1.0:
        logits = logits / jnp.asarray(self.divisor, logits.dtype)
      if self.bias_letters:
        logits = logits + biases[0][None, None]
      return [logits, *route(logits, choice, biases[-1] if choice.bias_corrects else None)]

    logits_BRe, *found = sharded(
      routed,
      [
        Operand(RESIDUAL.between, x_BRD.astype(wide)),
        Operand(self.letters, self.effective_kernel(), inside, kernel=True),
        *(Operand("e", bias, kernel=True) for bias in biases),
      ],
      [f"{_TOKENS}{one}" for one in ("e", "k", "k", "e")],
      residual=RESIDUAL,
      dtype=wide,
      by_hand=True,
    )
    return logits_BRe, Routed(*found)


class Kernels(nnx.Module):
  """One linear layer of all experts."""

  def __init__(self, name: str, spec: DecoderSpec, *, scale: float = 1.0, rngs: nnx.Rngs):
    """Draws the kernels; biases start at 0."""
    linear = Linear(name, spec, scale=scale, rngs=rngs)
    self.letters, self.bias_letters = linear.letters, linear.bias_letters
    self.format = linear.format
    for part in self.format.parts if self.format else ("kernel",):
      setattr(self, part, getattr(linear, part))
    if self.bias_letters:
      self.bias = linear.bias

  def operands(self) -> list[Operand]:
    """Returns the kernels, and the biases where there are some."""
    kernel = self.format.kernel_of(self) if self.format else self.kernel[...]
    found = [Operand(self.letters, kernel, kernel=True)]
    if self.bias_letters:
      found.append(Operand(self.bias_letters, self.bias[...], kernel=True))
    return found


class Experts(nnx.Module):
  """Each token's sum over its experts of gate times MLP, plus the shared experts' MLP.

  That one may have a gate of its own (arXiv:2407.10671, section 2.2.2).
  """

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str = f"{LAYERS}experts"):
    """Draws the parameters; the experts' last layer is scaled down by the depth, as in GPT-2."""
    self.router = RouterLinear(f"{name}/router", spec, rngs=rngs)
    kernels = functools.partial(Kernels, spec=spec, rngs=rngs)
    self.gated = spec.gated
    if self.gated:
      self.gate = kernels(f"{name}/gate")
    self.up = kernels(f"{name}/up")
    self.down = kernels(f"{name}/down", scale=spec.out_scale)
    self.has_shared = spec.shared_feedforward_size > 0
    if self.has_shared:
      self.shared = MLP(spec, rngs=rngs, name=f"{name}/shared")
    self.has_shared_gate = spec.shared_gate
    if self.has_shared_gate:
      drawn = jax.random.normal(rngs.params(), spec.sizes("D"), spec.parameter_dtype)
      self.shared_gate = nnx.Param(drawn * jnp.asarray(spec.deviation("D"), drawn.dtype))
    self.choice, self.scales_inputs = router_of(spec), spec.router_scales_inputs
    self.hidden = ACTIVATIONS[spec.activation]
    if self.gated:
      self.hidden = functools.partial(
        clamped_gate,
        activation=spec.activation,
        limit=spec.gate_limit,
        offset=spec.up_offset,
      )
    self.exchange, self.capacity = spec.expert_exchange, spec.expert_capacity
    self.way = spec.grouped_matmul

  @staticmethod
  def dims(spec: DecoderSpec) -> dict[str, str]:
    """Returns parameter -> letters. The correction moves by the loads, not by its gradient."""
    found = {"router/kernel": "De"}
    if spec.router_bias:
      found["router/bias"] = "e"
    if spec.router_correction:
      found["router/correction"] = "e"
    for row, letters in MLP.kernel_dims(spec, "M").items():
      found[row] = f"E{letters}"
      if spec.expert_biases:
        found[row.replace("kernel", "bias")] = f"E{letters[-1]}"
    shared = MLP.kernel_dims(spec, "W") if spec.shared_feedforward_size else {}
    if spec.shared_gate:
      found["shared_gate"] = "D"
    return found | under("shared", shared)

  def __call__(
    self, x_BRD: Float[Array, "B R D"], rows: Rows
  ) -> tuple[Float[Array, "B R D"], dict[str, jax.Array]]:
    """Returns the residual's update, and numbers of each row.

    Args:
      x_BRD: the normalized residual.
      rows: slots and weights of the tokens.

    Returns:
      The update; numbers [B], each times the row's weight: the balance loss, the z-loss, the
      entropy of the router, the rounds of the exchange and its fullest pair of devices; and int32
      [B, e], how many tokens of a row each expert has been given. {} where rows have no weights.
    """
    logits_BRe, routed = self.router(x_BRD, self.choice)
    activations.record("router", logits_BRe)
    inputs_BRD, gates_BRk = x_BRD, routed.gates
    if self.scales_inputs:  # of the one expert
      inputs_BRD = (x_BRD * gates_BRk).astype(x_BRD.dtype)
      gates_BRk = jnp.ones_like(gates_BRk)
    update_BRD, rounds, fullest = self._exchanged(inputs_BRD, gates_BRk, routed.experts)
    if self.has_shared:
      shared_BRD = self.shared(x_BRD, None, rows.slots_BT[0])
      if self.has_shared_gate:
        shared_BRD = shared_BRD * self._shared_gates(x_BRD)
      update_BRD = update_BRD + shared_BRD
    if rows.weights_BT is None:
      return update_BRD, {}
    numbers = _numbers(logits_BRe, routed, constrain(rows.weights_BT, _TOKENS), self.choice.top_k)
    weight_B = numbers.pop("weight")
    for name, x in ((ROUNDS, rounds), (FULLEST, fullest)):
      numbers[name] = weight_B * x.astype(weight_B.dtype)
    return update_BRD, numbers

  def _shared_gates(self, x_BRD: Float[Array, "B R D"]) -> Float[Array, "B R 1"]:
    """Returns the factor of each token's shared experts."""
    kernel_D = constrain(self.shared_gate[...], "D")
    wide = wide_dtype(x_BRD.dtype)
    logits_BR = jnp.einsum("BRD,D->BR", x_BRD.astype(wide), kernel_D.astype(wide))
    return jax.nn.sigmoid(logits_BR)[..., None].astype(x_BRD.dtype)

  def _exchanged(self, x_BRD, gates_BRk, experts_BRk) -> list[jax.Array]:
    """Returns the experts' update, and rounds and fullest pair of the exchange."""
    layers = [*([self.gate] if self.gated else []), self.up, self.down]
    tokens = (RESIDUAL.between, x_BRD), (f"{_TOKENS}k", gates_BRk), (f"{_TOKENS}k", experts_BRk)
    operands = [Operand(*one) for one in tokens]
    operands += [one for layer in layers for one in layer.operands()]
    sequence, partial, axes = sequence_axes(RESIDUAL), split_over("M"), split_over("E")

    def region(manual: bool, *arguments: jax.Array) -> list[jax.Array]:
      tokens, weights = arguments[:3], arguments[3:]
      if manual and sequence:
        tokens = [collectives.all_gather(x, sequence, SEQUENCE_DIM) for x in tokens]
      batch, length, width = tokens[0].shape
      flat = [x.reshape(batch * length, x.shape[-1]) for x in tokens]
      compute = functools.partial(self._of_rows, axes=partial if manual else ())
      found = exchanged(self._way_of_tokens(axes if manual else (), compute), *flat, weights)
      update = found.tokens_nD.reshape(batch, length, width)
      update = reduce_partial(update, partial, sequence) if manual else update
      return [update, found.rounds, found.fullest]

    return sharded(
      region,
      operands,
      [RESIDUAL.between, "", ""],
      residual=RESIDUAL,
      dtype=x_BRD.dtype,
      by_hand=True,
    )

  def _way_of_tokens(self, axes: Axes, compute: Callable) -> Exchange:
    """Returns how tokens reach their experts, which `axes` split."""
    devices = jax.lax.axis_size(axes) if axes else 1
    return Exchange(
      self.exchange,
      axes[0] if axes else "",
      devices,
      self.choice.experts // devices,
      self.capacity,
      compute,
      self.way,
      LARGEST_TILE,
    )

  def _of_rows(
    self, x_XD: jax.Array, weights: tuple[jax.Array, ...], groups: Groups, how: Way, *, axes
  ) -> Float[Array, "X D"]:
    """Returns each row through its expert; partial sums where `axes` split the hidden dim."""
    hot_XE = None
    if self.up.bias_letters:
      # A matmul and not a gather, whose gradient would be a scatter.
      hot_XE = jax.nn.one_hot(groups.expert_X, groups.sizes_E.shape[0], dtype=x_XD.dtype)
    weights = list(weights)

    def linear(rows, *, once=()):
      kernel, bias = weights.pop(0), weights.pop(0) if hot_XE is not None else None
      y = grouped_matmul(rows, kernel, groups.sizes_E, how)
      if bias is None:
        return y
      if once:  # of partial sums one device's has the bias
        bias = jnp.where(jax.lax.axis_index(once) == 0, bias, jnp.zeros_like(bias))
      return y + hot_XE @ bias

    projected = [linear(x_XD) for _ in range(1 + self.gated)]  # of gate, if there is one, and up
    return linear(self.hidden(*projected), once=axes)


def router_of(spec: DecoderSpec) -> Router:
  """Returns how a model's routers choose; the checks of the config have seen that they can."""
  return Router(
    experts=spec.experts,
    top_k=spec.experts_per_token,
    scores=spec.router_scores,
    normalize=spec.router_normalized,
    scale=spec.router_scale,
    groups=spec.router_groups,
    top_groups=spec.router_top_groups,
    group_score=spec.router_group_score,
    bias_corrects=spec.router_correction,
  )


def _numbers(logits_BRe, routed: Routed, weights_BR, top_k: int) -> dict[str, jax.Array]:
  """Returns what is known of each row's routing, times the row's weight."""
  wide = logits_BRe.dtype
  weights_BR = weights_BR.astype(wide)
  sums = load_balance.row_sums(routed.experts, routed.probabilities, weights_BR)
  sums = jax.tree.map(lambda x: constrain(x, "Be" if x.ndim == 2 else "B"), sums)
  weight_B = constrain(jnp.sum(weights_BR, axis=1), "B")
  found = {
    Z_LOSS: load_balance.router_z_loss(logits_BRe),
    ENTROPY: jax.lax.stop_gradient(load_balance.router_entropy(routed.probabilities)),
  }
  found = {n: constrain(jnp.sum(x * weights_BR, axis=1), "B") for n, x in found.items()}
  balance_B = load_balance.sequence_balance(sums, top_k)
  return {**found, BALANCE: weight_B * balance_B, COUNTS: sums.counts, "weight": weight_B}
