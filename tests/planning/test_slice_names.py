"""Topologies and constants: what is known, and what is refused by name."""

import dataclasses
import math

import pytest

from planning.topology import of_devices, parse
from runtime.chips import CHIPS, REASONS, Rates, overridden


@pytest.mark.parametrize(
  ("name", "devices", "platform", "wraps"),
  [
    ("v5p:4x4x4", 64, "tpu", (True, True, True)),
    ("v5p:8x4x12", 384, "tpu", (True, True, True)),
    ("v5p:2x4x8", 64, "tpu", (False, False, False)),  # not made of whole cubes
    ("v5p:2x2x4", 16, "tpu", (False, False, False)),
    ("tpu7x:4x4x8", 256, "tpu", (True, True, True)),
    ("V5E:16x16", 256, "tpu", (True, True)),
    ("v6e:8x16", 128, "tpu", (False, True)),
    ("v6e:4x4", 16, "tpu", (False, False)),
    ("tpu7x:2x2x1", 8, "tpu", (False, False, False)),
    ("h100:8", 8, "gpu", ()),
    ("rtx4090:1", 1, "gpu", ()),
    ("mi300x:8", 8, "gpu", ()),
  ],
)
def test_topologies(name, devices, platform, wraps):
  found = parse(name)
  assert (found.devices, found.platform, found.wraps()) == (devices, platform, wraps)
  assert found.chip is CHIPS[name.lower().split(":")[0]]


@pytest.mark.parametrize(
  ("name", "shape"),
  [("v5e:1", "v5e:1x1"), ("v5e-1", "v5e:1x1"), ("v6e:16", "v6e:4x4"), ("v5p:1", "v5p:1x1x1")],
)
def test_a_number_of_chips_is_a_shape_where_it_can_be_nothing_else(name, shape):
  assert parse(name).name == shape
  with pytest.raises(ValueError, match="v5p takes 3 dims"):  # chips or TensorCores
    parse("v5p:8")
  with pytest.raises(ValueError, match="v5e takes 2 dims"):
    parse("v5e:3")


# The tables of the Cloud TPU pages: TensorCores of v4, v5p and 7x, chips of v5e and v6e.
@pytest.mark.parametrize(
  ("name", "shape", "chips"),
  [
    ("v4-8", "v4:2x2x1", 4),
    ("v4-4096", "v4:8x16x16", 2048),
    ("v5p-8", "v5p:2x2x1", 4),
    ("V5P-64", "v5p:2x4x4", 32),
    ("v5p-128", "v5p:4x4x4", 64),
    ("v5p-640", "v5p:4x4x20", 320),
    ("v5p-12288", "v5p:16x16x24", 6144),
    ("tpu7x-2", "tpu7x:1x1x1", 1),
    ("v5litepod-16", "v5e:4x4", 16),
    ("v5e-8", "v5e:2x4", 8),
    ("v6e-32", "v6e:4x8", 32),
    ("v6e-256", "v6e:16x16", 256),
  ],
)
def test_a_clouds_name_is_a_slice_of_the_standard_shape(name, shape, chips):
  found, two = parse(name), parse(f"2x{name}")
  assert (found.name, math.prod(found.shape), found.slices) == (shape, chips, 1)
  assert found.note.startswith(f"{name.lower()} is {shape}: {chips} chip")
  assert ("TensorCores" in found.note) == (int(name.partition("-")[2]) != chips)
  assert (two.name, two.devices, two.slices) == (shape, found.devices, 2)


def test_slices_may_have_any_shape():
  assert parse("3xv5p:2x2x2") == dataclasses.replace(parse("v5p:2x2x2"), slices=3)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("v5q:4x4", "unknown device 'v5q'; there are v4:2x2x2, .*; did you mean 'v5"),
    ("v5e", "its size is missing, such as v5e:4x4$"),
    ("h100", "its size is missing, such as h100:8$"),
    ("v5e:4x0", "'4x0' is not a shape"),
    ("v5e:4x4x4", "v5e takes 2 dims, such as 4x4, 8x8, 16x16"),
    ("v5p:4x4", "v5p takes 3 dims, such as 2x2x2"),
    ("h100:2x4", "h100 takes a number of GPUs"),
    ("v5p:4x4x\u0664", "is not a shape"),
    ("2xh100:8", "the number before the x counts slices of TPUs and is at least 1; of GPUs give"),
    ("0xv5p-128", "counts slices of TPUs and is at least 1"),
    ("v3-8", "unknown device 'v3-8'; there are .*also v5p-128, v6e-256 and 2xv5p-128"),
    (
      "v5p-100",
      r"no slice of 100 TensorCores \(two per chip\); the nearest are v5p-64 \(2x4x4\) and "
      r"v5p-128 \(4x4x4\)",
    ),
    ("v5p-64000", r"the nearest are v5p-12160 \(4x20x76\) and v5p-12288 \(16x16x24\)"),
    ("v6e-12", r"no slice of 12 chips; the nearest are v6e-8 \(2x4\) and v6e-16 \(4x4\)"),
    ("2xv5e-2", r"no slice of 2 chips; the nearest are v5e-1 \(1x1\) and v5e-4 \(2x2\)"),
    ("v5p-0", "no slice of 0 TensorCores"),
    ("cpu:2x4", "cpu takes a number of simulated devices"),
  ],
)
def test_unknown_topologies_are_refused(name, message):
  with pytest.raises(ValueError, match=message):
    parse(name)


@dataclasses.dataclass
class Device:
  """What is asked of a device at hand."""

  platform: str
  device_kind: str
  coords: tuple[int, ...] = ()


@pytest.mark.parametrize(
  ("devices", "name"),
  [
    ([Device("cpu", "cpu")] * 8, "cpu:8"),
    ([Device("gpu", "NVIDIA H200")] * 4, "h200:4"),
    ([Device("gpu", "NVIDIA H100 PCIe")] * 2, "h100-pcie:2"),
    ([Device("gpu", "NVIDIA L4")], "l4:1"),
    ([Device("tpu", "TPU v5 lite", (x, y, 0)) for x in range(4) for y in range(2)], "v5e:4x2"),
    ([Device("tpu", "TPU v5p", (x, 0, z)) for x in range(2) for z in range(2)], "v5p:2x1x2"),
    ([Device("tpu", "TPU v6 lite", (0, 0, 0))], "v6e:1x1"),
    ([Device("tpu", "TPU7x", (x // 2, 0, 0)) for x in range(4)], "tpu7x:2x1x1"),
  ],
)
def test_devices_at_hand_are_a_topology(devices, name):
  assert of_devices(devices) == name
  assert parse(name).devices == len(devices)


def test_devices_of_an_unknown_kind_are_refused():
  with pytest.raises(ValueError, match="no constants are known for 'Quadro'; known are v4, v5e"):
    of_devices([Device("gpu", "Quadro")])


def test_simulated_devices_share_one_machine():
  one, eight = parse("cpu:1"), parse("cpu:8")
  assert (eight.devices, eight.platform) == (8, "cpu")
  for name in ("hbm_bytes", "hbm_bandwidth", "link_bandwidth", "flops"):
    assert getattr(eight.chip, name) == getattr(one.chip, name) / 8 > 0
  chips, _ = overridden("cpu.hbm_bytes=8e9")
  assert parse("cpu:8", chips).chip.hbm_bytes == 1e9


def test_constants_can_be_replaced():
  chips, rates = overridden("matmul=0.5,v5p.hbm_bandwidth=2e12")
  assert rates.matmul == 0.5
  assert chips["v5p"].hbm_bandwidth == 2e12
  assert chips["v5e"] == CHIPS["v5e"]
  assert CHIPS["v5p"].hbm_bandwidth != 2e12


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("matmull=0.5", "there is no 'matmull'; did you mean 'matmul'"),
    ("v5p.flop=1", "there is no 'v5p.flop'; did you mean 'v5p.flops'"),
    ("matmul=0", "is not a positive number"),
    ("matmul=1..2", "is not a positive number"),
    ("matmul=.", "is not a positive number"),
    ("matmul=fast", "matmul='fast' is not a positive number"),
    ("v5p.name=1", "there is no 'v5p.name'"),
  ],
)
def test_unknown_constants_are_refused(text, message):
  with pytest.raises(ValueError, match=message):
    overridden(text)


def test_every_rate_has_its_reason():
  assert set(REASONS) == set(Rates.__dataclass_fields__)
  assert all(chip.source for chip in CHIPS.values())


def test_every_chip_has_a_peak_a_source_of_it_and_names_of_its_own():
  for name, chip in CHIPS.items():
    assert chip.flops > 0
    assert chip.source
    assert chip.flops_source
    assert 0.7 < chip.matmul < 0.95
    assert chip.matmul_source
    assert bool(chip.device_kinds) == (name != "cpu")
    assert all(kind == kind.lower() for kind in chip.device_kinds)
  kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
  assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(
  ("name", "count", "most"),
  [
    ("h100:99999999", "99,999,999", "131,072"),
    ("cpu:1000000", "1,000,000", "8,192 where they are simulated"),
    ("v5p:9999x9999x9999", "999,700,029,999", "131,072"),
    ("99999xv5p-128", "6,399,936", "131,072"),
  ],
)
def test_absurd_numbers_of_devices_are_refused(name, count, most):
  with pytest.raises(
    ValueError, match=f"has {count} devices, and a plan is made of at most {most}"
  ):
    parse(name)
