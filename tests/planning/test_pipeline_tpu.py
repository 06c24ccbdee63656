"""Memory of pipeline schedules by the compiler for TPUs; `make test-plan` runs it."""

import pytest

from configs import single
from planning import aot
from planning.topology import parse

pytestmark = [
  pytest.mark.plan,
  # Programs for devices that are only described are kept, but cannot be read back.
  pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry"),
]
SIZES = {
  "model.layers": 4,
  "model.model_size": 256,
  "model.heads": 4,
  "model.kv_heads": 4,
  "model.feedforward_size": 512,
  "data.sequence_length": 512,
  "mesh.stage": 4,
}


def peak_bytes(kind: str, microbatches: int) -> int:
  """Returns the peak of a device in a step with one row in each microbatch, on four stages."""
  config = single.get_config("lm")
  keys = {
    **SIZES,
    "training.pipeline": kind,
    "training.microbatches": microbatches,
    "data.global_batch_size": microbatches,
  }
  for key, value in keys.items():
    config.update_from_flattened_dict({key: value})
  program = aot.compile_step(aot.prepare(config, parse("v5p:2x2x1"), ()))
  assert program.fits
  return program.peak_bytes


def test_memory_of_1f1b_does_not_grow_with_the_microbatches():
  found = [peak_bytes("1f1b", count) for count in (8, 16, 32)]
  assert max(found) <= 1.01 * min(found), found


def test_memory_of_gpipe_grows_with_them():
  found = [peak_bytes("gpipe", count) for count in (8, 32)]
  assert found[1] - found[0] >= 24 * 512 * 256 * 2, found  # an input of each, in bfloat16
