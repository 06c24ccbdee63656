r"""Loss and gradients with 8-bit matmuls beside bfloat16, on one CPU device.

  python -m benchmarks.eight_bit [--steps=100] [--seeds=0,1,2] [--repeats=1]

Trains the recipe lm (8 rows a step) in bfloat16 with each seed, and with each kind of 8-bit matmul
with the first ones. A line per run has the mean loss of the last 20 steps and the held-out loss of
16 batches, in nats per byte. Then
the gradients of one batch, by the parameters that the first run in bfloat16 has found: the distance
from those in float32, relative L2, of all kernels of the layers and of the worst one. On CPUs 8-bit
numbers are emulated: integers exactly, float8 products in float32.

"int8, kernels' gradients too" rounds the operands of dW to int8 as well, with a scale for each
input and each output over all tokens; training.matmul_dtype does not offer it.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import timing
from partitioning.parallel import eight_bit
from partitioning.rules import named_leaves
from runtime import devices
from training import setup, splits
from training.state import State

INT8 = {"training.matmul_dtype": "int8"}
FLOAT8 = {"training.matmul_dtype": "float8"}
VARIANTS = {
  "bfloat16": {},
  "int8": INT8,
  "float8": FLOAT8,
  "float8, delayed": {**FLOAT8, "training.matmul_scaling": "delayed"},
  "int8, kernels' gradients too": INT8,
}
LAST, HELD_OUT, ROWS = 20, 16, 8
STEPS = flags.DEFINE_integer("steps", 100, "Steps of a run.", 1)
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Of the parameters, data order and split.")
REPEATS = flags.DEFINE_integer("repeats", 1, "Seeds of the variants other than bfloat16.", 1)


def variant_job(variant: str, seed: int, **changes) -> setup.Job:
  """Returns the job of a variant."""
  own = {"seed": seed, "data.global_batch_size": ROWS, "training.steps": STEPS.value}
  compute = {"training.compute_dtype": "bfloat16"}
  return timing.job_of("lm", {**own, **compute, **VARIANTS[variant], **changes})


@contextlib.contextmanager
def rounding_dw_too(variant: str) -> Iterator[None]:
  """Rounds the operands of dW too, where the variant says so."""
  original = eight_bit.contracted_in_8_bits

  def dot(a, b, contracted, dtype, *, precise=False):
    if not precise:
      return original(a, b, contracted, dtype)
    (a, of_a), (b, of_b) = (
      eight_bit.rounded_to_8_bits(x, dims, (), jnp.int8, ())
      for x, dims in zip((a, b), contracted, strict=True)
    )
    found = original(a, b, contracted, jnp.float32)
    of_a = of_a.reshape(*of_a.shape[2:], *(1,) * (of_b.ndim - 2))
    return (found * of_a * of_b.reshape(*(1,) * (a.ndim - 2), *of_b.shape[2:])).astype(dtype)

  with mock.patch.object(eight_bit, "contracted_in_8_bits", dot if "too" in variant else original):
    yield


def trained(variant: str, seed: int) -> tuple[float, float, State]:
  """Returns the mean loss of the last steps, the held-out loss, and the state."""
  job = variant_job(variant, seed)
  with rounding_dw_too(variant):
    trainer = timing.Trainer(job)
  data = splits.open_data(job)
  state, losses = trainer.run(seed, data.train, STEPS.value)
  loss = trainer.held_out(state, data.evaluation, HELD_OUT)
  return statistics.fmean(losses[-LAST:]), loss, state


def gradients(variant: str, params, **changes) -> dict[str, np.ndarray]:
  """Returns the gradients of the layers' kernels of one batch."""
  job = variant_job(variant, 0, **changes)
  batch = splits.open_data(job).train.batch(STEPS.value, job.batch_shardings)
  history = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), job.state.variables)
  with rounding_dw_too(variant):
    compiled = job.compile(job.program.gradients, params, batch, None, history).function
  # Of the second of two times: delayed scaling takes magnitudes from the first.
  *_, history = compiled(params, batch, None, history)
  found = compiled(params, batch, None, history)[0]
  leaves = named_leaves(found)
  return {
    name: np.asarray(leaves[name], np.float64)
    for name in leaves
    if name.startswith("layers/") and name.endswith("/kernel")
  }


def distances(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> tuple[float, float]:
  """Returns the relative L2 distance of all arrays together, and the largest of one."""
  squares = {n: (np.sum((found[n] - x) ** 2), np.sum(x**2)) for n, x in wanted.items()}
  far, size = (sum(pair[i] for pair in squares.values()) for i in (0, 1))
  return (far / size) ** 0.5, max((a / b) ** 0.5 for a, b in squares.values())


def main(_) -> None:
  """Prints a line for each run, then one for each variant's gradients."""
  devices.start({}, simulate=True)
  kept, seeds = None, [int(seed) for seed in SEEDS.value]
  for variant in VARIANTS:
    for seed in seeds[: None if variant == "bfloat16" else REPEATS.value]:
      began = time.monotonic()
      last, held_out, state = trained(variant, seed)
      seconds = time.monotonic() - began
      print(f"{variant}, seed {seed}: {last:.4f}, {held_out:.4f} ({seconds:.0f} s)", flush=True)
      kept = state.params if kept is None else kept
  wanted = gradients("bfloat16", kept, **{"training.compute_dtype": "float32"})
  for variant in VARIANTS:
    every, worst = distances(gradients(variant, kept), wanted)
    print(f"{variant}, gradients: {every:.2%} of all kernels, {worst:.2%} of the worst", flush=True)


if __name__ == "__main__":
  app.run(main)
