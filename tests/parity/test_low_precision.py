"""State in fewer bytes on meshes: the same bits as on one device, resumed on another, no messages.

Given the same gradients, that is: these differ between meshes in the last bits of their sums.
"""

import functools

import jax
import numpy as np
import pytest

from partitioning.rules import LayoutError, named_leaves
from tests.helpers.flips import altered
from tests.helpers.jobs import first_state, host_batch, make_job, place, replica_check
from tests.parity.budgets import INVOLUNTARY, STRATEGIES, Step, budget, said_while
from tests.parity.expert_cases import WITH_DENSE
from tests.training.checkpointing.states import moved
from training.replica_check import CopiesDifferError
from training.state import State, wide

STEPS = 2
NARROW = {"training.parameter_dtype": "bfloat16", "optimizer.state_dtype": "int8"}
# Sizes of which blocks of 128 leave eight parts of each dim.
KEYS = {
  "model.model_size": 64,
  "model.feedforward_size": 128,
  "model.head_size": 16,
  "model.vocabulary_multiple": 128,
  **NARROW,
}
MLP = {"model.input_size": 16, "model.model_size": 64, "model.feedforward_size": 128, **NARROW}
MESHES = [
  "dp8, ZeRO-1",
  "dp2_fsdp2_tp2",
  pytest.param("fsdp8", marks=pytest.mark.long),
  pytest.param("tp8", marks=pytest.mark.long),
]


def prepared(mesh, **overrides):
  """Returns a job of the decoder."""
  file, changed = ("single", {}) if mesh == "single" else STRATEGIES[mesh]
  return make_job(file, "lm", **{**KEYS, **changed, **overrides})


@functools.cache
def compiled(mesh):
  """Returns a job of the network, which has few arrays, its compiled update, and its messages."""
  file, changed = ("single", {}) if mesh == "single" else STRATEGIES[mesh]
  job = make_job(file, "mlp", **MLP, **changed)
  placed = job.state_shardings

  def update(state, grads):
    params, optimizer, _ = job.program.updated(state, job.program.laid_out(grads))
    return State(state.step + 1, params, optimizer, state.variables)

  def compile_it():
    ways = {"in_shardings": (placed, placed.params), "out_shardings": placed}
    grads = jax.eval_shape(wide, job.state.params)
    return job.compile(update, job.state, grads, **ways).function

  function, said = said_while(compile_it)
  return job, function, Step(job, function.as_text(), said)


def take(mesh, state, count):
  """Takes steps by gradients that depend on the step alone; returns the state."""
  job, update, _ = compiled(mesh)
  for _ in range(count):
    random = np.random.default_rng(int(state.step))
    leaves, structure = jax.tree.flatten(job.state.params)
    grads = [random.standard_normal(x.shape).astype(np.float32) for x in leaves]
    state = update(state, jax.device_put(structure.unflatten(grads), job.state_shardings.params))
  return state


@functools.cache
def trained(mesh):
  """Returns parameters and optimizer state after the steps, on the host."""
  return on_host(take(mesh, first_state(compiled(mesh)[0]), STEPS))


def on_host(state):
  return named_leaves(jax.device_get({"params": state.params, "optimizer": state.optimizer}))


def assert_same_bits(ours, wanted):
  assert ours.keys() == wanted.keys()
  assert {x.dtype.name for x in ours.values()} == {"bfloat16", "float32", "uint8", "int32"}
  assert [name for name, x in wanted.items() if x.tobytes() != ours[name].tobytes()] == []


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_computes_the_same_bits(mesh):
  assert_same_bits(trained(mesh), trained("single"))
  begun = on_host(first_state(compiled("single")[0]))
  assert not any(np.array_equal(x, begun[name]) for name, x in trained(mesh).items())


@pytest.mark.parametrize("mesh", MESHES)
def test_an_update_sends_nothing_but_what_updated_parameters(mesh):
  job, _, ours = compiled(mesh)
  sent = {kind: size for kind, (_, size) in ours.sent().items()}
  split = {n.partition("mu/")[2] for n, p in job.placements["optimizer"].items() if any(p.spec)}
  split = {name.removesuffix("/codes") for name in split}
  params = [x for name, x in named_leaves(job.state.params).items() if name in split]
  gathered = {("all-gather", ("data",)): sum(4 * x.size for x in params)}
  assert sent == (gathered if "ZeRO-1" in mesh else {})
  assert INVOLUNTARY not in ours.said


def test_it_is_saved_and_resumes_on_another_mesh_to_the_bit(tmp_path):
  one, other = "dp8, ZeRO-1", "dp2_fsdp2_tp2"
  state = take(one, first_state(compiled(one)[0]), STEPS - 1)
  state = moved(tmp_path, STEPS - 1, state, compiled(other)[0])
  assert_same_bits(on_host(take(other, state, 1)), trained("single"))


@pytest.mark.long
def test_a_step_sends_what_a_step_of_float32_sends_in_a_quarter_of_the_memory():
  job = prepared("fsdp8")
  function = job.compile_train_step().function
  ours = Step(job, function.as_text(), "")
  assert ours.sent() == budget(job)
  count = sum(x.size for x in jax.tree.leaves(job.state.params))
  batch = sum(x.size * 4 for x in jax.tree.leaves(job.batch))
  sizes = function.memory_analysis()
  assert sizes.argument_size_in_bytes <= ((2 + 2.2) * count + batch) / 8 + 1024
  moments = [p for n, p in job.placements["optimizer"].items() if n.endswith(("codes", "scales"))]
  stored = sum(p.dtype.itemsize * np.prod(p.shape) for p in moments)
  of_kernels = sum(np.prod(p.shape) for p in moments if p.name.endswith("codes")) / 2
  assert stored == (2 + 2 * 4 / 128) * of_kernels
  # The gradients are float32, though the parameters are not.
  state, batch = first_state(job), place(job, host_batch(job))
  with job.tracing():
    grads = jax.eval_shape(lambda s, b: job.program.step_and_gradients(s, b)[2], state, batch)
  assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}
  after, metrics = function(state, batch)
  assert np.isfinite(metrics["loss"])
  job.check_placed(after)


def test_a_mesh_that_would_cut_blocks_is_refused():
  with pytest.raises(LayoutError) as refusal:
    prepared("fsdp8", **{"model.model_size": 32})
  assert (
    "optimizer/inner/0/mu/layers/mlp/up/kernel/scales: shards of 4 of dim D = 32 (mesh axis "
    "fsdp=8) would cut blocks of 8, whose shape 1 x 8 x 16 is the same on every mesh; split it "
    "over at most 4 devices, or set optimizer.state_dtype=bfloat16"
  ) in str(refusal.value)


def test_copies_of_codes_are_compared():
  job = compiled("dp2_fsdp2_tp2")[0]
  check, state = replica_check(job), first_state(job)
  check.before_save(1, state)
  mu = state.optimizer.inner[0].mu
  blocks = mu["layer_2"]["kernel"]
  mu["layer_2"]["kernel"] = blocks._replace(codes=altered(blocks.codes, 3, (5, 1)))
  with pytest.raises(CopiesDifferError, match="mu/layer_2/kernel/codes"):
    check.before_save(2, state)


@pytest.mark.long
def test_losses_are_those_of_float32_within_the_spread_of_its_seeds():
  def last_losses(keys, seeds):
    job = prepared("single", **keys, **{"optimizer.warmup_steps": 5})
    step, found = job.compile_train_step().function, []
    for seed in seeds:
      state, losses = first_state(job), []
      for number in range(50):
        state, metrics = step(state, place(job, host_batch(job, seed=1000 * seed + number)))
        losses.append(float(metrics["loss"]))
      found.append((losses[0], np.mean(losses[-10:])))
    return found

  wanted = last_losses(
    dict.fromkeys(("training.parameter_dtype", "optimizer.state_dtype"), "float32"), (0, 1, 2)
  )
  [(first, ours)] = last_losses({}, (0,))
  ends = [end for _, end in wanted]
  assert ours < first - 10 * np.ptp(ends), "the losses fall"
  assert abs(ours - ends[0]) < np.ptp(ends)


@pytest.mark.long
def test_experts_with_zero_1_train_as_on_one_device_and_their_routers_biases_stay_float32():
  experts = {**WITH_DENSE, "model.expert_feedforward_size": 32, "model.router_correction": True}
  keys = {**experts, "training.router_bias_rate": 0.001, "training.matmul_precision": "highest"}
  zero_1 = {"partitioning.optimizer.model": ("fsdp", "data")}
  mesh = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.expert": 2, **zero_1}
  found = []
  for more in ({}, mesh):
    job = prepared("single", **keys, **more)
    state, step = first_state(job), job.compile_train_step().function
    for number in range(STEPS):
      state, _ = step(state, place(job, host_batch(job, seed=number)))
    assert any("experts/gate/kernel/codes" in name for name in named_leaves(state.optimizer))
    found.append(named_leaves(jax.device_get(state.params)))
  assert found[0]["layers/experts/router/correction"].dtype == np.float32
  for name, wanted in found[0].items():
    ours, wanted = (np.asarray(x, np.float32) for x in (found[1][name], wanted))
    assert np.linalg.norm(ours - wanted) <= 1e-4 * np.linalg.norm(wanted), name
