"""Reading metrics late, stopping at bad numbers, rates."""

import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from models import model_spec
from runtime.chips import peak_flops
from tests.helpers.jobs import make_job
from training.bad_steps import TrainingStoppedError
from training.metrics.reader import MetricsReader
from training.metrics.throughput import Meter


def metrics(loss, norm=1.0):
  """Returns what a step gives."""
  return {"loss": jnp.float32(loss), "grad_norm": jnp.float32(norm)}


def test_metrics_are_read_one_step_late_and_drained_at_the_end():
  reader = MetricsReader(late=1)
  assert reader.read(1, metrics(3), drain=False) == []
  assert [one.step for one in reader.read(2, metrics(2), drain=False)] == [1]
  assert [one.step for one in reader.read(3, metrics(1), drain=True)] == [2, 3]
  assert [one.step for one in MetricsReader(late=0).read(1, metrics(3), drain=False)] == [1]


def test_steps_that_are_read_together_have_the_times_at_which_each_was_done(monkeypatch):
  """As before an evaluation on an accelerator: the second did not take no time at all."""
  done = iter([10.0, 12.0])
  clock = types.SimpleNamespace(monotonic=lambda: next(done))
  monkeypatch.setattr("training.metrics.reader.time", clock)
  reader = MetricsReader(late=1)
  reader.read(1, metrics(3), drain=False)
  assert [one.at for one in reader.read(2, metrics(2), drain=True)] == [10.0, 12.0]


@pytest.mark.parametrize(("loss", "norm"), [(np.nan, 1.0), (1.0, np.inf)])
def test_a_number_that_is_not_finite_stops_and_names_its_step(loss, norm):
  reader = MetricsReader(late=1)
  reader.read(7, metrics(loss, norm), drain=False)
  with pytest.raises(TrainingStoppedError, match=r"step 7: .*(nan|inf).*learning_rate"):
    reader.read(8, metrics(1.0), drain=False)


def test_rates_leave_out_the_first_step_and_pauses(monkeypatch):
  now = [100.0]
  monkeypatch.setattr("training.metrics.throughput.time.monotonic", lambda: now[0])
  job = make_job("dp8", "lm")
  meter = Meter(job.batches, model_spec(job.config), job.mesh)  # 16 rows of 12 tokens
  meter.start(1, wait_seconds=3.0, at=150.0)
  now[0] = 160.0
  with meter.paused():
    now[0] = 1000.0
  values = meter.lap(6, wait_seconds=3.5, at=1000.0)
  assert values["step_seconds"] == pytest.approx(2.0)
  assert values["data_wait_seconds"] == pytest.approx(0.1)
  assert values["tokens_per_second"] == pytest.approx(96.0)
  assert meter.wait_share == pytest.approx(0.05)
  assert "mfu" not in values, "a CPU's peak is not known"
  parts, least = meter.text(6, {"loss": 1.0, "grad_norm": 1.0, **values})
  assert parts[0] == "step 6/200"
  assert parts[-1] == "left 6:28"
  assert least == ["grad_norm 1.000", parts[-2]]
  assert re.fullmatch(r"memory \d+\.\d GiB", parts[-2])


def test_peak_bytes_if_the_device_reports_them():
  job = make_job("dp8", "lm")
  device = types.SimpleNamespace(
    device_kind="NVIDIA H200",
    memory_stats=lambda: {"peak_bytes_in_use": 12345, "bytes_limit": 90 * 2**30},
  )
  mesh = types.SimpleNamespace(local_devices=[device], size=8)
  meter = Meter(job.batches, model_spec(job.config), mesh)
  meter.start(1, wait_seconds=0.0, at=1.0)
  values = meter.lap(2, wait_seconds=0.0, at=2.0)
  assert values["peak_bytes"] == 12345
  assert values["mfu"] > 0
  parts, _ = meter.text(2, {"loss": 1.0, "grad_norm": 1.0, **values, "mfu": 0.4125})
  assert parts[4:6] == ["MFU 41.2 %", "memory 0.0 of 90 GiB"]


def test_rates_are_those_of_the_stages_of_ramps(monkeypatch):
  now = [0.0]
  monkeypatch.setattr("training.metrics.throughput.time.monotonic", lambda: now[0])
  ramps = {
    "data.batch_size_ramp": ((0, 8), (5, 16)),
    "data.sequence_length_ramp": ((0, 6), (7, 12)),
  }
  plain, job = make_job("dp8", "lm"), make_job("dp8", "lm", **ramps)
  device = types.SimpleNamespace(device_kind="NVIDIA H200", memory_stats=dict)
  mesh = types.SimpleNamespace(local_devices=[device], size=8)
  meter = Meter(job.batches, model_spec(job.config), mesh)
  meter.start(3, wait_seconds=0.0, at=0.0)
  values = meter.lap(8, wait_seconds=0.0, at=10.0)  # steps 4 and 5 of 8 rows, 6 to 8 of 16
  assert values["tokens_per_second"] == pytest.approx((2 * 8 + 3 * 16) * 12 / 10)
  # Only step 8 has rows of 12 tokens; attention of half a row costs a quarter.
  whole, config = model_spec(plain.config).train_flops_per_example(), plain.config
  m = config.model
  attention = 12 * m.layers * m.heads * m.head_size * 12**2
  flops = 16 * whole + (2 * 8 + 2 * 16) * (whole - attention / 2)
  assert values["mfu"] == pytest.approx(flops / (10 * peak_flops(device) * 8))
