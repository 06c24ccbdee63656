"""The buffers at the peak of a compiled step, read from what XLA writes."""

import pathlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from planning import buffers
from planning.step_facts import of_job
from tests.helpers.compiling import FAST
from tests.helpers.jobs import make_job

ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
 value: <1 state.1 @0> (size=4096,offset=0): f32[1024]{0}
 value: <9 updated @0> (size=4096,offset=0): f32[1024]{0}
allocation 1: size 16, thread-local:
 value: <2 add.1 @0> (size=16,offset=0): f32[4]{0}
allocation 2: size 8, constant:
 value: <3 constant.1 @0> (size=8,offset=0): f32[2]{0}
allocation 3: size 5000, preallocated-temp:
 value: <4 first @0> (size=2000,offset=0): f32[500]{0}
 value: <5 second @0> (size=1000,offset=2000): f32[250]{0}
 value: <6 loop{1} (phi) @0> (size=1000,offset=2000): f32[250]{0}
 value: <7 loop{} @0> (size=96,offset=3000): (s32[], f32[250]{0})
 value: <8 third @0> (size=1500,offset=3500): f32[375]{0}
allocation 4: size 9000, color 1, preallocated-temp:
 value: <10 on_chip @1> (size=9000,offset=0): f32[2250]{0:S(1)}
BufferAssignment END
"""
PROGRAM = """ENTRY %main (x: f32[1]) -> f32[1] {
  ROOT %x = f32[1] parameter(0)
}
"""
LIVES = """HloLiveRange (max 6):
  InstructionSequence:
    0:state.1
    1:first
    2:second
    3:loop
    4:third
    5:updated
  BufferLiveRange:
    state.1{}:0-6
    updated{}:5-6
    constant.1{}:0-6
    first{}:1-2
    second{}:2-3
    loop{1}:3-5
    loop{}:3-5
    third{}:4-5
    on_chip{}:1-5
  Live ranges at 2 (peak):
    first{}: 2000 bytes (cumulative: 2000 bytes)
"""


@pytest.fixture(scope="module")
def job():
  return make_job("fsdp8", "lm")


def written(folder: pathlib.Path, assignment: str, lives: str) -> pathlib.Path:
  (folder / "module_0000.jit_train_step.x-buffer-assignment.txt").write_text(assignment)
  (folder / "module_0000.jit_train_step.x-live-range.txt").write_text(lives)
  (folder / "module_0000.jit_train_step.after_optimizations.txt").write_text(PROGRAM)
  return folder


def test_what_lives_at_once_is_counted_once_and_gaps_apart(tmp_path, job):
  found = buffers.read(written(tmp_path, ASSIGNMENT, LIVES), of_job(job))
  held = 4096 + 8  # what is updated in place once; nothing of a thread
  # `second` and the loop's share bytes; neither tuples' tables nor on-chip memory count.
  assert found.curve == tuple(held + now for now in (0, 2000, 3000, 1000, 2500, 2500))
  assert found.peak == held + 3000
  assert found.gaps == 5000 - 3000
  assert [(one.name, one.bytes) for one in found.buffers] == [
    *(("state.1", 4096), ("first", 2000), ("second", 1000), ("constant.1", 8)),
  ]
  assert buffers.read(tmp_path / "nothing", of_job(job)) is None


@pytest.fixture
def compiled_anew():
  """Has nothing come from the compilation cache, for which XLA writes nothing."""
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()  # JAX looks at the option once
  yield
  jax.config.update("jax_enable_compilation_cache", True)
  compilation_cache.reset_cache()


@pytest.mark.usefixtures("lines_of_python", "compiled_anew")
def test_arrays_of_a_step_are_known_by_layout_and_line(tmp_path):
  options = f"{FAST},xla_dump_to={tmp_path},xla_dump_hlo_as_text=true"
  job = make_job("fsdp8", "lm", **{"model.layers": 3, "compiler_options": options})
  compiled = job.compile_train_step().function
  found = buffers.read(tmp_path, of_job(job))
  assert sum(one.bytes for one in found.buffers) == found.peak == max(found.curve)
  stats, parts = compiled.memory_analysis(), found.parts()
  arguments = sum(parts[name] for name in ("parameters", "optimizer state", "batch"))
  assert arguments <= stats.argument_size_in_bytes
  allocated = stats.argument_size_in_bytes + stats.temp_size_in_bytes
  assert found.peak < allocated + stats.output_size_in_bytes
  ours = sum(leaf.nbytes for leaf in jax.tree.leaves(job.initial_state().params)) / 8
  assert parts["parameters"] == pytest.approx(ours, rel=0.05)
  assert parts["optimizer state"] == pytest.approx(2 * ours, rel=0.05)
  named = {one.made for one in found.buffers if one.part == "parameters"}
  assert "params/layers/mlp/gate/kernel" in named
  kernels = {one.split for one in found.buffers if one.made == "params/layers/mlp/gate/kernel"}
  assert kernels == {"model=40 over fsdp"}
  temporaries = {(one.part, one.split) for one in found.buffers if one.until != buffers.ALWAYS}
  assert ("saved for the backward pass", "batch=16 over fsdp") in temporaries
  assert ("gathered parameters", "whole on each device") in temporaries
  lines = {one.made.partition(":")[0] for one in found.buffers if one.until != buffers.ALWAYS}
  assert any(line.startswith("models/") for line in lines), lines
  assert {one.part for one in found.buffers} <= {*buffers.FIXES, "other"}
