"""Every shipped strategy trains as one device does: loss, every raw gradient, three SGD steps.

Norm and bounds are the design's: relative L2 per tensor, 1e-5 in float32 at highest matmul
precision, 1e-12 in float64, where rounding cannot hide a wrong reduction. The floor keeps
tensors that are mathematically zero from being judged by their rounding.
"""

import functools
import math

import jax
import numpy as np
import pytest

from partitioning import collectives, layout
from partitioning.rules import named_leaves
from tests.jobs import STRATEGIES, host_batch, make_job, place
from training.job import Job

BOUNDS = {"float32": 1e-5, "float64": 1e-12}
STEPS = 3


@functools.cache
def trained(strategy: str, recipe: str, dtype: str, accumulation: int = 1):
  """Returns (job, compiled step's text, gradients, losses, norms, parameters after STEPS)."""
  with jax.enable_x64(dtype == "float64"):
    job = make_job(
      strategy,
      recipe,
      **{
        "training.parameter_dtype": dtype,
        "training.matmul_precision": "highest",
        "training.gradient_accumulation_steps": accumulation,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.05,
        "optimizer.warmup_steps": 0,
        "optimizer.clip_norm": 0.5,
      },
    )

    def probe(state, batch):
      key = jax.random.key(job.config.seed)
      gradients, _ = job.program.gradients(state.params, batch, key)
      return gradients, *job.program.train_step(state, batch)

    shardings = job.state_shardings
    compiled = job.compile(
      probe,
      job.state,
      job.batch,
      in_shardings=(shardings, job.batch_shardings),
      out_shardings=(shardings.params, shardings, None),
    ).function
    state, losses, norms = job.initial_state(), [], []
    for step in range(STEPS):
      gradients, state, metrics = compiled(state, place(job, host_batch(job, seed=step)))
      if step == 0:
        first = {name: np.asarray(leaf) for name, leaf in named_leaves(gradients).items()}
      losses.append(float(metrics["loss"]))
      norms.append(float(metrics["grad_norm"]))
      job.check_placed(state)
    parameters = {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}
  return job, compiled.as_text(), first, losses, norms, parameters


def assert_close(ours: dict, reference: dict, bound: float) -> None:
  """Compares by relative L2 per tensor, with a floor for tensors that are zero."""
  assert ours.keys() == reference.keys()
  everything = math.sqrt(sum(float(np.sum(np.square(x))) for x in reference.values()))
  wrong = {}
  for name, wanted in reference.items():
    assert ours[name].dtype == wanted.dtype
    floor = np.finfo(wanted.dtype).eps * everything
    distance = np.linalg.norm(ours[name] - wanted) / max(np.linalg.norm(wanted), floor)
    if not distance <= bound:
      wrong[name] = distance
  assert not wrong, wrong


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("recipe", ["lm", "mlp"])
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "single"])
def test_trains_as_one_device_does(strategy, recipe, dtype):
  _, _, gradients, losses, norms, parameters = trained(strategy, recipe, dtype)
  _, _, wanted_gradients, wanted_losses, wanted_norms, wanted = trained("single", recipe, dtype)
  bound = BOUNDS[dtype]
  np.testing.assert_allclose(losses, wanted_losses, rtol=bound)
  np.testing.assert_allclose(norms, wanted_norms, rtol=bound)
  assert_close(gradients, wanted_gradients, bound)
  assert_close(parameters, wanted, bound)
  assert max(wanted_norms) > 0.5, "the clipping must act, or its norm is not compared"


@pytest.mark.parametrize("strategy", ["single", "dp2_fsdp2_tp2"])
def test_accumulation_gives_the_gradients_of_the_whole_batch(strategy):
  # Microbatches of unequal weight: a mean of means would differ.
  _, _, gradients, losses, _, parameters = trained(strategy, "lm", "float64", accumulation=4)
  _, _, wanted_gradients, wanted_losses, _, wanted = trained("single", "lm", "float64")
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-12)
  assert_close(gradients, wanted_gradients, 1e-12)
  assert_close(parameters, wanted, 1e-12)


@pytest.mark.parametrize("recipe", ["lm", "mlp"])
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "single"])
def test_every_axis_changes_a_shard_and_a_collective(strategy, recipe):
  job, text, *_ = trained(strategy, recipe, "float32")
  found = collectives.collectives(text, job.mesh)
  for axis, size in job.devices.sizes.items():
    if size > 1:
      assert any(axis in c.axes for c in found), f"no collective over {axis}"
      assert shards(job, {}) != shards(job, {axis: 1}), f"no shard is cut by {axis}"
  # Key/value heads that stay whole are summed in groups of N/K: halves of the tensor axis.
  kept_whole = any(p.notes for p in job.placements["parameters"].values())
  assert all(c.whole for c in found) or kept_whole
  assert kept_whole == (strategy == "tp8" and recipe == "lm")


def test_one_device_needs_no_collective():
  job, text, *_ = trained("single", "lm", "float32")
  assert collectives.collectives(text, job.mesh) == []


def shards(job: Job, changed: dict[str, int]) -> dict[str, tuple[int, ...]]:
  """Returns name -> shard shape of state and batch, with some axes' sizes changed."""
  sizes = {**job.devices.sizes, **changed}
  return {
    name: layout.shard_shape(p.shape, p.spec, sizes)
    for section in job.placements.values()
    for name, p in section.items()
  }


def test_the_comparison_can_fail():
  reference = {"a": np.ones(3), "zero": np.zeros(2)}
  assert_close({"a": np.ones(3), "zero": np.full(2, 1e-30)}, reference, 1e-12)
  with pytest.raises(AssertionError, match="'a'"):
    assert_close({"a": np.ones(3) * (1 + 1e-9), "zero": np.zeros(2)}, reference, 1e-12)
