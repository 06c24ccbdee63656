r"""The application's training loop against a plain hand-written one: a line `ratio R` for each case.

  python benchmarks/step_overhead.py [--configs=dp8,dp4_tp2] [--recipes=lm,mlp_tutorial]
    [--steps=41] [--rounds=5]

Ours is `training.loop.train` itself, with prefetching, metrics.jsonl and TensorBoard events as in
any run. The reference is `benchmarks/reference.py`: the same shapes, mesh, optimizer, steps and
batches, but these lie on the devices before it begins. Each starts from the same parameters, and
ends with the same loss or the run exits with 1; so it does where a ratio is above 1.03.

Method: both are compiled beforehand. A round runs the one and then the other, `steps` steps each,
and every second round in the opposite order, so that a drift of the machine hits both. A run's
seconds per step are measured from the end of its first step to the end of its last; ours are
those that the loop writes to metrics.jsonl. The ratio is that of the medians over the rounds. The
default is for a quiet machine; on a shared one take more rounds.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import statistics
import sys
import tempfile
import time

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import optax
from etils import epath

from benchmarks import reference
from configs import base
from input_pipeline.batches import EvaluationBatches
from training import devices, job, loop

_CONFIGS = flags.DEFINE_list("configs", "dp8,dp4_tp2", "Strategies: files of configs/.")
_RECIPES = flags.DEFINE_list("recipes", "lm,mlp_tutorial", "Recipes.")
_STEPS = flags.DEFINE_integer("steps", 41, "Steps per run; the first is not timed.", 2)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each.", 1)
_SIMULATE = flags.DEFINE_bool("simulate", False, "Simulated CPU devices, even beside a GPU or TPU.")

MOST_RATIO = 1.03
# Relative difference of the last losses: rounding, grown over the steps.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


class CompiledOnce(job.Job):
  """A job whose train and eval steps are compiled at first use and kept for all rounds."""

  @functools.cached_property
  def _train_step(self) -> job.Compiled:
    return super().compile_train_step()

  @functools.cached_property
  def _eval_step(self) -> job.Compiled:
    return super().compile_eval_step()

  def compile_train_step(self) -> job.Compiled:
    """Returns the train step."""
    return self._train_step

  def compile_eval_step(self) -> job.Compiled:
    """Returns the eval step."""
    return self._eval_step


def get_config(strategy: str, recipe: str):
  """Returns the config of a case: as shipped, but short and evaluated only at the end."""
  config = importlib.import_module(f"configs.{strategy}").get_config(recipe)
  config.training.steps = _STEPS.value
  config.evaluation.every_steps = 0
  return config


def plain_step(ready: job.Job, batch):
  """Returns the reference's `start` and `step` for a job's config."""
  config = ready.config
  model, keys = config.model, config.optimizer
  dtype = jnp.dtype(config.training.compute_dtype)
  if keys.name == "sgd":
    optimizer = optax.sgd(keys.learning_rate)
  else:
    names = ("learning_rate", "warmup_steps", "weight_decay", "clip_norm")
    names += ("beta_1", "beta_2", "epsilon")
    optimizer = reference.adamw(
      steps=config.training.steps, **{name: keys[name] for name in names}
    )
  if model.name == "mlp":
    loss = functools.partial(reference.mlp_loss, dtype=dtype)
    specs = reference.MLP_SPECS
  else:
    epsilon, base = model.norm_epsilon, model.rotary_base
    loss = functools.partial(
      reference.lm_loss, dtype=dtype, norm_epsilon=epsilon, rotary_base=base
    )
    specs = reference.LM_SPECS
  arrays = (ready.state.params, batch)
  return reference.compile_step(loss, specs, optimizer, ready.mesh, arrays)


def run_ours(ready: job.Job, data: loop.Data) -> tuple[float, float]:
  """Trains in a temporary folder; returns the last loss and the seconds per step."""
  with tempfile.TemporaryDirectory() as folder:
    workdir = epath.Path(folder)
    with open(workdir / "stdout.txt", "w") as file, contextlib.redirect_stdout(file):
      loop.train(ready, data, workdir, started=time.time())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  lines = [line for line in lines if "loss" in line]
  assert [lines[0]["step"], lines[-1]["step"]] == [1, ready.config.training.steps], lines
  # Each line holds the mean over the steps since the one before it.
  steps = [line["step"] - before["step"] for before, line in zip(lines, lines[1:], strict=False)]
  means = [line["step_seconds"] for line in lines[1:]]
  total = sum(count * mean for count, mean in zip(steps, means, strict=True))
  return lines[-1]["loss"], total / sum(steps)


def measure(name: str, ready: job.Job) -> bool:
  """Prints the line of one case; returns whether speed and loss are as they should be."""
  data = loop.open_data(ready)
  # A short evaluation at the end: it is not timed, and the split is the same for every case.
  few = dataclasses.replace(data.held_out.source, rows=ready.config.data.global_batch_size)
  held_out = EvaluationBatches(few, global_batch_size=few.rows)
  data = dataclasses.replace(data, held_out=held_out)
  steps = ready.config.training.steps
  batches = [data.train.batch(step, ready.batch_shardings) for step in range(steps)]
  params = jax.device_get(ready.initial_state().params)
  start, step = plain_step(ready, batches[0])

  def run_plain():
    losses, seconds = reference.train(
      step, start(params), batches, wait_each_step=ready.devices.simulated
    )
    return losses[-1], seconds

  runs = {"ours": functools.partial(run_ours, ready, data), "reference": run_plain}
  results = {who: [] for who in runs}
  for number in range(_ROUNDS.value):
    for who in sorted(runs, reverse=number % 2 == 1):
      results[who].append(runs[who]())
  losses = {who: found[-1][0] for who, found in results.items()}
  medians = {who: statistics.median(s for _, s in found) for who, found in results.items()}
  for who, found in results.items():
    print("  ", who, " ".join(f"{1e3 * s:.1f}" for _, s in found))
  ratio = medians["ours"] / medians["reference"]
  print(
    f"ratio {ratio:.3f}  ({name}: ours {1e3 * medians['ours']:.1f} ms, "
    f"reference {1e3 * medians['reference']:.1f} ms, "
    f"loss ours {losses['ours']:.6g}, reference {losses['reference']:.6g})",
    flush=True,
  )
  tolerance = TOLERANCE[ready.config.training.compute_dtype]
  same = abs(losses["ours"] - losses["reference"]) <= tolerance * abs(losses["reference"])
  if not same:
    print(f"  the losses of {name} differ by more than {tolerance} of them", file=sys.stderr)
  if ratio > MOST_RATIO:
    print(f"  the ratio of {name} is above {MOST_RATIO}", file=sys.stderr)
  return same and ratio <= MOST_RATIO


def main(argv: list[str]) -> int:
  """Measures every case; returns the exit code."""
  del argv
  cases = [(strategy, recipe) for recipe in _RECIPES.value for strategy in _CONFIGS.value]
  configs = [get_config(*case) for case in cases]
  started = devices.start(*(c.mesh.to_dict() for c in configs), simulate=_SIMULATE.value)
  kind = "simulated CPU devices" if started[0].simulated else jax.devices()[0].device_kind
  print(f"{jax.device_count()} x {kind}, jax {jax.__version__}; {_ROUNDS.value} rounds of "
        f"{_STEPS.value} steps", flush=True)
  good = []
  for (strategy, recipe), config, its_devices in zip(cases, configs, started, strict=True):
    config = base.finalize(config, its_devices.platform)
    base.check(config, its_devices.sizes)
    ready = job.prepare(config, its_devices)
    ready = CompiledOnce(**{f.name: getattr(ready, f.name) for f in dataclasses.fields(ready)})
    good.append(measure(f"{recipe} {strategy}", ready))
  return 0 if all(good) else 1


if __name__ == "__main__":
  app.run(main)
