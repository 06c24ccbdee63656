"""The probe of accelerators computes on every device of the process, and takes longer for more."""

import jax

from processes.stragglers import DeviceProbe


def test_it_runs_on_every_device_without_a_collective():
  probe = DeviceProbe(size=16)
  assert {shard.device for shard in probe._matrices.addressable_shards} == {*jax.local_devices()}
  text = probe._matmuls.as_text()
  assert "bf16[1,16,16]" in text
  assert not any(name in text for name in ("all-reduce", "all-gather", "collective-permute"))
  assert 0 < probe() < 60


def test_more_work_takes_longer():
  assert DeviceProbe(size=256)() > 2 * DeviceProbe(size=16)()
