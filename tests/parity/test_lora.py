"""Adapters on meshes beside one device, and on one device beside W + s A B in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import layers
from partitioning.parallel import matmuls
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.models import numpy_decoder
from tests.parity.comparison import (
  ADAPTERS,
  MESHES,
  PLAIN,
  SEQUENCE_PARALLEL,
  assert_equal,
  train,
)

ON = {
  "data8": MESHES["data8"],
  "all three, sequence-parallel": {**MESHES["data2_fsdp2_tensor2"], **SEQUENCE_PARALLEL},
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


@pytest.mark.parametrize("mesh", ON)
def test_adapters_train_as_on_one_device(mesh):
  ours = train("lm", "float64", {**ADAPTERS, **ON[mesh]})
  assert_equal(ours, on_one_device(), "float64")
  names = {f"{kernel}/lora_{x}" for kernel in KERNELS for x in "ab"}
  assert {*ours.trained.gradients} == names


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


def training_loss(overrides):
  """Returns the first loss, with dropout."""
  keys = {**PLAIN, "training.parameter_dtype": "float64", **ADAPTERS, **overrides}
  with jax.enable_x64(True):
    job = make_job("single", "lm", **keys)

    def loss(params, batch):
      sums = job.program.sums(params, batch, jax.random.key(5))
      return sums["loss"] / sums["weight"]

    given = (job.state_shardings.params, job.batch_shardings)
    compiled = job.compile(loss, job.state.params, job.batch, in_shardings=given).function
    return float(compiled(first_state(job).params, place(job, host_batch(job))))


def test_dropout_drops_the_same_on_every_mesh():
  dropped = training_loss({"lora.dropout": 0.3})
  assert abs(dropped - of_merged()[1]) > 1e-3
  mesh = {**MESHES["data2_fsdp2_tensor2"], **SEQUENCE_PARALLEL}
  assert training_loss({"lora.dropout": 0.3, **mesh}) == pytest.approx(dropped, rel=1e-12)


# ---- What is broken is caught ----


def test_a_scale_left_out(monkeypatch):
  # test_loss_and_gradients_are_those_of_merged_kernels
  of_merged()
  monkeypatch.setattr(layers.lora, "scale", lambda config: 1.0)
  assert abs(training_loss({}) - of_merged()[1]) > 1e-3


def test_a_partial_sum_of_an_update_left_out(monkeypatch):
  # test_adapters_train_as_on_one_device: only one device's part of x A is counted.
  original = matmuls._Updates.added

  def added(self, results, x_letters, outputs, x, operands):
    found = original(self, results, x_letters, outputs, x, operands)
    if x_letters == "BTD":
      return found
    first = jax.lax.axis_index("tensor") == 0
    return [jnp.where(first, y, result) for y, result in zip(found, results, strict=True)]

  of_merged()
  monkeypatch.setattr(matmuls._Updates, "added", added)
  assert abs(training_loss(MESHES["data4_tensor2"]) - of_merged()[1]) > 1e-3


def test_a_gradient_that_is_not_summed_over_tensor(monkeypatch):
  # test_adapters_train_as_on_one_device: the replicated A of a column-parallel kernel.
  original = matmuls._Updates.added

  def added(self, results, x_letters, outputs, x, operands):
    if x_letters == "BTD":
      first = jax.lax.axis_index("tensor") == 0
      operands = [jnp.where(first, y, jax.lax.stop_gradient(y)) for y in operands]
    return original(self, results, x_letters, outputs, x, operands)

  monkeypatch.setattr(matmuls._Updates, "added", added)
  ours = train("lm", "float64", {**ADAPTERS, **MESHES["data4_tensor2"]})
  assert ours.trained.losses[0] == pytest.approx(of_merged()[1], rel=1e-12)
  with pytest.raises(AssertionError, match=r"Difference\(what='gradient'.*query/lora_a"):
    assert_equal(ours, on_one_device(), "float64")
