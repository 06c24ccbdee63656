r"""Loss with parameters and optimizer state in fewer bytes, beside that of float32.

  python -m benchmarks.low_precision_state [--steps=200] [--seeds=3] [--only=float32,int8]
    [--set=optimizer.beta_2=0.999,...]

Trains the recipe `lm` on one device, each variant with each seed, and prints a table: bytes of
parameters and of moments per parameter, the mean loss of the last tenth of the steps, the loss on
eight batches that were held out, and the processor time of a step over that of float32, the median
of steps that are taken in turn. All variants see the same batches with the same seed.

  python -m benchmarks.low_precision_state --codes [--steps=100]

compares ways to store moments in 8 bits instead, all with blocks of 128 elements: how far the
moments of a float32 run are from what is stored of them, and the update that follows from both.
"""

import json
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import ConfigDict

from benchmarks.timing import Trainer, in_turns, job_of, resolved, spread, table
from planning.search import stepper
from runtime import devices
from training import splits
from training.optimizers.low_precision import BLOCK, Blocks, decode_blocks, encode_blocks
from training.setup import Job

VARIANTS: dict[str, dict[str, Any]] = {
  "float32": {},
  "bfloat16 compute": {"training.compute_dtype": "bfloat16"},
  "bfloat16 state": {"optimizer.state_dtype": "bfloat16"},
  "int8 state": {"optimizer.state_dtype": "int8"},
  "bfloat16 parameters and state": {"training.parameter_dtype": "bfloat16"},
  "bfloat16 parameters, int8 state": {
    "training.parameter_dtype": "bfloat16",
    "optimizer.state_dtype": "int8",
  },
  "bfloat16 parameters, to the nearest": {
    "training.parameter_dtype": "bfloat16",
    "training.stochastic_rounding": False,
  },
}
EVALUATION_BATCHES = 8
ROUNDS = 8  # steps of each variant whose times are compared

STEPS = flags.DEFINE_integer("steps", 200, "Steps of each run.", 1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each variant.", 1)
ONLY = flags.DEFINE_list("only", [""], "Words of the variants to run; all by default.")
CODES = flags.DEFINE_bool("codes", False, "Compare ways to store moments in 8 bits.")
SET = flags.DEFINE_list("set", [], "Keys of the config, key=value.")


def keys_of(own: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys of the config of a variant."""
  given = dict(text.split("=", 1) for text in SET.value)
  return {"training.steps": STEPS.value, **{k: json.loads(v) for k, v in given.items()}, **own}


def config_of(own: Mapping[str, Any], seed: int) -> ConfigDict:
  """Returns the config of a variant's data with a seed.

  Random bits of rounding follow from the seed 0 in all runs; what differs between them is the first
  parameters and the order of the data.
  """
  return resolved("lm", {**keys_of(own), "seed": seed})


def losses_of(trainer: Trainer, own: Mapping[str, Any], seed: int) -> tuple[float, float]:
  """Returns the mean loss of the last steps of a run, and the one that was held out."""
  config = config_of(own, seed)
  state, losses = trainer.run(seed, splits.training_batches(config), STEPS.value)
  held_out = trainer.held_out(state, splits.evaluation_batches(config), EVALUATION_BATCHES)
  return float(np.mean(losses[-max(1, STEPS.value // 10) :])), held_out


def bytes_per_parameter(job: Job) -> list[str]:
  """Returns the bytes of parameters and of optimizer state, over the number of parameters."""
  count = sum(x.size for x in jax.tree.leaves(job.state.params))
  trees = (job.state.params, job.state.optimizer)
  sizes = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in trees)
  return [f"{size / count:.2f}" for size in sizes]


# ---- Ways to store a moment in 8 bits ----


def linear(signed: bool) -> np.ndarray:
  """Returns the numbers of equal distance up to 1, without zero where they have no sign."""
  return np.arange(-127, 128) / 127 if signed else np.arange(1, 256) / 255


def dynamic_tree(signed: bool) -> np.ndarray:
  """Returns the numbers of dynamic tree quantization. Source: arXiv:2110.02861, section 2.1."""
  found = [0.0, 1.0]
  for exponent in range(7):
    edges = np.linspace(0.1, 1, 2 ** (exponent + (0 if signed else 1)) + 1)
    found += list(10.0 ** (exponent - 6) * (edges[1:] + edges[:-1]) / 2)
  return np.unique([*found, *(-x for x in found)] if signed else found)


def ours(signed: bool) -> np.ndarray:
  """Returns the numbers of `training.optimizers.low_precision`, up to 1."""
  codes = jnp.arange(256, dtype=jnp.uint8).reshape(1, -1)
  scale = jnp.full((1, 1), -1.0 if signed else 1.0, jnp.float32)
  numbers = np.unique(np.asarray(decode_blocks(Blocks(codes, scale)), np.float64))
  return numbers / numbers.max()


def to_nearest(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
  """Returns blocks [block, element] in numbers times the largest of each block."""
  scale = np.abs(x).max(1, keepdims=True)
  middle = (numbers[1:] + numbers[:-1]) / 2
  return numbers[np.searchsorted(middle, x / np.where(scale > 0, scale, 1))] * scale


def to_ours(x: np.ndarray) -> np.ndarray:
  """Returns blocks as `training.optimizers.low_precision` rounds them, stochastically."""
  words = np.random.default_rng(0).integers(0, 2**32, x.shape, np.uint32)
  coded = encode_blocks(jnp.asarray(x, jnp.float32), (1, BLOCK), jnp.asarray(words))
  return np.asarray(decode_blocks(coded), np.float64)


WAYS = {
  "first moment linear, second linear": (
    lambda m: to_nearest(m, linear(True)),
    lambda v: to_nearest(v, linear(False)),
  ),
  "first moment linear, root of the second linear": (
    lambda m: to_nearest(m, linear(True)),
    lambda v: to_nearest(np.sqrt(v), linear(False)) ** 2,
  ),
  "dynamic tree": (
    lambda m: to_nearest(m, dynamic_tree(True)),
    lambda v: to_nearest(v, dynamic_tree(False)),
  ),
  "small floating point, to the nearest": (
    lambda m: to_nearest(m, ours(True)),
    lambda v: to_nearest(v, ours(False)[1:]),
  ),
  "small floating point, stochastic": (to_ours, to_ours),
}


def compare_codes() -> None:
  """Prints a table of the ways; a line's numbers are root mean squares over those of float32."""
  trainer = Trainer(job_of("lm", {**keys_of({}), "seed": 0}))
  state, _ = trainer.run(0, splits.training_batches(config_of({}, 0)), STEPS.value)
  moments = []
  for tree in (state.optimizer[0].mu, state.optimizer[0].nu):
    leaves = [x for x in jax.tree.leaves(tree) if x.size >= 4096]
    flat = [np.asarray(x, np.float64).reshape(-1, BLOCK) for x in leaves]
    moments.append(np.concatenate(flat))
  m, v = moments
  epsilon, update = 1e-8, m / (np.sqrt(v) + 1e-8)
  rows = []
  for name, (of_first, of_second) in WAYS.items():
    stored = of_first(m), of_second(v)
    found = stored[0] / (np.sqrt(stored[1]) + epsilon)
    pairs = ((stored[0], m), (np.sqrt(stored[1]), np.sqrt(v)), (found, update))
    errors = [np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)) for a, b in pairs]
    largest = f"{np.abs(found).max() / np.abs(update).max():.2f} times"
    rows.append([name, *(f"{100 * error:.1f} %" for error in errors), largest])
  head = ("stored as", "first moment", "root of the second", "update", "largest update")
  print(table(head, rows))


def main(_) -> None:
  """Prints the table."""
  devices.start({"data": 1}, simulate=True)
  if CODES.value:
    compare_codes()
    return
  trainers = {
    name: Trainer(job_of("lm", {**keys_of(own), "seed": 0}))
    for name, own in VARIANTS.items()
    if any(word in name for word in ONLY.value)
  }
  steps = {name: stepper(one.job, one.step) for name, one in trainers.items()}
  times = {name: statistics.median(x) for name, x in in_turns(steps, ROUNDS).items()}
  first, *_ = times.values()
  rows = []
  for name, one in trainers.items():
    found = [losses_of(one, VARIANTS[name], seed) for seed in range(SEEDS.value)]
    losses = (spread(some, 3, np.mean) for some in zip(*found, strict=True))
    share = f"{times[name] / first:.2f}"
    rows.append([name, *bytes_per_parameter(one.job), *losses, share])
  print(table(("stored", "parameters", "moments", "last losses", "held out", "step"), rows))


if __name__ == "__main__":
  app.run(main)
