"""Topologies of a plan: `v5p:4x4x4` is a slice of TPUs, `h100:8` a machine of GPUs.

`v5p-128` is a cloud's name of the same slice, and `2xv5p-128` two of them.
"""

import copy
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from etils import epy
from ml_collections import ConfigDict

from runtime.chips import CHIPS, Chip, known
from runtime.devices import GPU_MEMORY_SHARE, Devices, memory_bytes
from runtime.suggest import nearest

# The clouds' names of TPU slices: `v5p-128`, `v6e-256`, `v5litepod-16`.
#
# The number counts TensorCores, two per chip, of v4, v5p and 7x, and chips of v5e and v6e. A size
# has one standard shape: up to 32 chips 1x1x1 to 2x4x4, above that complete cubes of 4x4x4 chips,
# as close to a cube as their number allows. Source: the Cloud TPU pages of v4, v5e, v5p, v6e and
# tpu7x (cloud.google.com/tpu/docs), tables of configurations; for numbers of cubes that the tables
# omit, XPK's list (github.com/AI-Hypercomputer/xpk, system_characteristics.py).


@dataclasses.dataclass(frozen=True)
class _Family:
  """How slices of a chip are named.

  Attributes:
    chip: its name in a topology.
    cores: how much each chip adds to the number.
    small: shapes smaller than a cube; for two dims, all shapes.
    most: chips of the largest slice.
  """

  chip: str
  cores: int
  small: tuple[tuple[int, ...], ...]
  most: int


_BELOW_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBE = 4
_FAMILIES = {
  "v4": _Family("v4", 2, _BELOW_A_CUBE, 4096),
  "v5litepod": _Family("v5e", 1, _FLAT, 256),
  "v5e": _Family("v5e", 1, _FLAT, 256),
  "v5p": _Family("v5p", 2, _BELOW_A_CUBE, 6144),
  "v6e": _Family("v6e", 1, _FLAT, 256),
  "tpu7x": _Family("tpu7x", 2, ((1, 1, 1), *_BELOW_A_CUBE), 9216),
}


def most_chips(chip: str) -> int | None:
  """Returns the chips of the largest slice of a TPU; None for what is not one."""
  return max((one.most for one in _FAMILIES.values() if one.chip == chip), default=None)


def resolve_slice(text: str) -> tuple[str, str]:
  """Returns a topology's name (`v5p:4x4x4` for `v5p-128`) and a remark about it.

  A name of another form is returned unchanged, with "".

  Raises:
    ValueError: there is no slice of that size; the message names the nearest ones.
  """
  found = re.fullmatch(r"([a-z0-9]+)-(\d+)", text)
  if found is None or found[1] not in _FAMILIES:
    return text, ""
  family, number = _FAMILIES[found[1]], int(found[2])
  shapes = _shapes(found[1])
  if number not in shapes:
    near = sorted(shapes, key=lambda size: (abs(size - number), size))[:2]
    names = " and ".join(f"{found[1]}-{size} ({_text(shapes[size])})" for size in sorted(near))
    raise ValueError(
      f"--topology={text}: there is no slice of {number} {_counted(family)}; the nearest are "
      f"{names}"
    )
  name = f"{family.chip}:{_text(shapes[number])}"
  chips = math.prod(shapes[number])
  counted = f", {number} {_counted(family)}" if family.cores > 1 else ""
  return name, f"{text} is {name}: {chips} {'chip' if chips == 1 else 'chips'}{counted}"


def _counted(family: _Family) -> str:
  return "TensorCores (two per chip)" if family.cores > 1 else "chips"


def _text(shape: tuple[int, ...]) -> str:
  return "x".join(map(str, shape))


@functools.cache
def _shapes(name: str) -> dict[int, tuple[int, ...]]:
  """Returns the number in a slice's name -> the shape of the slice, in chips."""
  family = _FAMILIES[name]
  found = {family.cores * math.prod(shape): shape for shape in family.small}
  if len(family.small[0]) == 3:
    for count in range(1, family.most // _CUBE**3 + 1):
      found[family.cores * count * _CUBE**3] = tuple(_CUBE * side for side in _cubic(count))
  return found


def _cubic(count: int) -> tuple[int, int, int]:
  """Returns the three factors of a number, in order, whose sum is least."""
  sides = range(1, math.isqrt(count) + 1)
  triples = (
    (a, b, count // (a * b))
    for a, b in itertools.combinations_with_replacement(sides, 2)
    if count % (a * b) == 0 and count // (a * b) >= b
  )
  return min(triples, key=sum)


with epy.lazy_imports():
  import jax

# Devices of a plan; JAX starts those of a CPU, and a number near the second takes it about 12 s and
# 1 GiB, which grow faster than the number.
MOST_DEVICES, MOST_SIMULATED = 2**17, 2**13
EXAMPLES = {2: "4x4, 8x8, 16x16", 3: "2x2x2, 4x4x4, 8x8x16"}


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices that need not be attached.

  Attributes:
    name: as given, in lower case.
    chip: of a device.
    shape: of the torus of one slice, in chips; for GPUs, their number.
    slices: number in the name; 1: as many as the config's mesh_dcn.
    note: how a cloud's name was interpreted; "" for other names.
  """

  name: str
  chip: Chip
  shape: tuple[int, ...]
  slices: int = 1
  note: str = ""

  @property
  def devices(self) -> int:
    """Returns the number of devices of a slice, as JAX counts them."""
    return math.prod(self.shape) * self.chip.devices_per_chip

  @property
  def name_with_slices(self) -> str:
    """Returns `2xv5p:4x4x4`; the name alone of one slice."""
    return f"{self.slices}x{self.name}" if self.slices > 1 else self.name

  @property
  def platform(self) -> str:
    """Returns `tpu`, `gpu` or `cpu`."""
    return "cpu" if self.chip.name == "cpu" else "tpu" if self.chip.torus else "gpu"

  @property
  def usable_bytes(self) -> float:
    """Returns the bytes of a device's memory that a run takes: on a GPU a share of all."""
    return self.chip.hbm_bytes * (GPU_MEMORY_SHARE if self.platform == "gpu" else 1)

  def wraps(self) -> tuple[bool, ...]:
    """Returns for each axis of the torus whether it has wraparound links; () for GPUs.

    Slices of v4, v5p and 7x that consist of cubes of 4x4x4 chips have them on all axes, because the
    optical switches are at the faces of a cube; smaller slices have none. On v5e and v6e an axis
    has them if it is as long as the pod's. Source: [1] and [2] of runtime/chips.py.
    """
    if not self.chip.torus:
      return ()
    if self.chip.torus == 2:
      return tuple(size == self.chip.wraps for size in self.shape)
    return (all(size % self.chip.wraps == 0 for size in self.shape),) * 3


def parse(text: str, chips: Mapping[str, Chip] = CHIPS) -> Topology:
  """Returns the topology of a name.

  Raises:
    ValueError: there is no such topology; the message names the known ones.
  """
  slices, name = re.fullmatch(r"(?:(\d+)x(?=[a-z]))?(.*)", text.lower(), re.DOTALL).groups()
  name, note = resolve_slice(name)
  kind, _, rest = name.partition(":")
  if kind not in chips:
    hint = nearest(kind, chips)
    raise ValueError(f"--topology={text}: unknown device {kind!r}; {_known(chips)}{hint}")
  chip = chips[kind]
  if slices is not None and (not chip.torus or not int(slices)):
    raise ValueError(
      f"--topology={text}: the number before the x counts slices of TPUs and is at least 1; "
      "of GPUs give their number over all machines, such as h100:16"
    )
  if not rest:
    example = EXAMPLES[chip.torus].partition(",")[0] if chip.torus else 8
    raise ValueError(f"--topology={text}: its size is missing, such as {kind}:{example}")
  sizes = _of_chips(chip, rest).split("x")
  if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
    raise ValueError(f"--topology={text}: {rest!r} is not a shape; {_known(chips)}")
  shape = tuple(map(int, sizes))
  if len(shape) != (chip.torus or 1):
    of = "simulated devices" if kind == "cpu" else "GPUs"
    want = (
      f"{chip.torus} dims, such as {EXAMPLES[chip.torus]}" if chip.torus else f"a number of {of}"
    )
    raise ValueError(f"--topology={text}: {kind} takes {want}")
  if kind == "cpu":
    chip = _shared(chip, shape[0])
  found = Topology(f"{kind}:{_text(shape)}", chip, shape, int(slices or 1), note)
  require_devices(found, found.slices)
  return found


def _of_chips(chip: Chip, rest: str) -> str:
  """Returns the shape of a TPU slice of one chip, or of a number of them on v5e and v6e.

  Of v4, v5p and 7x a number could as well be that of TensorCores: it is returned unchanged.
  """
  shapes = {"1": (1,) * chip.torus}
  if chip.torus == 2:
    shapes |= {str(math.prod(shape)): shape for shape in _FLAT}
  return _text(shapes[rest]) if chip.torus and rest in shapes else rest


def require_devices(topology: Topology, slices: int) -> int:
  """Returns the devices of a topology; raises ValueError where a plan cannot have so many."""
  most = MOST_SIMULATED if topology.platform == "cpu" else MOST_DEVICES
  if (count := topology.devices * slices) > most:
    over = f" in {slices:,} slices" if slices > 1 else ""
    raise ValueError(
      f"--topology={topology.name}{over} has {count:,} devices, and a plan is made of at most "
      f"{most:,}{' where they are simulated' if most == MOST_SIMULATED else ''}"
    )
  return count


def _shared(chip: Chip, count: int) -> Chip:
  """Returns a simulated device's share of the machine."""
  return dataclasses.replace(
    chip,
    hbm_bytes=(chip.hbm_bytes or memory_bytes(Devices("cpu", True, {}))) / count,
    hbm_bandwidth=chip.hbm_bandwidth / count,
    link_bandwidth=chip.link_bandwidth / count,
    flops=chip.flops / count,
  )


def with_slices(config: ConfigDict, topology: Topology) -> ConfigDict:
  """Returns the config for the topology's number of slices, along `data` by default.

  Raises:
    ValueError: mesh_dcn has a different number.
  """
  asked = math.prod(config.mesh_dcn.values())
  if topology.slices in (1, asked):
    return config
  if asked != 1:
    raise ValueError(
      f"--topology={topology.slices}x{topology.name} has {topology.slices} slices, and the product "
      f"of mesh_dcn.* is {asked}; make it {topology.slices}, such as "
      f"--config.mesh_dcn.data={topology.slices}"
    )
  config = copy.deepcopy(config)
  config.mesh_dcn.data = topology.slices
  return config


def of_devices(found: "Sequence[jax.Device]") -> str:
  """Returns the topology's name of attached devices.

  Raises:
    ValueError: no constants are known for their kind.
  """
  if found[0].platform == "cpu":
    return f"cpu:{len(found)}"
  if (kind := known(found[0])) is None:
    names = ", ".join(chip.name for chip in CHIPS.values() if chip.device_kinds)
    raise ValueError(
      f"no constants are known for {found[0].device_kind!r}; known are {names}; choose the nearest "
      "with --topology"
    )
  name = kind.name
  torus = kind.torus
  if not torus:
    return f"{name}:{len(found)}"
  ends = [max(device.coords[dim] for device in found) + 1 for dim in range(torus)]
  return f"{name}:{'x'.join(map(str, ends))}"


def _known(chips: Mapping[str, Chip]) -> str:
  tpus = ", ".join(f"{c.name}:{EXAMPLES[c.torus].split(',')[0]}" for c in chips.values() if c.torus)
  gpus = ", ".join(c.name for c in chips.values() if not c.torus and c.name != "cpu")
  return (
    f"there are {tpus} (slices of TPUs of any such shape; also v5p-128, v6e-256 and 2xv5p-128, as "
    f"clouds name them), h100:8 and the like (GPUs and their number: {gpus}), cpu:8 (simulated "
    f"devices)"
  )
