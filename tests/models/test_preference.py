"""DPO: the loss by NumPy in float64, on every mesh; with adapters the base is the reference."""

import jax
import numpy as np
import pytest

from models import adapters, model_spec
from models.spec import LORA_B
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, make_job, place
from tests.models import numpy_decoder

RECIPE = "model=lm,data=preferences"
PAIRS = {
  "data.files": "pairs.jsonl",
  "data.sequence_length": 8,
  "data.global_batch_size": 8,
  "model.layers": 1,
  "training.parameter_dtype": "float64",
  "training.compute_dtype": "float64",
  "training.dpo_beta": 0.3,
}
MESHES = {
  "fsdp8, chunks": ("fsdp8", {"training.loss_chunks": 2}),
  "context=2": ("single", {"mesh.context": 2, "mesh.data": 2}),
  "microbatches": ("dp4_tp2", {"training.gradient_accumulation_steps": 2}),
}
SMOOTHING = {"training.dpo_label_smoothing": 0.1}


def batch_of(job, seed=0):
  """Returns pairs, one of them of weight 0, with answers of different lengths."""
  random, batch = np.random.default_rng(seed), {}
  for name, array in job.batch.items():
    if name.endswith(("tokens", "targets")):
      batch[name] = random.integers(0, 61, array.shape).astype(np.int32)
    elif name.endswith("_weights"):
      batch[name] = (random.random(array.shape) < 0.5).astype(np.float32)
      batch[name][:, 2] = 1
    elif name == "weights":
      batch[name] = np.ones(array.shape, np.float32)
      batch[name][3] = 0
    else:
      batch[name] = -30 * random.random(array.shape).astype(np.float32)
  return batch


def log_p(config, params, batch, side):
  """Returns log p of the answers of a side by NumPy, [B]."""
  arrays = named_leaves(params)
  rows = [numpy_decoder.logits(config, arrays, tokens) for tokens in batch[f"{side}_tokens"]]
  logits = np.stack(rows)
  shifted = logits - logits.max(-1, keepdims=True)
  log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
  targets = batch[f"{side}_targets"]
  taken = np.take_along_axis(log_probabilities, targets[..., None], -1)[..., 0]
  return (taken * batch[f"{side}_weights"]).sum(1)


def by_numpy(config, params, batch, smoothing, reference=None):
  """Returns the mean loss and the metrics: arXiv:2305.18290, equation 7, as it is written."""
  reference = batch if reference is None else reference
  pi_w, pi_l = (log_p(config, params, batch, side) for side in ("chosen", "rejected"))
  ref_w, ref_l = (
    reference[f"reference_{side}"].astype(np.float64) for side in ("chosen", "rejected")
  )
  margin = 0.3 * (pi_w - ref_w) - 0.3 * (pi_l - ref_l)
  sigmoid = 1 / (1 + np.exp(-margin))
  losses = -(1 - smoothing) * np.log(sigmoid) - smoothing * np.log(1 - sigmoid)
  weights = batch["weights"].astype(np.float64)
  mean = lambda values: (values * weights).sum() / weights.sum()  # noqa: E731
  return {
    "loss": mean(losses),
    "reward_chosen": mean(0.3 * (pi_w - ref_w)),
    "reward_rejected": mean(0.3 * (pi_l - ref_l)),
    "reward_margin": mean(margin),
    "reward_accuracy": mean(margin > 0),
  }


def measured(job, batch, *states):
  """Returns the means of a step's loss sums, and its gradients, with each of some parameters."""
  compiled = job.compile(
    lambda params, batch: job.program.gradients(params, batch, None)[:3],
    *(job.state.params, job.batch),
    in_shardings=(job.state_shardings.params, job.batch_shardings),
  ).function
  found = []
  for params in states:
    grads, means, scale = jax.device_get(compiled(params, place(job, batch)))
    found.append((means, jax.tree.map(lambda g, scale=scale: g * scale, grads)))
  return found


@pytest.fixture(scope="module")
def expected():
  with jax.enable_x64(True):
    job = make_job("single", RECIPE, **PAIRS, **SMOOTHING)
    params, batch = first_state(job).params, batch_of(job)
    [(means, grads)] = measured(job, batch, params)
    wanted = by_numpy(job.config, jax.device_get(params), batch, 0.1)
    assert {key: means[key] for key in wanted} == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    return wanted, named_leaves(grads)


@pytest.mark.parametrize("name", MESHES)
def test_the_loss_is_that_of_numpy_on_every_mesh(name, expected):
  numbers, grads_of_one = expected
  strategy, overrides = MESHES[name]
  with jax.enable_x64(True):
    job = make_job(strategy, RECIPE, **PAIRS, **SMOOTHING, **overrides)
    [(means, grads)] = measured(job, batch_of(job), first_state(job).params)
  for key, value in numbers.items():
    assert means[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key
  for key, grad in named_leaves(grads).items():
    one = grads_of_one[key]
    assert np.linalg.norm(grad - one) <= 1e-12 * np.linalg.norm(one), key


def test_with_adapters_the_reference_is_the_model_without_them():
  with jax.enable_x64(True):
    job = make_job("dp4_tp2", RECIPE, **PAIRS, **{"lora.rank": 3})
    params, batch = first_state(job).params, batch_of(job)
    host = jax.device_get(params)

    def without(path, leaf):
      return np.zeros_like(leaf) if LORA_B in jax.tree_util.keystr(path) else leaf

    base = jax.tree_util.tree_map_with_path(without, host)
    at_zero = jax.device_put(base, job.state_shardings.params)
    (means, grads), (at_start, _) = measured(job, batch, params, at_zero)
    merged = [
      jax.device_get(adapters.merge_adapters(model_spec(job.config), tree)) for tree in (base, host)
    ]
  assert at_start["loss"] == pytest.approx(np.log(2), rel=1e-12)
  reference = {
    f"reference_{side}": log_p(job.config, merged[0], batch, side)
    for side in ("chosen", "rejected")
  }
  numbers = by_numpy(job.config, merged[1], batch, 0.0, reference)
  for key, value in numbers.items():
    assert means[key] == pytest.approx(value, rel=1e-11, abs=1e-12), key
  assert all("lora_" in name for name in named_leaves(grads))
