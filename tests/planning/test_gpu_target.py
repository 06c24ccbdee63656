"""Plans for NVIDIA's GPUs that are compiled without one, where JAX for them is installed."""

import pytest

from configs import single
from planning import aot, gpu_target, plan
from planning.topology import parse


@pytest.fixture
def compiler(monkeypatch):
  """The compiler is there."""
  monkeypatch.setattr(gpu_target.importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("compiler")
def test_gpus_that_xla_can_be_told_of_are_compiled_for():
  there = [f"{name}:8" for name in ("a100", "h100", "h200", "b200")]
  assert all(aot.compiled_here(parse(name), ()) for name in there)
  assert not any(aot.compiled_here(parse(name), ()) for name in ("rtx4090:1", "mi300x:8", "t4:1"))


def test_without_the_compiler_gpus_are_planned_by_formula(monkeypatch):
  monkeypatch.setattr(gpu_target.importlib.util, "find_spec", lambda name: None)
  assert not aot.compiled_here(parse("h100:8"), ())


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
  ("count", "shape"), [(1, "1x1x1"), (8, "1x1x8"), (12, "1x1x12"), (64, "1x8x8")]
)
def test_a_gpu_is_described_as_the_driver_has_it(count, shape, monkeypatch):
  asked = {}

  def described(**given):
    asked.update(given)
    return type("", (), {"devices": range(count)})

  monkeypatch.setattr(aot.described, "get_topology_desc", described)
  assert len(aot.start(parse(f"h100:{count}"), 1, ())) == count
  assert (asked["platform"], asked["topology"]) == ("cuda", shape)
  text = " ".join(asked["target_config"].split())
  assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED" in text
  assert "core_count: 132 " in text
  assert "memory_bandwidth: 3350000000000 " in text
  assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in text


@pytest.mark.plan
def test_the_peak_is_that_of_the_program_on_an_h100():
  """Of Llama 3.2 1B: its buffers there take 45,776,692,160 bytes (docs/plan.md)."""
  topology = parse("h100:1")
  if not gpu_target.compiler_there(topology.chip):
    pytest.skip("jax[cuda12] is not installed")
  config = single.get_config("model=llama3_2_1b")
  given = {"data.global_batch_size": 8, "data.sequence_length": 2048}
  given |= {"training.rematerialization": "elementwise"}
  config.update_from_flattened_dict(given)
  program = aot.compile_step(aot.prepare(config, topology, ()))
  assert program.peak_bytes == pytest.approx(45_776_692_160, rel=0.005)
  assert program.text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 16


@pytest.mark.long
def test_a_step_that_jax_refuses_to_compile_without_a_gpu_is_planned_by_formula(monkeypatch):
  def refuse(*_):
    raise NotImplementedError("head_dim <= 128")

  monkeypatch.setattr(aot, "compiled_here", lambda *_: True)
  monkeypatch.setattr(aot, "compile_step", refuse)
  config = single.get_config("mlp")
  found = plan.make(config, "h100:1", here=())
  assert found.program is None
  assert found.times.step > 0
  assert "not compiled, so all is by formula: head_dim <= 128" in found.warnings
