"""How attention runs where mesh axes split the sequence: three ways, and which is the fastest.

A ring passes keys and values around (`ring_attention`). A gather gives each device the keys and
values of complete rows. DeepSpeed-Ulysses (arXiv:2309.14509) exchanges the sequence for heads by
all-to-alls: a device then has complete rows of some heads, which every kernel takes, and gives the
outputs back.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

from partitioning.constraints import axes_splitting, current_layout, layout_in_force
from partitioning.rules import axes_size

RING, GATHER, ULYSSES = "ring", "gather", "ulysses"
AUTO = "auto"

# FLOPs that an accelerator computes in the time that it sends a byte: 2,190 (TPU v5e,
# 197e12 / 90e9) to 5,100 (v6e), in bfloat16, over both links of a torus axis or NVLink.
OPERATIONS_PER_BYTE = 2500


def devices_along(letter: str) -> int:
  """Returns how many devices split a dim of activations; 1 where it is not split."""
  return axes_size(axes_splitting(letter), current_layout()[1])


def splits_heads(queries: int, count: int, tensor: int) -> bool:
  """Returns whether each of the devices that split sequence and heads can have as many heads."""
  return queries % (count * tensor) == 0


def repeats(keys: int, count: int, tensor: int) -> int:
  """Returns how often key/value heads are repeated before they are exchanged by `ULYSSES`.

  As often as they need to be for every device to have as many.
  """
  return math.lcm(keys, count * tensor) // keys


def fastest_way(
  kind: str, kernel: str, length: int, queries: int, keys: int, *, count: int, tensor: int
) -> str:
  """Returns how attention runs over a sequence that devices split: RING, GATHER or ULYSSES.

  By default the fastest of those that there are. In units of the time of an all-gather of keys and
  values, let r be the time to compute the causal half of the scores. The all-gather does not
  overlap with compute, which includes the masked half: 1 + 2 r. The ring uses one direction of the
  links and overlaps: max(2, r). An all-to-all on a ring of links takes a quarter of the time of an
  all-gather of as much: with g query heads per key/value head, which is repeated f times, queries,
  keys, values and outputs take (g + f) / 4, and then r is computed. The ring needs the least
  memory. cuDNN's kernel takes complete rows of both queries and keys, which Ulysses alone has.

  Args:
    kind: `model.context_attention`: a way, or auto.
    kernel: `training.attention_kernel`.
    length: of the sequence.
    queries: number of query heads.
    keys: number of key/value heads.
    count: of the devices that split the sequence.
    tensor: of the devices that split the heads.
  """
  if kind != AUTO:
    return kind
  group = queries / keys
  computed = length / count * group / (2 * OPERATIONS_PER_BYTE)
  seconds = {GATHER: 1 + 2 * computed}
  if length % (2 * count) == 0:
    seconds[RING] = max(2, computed)
  if splits_heads(queries, count, tensor):
    seconds[ULYSSES] = (group + repeats(keys, count, tensor)) / 4 + computed
    if kernel == "cudnn":
      return ULYSSES
  return min(seconds, key=seconds.get)


@contextlib.contextmanager
def resized(letter: str, size: int) -> Iterator[None]:
  """Gives a dim another size inside of the block, as of repeated key/value heads."""
  layout, _ = current_layout("an exchange of sequence and heads")
  legend = {**layout.legend, letter: dataclasses.replace(layout.legend[letter], size=size)}
  with layout_in_force(dataclasses.replace(layout, legend=legend)):
    yield


@contextlib.contextmanager
def exchanged(sequence: str, heads: str) -> Iterator[None]:
  """Splits heads, and no longer the sequence, over the axes of both; inside of the block.

  Args:
    sequence: the legend's letter of the tokens of a row.
    heads: the letters of heads, of queries and of keys and values.
  """
  layout, _ = current_layout("an exchange of sequence and heads")
  legend, table = layout.legend, {**layout.table}
  around = table.pop(legend[sequence].name)
  for name in (legend[letter].name for letter in heads):
    table[name] = (*table[name], *around)
  table[legend[sequence].name] = ()
  with layout_in_force(dataclasses.replace(layout, table=table)):
    yield
