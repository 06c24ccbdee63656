r"""The application's train step beside MaxText's on CPUs, in turns: `ratio R` of times per mesh.

  python -m benchmarks.maxtext_cpu [--turns=6] [--turn_steps=2] [--meshes=single,fsdp8,dp8,dp4_tp2]

In an environment that has MaxText (docs/check.md) and what requirements.txt names, so that both
have one jax. A Llama-style decoder of 4 layers of width 256 in float32 with
AdamW and clipping: `LLAMA` of benchmarks/step_overhead.py, 16 rows of 256 tokens. Three compiled
steps, each in a process of its own, of which two wait while one works:

  ours: with the rematerialization, compiler options and allocator that a run chooses on CPUs.
  MaxText: its defaults, but for remat_policy=minimal_with_context, its fastest here.
  MaxText tuned: the same with our compiler options and allocator.

R is the median over the turns of ours / MaxText's, and ours / MaxText's tuned, of wall and of
processor time.
"""

import contextlib
import os
import statistics
import sys
import time

import jax
import numpy as np
from absl import app, flags

from benchmarks import gpu, gpu_protocol, timing
from benchmarks.step_overhead import LLAMA
from runtime import devices

_MESHES = flags.DEFINE_list("meshes", "single,fsdp8,dp8,dp4_tp2", "Of MESHES.")
_MAXTEXT = flags.DEFINE_bool("maxtext_side", False, "Is MaxText's side, started by this command.")

MESHES = {
  "single": {},
  "fsdp8": {"fsdp": 8},
  "dp8": {"data": 8},
  "dp4_tp2": {"data": 4, "tensor": 2},
}
ROWS, LENGTH = LLAMA["data.global_batch_size"], LLAMA["data.sequence_length"]
SETTINGS = {
  "rows": ROWS,
  "max_target_length": LENGTH,
  "vocab_size": LLAMA["model.vocabulary_size"],
  "base_emb_dim": LLAMA["model.model_size"],
  "base_mlp_dim": LLAMA["model.feedforward_size"],
  "base_num_decoder_layers": LLAMA["model.layers"],
  "base_num_query_heads": LLAMA["model.heads"],
  "base_num_kv_heads": LLAMA["model.kv_heads"],
  "head_dim": LLAMA["model.head_size"],
  "learning_rate": LLAMA["optimizer.learning_rate"],
  "matmul_precision": "default",
  "remat_policy": "minimal_with_context",
  "steps": 1000,
}
# glibc's own: the allocator is then left as it is, see `runtime.devices`.
PLAIN_ALLOCATOR = {"MALLOC_TOP_PAD_": "131072"}


class MaxText:
  """MaxText's compiled step, its state and batches."""

  def __init__(self, told: dict):
    """Compiles it; see `told` in `measure`."""
    from benchmarks.checked import maxtext_step  # only this side's process needs it

    devices.start(told["mesh"], simulate=True)
    program = maxtext_step.program(told["mesh"], **SETTINGS)
    self._state = program.state(0)
    self._rows = program.in_shardings[1]
    self._batches = [self._placed(*pair) for pair in gpu_protocol.batches(told)]
    step = jax.jit(program.step, in_shardings=program.in_shardings, donate_argnums=0)
    with jax.set_mesh(program.mesh):
      lowered = step.lower(self._state, self._batches[0])
    self._step = lowered.compile(compiler_options=told["compiler_options"])
    self._done = 0

  def _placed(self, inputs: np.ndarray, targets: np.ndarray) -> dict[str, jax.Array]:
    """Returns rows of one document each, as MaxText has them, on the devices."""
    rows = {}
    for name, values in (("inputs", inputs), ("targets", targets)):
      positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), values.shape)
      rows |= {name: values, f"{name}_position": positions}
      rows[f"{name}_segmentation"] = np.ones(values.shape, np.int32)
    return jax.device_put(rows, self._rows)

  def run(self, steps: int) -> dict:
    """Runs some steps; see benchmarks/gpu_protocol.py."""
    began = time.perf_counter(), time.process_time()
    for _ in range(steps):
      batch = self._batches[self._done % len(self._batches)]
      self._state, metrics = jax.block_until_ready(self._step(self._state, batch))
      self._done += 1
    seconds, processor = time.perf_counter() - began[0], time.process_time() - began[1]
    return {"seconds": seconds, "processor": processor, "loss": float(metrics["loss"])}

  def facts(self) -> dict:
    """Returns how many parameters it has."""
    return {"parameters": sum(x.size for x in jax.tree.leaves(self._state.model))}


def measure(name: str) -> None:
  """Prints the ratios and the times on a mesh."""
  mesh, module = MESHES[name], "benchmarks.maxtext_cpu"
  overrides = {**LLAMA, **{f"mesh.{axis}": size for axis, size in {"data": 1, **mesh}.items()}}
  overrides["training.compute_dtype"] = "float32"
  told = {"family": "llama", "recipe": "model=lm,data=python_source", "overrides": overrides}
  told |= {"rows": ROWS, "seed": 0, "text": None, "parameters": "", "mesh": mesh}
  three = {"ours": gpu.Process(sys.executable, "benchmarks.gpu", None, "--side")}
  os.environ.update(PLAIN_ALLOCATOR)
  three["MaxText"] = gpu.Process(sys.executable, module, None, "--maxtext_side")
  for key in PLAIN_ALLOCATOR:
    del os.environ[key]
  three["MaxText tuned"] = gpu.Process(sys.executable, module, None, "--maxtext_side")
  with contextlib.ExitStack() as stack:
    ours, shipped, tuned = map(stack.enter_context, three.values())
    ours.ask(**told)
    facts = ours.ask(facts=True)
    told |= {"sizes": facts["sizes"], "compiler_options": {}}
    shipped.ask(**told)
    tuned.ask(**{**told, "compiler_options": facts["compiler_options"]})
    counts = [side.ask(facts=True)["parameters"] for side in three.values()]
    turns = [
      {side: process.ask(steps=gpu.STEPS.value) for side, process in three.items()}
      for _ in range(gpu.TURNS.value)
    ]
  times = {
    side: [[one[side][clock] for one in turns] for clock in ("seconds", "processor")]
    for side in three
  }
  for side in ("MaxText", "MaxText tuned"):
    wall, processor = map(timing.ratio, times["ours"], times[side])
    print(f"ratio {wall:.2f} of {side} ({name}; of the processor {processor:.2f})")
  for side, count in zip(three, counts, strict=True):
    ms = [1e3 * statistics.median(of) / gpu.STEPS.value for of in times[side]]
    print(
      f"  {side}: {ms[0]:.0f} ms, {ms[1]:.0f} of the processor; {count:,} parameters, "
      f"loss {turns[-1][side]['loss']:.3f}"
    )
  print(f"  {facts['library']}, {facts['chosen']}, {facts['compiler_options']}", flush=True)


def main(argv: list[str]) -> int:
  """Measures every mesh; with --maxtext_side, answers as a side instead."""
  del argv
  if _MAXTEXT.value:
    gpu_protocol.serve(MaxText)
    return 0
  if unknown := [name for name in _MESHES.value if name not in MESHES]:
    raise app.UsageError(f"--meshes={unknown[0]}: one of {', '.join(MESHES)}")
  for name in _MESHES.value:
    measure(name)
  return 0


if __name__ == "__main__":
  flags.set_default(gpu.TURNS, 6)
  flags.set_default(gpu.STEPS, 2)
  app.run(main)
