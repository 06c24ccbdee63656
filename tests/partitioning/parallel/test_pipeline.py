"""Pipeline schedules of a small network: sums, gradients and counts of one device, and memory.

The network's layers differ, the first one embeds, the last one's loss reads the same table, layers
add a loss of their own and count: a layer, microbatch or weight in the wrong place changes them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from partitioning.constraints import activation_layout
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from partitioning.parallel.pipeline import Pipeline
from partitioning.parallel.pipeline_schedule import GPIPE, INTERLEAVED, ONE_F_ONE_B, Schedule
from partitioning.rules import Dim

V, ROWS, D = 7, 5, 6
# Kind, stages, microbatches, chunks: fewer microbatches than stages, and no multiple.
CASES = [
  (ONE_F_ONE_B, 4, 2, 1),
  (ONE_F_ONE_B, 3, 7, 1),
  (GPIPE, 4, 6, 1),
  (INTERLEAVED, 2, 4, 3),
]


class Network:
  """Embeds, runs layers of `x + tanh(x W) (n + 1) / 10`, and reads the table again."""

  residual = "BD"

  def enter(self, params, one):
    return params["table"][one["tokens"]]

  def layers(self, params, x, one, first):
    def layer(x, both):
      kernel, number = both
      x = x + jnp.tanh(x @ kernel) * (number + 1).astype(x.dtype) / 10
      return x, (jnp.sum(x**2, axis=1) @ one["weights"], jnp.sum(x > 0, dtype=jnp.int32))

    numbers = first + jnp.arange(params["kernels"].shape[0], dtype=jnp.int32)
    x, (squares, counts) = jax.lax.scan(layer, x, (params["kernels"], numbers))
    return x, {"loss": 0.01 * jnp.sum(squares)}, counts

  def leave(self, params, x, one):
    logits = params["scale"] * (x @ params["table"].T)
    picked = jax.nn.one_hot(one["targets"], logits.shape[1], dtype=x.dtype)
    losses = jax.nn.logsumexp(logits, axis=1) - jnp.sum(picked * logits, axis=1)
    return {"loss": losses @ one["weights"], "weight": jnp.sum(one["weights"])}


def drawn(layers, microbatches, dtype=np.float64, rows=ROWS, width=D):
  """Returns parameters and microbatches whose rows weigh differently."""
  random = np.random.default_rng(layers)
  params = {
    "table": random.standard_normal((V, width)).astype(dtype),
    "kernels": (random.standard_normal((layers, width, width)) / width**0.5).astype(dtype),
    "scale": np.asarray(0.7, dtype),
  }
  shape = microbatches, rows
  inputs = {name: random.integers(0, V, shape, np.int32) for name in ("tokens", "targets")}
  inputs["weights"] = random.integers(0, 4, shape).astype(dtype)
  return params, inputs


class Counting(Network):
  """Counts the devices that compute a microbatch's losses."""

  def __init__(self):
    self.losses = 0

  def leave(self, params, x, one):
    def count(_):
      self.losses += 1

    jax.debug.callback(count, x[0, 0])
    return super().leave(params, x, one)


def compiled(schedule, layers, params, inputs, *, conditional=False, forward=False, network=None):
  """Returns the compiled pipeline on as many devices as there are stages."""
  devices = jax.devices()[: schedule.stages]
  if network is None:
    mesh = make_mesh({**dict.fromkeys(AXES, 1), "stage": schedule.stages}, devices)
  else:  # a callback needs a region without automatic axes
    mesh = Mesh(devices, ("stage",), axis_types=(AxisType.Auto,))
  pipeline = Pipeline(
    schedule, network or Network(), layers, lambda name: name == "kernels", conditional=conditional
  )
  rows, width = inputs["tokens"].shape[1], params["table"].shape[1]
  legend = {"B": Dim("batch", rows), "D": Dim("model", width)}
  with jax.set_mesh(mesh), activation_layout(legend, {"batch": (), "model": ()}):
    if forward:
      return jax.jit(pipeline.sums).lower(params, inputs).compile()
    frozen = {"scale": params["scale"]}
    trained = {name: x for name, x in params.items() if name != "scale"}
    return jax.jit(pipeline.gradients).lower(trained, frozen, inputs).compile()


def run(schedule, layers, **options):
  """Returns what the pipeline does, in float64 and on the host."""
  with jax.enable_x64(True):
    params, inputs = drawn(layers, schedule.microbatches)
    function = compiled(schedule, layers, params, inputs, **options)
    if options.get("forward"):
      return jax.device_get(function(params, inputs))
    frozen = {"scale": params.pop("scale")}
    return jax.device_get(function(params, frozen, inputs))


@functools.cache
def wanted(layers, microbatches):
  """Returns gradients, sums and counts of NumPy's loop over microbatches and layers."""
  params, inputs = drawn(layers, microbatches)
  grads = {name: np.zeros_like(params[name]) for name in ("table", "kernels")}
  sums, counts = {"loss": 0.0, "weight": 0.0}, np.zeros(layers, np.int32)
  table, kernels, scale = params["table"], params["kernels"], params["scale"]
  for number in range(microbatches):
    tokens, targets, weights = (inputs[name][number] for name in ("tokens", "targets", "weights"))
    kept = [table[tokens]]
    for layer in range(layers):
      kept.append(kept[-1] + np.tanh(kept[-1] @ kernels[layer]) * (layer + 1) / 10)
      counts[layer] += np.sum(kept[-1] > 0)
      sums["loss"] += 0.01 * np.sum(kept[-1] ** 2, axis=1) @ weights
    logits = scale * kept[-1] @ table.T
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    rows = np.arange(len(tokens))
    sums["loss"] += -np.log(shares[rows, targets]) @ weights
    sums["weight"] += weights.sum()
    shares[rows, targets] -= 1
    of_logits = scale * shares * weights[:, None]
    grads["table"] += of_logits.T @ kept[-1]
    gradient = of_logits @ table
    for layer in reversed(range(layers)):
      x, y = kept[layer], kept[layer + 1]
      gradient = gradient + 0.02 * y * weights[:, None]
      through = gradient * (layer + 1) / 10 * (1 - np.tanh(x @ kernels[layer]) ** 2)
      grads["kernels"][layer] += x.T @ through
      gradient = gradient + through @ kernels[layer].T
    np.add.at(grads["table"], tokens, gradient)
  return grads, sums, counts


def assert_right(found, layers, microbatches):
  """Compares what a pipeline has computed with NumPy."""
  grads, sums, counts = wanted(layers, microbatches)
  for name, gradient in grads.items():
    assert np.linalg.norm(found[0][name] - gradient) <= 1e-13 * np.linalg.norm(gradient), name
  assert found[1].keys() == sums.keys()
  for name, value in sums.items():
    assert found[1][name] == pytest.approx(value, rel=1e-13), name
  np.testing.assert_array_equal(found[2], counts)


@pytest.mark.parametrize("case", CASES)
def test_a_schedule_computes_what_a_loop_does(case):
  schedule = Schedule(*case)
  layers = 2 * schedule.stages * schedule.chunks
  assert_right(run(schedule, layers), layers, schedule.microbatches)


@pytest.mark.parametrize("case", [(ONE_F_ONE_B, 4, 4, 1), (INTERLEAVED, 4, 8, 2)])
def test_ends_behind_a_condition_compute_the_same(case):
  schedule = Schedule(*case)
  layers = schedule.stages * schedule.chunks
  assert_right(run(schedule, layers, conditional=True), layers, schedule.microbatches)


def test_sums_without_gradients_are_the_same_to_the_last_bit():
  # Microbatches are added up in the same order; each stage's sums are added by one psum.
  of_kinds = [run(Schedule(kind, 4, 6), 4) for kind in (ONE_F_ONE_B, GPIPE)]
  sums, counts = run(Schedule(ONE_F_ONE_B, 4, 6), 4, forward=True)
  for name, value in sums.items():
    assert of_kinds[0][1][name] == of_kinds[1][1][name] == value, name
  np.testing.assert_array_equal(counts, of_kinds[0][2])
  of_chunks, _ = run(Schedule(INTERLEAVED, 2, 4, 2), 4, forward=True)
  assert of_chunks["loss"] == pytest.approx(wanted(4, 4)[1]["loss"], rel=1e-13)


# ---- How often losses are computed ----


@pytest.mark.parametrize(
  ("case", "conditional", "times"),
  [
    ((INTERLEAVED, 2, 4, 3), False, 2 * 4),  # once for each microbatch, on both stages
    ((INTERLEAVED, 2, 4, 3), True, 4),
  ],
)
def test_an_evaluation_computes_losses_of_the_last_chunk_alone(case, conditional, times):
  schedule, network = Schedule(*case), Counting()
  layers = schedule.stages * schedule.chunks
  options = {"conditional": conditional, "network": network}
  sums, counts = run(schedule, layers, forward=True, **options)
  jax.effects_barrier()
  assert network.losses == times
  _, wanted_sums, wanted_counts = wanted(layers, schedule.microbatches)
  assert sums["loss"] == pytest.approx(wanted_sums["loss"], rel=1e-13)
  assert sums["weight"] == wanted_sums["weight"]
  np.testing.assert_array_equal(counts, wanted_counts)


# ---- Memory ----


@pytest.mark.parametrize(("kind", "chunks"), [(ONE_F_ONE_B, 1), (INTERLEAVED, 2)])
def test_memory_does_not_grow_with_the_microbatches(kind, chunks):
  def temporary_bytes(microbatches):
    schedule = Schedule(kind, 2, microbatches, chunks)
    given = drawn(4, microbatches, np.float32, rows=64, width=256)
    return compiled(schedule, 4, *given).memory_analysis().temp_size_in_bytes

  found = [temporary_bytes(count) for count in (8, 32)]
  assert max(found) <= 1.01 * min(found), found


# ---- A mistake that the comparison catches ----


def test_a_slot_that_is_used_again_too_early(monkeypatch):
  # The second stage has 2 S - 3 inputs at once; the first one's are embeddings, computed again.
  found = []
  for slots in (3, 2):
    monkeypatch.setattr(Schedule, "slots", property(lambda self, slots=slots: slots))
    found.append(run(Schedule(ONE_F_ONE_B, 3, 7), 3))
  assert_right(found[0], 3, 7)
  with pytest.raises(AssertionError):
    assert_right(found[1], 3, 7)
