"""The GPU benchmark without PyTorch: names, decay, the protocol, and what it refuses to report."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import gpu, gpu_protocol, nanogpt_cpu
from partitioning.mesh_sizes import AXES
from partitioning.rules import named_leaves
from runtime.devices import Devices
from tests.helpers.forks import ROOT
from training.optimizers.build import decayed

SMALL = {
  **{"model.layers": 2, "model.model_size": 16, "model.feedforward_size": 24, "model.heads": 4},
  **{"model.kv_heads": 2, "model.head_size": 4, "model.vocabulary_size": 256},
  **{"data.sequence_length": 8, "data.global_batch_size": 2},
}


@pytest.mark.parametrize(
  "model", [*gpu.MODELS.values(), nanogpt_cpu.MODELS["nanogpt"][0]], ids=lambda one: one.preset
)
def test_each_parameter_has_its_place_in_pytorch_and_the_same_decay(model):
  more = {"model.max_positions": 8, "model.kv_heads": 4} if model.family == "gpt2" else {}
  recipe = f"model={model.preset},data=python_source"
  one = Devices("cpu", simulated=True, sizes=dict.fromkeys(AXES, 1))
  job = gpu.prepare(recipe, {**model.overrides, **SMALL, **more}, one)
  leaves = named_leaves(job.state.params)
  places = gpu_protocol.torch_names(gpu.sizes(job, model.family))
  taken = [(file.replace(".", "/"), layer) for file, layer, _ in places.values()]
  there = {
    (leaf, layer)
    for leaf in leaves
    for layer in (range(2) if leaf.startswith("layers/") else (None,))
  }
  assert {*taken} == there
  assert len(taken) == len(there)
  decays = named_leaves(decayed(job.state.params))
  for own, (file, _, _) in places.items():
    assert gpu_protocol.decays(own) == decays[file.replace(".", "/")], own


def test_both_sides_see_the_same_batches_of_tokens_within_the_vocabulary():
  told = {"seed": 3, "rows": 2, "sizes": {"length": 64, "vocabulary": 50}}
  first, second = gpu_protocol.batches(told), gpu_protocol.batches(told)
  assert len(first) == gpu_protocol.BATCHES
  for (tokens, targets), (again, _) in zip(first, second, strict=True):
    np.testing.assert_array_equal(tokens, again)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.shape == (2, 64)
    assert 0 <= tokens.min() <= tokens.max() < 50


def test_what_a_side_prints_is_no_answer():
  script = """
from benchmarks import gpu_protocol

class Side:
  def __init__(self, job):
    print("a library says hello")
  def run(self, steps, **more):
    return {"seconds": steps * 1.0, "loss": 2.0, **more}
  def facts(self):
    return {"library": "none"}

gpu_protocol.serve(Side)
"""
  questions = [{"rows": 1}, {"steps": 3, "trace": "there"}, {"facts": True}]
  done = subprocess.run(
    [sys.executable, "-c", script],
    input="".join(f"{json.dumps(one)}\n" for one in questions),
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  answers = [json.loads(line) for line in io.StringIO(done.stdout)]
  assert answers == [
    {"seconds": 2.0, "loss": 2.0},
    {"seconds": 3.0, "loss": 2.0, "trace": "there"},
    {"library": "none"},
  ]


def facts(**other):
  """Returns the facts of both sides; `other` are PyTorch's."""
  ours = {"library": "jax 0", "device": "a chip", "parameters": 10, "peak_bytes": 2**30}
  own = {"rows": 2, "sizes": {"length": 500}, "flops": [3e9, 2e9], "peak_flops": 1e12}
  return {**ours, **own, "chosen": {}, "compiler_options": {}}, {**ours, **other}


def turns(loss):
  """Returns two turns of both sides; `loss` is PyTorch's last."""
  return [
    (
      {"seconds": 0.1, "processor": 0.2, "loss": 5.0},
      {"seconds": 0.2, "processor": 0.2, "loss": 5.0},
    ),
    (
      {"seconds": 0.12, "processor": 0.2, "loss": 4.0},
      {"seconds": 0.2, "processor": 0.2, "loss": loss},
    ),
  ]


def test_the_report_has_ratio_speed_and_utilization(capsys):
  assert gpu.report("gpt2_124m", turns(4.01), facts(), 20)
  said = capsys.readouterr().out
  assert "ratio 0.550, of the processor 1.000  (gpt2_124m: 2 rows, 1,000 tokens, a chip)" in said
  # 0.11 s for 20 steps: 3e9 / 5.5e-3 / 1e12.
  assert "jax 0: 5.50 ms (10.00 of the processor), 181,818 tokens/s, MFU 54.5% (36.4% by" in said


@pytest.mark.parametrize(
  ("loss", "other", "said"),
  [(4.1, {}, "the losses differ"), (4.0, {"parameters": 11}, "10 parameters, and PyTorch has 11")],
)
def test_two_models_that_are_not_the_same_are_no_comparison(loss, other, said, capsys):
  assert not gpu.report("gpt2_124m", turns(loss), facts(**other), 20)
  assert said in capsys.readouterr().err
