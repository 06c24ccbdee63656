"""Layers that predict further tokens. Sources: arXiv:2412.19437, section 2.2; Qwen3-Next.

The layer of depth n reads of the slot of token t what the layer before it has made of it, the main
model or that of depth n - 1, and the embedding of token t + n, and predicts token t + n + 1 by the
main model's head. It acts in training alone.

Names carry their dims: `hidden_BRD` is batch, residual sequence, width.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key, Shaped

from models import activations, load_balance
from models.layer_stack import Block
from models.layers import NORMS, Linear, rematerialized
from models.losses import COUNTS, Batch, Sums, weighted_sum
from models.spec import MTP_LAYERS, RESIDUAL, DecoderSpec
from partitioning.constraints import constrain
from partitioning.parallel.matmuls import column_parallel
from partitioning.parallel.sharded_function import Residual
from runtime.layer_kinds import MIXER, layer_type

MTP_LOSS = "mtp_loss"
# Each token where it is, as the down-projections of latent attention.
_IN_PLACE = Residual(between=RESIDUAL.between, inside=RESIDUAL.between)


class FurtherToken(Block):
  """One layer: joins the residual and the embedding of a later token; a block; a norm."""

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, stack: str = MTP_LAYERS):
    """Draws the parameters from `rngs.params`."""
    super().__init__(spec, rngs=rngs, stack=stack)
    norm, linear = (functools.partial(one, spec=spec) for one in (NORMS[spec.norm], Linear))
    self.embedding_norm, self.hidden_norm = (
      norm(f"{stack}embedding_norm"),
      norm(f"{stack}hidden_norm"),
    )
    half = functools.partial(linear, scale=2**-0.5, rngs=rngs)  # of the deviation by both inputs
    self.from_embedding, self.from_hidden = (
      half(f"{stack}from_embedding"),
      half(f"{stack}from_hidden"),
    )
    self.out_norm = norm(f"{stack}out_norm")

  @staticmethod
  def dims(spec: DecoderSpec, stack: str = MTP_LAYERS) -> dict[str, str]:
    """Returns parameter -> letters."""
    norm = NORMS[spec.norm].dims(spec)
    names = ("embedding_norm", "hidden_norm", "out_norm")
    found = {f"{name}/{key}": letters for name in names for key, letters in norm.items()}
    return {**found, "(from_embedding|from_hidden)/kernel": "DO", **Block.dims(spec, stack)}

  def joined(
    self, hidden_BRD: Float[Array, "B R D"], embedding_BRD: Float[Array, "B R D"]
  ) -> Float[Array, "B R D"]:
    """Returns the residual before the block."""
    pairs = (
      (self.embedding_norm(embedding_BRD), self.from_embedding),
      (self.hidden_norm(hidden_BRD), self.from_hidden),
    )
    one, two = (column_parallel(x, [linear], _IN_PLACE)[0] for x, linear in pairs)
    return constrain(one + two, RESIDUAL.between)


def with_further_tokens(batch: Batch, layers: int) -> Batch:
  """Returns a batch in the order of the text, with what each layer predicts.

  These are `targets_n` and `weights_n` of depth n, of which slots are without a weight whose target
  is in another document, or beyond the row.
  """
  found = dict(batch)
  targets, weights, segments = (batch[name] for name in ("targets", "weights", "segments"))
  for depth in range(1, layers + 1):
    same_BT = segments == _later(segments, depth)
    later_BT = _later(weights, depth)
    found[f"targets_{depth}"] = constrain(_later(targets, depth), "BT")
    found[f"weights_{depth}"] = constrain(
      jnp.where(same_BT, later_BT, jnp.zeros_like(later_BT)), "BT"
    )
  return found


def _later(x_BT: Shaped[Array, "B T"], count: int) -> Shaped[Array, "B T"]:
  """Returns what is so many slots later; 0 beyond the row."""
  return jnp.pad(x_BT[:, count:], ((0, 0), (0, count)))


def add_losses(
  model: Any, x_BRD: Float[Array, "B R D"], batch: Batch, key: Key[Array, ""], sums: Sums
) -> Sums:
  """Returns the sums of a training step with those of further tokens.

  Args:
    model: the decoder.
    x_BRD: the residual after its last layer.
    batch: of `Transformer.ordered`.
    key: draws the dropout.
    sums: of the main model.

  Returns:
    `loss` with the mean over depths, times `training.mtp_weight`, which is `mtp_loss` alone; and
    the numbers of these layers' experts beside those of the others.
  """
  spec, rows = model.spec, model.rows(batch, key)
  graphdef, stack = nnx.split(model.mtp_layers)
  places = [n for n in range(spec.layers) if layer_type(spec, n) != MIXER]
  pattern = jax.tree.map(lambda x: x[places[-1]], model.layer_pattern.stacked())

  def run(hidden_BRD: Array, given: tuple) -> tuple[Array, dict]:
    params, embedding_BRD, key = given
    layer = nnx.merge(graphdef, params)
    with activations.layer():
      joined_BRD = layer.joined(hidden_BRD, embedding_BRD)
      found_BRD, _, numbers = layer(joined_BRD, pattern, key, rows)
    return layer.out_norm(found_BRD), numbers

  run = rematerialized(run, spec.rematerialization, reshard=spec.reshard_after_forward)
  hidden_BRD, tokens_BT, total, numbers = model.final_norm(x_BRD), batch["targets"], 0.0, []
  for depth in range(1, spec.mtp_layers + 1):
    params = jax.tree.map(operator.itemgetter(depth - 1), stack)
    given = params, model.embed(tokens_BT), jax.random.fold_in(key, spec.layers + depth)
    hidden_BRD, of_layer = run(hidden_BRD, given)
    numbers.append(of_layer)
    tokens_BT = batch[f"targets_{depth}"]
    [losses_BT] = model.numbers_of(hidden_BRD, tokens_BT, ("loss",), normed=True)
    total += weighted_sum(losses_BT, batch[f"weights_{depth}"])
  total = total / spec.mtp_layers
  found = {**sums, "loss": sums["loss"] + spec.mtp_weight * total, MTP_LOSS: total}
  if not numbers[0]:
    return found
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *numbers)
  more = load_balance.sums_of(stacked, batch["weights"], model.sparse_layers)
  counts = jnp.concatenate([sums[COUNTS], more.pop(COUNTS)])
  balance = load_balance.auxiliary_loss(more, spec.balance_loss, spec.router_z_loss)
  of_experts = {name: sums[name] + x for name, x in more.items()}
  return {**found, **of_experts, "loss": found["loss"] + balance, COUNTS: counts}
