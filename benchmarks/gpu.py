r"""Trains on one GPU beside PyTorch: `ratio R` of seconds, tokens per second, MFU.

  python -m benchmarks.gpu [--gpu_models=gpt2_124m,llama_1b] [--turns=8] [--turn_steps=20]
    [--torch_python=PYTHON] [--trace=DIR] [--small]

The reference is `benchmarks/gpu_torch.py`: the same shapes, compiled by torch.compile, with flash
attention, fused AdamW, bfloat16 autocast and clipping of the gradients' norm. Each side is a
process of its own, and they have the device one after the other: both models at once do not fit
it. They start from the same parameters, see the same batches and take `turns` turns of
`turn_steps` steps. The losses after as many steps must agree, or the two do not train the same
model, and it exits with 1.

R is the median over the turns of ours / PyTorch's. MFU is the model's FLOPs per second over the
device's dense bfloat16 peak (`runtime/chips.py`), once with all scores of attention, as nanoGPT
and torchtitan count, and once with the causal half. `--small` shrinks the models for a CPU: it
shows that the benchmark works, and says nothing about speed. PyTorch may be installed for another
Python than JAX: `--torch_python`. `--trace` writes our compiled step (hlo.txt) and a trace of a
last turn of ours.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks import gpu_protocol, timing
from configs import single
from configs.schema import finalize, validate
from models import model_spec
from partitioning.rules import named_leaves
from runtime import chips, devices
from training import setup
from training.setup import Job

_MODELS = flags.DEFINE_list("gpu_models", "gpt2_124m,llama_1b", "Of MODELS.")
TURNS = flags.DEFINE_integer("turns", 8, "Turns of each.", 1)
STEPS = flags.DEFINE_integer("turn_steps", 20, "Steps of a turn.", 1)
PYTHON = flags.DEFINE_string("torch_python", sys.executable, "The Python that has PyTorch.")
_TRACE = flags.DEFINE_string("trace", None, "Writes a trace of a turn of ours to this folder.")
_SIDE = flags.DEFINE_bool("side", False, "Is the application's side, started by this command.")
_SMALL = flags.DEFINE_bool("small", False, "Small models, for a CPU.")
_COMPILE = flags.DEFINE_bool("torch_compile", True, "Whether PyTorch compiles.")

ROOT = pathlib.Path(__file__).parents[1]
# Relative difference of the losses after some steps in bfloat16, with other orders of sums.
TOLERANCE = 2e-2
TRACED_STEPS = 4
OPTIMIZER = {
  "learning_rate": 3e-4,
  "beta_1": 0.9,
  "beta_2": 0.95,
  "epsilon": 1e-8,
  "weight_decay": 0.1,
  "clip_norm": 1.0,
  "warmup_steps": 10,
  "steps": None,
}


@dataclasses.dataclass(frozen=True)
class Model:
  """A model of the benchmark.

  Attributes:
    family: gpt2 or llama.
    preset: of the application.
    rows: of a batch on one GPU.
    length: tokens of a row.
    overrides: keys of the config.
  """

  family: str
  preset: str
  rows: int
  length: int
  overrides: dict[str, Any] = dataclasses.field(default_factory=dict)


MODELS = {
  # As many tokens as nanoGPT has: PyTorch's side has no padding that it masks.
  "gpt2_124m": Model("gpt2", "gpt2_124m", 32, 1024, {"model.vocabulary_size": 50_304}),
  # Llama 3.2 1B with plain rotary positions: their table costs the same.
  "llama_1b": Model("llama", "llama3_2_1b", 8, 2048, {"model.rotary_scaling": ()}),
}
# Sizes for a CPU.
_SMALLER = {
  "model.layers": 2,
  "model.model_size": 128,
  "model.feedforward_size": 256,
  "model.heads": 4,
  "model.head_size": 32,
  "model.vocabulary_size": 512,
}


def told(model: Model, optimizer: dict, dtype: str, **more: Any) -> dict:
  """Returns what both sides are told, see benchmarks/gpu_protocol.py; PyTorch's sizes are added."""
  overrides = {
    **{f"optimizer.{key}": value for key, value in optimizer.items() if key != "steps"},
    "training.compute_dtype": dtype,
    "data.sequence_length": model.length,
    "data.global_batch_size": model.rows,
    **({"model.max_positions": model.length} if model.family == "gpt2" else {}),
    **model.overrides,
  }
  found = {"family": model.family, "recipe": f"model={model.preset},data=python_source"}
  found |= {"overrides": overrides, "rows": model.rows, "seed": 0, "compute_dtype": dtype}
  return found | {"optimizer": optimizer, "text": None, "parameters": "", "compile": True} | more


def job(name: str) -> dict:
  """Returns what both sides are told of a model of MODELS."""
  model = MODELS[name]
  if _SMALL.value:
    sizes = {**_SMALLER, "model.kv_heads": 4 if model.family == "gpt2" else 2}
    overrides = {**model.overrides, **sizes}
    model = dataclasses.replace(model, rows=4, length=64, overrides=overrides)
  more = {"optimizer.schedule": "constant", "training.rematerialization": "elementwise"}
  model = dataclasses.replace(model, overrides={**more, **model.overrides})
  return told(model, OPTIMIZER, "bfloat16", compile=_COMPILE.value)


class Process:
  """A side in a process of its own, which imports its libraries as soon as it is made.

  A context manager, which ends the process.
  """

  def __init__(self, python: str, module: str, cores: Iterable[int] | None, *options: str):
    """Starts it, on some of the processor's cores."""
    self._process = subprocess.Popen(
      [python, "-m", module, *options],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      cwd=ROOT,
      text=True,
      preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
    )
    self._module = module

  def ask(self, **question: Any) -> dict:
    """Returns the answer to a line: a description, `steps`, or `facts`; see gpu_protocol.py."""
    with contextlib.suppress(BrokenPipeError):
      print(json.dumps(question), file=self._process.stdin, flush=True)
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(f"{self._module} ended with {self._process.wait()}; see above")
    return json.loads(line)

  def __enter__(self) -> "Process":
    """Returns itself."""
    return self

  def __exit__(self, *_) -> None:
    """Ends the process; a second time it does nothing."""
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()
    self._process.wait()


def sides(cores: Iterable[int] | None = None) -> tuple[Process, Process]:
  """Returns both sides, ours first, which import their libraries meanwhile.

  Args:
    cores: of the processor that both may use.
  """
  ours = Process(sys.executable, "benchmarks.gpu", cores, "--side")
  return ours, Process(PYTHON.value, "benchmarks.gpu_torch", cores)


Turns = list[tuple[dict, dict]]  # what both sides answer, ours first


def in_turns(
  both: tuple[Process, Process], told: dict, steps: int, **more: Any
) -> tuple[Turns, tuple[dict, dict]]:
  """Returns the turns of both sides, which alternate, and their facts: ours first.

  Args:
    both: sides, which end here.
    told: see benchmarks/gpu_protocol.py; where parameters are and PyTorch's sizes are added.
    steps: of a turn.
    **more: of each turn.
  """
  with tempfile.TemporaryDirectory() as told["parameters"], both[0], both[1]:
    for side in both:
      side.ask(**told)
      told["sizes"] = both[0].ask(facts=True)["sizes"]
    turns = [tuple(side.ask(steps=steps, **more) for side in both) for _ in range(TURNS.value)]
    return turns, tuple(side.ask(facts=True) for side in both)


def one_after_the_other(
  both: tuple[Process, Process], told: dict, steps: int, trace: str | None
) -> tuple[Turns, tuple[dict, dict]]:
  """Returns what `in_turns` does, where only one of the models fits the device.

  With `trace`, our compiled step and a trace of a last turn of ours are written to that folder.
  """
  runs, facts = [], []
  with tempfile.TemporaryDirectory() as told["parameters"], both[0], both[1]:
    for side in both:
      with side:
        side.ask(**told)
        runs.append([side.ask(steps=steps) for _ in range(TURNS.value)])
        facts.append(side.ask(facts=True))
        told["sizes"] = facts[0]["sizes"]
        if trace and side is both[0]:
          side.ask(steps=TRACED_STEPS, trace=trace)
  return list(zip(*runs, strict=True)), tuple(facts)


def agree(name: str, ours: float, other: float) -> bool:
  """Returns whether two losses are of the same training, and says so where they are not."""
  if abs(ours - other) <= TOLERANCE * abs(other):
    return True
  print(f"{name}: the losses differ by more than {TOLERANCE} of them", file=sys.stderr)
  return False


def measure(name: str, both: tuple[Process, Process]) -> bool:
  """Prints the lines of a model; returns whether both sides trained the same model."""
  trace = f"{_TRACE.value}/{name}" if _TRACE.value else None
  turns, facts = one_after_the_other(both, job(name), STEPS.value, trace)
  return report(name, turns, facts, STEPS.value)


def report(
  name: str, turns: Turns, facts: tuple[dict, dict], steps: int, last: str = "loss"
) -> bool:
  """Prints what was measured; returns whether parameters and losses agree: `last` of each."""
  own, runs = facts[0], [*zip(*turns, strict=True)]
  tokens = own["rows"] * own["sizes"]["length"]
  wall, processor = (
    timing.ratio(*([one[clock] for one in of] for of in runs)) for clock in ("seconds", "processor")
  )
  print(f"ratio {wall:.3f}, of the processor {processor:.3f}", end="")
  print(f"  ({name}: {own['rows']} rows, {tokens:,} tokens, {own['device']})")
  for side, fact, of in zip(("ours", "PyTorch"), facts, runs, strict=True):
    seconds, busy = (
      statistics.median(one[clock] for one in of) / steps for clock in ("seconds", "processor")
    )
    line = (
      f"  {side}, {fact['library']}: {1e3 * seconds:.2f} ms ({1e3 * busy:.2f} of the processor)"
    )
    line += f", {tokens / seconds:,.0f} tokens/s"
    if own["peak_flops"]:
      whole, half = (flops / seconds / own["peak_flops"] for flops in own["flops"])
      line += f", MFU {whole:.1%} ({half:.1%} by the causal half)"
    print(f"{line}, loss {of[-1]['loss']:.4f}, peak {fact['peak_bytes'] / 2**30:.1f} GiB")
  print(f"  chosen: {own['chosen']}; compiler options: {own['compiler_options']}", flush=True)
  counts = [fact["parameters"] for fact in facts]
  if counts[0] != counts[1]:
    print(f"{name}: {counts[0]:,} parameters, and PyTorch has {counts[1]:,}", file=sys.stderr)
    return False
  return agree(name, *(one[last] for one in turns[-1]))


# ---- The application's side: its step, as a run compiles it, in a process of its own ----


def prepare(recipe: str, overrides: dict, one: devices.Devices | None = None) -> Job:
  """Returns the job of a recipe on one device; None: the one that is there."""
  config = single.get_config(recipe)
  config.update_from_flattened_dict(overrides)
  if one is None:
    [one] = devices.start(config.mesh.to_dict(), slices=[config.mesh_dcn.to_dict()])
  config, choices = finalize.with_choices(
    config, one.platform, one.sizes, devices.compute_capability(one)
  )
  validate.check(config, one.sizes)
  return setup.prepare(config, one, choices)


def sizes(job: Job, family: str) -> dict:
  """Returns the sizes of a job's model as benchmarks/gpu_protocol.py has them."""
  m = job.config.model
  return {
    "family": family,
    "width": m.model_size,
    "layers": m.layers,
    "heads": m.heads,
    "kv_heads": m.kv_heads,
    "head_size": m.head_size,
    "feedforward": m.feedforward_size,
    "vocabulary": job.state.params["embed"]["table"].shape[0],
    "length": job.config.data.sequence_length,
    "rotary_base": m.rotary_base,
    "epsilon": m.norm_epsilon,
    "activation": m.activation,
    "biases": m.biases != "none",
  }


def save(params: Any, folder: pathlib.Path) -> None:
  """Writes the parameters that both sides start from, one .npy file each."""
  for name, array in named_leaves(params).items():
    np.save(folder / f"{name.replace('/', '.')}.npy", np.asarray(array))


class Side:
  """A job, its state and its batches."""

  def __init__(self, description: dict):
    """Compiles the step and initializes the state; see benchmarks/gpu_protocol.py."""
    self._job = prepare(description["recipe"], description["overrides"])
    description["sizes"] = self._sizes = sizes(self._job, description["family"])
    if description["parameters"]:
      save(self._job.initial_state().params, pathlib.Path(description["parameters"]))
    self._step = self._job.compile_train_step().function
    self._state = self._job.initial_state()
    self._description, self._batch = description, gpu_protocol.train_batch(description)
    self._evaluate = None if description["text"] is None else self._job.compile_eval_step().function
    self._done = 0

  def _placed(self, pair: tuple[np.ndarray, np.ndarray]) -> dict[str, jax.Array]:
    """Returns a batch on the device."""
    fields = dict(zip(("tokens", "targets"), pair, strict=True))
    fields["weights"] = np.ones(pair[0].shape, np.float32)
    found = {
      name: fields.get(name, np.zeros(array.shape, array.dtype))
      for name, array in self._job.batch.items()
    }
    return jax.device_put(found, self._job.batch_shardings)

  def run(self, steps: int, trace: str = "", validate: bool = False) -> dict:
    """Runs some steps; see benchmarks/gpu_protocol.py."""
    with jax.profiler.trace(trace) if trace else contextlib.nullcontext():
      found = self._run(steps)
    if trace:
      pathlib.Path(trace, "hlo.txt").write_text(self._step.as_text())
    if validate:
      batches = map(self._placed, gpu_protocol.validation_batches(self._description))
      sums = [self._evaluate(self._state.params, batch) for batch in batches]
      losses = [float(one["loss"] / one["weight"]) for one in sums]
      found["validation"] = sum(losses) / len(losses)
    return found

  def _run(self, steps: int) -> dict:
    jax.block_until_ready(self._state)
    began = time.perf_counter(), time.process_time()
    for _ in range(steps):
      self._state, metrics = self._step(self._state, self._placed(self._batch(self._done)))
      if self._job.devices.simulated:  # as in a run
        jax.block_until_ready(metrics)
      self._done += 1
    last = float(metrics["loss"])  # waits for the device
    seconds, processor = time.perf_counter() - began[0], time.process_time() - began[1]
    return {"seconds": seconds, "processor": processor, "loss": last}

  def temporary_bytes(self) -> int:
    """Returns what the compiled step takes beside its state and batch."""
    return self._step.memory_analysis().temp_size_in_bytes

  def facts(self) -> dict:
    """Returns versions, sizes, what was chosen, and the FLOPs of a step and of the device."""
    job, device = self._job, self._job.mesh.devices.flat[0]
    counted = named_leaves(job.state.params).values()
    rows = job.config.data.global_batch_size
    return {
      "library": f"jax {jax.__version__}",
      "device": device.device_kind,
      "parameters": sum(int(np.prod(array.shape)) for array in counted),
      "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use", 0),
      "sizes": self._sizes,
      "rows": rows,
      "flops": [
        rows * model_spec(job.config).train_flops_per_example(causal=causal)
        for causal in (False, True)
      ],
      "peak_flops": chips.peak_flops(device),
      "chosen": {one.key: one.value for one in job.choices},
      "compiler_options": job.compiler_defaults,
    }


def main(argv: list[str]) -> int:
  """Measures every model; returns the exit code. With --side, answers as a side instead."""
  del argv
  if _SIDE.value:
    gpu_protocol.serve(Side)
    return 0
  if unknown := [name for name in _MODELS.value if name not in MODELS]:
    raise app.UsageError(f"--gpu_models={unknown[0]}: one of {', '.join(MODELS)}")
  started = {name: sides() for name in _MODELS.value}
  good = [measure(name, both) for name, both in started.items()]
  return 0 if all(good) else 1


if __name__ == "__main__":
  app.run(main)
