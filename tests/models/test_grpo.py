"""GRPO: the loss and its gradient by NumPy in float64, on every mesh; advantages of a group."""

import jax
import numpy as np
import pytest

from models import grpo
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, make_job, place
from tests.models import numpy_decoder

RECIPE = "model=lm,data=prompts"
ANSWERS = {
  "data.files": "prompts.jsonl",
  "data.sequence_length": 8,
  "data.global_batch_size": 8,
  "grpo.answers": 4,
  "grpo.rewards": "number",
  "grpo.temperature": 0.7,
  "model.layers": 1,
  "training.parameter_dtype": "float64",
  "training.compute_dtype": "float64",
}
# The variants, and what each adds to a mesh.
VARIANTS = {
  "DAPO": ("single", {"grpo.clip_low": 0.1, "grpo.clip_high": 0.4}),
  "GRPO, with a divergence": ("fsdp8", {"grpo.kl": 0.3, "training.loss_chunks": 2}),
  "GSPO": ("single", {"grpo.ratio": "answer", "grpo.kl": 0.1, "mesh.context": 2, "mesh.data": 2}),
  "microbatches": ("dp4_tp2", {"training.gradient_accumulation_steps": 2, "grpo.kl": 0.2}),
}


def batch_of(job, log_p_of=None, seed=0):
  """Returns answers of several lengths, one of them without a reward; log p near the model's."""
  random, shape = np.random.default_rng(seed), job.batch["tokens"].shape
  rows, length = shape
  tokens = random.integers(0, 61, (rows, length + 1)).astype(np.int32)
  first, count = random.integers(1, 4, rows), random.integers(1, 5, rows)
  places = np.arange(length)[None]
  drawn = (places >= first[:, None]) & (places < (first + count)[:, None])
  batch = {
    "tokens": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "token_weights": drawn / count[:, None],
    "advantages": random.standard_normal(rows),
    "rewards": random.random(rows),
    "weights": np.ones(rows, np.float32),
  }
  batch["weights"][3] = 0
  near = np.zeros(shape) if log_p_of is None else log_p_of(batch)
  batch["sampled"] = np.where(drawn, near + random.normal(0, 0.3, shape), 0)
  batch["reference"] = np.where(drawn, near + random.normal(0, 0.3, shape), 0)
  return batch


def log_p(config, params, batch):
  """Returns log p of each target by NumPy, [B, T]."""
  rows = [numpy_decoder.logits(config, named_leaves(params), one) for one in batch["tokens"]]
  logits = np.stack(rows) / config.grpo.temperature
  shifted = logits - logits.max(-1, keepdims=True)
  log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
  return np.take_along_axis(log_probabilities, batch["targets"][..., None], -1)[..., 0]


def by_numpy(config, params, batch):
  """Returns the mean loss and the metrics, answer by answer and token by token."""
  keys, policy = config.grpo, log_p(config, params, batch)
  found = dict.fromkeys(("loss", "clipped", "entropy", "kl", "reward"), 0.0)
  for row, weight in enumerate(batch["weights"].astype(np.float64)):
    drawn = np.flatnonzero(batch["token_weights"][row])
    ratios = np.exp(policy[row] - batch["sampled"][row])
    if keys.ratio == "answer":
      ratios[:] = np.prod(ratios[drawn]) ** (1 / len(drawn))
    advantage = batch["advantages"][row]
    for token in drawn:
      share = weight * batch["token_weights"][row, token]
      ratio, most = ratios[token], 1 + keys.clip_high if advantage > 0 else np.inf
      least = 1 - keys.clip_low if advantage < 0 else 0.0
      is_clipped = not least <= ratio <= most
      gain = min(max(ratio, least), most) * advantage
      other = batch["reference"][row, token] - policy[row, token]
      kl = np.exp(other) - other - 1
      found["loss"] -= share * (gain - keys.kl * kl)
      found["clipped"] += share * is_clipped
      found["entropy"] -= share * policy[row, token]
      found["kl"] += share * kl
    found["reward"] += weight * batch["rewards"][row]
  if not keys.kl:
    del found["kl"]
  return {name: value / batch["weights"].sum() for name, value in found.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_are_those_of_numpy(name):
  strategy, overrides = VARIANTS[name]
  with jax.enable_x64(True):
    job = make_job(strategy, RECIPE, **ANSWERS, **overrides)
    params = jax.device_get(first_state(job).params)
    batch = batch_of(job, lambda batch: log_p(job.config, params, batch))
    compiled = job.compile(
      lambda params, batch: job.program.gradients(params, batch, jax.random.key(0))[:3],
      *(job.state.params, job.batch),
      in_shardings=(job.state_shardings.params, job.batch_shardings),
    ).function
    placed = jax.device_put(params, job.state_shardings.params)
    grads, means, scale = jax.device_get(compiled(placed, place(job, batch)))
  expected = by_numpy(job.config, params, batch)
  for key, value in expected.items():
    assert means[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key
  assert 0 < means["clipped"] < 1

  # Along a random direction, by central differences of what NumPy computes.
  random, step = np.random.default_rng(1), 3e-7
  way = jax.tree.map(lambda x: random.standard_normal(x.shape), params)
  there, back = (
    by_numpy(job.config, jax.tree.map(lambda x, d: x + sign * step * d, params, way), batch)  # noqa: B023
    for sign in (1, -1)
  )
  slope = sum(np.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (grads, way)), strict=True))
  assert scale * slope == pytest.approx((there["loss"] - back["loss"]) / (2 * step), rel=1e-6)


def test_an_evaluation_is_of_rewards_alone():
  batch = {"rewards": np.array([1.0, 0.0, 5.0]), "weights": np.array([1.0, 1.0, 0.0])}
  sums = grpo.answer_sums(None, {name: jax.numpy.asarray(x) for name, x in batch.items()})
  assert {name: float(x) for name, x in sums.items()} == {"loss": -1.0, "reward": 1.0}
