"""The prediction beside a run: that of a plan of the same config on the same devices."""

import dataclasses

import jax
import numpy as np
import pytest

from planning import aot, plan, prediction
from tests.helpers.jobs import make_job


def test_it_is_what_a_plan_says(monkeypatch):
  job = make_job("dp4_tp2", "mlp")
  found = prediction.of_program(job.compile_train_step().function, job.mesh, "cpu")
  here = tuple(jax.devices())
  monkeypatch.setattr(aot, "prepare", lambda *arguments: job)
  expected = plan.make(job.config, "cpu:8", here=here)
  assert found["topology"] == "cpu:8"
  assert found["step_seconds"] == pytest.approx(expected.step_seconds, rel=1e-9)
  assert found["peak_bytes"] == expected.peak_bytes
  assert found["limit_bytes"] == int(expected.topology.chip.hbm_bytes)
  assert found["accuracy"] == expected.accuracy["times"]
  sums = {}
  for one in expected.sent:
    key = ("+".join(one.axes), one.kind)
    seconds, size, runs = sums.get(key, (0, 0, 0))
    sums[key] = (seconds + one.seconds, size + one.bytes, runs + one.runs)
  assert {axis for axis, _ in sums} >= {"data", "tensor"}
  assert {(one["axis"], one["kind"]) for one in found["sent"]} == {*sums}
  for one in found["sent"]:
    sent = (one["seconds"], one["bytes"], one["runs"])
    assert sent == pytest.approx(sums[one["axis"], one["kind"]])


def test_unknown_devices_are_refused():
  @dataclasses.dataclass
  class Device:
    platform = "gpu"
    device_kind = "Z9000"

  mesh = type("", (), {"devices": np.array([Device()])})()
  with pytest.raises(ValueError, match="no constants are known for 'Z9000'"):
    prediction.of_program(None, mesh, "gpu")
