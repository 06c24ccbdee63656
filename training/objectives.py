"""What is minimised, by `config.training.loss`: sums over the rows of a batch, never means.

Sums of weighted losses and of weights are what adds up over microbatches, devices and
evaluation batches; the mean is taken once, over the global batch.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key
from ml_collections import ConfigDict

from models.dtypes import wide_dtype
from models.losses import cross_entropy
from partitioning.constraints import constrain
from partitioning.dims import Legend

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]  # each a scalar, float32 or wider; "loss" always

# loss -> array of the batch -> its dims and its dtype.
BATCH = {
  "next_token": {
    "tokens": ("BT", "int32"),
    "targets": ("BT", "int32"),
    "weights": ("BT", "float32"),
  },
  "classification": {
    "inputs": ("BI", "float32"),
    "targets": ("B", "int32"),
    "weights": ("B", "float32"),
  },
  "squared_error": {
    "inputs": ("BI", "float32"),
    "targets": ("BO", "float32"),
    "weights": ("B", "float32"),
  },
}


def abstract_batch(config: ConfigDict, legend: Legend) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the global batch's arrays as a config has them, without opening the data set."""
  differing = {"B": config.data.global_batch_size, "T": config.data.sequence_length}
  return {
    name: jax.ShapeDtypeStruct(
      tuple(differing.get(letter) or legend[letter].size for letter in letters), jnp.dtype(dtype)
    )
    for name, (letters, dtype) in BATCH[config.training.loss].items()
  }


def next_token(model: nnx.Module, batch: Batch, key: Key[Array, ""] | None) -> Sums:
  """Returns the summed weighted cross-entropy of each next token, in nats."""
  targets_BT, weights_BT = batch["targets"], batch["weights"]
  order_T = model.order(targets_BT.shape[1])
  if order_T is not None:  # the logits come in the order in which attention goes round
    targets_BT, weights_BT = (
      constrain(x_BT[:, order_T], "BT") for x_BT in (targets_BT, weights_BT)
    )
  loss_BT = model.losses(
    constrain(batch["tokens"], "BT"), targets_BT, cross_entropy, key, order_T=order_T
  )
  return {"loss": jnp.sum(loss_BT * weights_BT.astype(loss_BT.dtype))}


def classification(model: nnx.Module, batch: Batch, key: Key[Array, ""] | None) -> Sums:
  """Returns the summed weighted cross-entropy of the labels, and how many were right."""
  logits_BO = model(batch["inputs"])
  loss_B = cross_entropy(logits_BO, batch["targets"])
  weights_B = batch["weights"].astype(loss_B.dtype)
  right_B = jax.lax.argmax(logits_BO, 1, batch["targets"].dtype) == batch["targets"]
  correct = jnp.sum(jnp.where(right_B, weights_B, jnp.zeros_like(weights_B)))
  return {"loss": jnp.sum(loss_B * weights_B), "correct": correct}


def squared_error(model: nnx.Module, batch: Batch, key: Key[Array, ""] | None) -> Sums:
  """Returns the weighted sum over rows of the squared error summed over outputs."""
  outputs_BO = model(batch["inputs"])
  wide = wide_dtype(outputs_BO.dtype)
  error_BO = outputs_BO.astype(wide) - batch["targets"].astype(wide)
  return {"loss": jnp.sum(jnp.sum(error_BO**2, axis=-1) * batch["weights"].astype(wide))}


OBJECTIVES: dict[str, Callable[[nnx.Module, Batch, jax.Array | None], Sums]] = {
  "next_token": next_token,
  "classification": classification,
  "squared_error": squared_error,
}
