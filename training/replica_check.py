"""Detects silent data corruption: replicas of parameters and optimizer state that differ.

A device that computes wrong results, or a bit flip in its memory, raises no error. Replicas get the
same updates to the bit, so they can be compared. No array is gathered: each device reduces its
shard to one 32-bit number per array, by integer arithmetic on its bits, and only these numbers are
compared.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.rules import HOST, named_leaves
from processes.coordination import current
from runtime import forms
from training.bad_steps import TrainingStoppedError
from training.state import State

# Odd, so that multiplying by them modulo 2**32 can be undone; MurmurHash3's finalizer has the last
# two, the first is 2**32 over the golden ratio.
_PLACE, _MIX_1, _MIX_2 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


@dataclasses.dataclass(frozen=True)
class Difference:
  """Replicas of one shard of an array that are not the same to the bit.

  Attributes:
    name: of the array.
    wrong: the devices that differ from the majority; all of them, if there is no majority.
    right: the devices of the majority; none if there is none.
  """

  name: str
  wrong: tuple[jax.Device, ...]
  right: tuple[jax.Device, ...]


def holders(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> list[tuple[jax.Device, ...]]:
  """Returns, for each shard with several replicas, the devices that hold them."""
  parts = collections.defaultdict(list)
  for device, index in sharding.devices_indices_map(tuple(shape)).items():
    parts[tuple(part.indices(size) for part, size in zip(index, shape, strict=True))].append(device)
  return [tuple(devices) for devices in parts.values() if len(devices) > 1]


def digest_program(
  leaves: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh
) -> Callable[[Sequence[jax.Array]], jax.Array]:
  """Returns the function from arrays to their digests: uint32 [device of the mesh, array].

  Each device computes the row of its shards; jitted with a replicated output, these few numbers are
  gathered everywhere.

  Args:
    leaves: name -> shape, dtype and NamedSharding; the function takes a list in this order.
    mesh: of all of them.
  """
  kinds = [leaf.sharding.memory_kind for leaf in leaves.values()]
  program = jax.shard_map(
    lambda blocks: jnp.stack(digests(blocks)).reshape(1, -1),
    mesh=mesh,
    in_specs=([leaf.sharding.spec for leaf in leaves.values()],),
    out_specs=PartitionSpec(mesh.axis_names),
    check_vma=False,  # the result differs between devices if replicas do
  )

  def fetching(arrays: Sequence[jax.Array]) -> jax.Array:
    """Brings to the device what is in host memory."""
    device = jax.memory.Space.Device
    pairs = zip(arrays, kinds, strict=True)
    return program([jax.device_put(x, device) if kind == HOST else x for x, kind in pairs])

  return fetching if HOST in kinds else program


def gathered(mesh: Mesh) -> NamedSharding:
  """Returns how digests are sharded that are compared on every process.

  A single process reads the rows directly; several processes each need all rows.
  """
  return NamedSharding(mesh, PartitionSpec(mesh.axis_names) if current().alone else PartitionSpec())


def compile_digests(
  leaves: Mapping[str, jax.ShapeDtypeStruct],
  mesh: Mesh,
  compile_on: Callable[..., Any],
  name: str = "",
) -> Callable[[Sequence[jax.Array]], jax.Array]:
  """Returns `digest_program`, compiled; arguments as of it and of `Job.compile`."""
  program = digest_program(leaves, mesh)
  given = {"name": name, "out_shardings": gathered(mesh)}
  return compile_on(program, list(leaves.values()), **given).function


def digests(blocks: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns for each array a uint32 that changes with any single bit of it.

  Each word is mixed with its index by a bijection, so a changed word changes its term; the terms
  are summed modulo 2**32, in any order. Several changes cancel with a probability of one in four
  billion. Bits are compared, not values: -0.0 is not 0.0, and NaNs differ by their payload.
  """
  mixed = [_mixed(_words(block), seed) for seed, block in enumerate(blocks)]
  # Arrays of one shape (with AdamW, parameter and both moments) are reduced together: on CPUs that
  # is a third of the code to compile, and runs four times as fast.
  alike = collections.defaultdict(list)
  for position, words in enumerate(mixed):
    alike[words.shape].append(position)
  sums: dict[int, jax.Array] = {}
  for shape, positions in alike.items():
    totals = jax.lax.reduce(
      [mixed[position] for position in positions],
      [jnp.uint32(0)] * len(positions),
      lambda one, other: [a + b for a, b in zip(one, other, strict=True)],
      tuple(range(len(shape))),
    )
    sums.update(zip(positions, totals, strict=True))
  return [sums[position] for position in range(len(blocks))]


def content_digests(arrays: Sequence[jax.Array]) -> jax.Array:
  """Returns a row of four uint32 for each array, which depends on its bits alone.

  As in `digests`, but with the index in the full array, so that every sharding gives the same.
  """
  rows = [[jnp.sum(_mixed(_words(x), n), dtype=jnp.uint32) for n in range(4)] for x in arrays]
  return jnp.stack([jnp.stack(row) for row in rows])


def _mixed(words: jax.Array, seed: int) -> jax.Array:
  """Returns words that depend on their place; their index keeps its dims, unlike a reshape."""
  place = jnp.full(words.shape, (seed * _MIX_1 + 1) % 2**32, jnp.uint32)
  for dim in range(words.ndim):
    stride = math.prod(words.shape[dim + 1 :]) * _PLACE % 2**32
    place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride)
  mixed = words ^ place
  for shift, factor in ((16, _MIX_1), (13, _MIX_2)):
    mixed = (mixed ^ (mixed >> jnp.uint32(shift))) * jnp.uint32(factor)
  return mixed ^ (mixed >> jnp.uint32(16))


def _words(block: jax.Array) -> jax.Array:
  """Returns the bits of an array as uint32: one word for each element, or two."""
  if block.dtype == jnp.bool_:
    return block.astype(jnp.uint32)
  bits = jnp.finfo if jnp.issubdtype(block.dtype, jnp.floating) else jnp.iinfo
  unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}
  words = jax.lax.bitcast_convert_type(block, unsigned[bits(block.dtype).bits])
  return words.astype(jnp.uint32)


class Copies:
  """Replicated arrays.

  Attributes:
    leaves: name -> shape, dtype and NamedSharding; only those with several replicas.
  """

  def __init__(self, leaves: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh):
    """Picks, of these arrays, those that are replicated; all are on this mesh."""
    found = {name: holders(leaf.sharding, leaf.shape) for name, leaf in leaves.items()}
    self.leaves = {name: leaf for name, leaf in leaves.items() if found[name]}
    rows = {device: row for row, device in enumerate(mesh.devices.flat)}
    # Of each array (devices with the same shard, their rows).
    self._groups = [
      [(devices, [rows[device] for device in devices]) for devices in found[name]]
      for name in self.leaves
    ]

  def differences(self, digests: np.ndarray) -> list[Difference]:
    """Compares the digests of replicas; returns those that differ.

    Args:
      digests: uint32 [device of the mesh, array], of `digest_program`.
    """
    differing = []
    for name, groups, column in zip(self.leaves, self._groups, digests.T, strict=True):
      for devices, rows in groups:
        values = column[rows].tolist()
        ranked = collections.Counter(values).most_common(2)
        if len(ranked) == 1:
          continue
        majority = [ranked[0][0]] if ranked[0][1] > ranked[1][1] else []
        right = [device for device, x in zip(devices, values, strict=True) if x in majority]
        wrong = [device for device in devices if device not in right]
        differing.append(Difference(name, tuple(wrong), tuple(right)))
    return differing


# ------------------------------ the check of a run ------------------------------

_MOST_LINES = _MOST_NAMES = 8


class CopiesDifferError(TrainingStoppedError):
  """Copies of the state differ between devices; the same message on every process.

  Attributes:
    step: the first after which it was seen; the check before found nothing.
    wrong: the devices whose replicas differ from the majority.
  """

  def __init__(self, step: int, found: Sequence[Difference], leaves: Mapping[str, Any]):
    """Takes what differs after a step; `leaves` have the shapes, by name."""
    self.step = step
    self.wrong = tuple(dict.fromkeys(device for one in found for device in one.wrong))
    lines = forms.first([_line(one, leaves[one.name].shape) for one in found], _MOST_LINES)
    counts = collections.Counter(device for one in found if one.right for device in one.wrong)
    verdict = "there is no majority, so it is not known which device is wrong"
    if counts:
      named = device_text([device for device, _ in counts.most_common()])
      verdict = f"{named} {'differs' if len(counts) == 1 else 'differ'} from the other replicas"
    super().__init__(
      f"step {step}: copies of the state differ, which must be the same to the bit: {verdict}:"
      + "".join(f"\n  {line}" for line in lines)
      + "\nThis step is not saved. Run the same command again to resume from the last checkpoint; "
      "if the same device is named again, leave it out. Where many differ at once after few steps, "
      "a collective or an operation of this platform may not give the same bits everywhere: "
      "training.replica_check_every_steps=0 turns this check off"
    )


def _line(one: Difference, shape: Sequence[int]) -> str:
  name = f"{one.name} [{', '.join(map(str, shape))}]"
  if not one.right:
    return f"{name}: the copies on {device_text(one.wrong)} differ"
  return f"{name}: {device_text(one.wrong)} against {device_text(one.right)}"


class ReplicaCheck:
  """Compares replicas every `training.replica_check_every_steps` steps, and before every save."""

  def __init__(
    self, state: State, mesh: Mesh, compile_on: Callable[..., Any], *, every: int, late: bool
  ):
    """Compiles the digests, unless the config turns the check off or nothing is replicated.

    Args:
      state: abstract, with its shardings.
      mesh: of all of it.
      compile_on: compiles a function for abstract arguments on the mesh (`Job.compile`).
      every: steps from one check to the next; 0: there is none.
      late: a check is read a step late, so that the device never waits for the host.
    """
    self._every, self._late = every, late
    self._copies = Copies(named_state(state) if every else {}, mesh)
    self._pending: tuple[int, jax.Array] | None = None
    self._checked: int | None = None
    if not self._copies.leaves:
      return
    self._digests = compile_digests(self._copies.leaves, mesh, compile_on, "digests of replicas")

  def after_step(self, step: int, state: State) -> None:
    """Starts a check if one is due, and reads the previous one.

    Args:
      step: the steps done.
      state: after them; it may be donated as soon as this returns.

    Raises:
      CopiesDifferError: copies differ.
    """
    self._read()
    self._checked = None  # a run that was rolled back reaches the same step again
    if self._copies.leaves and step % self._every == 0:
      self._begin(step, state)
      if not self._late:
        self._read()

  def before_save(self, step: int, state: State) -> None:
    """Checks a state that is about to be saved, unless it was checked; raises as above."""
    if self._copies.leaves and self._checked != step:
      self._begin(step, state)
    self._read()

  def _begin(self, step: int, state: State) -> None:
    arrays = named_state(state)
    self._pending = step, self._digests([arrays[name] for name in self._copies.leaves])
    self._checked = step

  def _read(self) -> None:
    if self._pending is None:
      return
    (step, digests), self._pending = self._pending, None
    if found := self._copies.differences(np.asarray(digests)):
      raise CopiesDifferError(step, found, self._copies.leaves)


def named_state(state: State) -> dict[str, Any]:
  """Returns the leaves by the names that the layout gives them."""
  optimizer = named_leaves(state.optimizer, "optimizer/")
  variables = named_leaves(state.variables, "variables/")
  return {"step": state.step, **named_leaves(state.params), **optimizer, **variables}


def device_text(devices: Sequence[jax.Device]) -> str:
  """Returns `device 3 (process 1)` or `devices 3, 5 (process 1), 8 (process 2)`."""
  by_process = collections.defaultdict(list)
  for device in devices[:_MOST_NAMES]:
    by_process[device.process_index].append(str(device.id))
  texts = [
    ", ".join(ids) + ("" if current().alone else f" (process {process})")
    for process, ids in by_process.items()
  ]
  if len(devices) > _MOST_NAMES:
    texts.append(f"{len(devices) - _MOST_NAMES} more")
  return f"device{'s' * (len(devices) > 1)} {', '.join(texts)}"
