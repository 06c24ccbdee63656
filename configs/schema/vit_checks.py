"""The keys of a vision transformer: what follows from them, and what does not go together."""

import math
from collections.abc import Iterator

from ml_collections import ConfigDict


def finalize(model: ConfigDict) -> None:
  """Fills in the side of an image, that of a square with as many pixels."""
  if model.image_size is None:
    model.image_size = math.isqrt(max(0, model.input_size) // max(1, model.channels))


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each thing that is wrong with the sizes, of a finalized config.

  Args:
    config: of a vision transformer.
  """
  model = config.model
  side, channels, patch = model.image_size, model.channels, model.patch_size
  if min(side, channels, patch, model.heads) < 1:
    return  # refused as such
  if side**2 * channels != model.input_size:
    yield (
      f"model.input_size={model.input_size}: an image of {side} x {side} pixels with "
      f"model.channels={channels} has {side**2 * channels} values; images are square, and "
      f"coloured ones have model.channels=3"
    )
  elif side % patch:
    whole = [size for size in range(1, side + 1) if side % size == 0]
    yield (
      f"model.patch_size={patch}: it does not divide model.image_size={side}; "
      f"take one of {', '.join(map(str, whole))}"
    )
  if model.model_size % model.heads:
    yield f"model.heads={model.heads}: model.model_size={model.model_size} is no multiple of it"
  if not 0 <= model.dropout_rate < 1:
    yield f"model.dropout_rate={model.dropout_rate}: at least 0 and below 1"
