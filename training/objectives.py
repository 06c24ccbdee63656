"""The arrays of a batch, by `config.training.loss`."""

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from partitioning.dims import Legend

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
