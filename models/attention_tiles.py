"""Block sizes of attention, by the kind of the devices: in one table, with where they come from.

`python -m benchmarks.tune` times others on the device at hand.
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Block sizes on one kind of device.

  Attributes:
    blockwise: most tokens of a block of queries and of keys in `models.blockwise_attention`.
    splash: most tokens of a block in `models.splash_attention`.
    source: where the sizes come from.
  """

  blockwise: tuple[int, int]
  splash: int
  source: str


# By JAX's `device_kind`, in lower case.
TILES = {
  "cpu": Tiles(
    (128, 128),
    128,
    "measured on two cores: rows of 256 to 4,096 tokens took 0.37 to 0.80 of the time of plain "
    "attention, forward and backward, with larger blocks up to twice as much",
  ),
}
# Compiled for TPUs and GPUs ahead of time, and not timed: blocks whose scores are some MiB. Splash
# with blocks of 1024 needs more than a v5p's VMEM for heads of 256, with 2048 for heads of 128.
DEFAULT = Tiles((512, 512), 512, "not measured")


def of_devices() -> Tiles:
  """Returns the block sizes for the devices of the mesh in force."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return TILES.get(device.device_kind.lower() if device else "", DEFAULT)
