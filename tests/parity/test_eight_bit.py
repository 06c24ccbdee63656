"""Training with 8-bit matmuls: on meshes beside one device, and what it sends, to the byte."""

import functools

import numpy as np
import pytest
from etils import epath

from input_pipeline.row_source import array_source
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.parity import budgets
from tests.parity.comparison import (
  COLLECTIVE_MATMUL,
  MESHES,
  PLAIN,
  SEQUENCE_PARALLEL,
  assert_equal,
  reference,
  train,
)
from tests.training import runs
from training.checkpointing import integrity, reading

INT8 = {"training.matmul_dtype": "int8"}
FLOAT8 = {"training.matmul_dtype": "float8"}
DELAYED = {**FLOAT8, "training.matmul_scaling": "delayed"}
ALL = {**MESHES["data2_fsdp2_tensor2"], **SEQUENCE_PARALLEL}
RINGS = {**MESHES["fsdp2_tensor4"], **COLLECTIVE_MATMUL}
KINDS = {"int8": INT8, "float8": FLOAT8, "delayed": DELAYED}


@functools.cache
def on_one_device(kind, **more):
  """Returns what one device gives."""
  return train("lm", "float64", {**KINDS[kind], **more})


@pytest.mark.parametrize(
  ("kind", "mesh"),
  [
    ("int8", ALL),
    # Rings: 6 tokens of a device, in both directions.
    pytest.param("int8", RINGS, marks=pytest.mark.long),
    pytest.param("float8", RINGS, marks=pytest.mark.long),
    pytest.param("delayed", RINGS, marks=pytest.mark.long),
    # The 4 key/value heads are replicated.
    pytest.param("int8", MESHES["tensor8"], marks=pytest.mark.long),
    pytest.param("float8", ALL, marks=pytest.mark.long),
    pytest.param("float8", MESHES["tensor8"], marks=pytest.mark.long),
    pytest.param("delayed", MESHES["tensor8"], marks=pytest.mark.long),
    pytest.param("delayed", ALL, marks=pytest.mark.long),
  ],
)
def test_trains_as_on_one_device(kind, mesh):
  ours = train("lm", "float64", {**KINDS[kind], **mesh})
  assert_equal(ours, on_one_device(kind), "float64")


def test_rounding_changes_little_and_all_kernels_of_the_layers():
  plain, ours = reference("lm", "float64").trained, on_one_device("int8").trained
  assert 1e-5 < abs(plain.losses[0] - ours.losses[0]) < 0.01
  for name, gradient in plain.gradients.items():
    distance = np.linalg.norm(ours.gradients[name] - gradient) / np.linalg.norm(gradient)
    assert 1e-4 < distance < 0.07, name


def histories(steps, **overrides):
  """Returns losses and histories of delayed scaling after some steps of plain SGD."""
  job = make_job("single", "lm", **{**PLAIN, **DELAYED, **overrides})
  compiled, state, losses = job.compile_train_step().function, first_state(job), []
  for step in range(steps):
    state, metrics = compiled(state, place(job, host_batch(job, seed=step)))
    losses.append(float(metrics["loss"]))
  return losses, {n: np.asarray(x) for n, x in named_leaves(state.variables).items()}


@pytest.mark.long
def test_a_history_has_one_magnitude_for_a_step_with_rematerialization_and_microbatches():
  losses, wanted = histories(2)
  kernels = "attention/query attention/key attention/value attention/out mlp/gate mlp/up mlp/down"
  assert {*wanted} == {f"layers/{name}/amax_history" for name in kernels.split()}
  for history in wanted.values():
    assert history.shape == (2, 3, 16)
    assert (history[..., :2] > 0).all()
    assert (history[..., 2:] == 0).all()
  again = histories(2, **{"training.rematerialization": "full"})
  assert again[0] == pytest.approx(losses, rel=1e-6)
  for name, history in again[1].items():
    np.testing.assert_allclose(history, wanted[name], rtol=1e-5, err_msg=name)


def text(job):
  """Returns rows of random tokens."""
  random, shape = np.random.default_rng(0), (100, job.config.data.sequence_length)
  tokens = random.integers(0, 61, shape, np.int32)
  arrays = {"tokens": tokens, "targets": tokens, "segments": np.zeros(shape, np.int32)}
  arrays["weights"] = np.ones(shape, np.float32)
  return array_source("text", {name: arrays[name] for name in sorted(arrays)})


@pytest.mark.long
def test_histories_are_saved_and_a_resumed_run_goes_on_with_them(tmp_path):
  keys = {**runs.KEYS, **DELAYED, "optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
  ends = {}
  # To the bit on the same mesh.
  for name, parts in {
    "whole": [(4, {})],
    "cut": [(2, {}), (4, {})],
    "moved": [(2, {}), (4, {"mesh.fsdp": 2})],
  }.items():
    for steps, mesh in parts:
      job = make_job("single", "lm", **{**keys, "training.steps": steps, **mesh})
      rows = text(job)
      end = runs.train(tmp_path / name, rows, prepared=job, held_out=rows)
      variables = named_leaves(end.state.variables)
      ends[name] = {n: np.asarray(x) for n, x in variables.items()}
  stored = reading.stored_arrays(epath.Path(tmp_path / "cut") / integrity.FOLDER / "4")
  assert {f"variables/{name}" for name in ends["whole"]} < {*stored}
  for name, history in ends["whole"].items():
    assert (history[..., :4] > 0).all()
    assert (history[..., 4:] == 0).all()
    assert history.tobytes() == ends["cut"][name].tobytes()
    np.testing.assert_allclose(ends["moved"][name], history, rtol=1e-2, err_msg=name)


# ---- What a step sends ----

SPLIT = "dp2_fsdp2_tp2, sequence-parallel"
IN_RINGS = "fsdp=2 x tensor=4, collective matmul"


def expected(strategy, job):
  """Returns (kind, axes) -> bytes of a step with int8: what one without it sends, but for this."""
  sent = {key: size for key, (_, size) in budgets.budget(budgets.shared_job(strategy)).items()}
  sizes = job.devices.sizes
  L, D, F, N, K, H = (job.legend[letter].size for letter in "LDFNKH")
  d, f, t = (sizes[axis] for axis in ("data", "fsdp", "tensor"))
  b, T, W = 16 // (d * f), 12, (D * H * (2 * N + 2 * K) + 3 * D * F) // t
  passes = 2  # the backward pass rounds and gathers again
  # Kernels of one byte a number; scales of the outputs of out and down, which fsdp splits.
  sent["all-gather", ("fsdp",)] += passes * L * (-4 * W + W + 2 * 4 * D)
  # The inputs of both blocks, likewise, with a scale for each token; t - 1 times around a ring.
  ring = ("collective-permute", ("tensor",)) in sent
  kind, share = ("collective-permute", (t - 1) / t) if ring else ("all-gather", 1)
  sent[kind, ("tensor",)] += passes * L * 2 * b * T * (-4 * D + D + 4) * share
  # Magnitudes: of the outputs of the other kernels; of the outputs of out and down, of the tokens
  # that these multiply, and of the five gradients whose outputs tensor splits.
  outputs = (N * H + 2 * K * H + 2 * F) // t
  sent["all-reduce", ("fsdp",)] = sent.get(("all-reduce", ("fsdp",)), 0) + 4 * passes * L * outputs
  tokens = passes * 2 * b * T + 5 * b * T
  sent["all-reduce", ("tensor",)] += 4 * L * (passes * 2 * D // f + tokens)
  return sent


@pytest.mark.parametrize("strategy", [SPLIT, IN_RINGS])
def test_a_step_with_int8_sends_what_formulas_say(strategy):
  ours = budgets.compile_step(budgets.job_of(strategy, **INT8))
  assert budgets.INVOLUNTARY not in ours.said
  assert {key: size for key, (_, size) in ours.sent().items()} == expected(strategy, ours.job)
