"""Adapters on meshes beside one device, and on one device beside W + s A B in NumPy."""

import functools
import re

import jax
import numpy as np
import pytest

from partitioning import rules
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job
from tests.models import numpy_decoder
from tests.parity import budgets
from tests.parity.comparison import (
  ADAPTERS,
  COLLECTIVE_MATMUL,
  MESHES,
  PLAIN,
  SEQUENCE_PARALLEL,
  assert_equal,
  train,
)

ON = {
  "all three, sequence-parallel": {**MESHES["data2_fsdp2_tensor2"], **SEQUENCE_PARALLEL},
  "collective matmuls": {**MESHES["fsdp2_tensor4"], **COLLECTIVE_MATMUL},
  "context": {"mesh.data": 4, "mesh.context": 2, "model.context_attention": "gather"},
}
# Kernel -> its letters without L, those that it contracts first.
KERNELS = {
  "layers/attention/query": ("D", "NH"),
  "layers/attention/key": ("D", "KH"),
  "layers/attention/value": ("D", "KH"),
  "layers/attention/out": ("NH", "D"),
  "layers/mlp/gate": ("D", "F"),
  "layers/mlp/up": ("D", "F"),
  "layers/mlp/down": ("F", "D"),
}

on_one_device = functools.cache(lambda: train("lm", "float64", ADAPTERS))


@pytest.mark.parametrize(
  "mesh",
  [pytest.param(x, marks=pytest.mark.long) if x == "collective matmuls" else x for x in ON],
)
def test_adapters_train_as_on_one_device(mesh):
  ours = train("lm", "float64", {**ADAPTERS, **ON[mesh]})
  assert_equal(ours, on_one_device(), "float64")
  names = {f"{kernel}/lora_{x}" for kernel in KERNELS for x in "ab"}
  assert {*ours.trained.gradients} == names
  if mesh == "collective matmuls":  # in a ring, x is nowhere whole
    assert "collective-permute" in ours.trained.text
    assert not re.search(r"f64\[8,24,40\]\S* all-gather", ours.trained.text)


def merged(arrays):
  """Returns the parameters without adapters, W + 5/3 A B, in NumPy."""
  found = {name: x for name, x in arrays.items() if "lora" not in name}
  for kernel, (ins, outs) in KERNELS.items():
    a, b = arrays[f"{kernel}/lora_a"], arrays[f"{kernel}/lora_b"]
    product = np.einsum(f"L{ins}r,Lr{outs}->L{ins}{outs}", a, b)
    found[f"{kernel}/kernel"] = found[f"{kernel}/kernel"] + 5 / 3 * product
  return found


@functools.cache
def of_merged():
  """Returns the parameters with adapters, and loss and gradients of the merged ones without."""
  job = on_one_device().job
  with jax.enable_x64(True):
    arrays = {n: np.asarray(x) for n, x in named_leaves(first_state(job).params).items()}
    batch = host_batch(job, seed=0)
    base = make_job("single", "lm", **{**PLAIN, "training.parameter_dtype": "float64"})
    params = jax.tree.unflatten(
      jax.tree.structure(base.state.params),
      [merged(arrays)[name] for name in named_leaves(base.state.params)],
    )
    raw, _, factor, _ = base.compile(
      base.program.gradients, base.state.params, base.batch, None
    ).function(params, batch, None)
  gradients = {name: np.asarray(x) * float(factor) for name, x in named_leaves(raw).items()}
  inputs = [batch[name] for name in ("tokens", "targets", "weights")]
  loss = numpy_decoder.loss(base.config, merged(arrays), *inputs, np.zeros_like(batch["tokens"]))
  return arrays, loss, gradients


def assert_as_merged(trained):
  """Asserts that loss and gradients of the first step follow from those of the merged kernels."""
  arrays, loss, gradients = of_merged()
  assert trained.losses[0] == pytest.approx(loss, rel=1e-12)
  for kernel, (ins, outs) in KERNELS.items():
    gradient = 5 / 3 * gradients[f"{kernel}/kernel"]
    a, b = arrays[f"{kernel}/lora_a"], arrays[f"{kernel}/lora_b"]
    wanted_a = np.einsum(f"L{ins}{outs},Lr{outs}->L{ins}r", gradient, b)
    wanted_b = np.einsum(f"L{ins}{outs},L{ins}r->Lr{outs}", gradient, a)
    for name, wanted in (("lora_a", wanted_a), ("lora_b", wanted_b)):
      found = trained.gradients[f"{kernel}/{name}"]
      distance = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
      assert distance < 1e-12, (kernel, name, distance)


def test_loss_and_gradients_are_those_of_merged_kernels():
  assert_as_merged(on_one_device().trained)


# ---- What the compiled step holds and sends ----

SPLIT = "dp2_fsdp2_tp2, sequence-parallel"
MANY_PARAMETERS = {
  "data.sequence_length": 2,
  "data.global_batch_size": 8,
  "model.layers": 8,
  "model.model_size": 96,
  "model.feedforward_size": 256,
}


@pytest.fixture(scope="module")
def compiled():
  """Returns a job with adapters of rank 3, many parameters and few tokens, and its step."""
  job = budgets.job_of(SPLIT, **MANY_PARAMETERS, **{"lora.rank": 3})
  return job, job.compile_train_step().function


def test_the_step_has_gradients_and_optimizer_state_of_the_adapters_alone(compiled):
  job, step = compiled

  def held(placements):
    return sum(rules.bytes_per_device(p, job.devices.sizes) for p in placements)

  parameters, batch = (job.placements[title] for title in ("parameters", "batch"))
  adapters = held(p for name, p in parameters.items() if "/lora_" in name)
  frozen = held(parameters.values()) - adapters
  memory, counts = step.memory_analysis(), 12  # bytes: the step, and what the optimizer counts
  state = frozen + 3 * adapters + held(batch.values())
  assert memory.argument_size_in_bytes == pytest.approx(state, abs=counts)
  # With gradients of all parameters it is three times as much.
  assert 2 * adapters < memory.temp_size_in_bytes < 0.9 * frozen


def test_the_step_sends_gradients_of_the_adapters_alone(compiled):
  job, step = compiled
  sent, r = budgets.Step(job, step.as_text(), "").sent(), 3
  L, D, F, N, K, H = (job.legend[letter].size for letter in "LDFNKH")
  f, t = (job.devices.sizes[axis] for axis in ("fsdp", "tensor"))
  whole = 4 * L * r * (5 * D + 2 * D)  # bytes: A of inputs D, B of outputs D
  split = 4 * L * r * (2 * N * H + 2 * K * H + 3 * F) // t
  assert sent == budgets.budget(job)
  scalars = 4 * 2 * 2 * 7  # of loss, weights and norm, at most
  assert 0 <= sent["all-reduce", ("data", "tensor")][1] - whole / f <= scalars
  assert 0 <= sent["all-reduce", ("data", "fsdp")][1] - split <= scalars
  assert sent["reduce-scatter", ("fsdp",)][1] == whole


# ---- What is broken is caught ----
