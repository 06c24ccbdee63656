r"""The application's training loop compared with a plain hand-written one: `ratio R` per case.

  python -m benchmarks.step_overhead [--cases=lm:dp8,lm:fsdp8] [--overhead_steps=10] [--rounds=8]

Ours is one call of `training.loop.train`, with prefetching, metrics.jsonl, TensorBoard events and
progress lines as in any run. The reference is the step of `examples/one_file.py`: the same shapes,
mesh, optimizer and batches; it returns what ours does (the next state, the loss and the norm of the
gradients), its batches on the devices before it begins. Both draw the same parameters, and must end
with the same loss.

Method: they alternate in turns of `steps` steps, `rounds` times, so that a drift of the machine
affects both: the compiled step given to the loop runs the reference before every turn of the loop.
A turn of the loop lasts until it asks for the step after its last, so it includes all work between
steps. Setup, compilation, and the first and the last step are excluded. R is the median over the
rounds of ours / reference; the milliseconds are the medians of the two. On a shared machine single
turns differ by tens of percent: use more rounds, and look at the ratio of CPU times at the end of
the line (on an accelerator it says little).

Exits with 1 if a ratio is above 1.03 or two losses differ.

  python -m benchmarks.step_overhead --llama [--recompute=dots]

A Llama-style decoder instead, on one device, fsdp=8, data=8 and data=4 x tensor=2: 4 layers, width
256, feed-forward 1024, 8 heads and 4 key/value heads of 32, vocabulary 1024, sequence 256, global
batch 16, float32, AdamW; turns of 3 steps. The reference saves what XLA decides; --recompute is our
`training.rematerialization`, of which `dots` is the fastest on CPUs. Exits with 1 if a ratio is
above 1.00 (rounded), or two losses differ.

  python -m benchmarks.step_overhead --sampling [--rounds=8]

The sampler of answers on one device, in tokens per second, beside the bound of its own decode step:
the forward pass of one token in every row, without draws, at once for all rows and again. Answers
end at random after 1 to 64 tokens; 1,024 of them, in groups of 16 that share a prompt of 4 to 32
tokens, pass through 32 rows. Prefill, draws, rows that wait to be refilled and the last answers,
beside which rows are empty, all count. Exits with 1 if the median of the shares, by time or where
others use the machine by processor time, is below 0.8.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from absl import app, flags
from etils import epath
from ml_collections import ConfigDict

from configs.schema import finalize, validate
from examples import one_file
from inference.rollouts import RolloutSampler
from inference.sampler import TokenSampler
from input_pipeline.batches import EvaluationBatches
from processes.coordination import current
from processes.preemption import StopRequest
from processes.watchdog import Watchdog
from runtime import devices
from training import loop, restore, setup, splits

_CASES = flags.DEFINE_list(
  "cases",
  "lm:dp8,lm:dp4_tp2,lm:fsdp8,lm:dp2_fsdp2_tp2,lm:tp8",
  "RECIPE:STRATEGY, the strategy being a file of configs/.",
)
STEPS = flags.DEFINE_integer(
  "overhead_steps", 10, "Steps per turn; a log line is written every 10.", 1
)
ROUNDS = flags.DEFINE_integer("rounds", 8, "Turns of each.", 1)
_SIMULATE = flags.DEFINE_bool(
  "overhead_simulate", False, "Use simulated CPU devices even if there is a GPU or TPU."
)

_LLAMA = flags.DEFINE_bool("llama", False, "Measure the Llama-style decoder.")
_RECOMPUTE = flags.DEFINE_string("recompute", "none", "Its training.rematerialization.")

_SAMPLING = flags.DEFINE_bool("sampling", False, "Measure the sampler of answers.")

MOST_RATIO, MOST_RATIO_OF_LLAMA = 1.03, 1.005
LEAST_SHARE = 0.8
SAMPLED = {
  "model.layers": 4,
  "model.model_size": 192,
  "model.feedforward_size": 512,
  "model.heads": 6,
  "model.kv_heads": 6,
  "model.head_size": 32,
  "data.sequence_length": 96,
}
LLAMA_STRATEGIES = ("single", "fsdp8", "dp8", "dp4_tp2")
LLAMA = {
  "model.layers": 4,
  "model.model_size": 256,
  "model.feedforward_size": 1024,
  "model.heads": 8,
  "model.kv_heads": 4,
  "model.head_size": 32,
  "model.vocabulary_size": 1024,
  "data.sequence_length": 256,
  "data.global_batch_size": 16,
  # At the recipe's, rounding grows a thousandfold in ten steps, and no two losses can be compared.
  "optimizer.learning_rate": 1e-4,
}
# Relative difference of the last losses: rounding, grown over the steps.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


class Turns:
  """Alternates between the loop and the reference, without the loop's knowledge."""

  def __init__(self, run_reference):
    """Takes the function that runs the next turn of the reference."""
    self._run_reference = run_reference
    self._calls = 0
    self._began = clocks()
    # Per turn: seconds per step, and the processor's seconds per step.
    self.ours: list[tuple[float, float]] = []
    self.reference: list[tuple[float, float]] = []

  def before_step(self, state) -> None:
    """At the end of each turn of the loop, runs a turn of the reference."""
    turn, inside = divmod(self._calls - 1, STEPS.value)  # the first step is in no turn
    self._calls += 1
    if inside or not 0 <= turn <= ROUNDS.value:
      return
    jax.block_until_ready(state)
    now = clocks()
    if turn > 0:
      self.ours.append(per_step(self._began, now))
    if turn < ROUNDS.value:
      self._run_reference()
      self._began = clocks()
      self.reference.append(per_step(now, self._began))


def clocks() -> tuple[float, float]:
  """Returns the time and the processor time of all threads of this process, in seconds."""
  return time.perf_counter(), time.process_time()


def per_step(began: tuple[float, float], ended: tuple[float, float]) -> tuple[float, float]:
  """Returns the difference of two readings of `clocks`, divided by the steps of a turn."""
  return tuple((b - a) / STEPS.value for a, b in zip(began, ended, strict=True))


class StepInTurns:
  """A compiled train step that asks `turns` before it runs."""

  def __init__(self, function, turns: Turns):
    """Takes what Job.compile_train_step compiled."""
    self._function = function
    self._turns = turns

  def __call__(self, state, batch):
    """Returns what the step returns."""
    self._turns.before_step(state)
    return self._function(state, batch)

  def __getattr__(self, name):
    """Delegates everything else, such as the compiled text, to the step."""
    return getattr(self._function, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobInTurns(setup.Job):
  """A job whose train step is a StepInTurns."""

  turns: Turns

  def compile_train_step(self, *shape: object) -> setup.Compiled:
    """Returns the job's own step, wrapped."""
    compiled = super().compile_train_step(*shape)
    return dataclasses.replace(compiled, function=StepInTurns(compiled.function, self.turns))


def get_config(case: str, overrides: Mapping[str, Any] | None = None):
  """Returns the config of RECIPE:STRATEGY, shortened and evaluated only at the end."""
  recipe, _, strategy = case.partition(":")
  config = importlib.import_module(f"configs.{strategy}").get_config(recipe)
  config.update_from_flattened_dict(dict(overrides or {}))
  config.training.steps = STEPS.value * ROUNDS.value + 2  # the first and the last are not timed
  config.evaluation.every_steps = 0
  config.checkpoint.every_steps = 0  # benchmarks/checkpoint.py measures the cost of saves
  return config


def plain_program(ready: setup.Job) -> one_file.Program:
  """Returns the reference's functions for a job's config."""
  from commands.eject import file_flags  # which defines flags that another benchmark has, too

  values = file_flags(ready.config, ready.devices.platform, ready.devices.sizes)
  return one_file.Program(*one_file.started(one_file.Config(**values)))


def run_plain(program: one_file.Program, state: dict, batches: Iterable, *, wait: bool):
  """Runs one plain step per batch and waits for the last; returns the state and the last loss.

  Args:
    program: of `plain_program`.
    state: donated.
    batches: on the mesh, at least one.
    wait: for each step: simulated devices that have several in flight can deadlock.
  """
  for batch in batches:
    state, metrics = program.step(state, batch)
    if wait:
      jax.block_until_ready(metrics)
  jax.block_until_ready(state)
  return state, float(metrics["loss"])


def last_loss(ready: setup.Job, data: splits.Data) -> float:
  """Trains in a temporary folder; returns the loss of the last step, from metrics.jsonl."""
  with tempfile.TemporaryDirectory() as folder:
    workdir = epath.Path(folder)
    with open(workdir / "stdout.txt", "w") as file, contextlib.redirect_stdout(file):
      start = restore.RunCheckpoints(ready, workdir).begin({})
      start.start_writing()
      with Watchdog(current(), StopRequest()) as watch:
        loop.train(data, start, watch, started=time.monotonic())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  [loss] = [x["loss"] for x in lines if x["step"] == ready.config.training.steps and "loss" in x]
  return loss


def measure(name: str, ready: setup.Job, most: float) -> bool:
  """Prints the line of one case; returns whether speed and loss are within the limits."""
  data = splits.open_data(ready)
  # The evaluation at the end is not timed; one batch of it is enough.
  size = ready.config.data.global_batch_size
  few = dataclasses.replace(data.evaluation.source, rows=size)
  data = dataclasses.replace(data, evaluation=EvaluationBatches(few, global_batch_size=size))
  steps = ready.config.training.steps
  batches = [data.train.batch(step, ready.batch_shardings) for step in range(steps)]
  program = plain_program(ready)
  run = functools.partial(run_plain, program, wait=ready.devices.simulated)

  state, _ = run(program.init(jax.random.key(ready.config.seed)), batches[:1])
  left = iter(batches[1:])

  def turn():
    nonlocal state
    state, _ = run(state, itertools.islice(left, STEPS.value))

  turns = Turns(turn)
  ours = last_loss(JobInTurns(**shallow_dict(ready), turns=turns), data)
  _, plain = run(state, left)

  pairs = list(zip(turns.ours, turns.reference, strict=True))
  ratio, processor = (statistics.median(a[i] / b[i] for a, b in pairs) for i in range(2))
  milliseconds = [
    1e3 * statistics.median(t for t, _ in found) for found in (turns.ours, turns.reference)
  ]
  print(
    f"ratio {ratio:.3f}  ({name}: ours {milliseconds[0]:.1f} ms, reference {milliseconds[1]:.1f} "
    f"ms, loss ours {ours:.7g}, reference {plain:.7g}; processor time {processor:.3f})",
    flush=True,
  )
  tolerance = TOLERANCE[ready.config.training.compute_dtype]
  same = abs(ours - plain) <= tolerance * abs(plain)
  if not same:
    print(f"{name}: the losses differ by more than {tolerance} of them", file=sys.stderr)
  if ratio > most:
    print(f"{name}: the ratio is above {most}", file=sys.stderr)
  return same and ratio <= most


def shallow_dict(record) -> dict:
  """Returns the fields of a dataclass, without copies."""
  return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def measure_all(configs: Mapping[str, ConfigDict], most: float) -> int:
  """Measures every case, name -> config; returns the exit code."""
  meshes = (config.mesh.to_dict() for config in configs.values())
  slices = [config.mesh_dcn.to_dict() for config in configs.values()]
  started = devices.start(*meshes, slices=slices, simulate=_SIMULATE.value)
  kind = "simulated CPU devices" if started[0].simulated else jax.devices()[0].device_kind
  print(
    f"{jax.device_count()} x {kind}, jax {jax.__version__}; {ROUNDS.value} rounds of "
    f"{STEPS.value} steps each",
    flush=True,
  )
  good = []
  for (name, config), its_devices in zip(configs.items(), started, strict=True):
    config = finalize.finalize(config, its_devices.platform)
    validate.check(config, its_devices.sizes)
    good.append(measure(name, setup.prepare(config, its_devices), most))
  return 0 if all(good) else 1


def measure_sampling(ready: setup.Job, *, groups: int, answers: int, rows: int, new: int) -> bool:
  """Prints the sampler's tokens per second beside the bound; returns whether the share is enough.

  Args:
    ready: the job.
    groups: of answers to one prompt.
    answers: of a group.
    rows: that decode together.
    new: the most tokens of an answer.
  """
  most, random = 32, np.random.default_rng(0)
  prompts = [random.integers(1, 256, random.integers(4, most + 1)) for _ in range(groups)]
  made = RolloutSampler(
    ready,
    prompt_tokens=most,
    new_tokens=new,
    rows=groups * answers,
    temperature=1.0,
    stop_tokens=tuple(range(1, 7)),  # of 256, by parameters that were drawn: about 35 tokens each
    together=rows,
  )
  params, batch = ready.initial_state().params, [one for one in prompts for _ in range(answers)]
  forward = forward_only(ready, made.sampler, params, new)
  draw = functools.partial(made, params, None, batch, seed=0)
  draw(step=0), forward()  # compiles
  shares = []
  for number in range(ROUNDS.value):
    began = clocks()
    tokens = int(draw(step=1 + number).lengths.sum())
    ours = [tokens / (b - a) for a, b in zip(began, clocks(), strict=True)]
    bound = forward()
    shares.append([a / b for a, b in zip(ours, bound, strict=True)])
  wall, processor = (statistics.median(one) for one in zip(*shares, strict=True))
  print(
    f"sampling: share {wall:.3f} of the tokens/s of the forward pass alone, {processor:.3f} by "
    f"processor time; in the last round {ours[0]:,.0f} and {bound[0]:,.0f} tokens/s, "
    f"{tokens:,} tokens in {groups * answers} answers"
  )
  return max(wall, processor) >= LEAST_SHARE


def forward_only(ready: setup.Job, sampler: TokenSampler, params: Any, steps: int) -> Callable:
  """Returns a function that decodes in all rows without draws; it returns tokens per second.

  Also per second of processor time.
  """

  def forward(params, tokens_B1, counts_B, cache):
    return ready.program.module(params, None).extend(tokens_B1, counts_B, cache)

  tokens_B1, counts_B = np.ones((sampler.rows, 1), np.int32), np.ones(sampler.rows, np.int32)
  given, tables = (params, tokens_B1, counts_B), sampler.activations
  compiled = ready.compile(
    forward, *given, sampler.empty_cache(), activations=tables, donate_argnums=3
  ).function
  given = params, *jax.device_put((tokens_B1, counts_B))

  def timed() -> list[float]:
    cache = sampler.empty_cache()
    began = clocks()
    for _ in range(steps):
      logits_BV, cache = compiled(*given, cache)
      logits_BV.block_until_ready()
    return [sampler.rows * steps / (b - a) for a, b in zip(began, clocks(), strict=True)]

  return timed


def main(argv: list[str]) -> int:
  """Measures every case; returns the exit code."""
  del argv
  if _SAMPLING.value:
    config = finalize.finalize(get_config("lm:single", SAMPLED), "cpu")
    ready = setup.prepare(config, devices.Devices("cpu", True, config.mesh.to_dict()))
    return 0 if measure_sampling(ready, groups=64, answers=16, rows=32, new=64) else 1
  if not _LLAMA.value:
    return measure_all({case: get_config(case) for case in _CASES.value}, MOST_RATIO)
  if not flags.FLAGS["overhead_steps"].present:
    flags.FLAGS["overhead_steps"].value = 3
  model = {**LLAMA, "training.rematerialization": _RECOMPUTE.value}
  cases = {name: get_config(f"lm:{name}", model) for name in LLAMA_STRATEGIES}
  return measure_all(cases, MOST_RATIO_OF_LLAMA)


if __name__ == "__main__":
  app.run(main)
