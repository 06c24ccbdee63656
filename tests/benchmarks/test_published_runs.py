"""Published runs: each has its source and settings, and `plan` can be asked for it."""

import collections
import math
import re

from benchmarks.published_runs import read
from configs.schema import recipes

RUNS = read()


def test_there_are_enough_of_every_kind():
  assert len(RUNS) >= 130
  chips = collections.Counter(run.place.chip.name for run in RUNS)
  assert {"v5e", "v5p", "v6e", "tpu7x", "a100", "h100", "h200", "b200"} <= chips.keys()
  devices = [run.devices for run in RUNS]
  assert (min(devices), max(devices)) == (1, 8192)
  axes = collections.Counter(axis for run in RUNS for axis in run.mesh)
  assert min(axes[axis] for axis in ("data", "fsdp", "tensor", "context", "expert", "stage")) >= 3
  assert sum(run.devices > run.place.devices for run in RUNS) >= 10  # several slices
  assert sum(run.matmuls != "bfloat16" for run in RUNS) >= 20
  assert sum("lora.rank" in run.settings for run in RUNS) >= 2


def test_no_run_stands_twice():
  places = collections.Counter((run.source, run.version, run.where, run.model) for run in RUNS)
  assert [place for place, count in places.items() if count > 1] == []


def test_every_run_is_complete():
  for run in RUNS:
    assert re.fullmatch(r"github\.com/[\w.-]+/[\w.-]+", run.source), run
    assert re.fullmatch(r"commit [0-9a-f]{7,40}|20\d\d-\d\d-\d\d", run.version), run
    assert run.software, run
    assert run.model in recipes.PRESETS, run
    assert bool(run.tokens_per_second) != bool(run.tflops), run  # one of them is published
    sizes = [*run.mesh.values(), *run.slices.values()]
    slices = re.match(r"(\d+)x(?=[a-z])", run.topology)
    assert math.prod(sizes) == run.devices == run.place.devices * int(slices[1] if slices else 1)
    same_rows = [run.mesh.get(axis, 1) for axis in ("tensor", "context", "stage")]
    copies, parts = run.devices // math.prod(same_rows), max(run.accumulation, run.microbatches)
    assert run.rows % (copies * parts) == 0, run
