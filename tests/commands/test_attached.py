"""Devices, their memory and their collectives: measured, checked, and beside the data sheets."""

import types

import jax
import numpy as np
import pytest

from commands import attached
from commands.machine import OK, WARNING, WRONG
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from runtime.chips import CHIPS
from runtime.devices import Devices

H100 = CHIPS["h100"]


@pytest.mark.parametrize(("share", "status"), [(0.75, OK), (0.5, WARNING), (0.1, WRONG)])
def test_memory_that_another_program_has(share, status):
  [one] = attached.memory(3, int(share * H100.hbm_bytes), H100)
  assert one.status == status
  assert one.what.startswith("device 3: ")
  assert f"{share:.0%} of 80.0 GiB" in one.what
  assert bool(one.fix) == (status != OK)


def test_memory_that_is_not_known():
  assert list(attached.memory(0, None, H100)) == []
  [one] = attached.memory(0, 2**30, None)
  assert one == attached.ok("device 0: 1.0 GiB of memory for JAX")


def test_simulated_and_unknown_devices():
  [one] = attached.check_devices(Devices("cpu", True, {}))
  assert one.what == f"{jax.device_count()} simulated CPU devices"
  found = list(attached.check_devices(Devices("gpu", False, {})))
  assert [one.status for one in found] == [OK, WARNING]
  assert "no data sheet of 'cpu' is known" in found[1].what


SIZES = {**dict.fromkeys(AXES, 1), "data": 4, "tensor": 2}


def test_each_axis_of_a_mesh_is_measured():
  found = list(attached.check_interconnect(make_mesh(SIZES), simulated=True))
  assert [one.status for one in found] == [OK, OK]
  assert "all-gather over data (4 devices): " in found[0].what
  assert "all-gather over tensor (2 devices): " in found[1].what
  one_device = make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
  [one] = attached.check_interconnect(one_device, simulated=True)
  assert one.what == "one device: there are no collectives"


def test_a_wrong_result_is_seen(monkeypatch):
  right = jax.lax.with_sharding_constraint

  def broken(array, shardings):
    return right(array, shardings).at[1, 7].add(1)

  monkeypatch.setattr(jax.lax, "with_sharding_constraint", broken)
  [one, _] = attached.check_interconnect(make_mesh(SIZES), simulated=True)
  assert one.status == WRONG
  assert "the result is wrong" in one.what


@pytest.mark.parametrize(("share", "status"), [(0.8, OK), (0.4, WARNING), (0.1, WRONG)])
def test_a_slow_link_is_judged_by_the_data_sheet(share, status):
  one = attached.judged("all-gather", share * 450e9, (450e9, "NVLink"))
  assert one.status == status
  assert f"{share:.0%} of NVLink's 450 GB/s" in one.what
  assert bool(one.fix) == (status != OK)
  assert attached.judged("all-gather", 1.0, None).status == OK


def mesh_of(kind, shape, **more):
  """Returns what `expected` reads of a mesh of devices that are not there."""
  places = np.ndindex(*shape)
  devices = np.empty(shape, object)
  for number, place in enumerate(places):
    devices[place] = types.SimpleNamespace(
      id=number, device_kind=kind, platform="x", coords=(*place, 0)[:3], **more
    )
  axes = ("data", "tensor")
  sizes = dict(zip(axes, shape, strict=True))
  return types.SimpleNamespace(
    devices=devices, axis_names=axes, shape=sizes, size=int(np.prod(shape))
  )


def test_the_bandwidth_of_data_sheets():
  bandwidth, network = attached.expected(mesh_of("NVIDIA H100 80GB HBM3", (2, 4)), "tensor")
  assert network == "NVLink"
  assert bandwidth == pytest.approx(450e9, rel=1e-2)
  bandwidth, network = attached.expected(mesh_of("NVIDIA H100 80GB HBM3", (2, 8)), "data")
  assert network == "DCN"  # two machines
  assert bandwidth == pytest.approx(50e9, rel=1e-2)
  # A v5e slice of 4x4 has no wraparound links: half of 90 GB/s along each axis.
  bandwidth, network = attached.expected(mesh_of("TPU v5 lite", (4, 4)), "tensor")
  assert network == "ICI"
  assert bandwidth == pytest.approx(45e9, rel=1e-2)
  assert attached.expected(mesh_of("unheard of", (2, 2)), "data") is None
