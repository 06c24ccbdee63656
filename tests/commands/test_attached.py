"""Devices and their memory beside the data sheet."""

import jax
import pytest

from commands import attached
from commands.machine import OK, WARNING, WRONG
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
