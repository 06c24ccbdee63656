r"""nanoGPT's published setting for CPUs beside PyTorch, in turns: `ratio R` of times, loss curves.

  python -m benchmarks.nanogpt_cpu --torch_python=PYTHON [--text=FILE] [--cores=2,1]
    [--cpu_models=nanogpt,decoder] [--turns=10] [--turn_steps=200]

nanogpt: 4 layers, 4 heads, width 128, rows of 64 characters, 12 of them, 2,000 iterations, whose
loss on Shakespeare is published as 1.88 (github.com/karpathy/nanoGPT, "I only have a macbook").
decoder: a Llama of 4 layers of width 256, 16 rows of 256 characters, for a fiftieth of the steps.
Both in float32 with AdamW and clipping. The text is read by its characters; without --text it is
the source of the standard library's modules. A tenth of it, the last, is the validation split.

The reference is `benchmarks/gpu_torch.py`, not compiled. Each side is a process of its own, on the
first so many cores, and the one that waits does nothing. They start from the same parameters and
see the same batches. R is the median over the turns of ours / PyTorch's. Exits with 1 where the
two validation losses differ by more than 2 %: then they do not train the same model.
"""

import collections
import os
import pathlib
import statistics
import tempfile

import numpy as np
from absl import app, flags

from benchmarks import gpu, timing

flags.set_default(gpu.TURNS, 10)
flags.set_default(gpu.STEPS, 200)
_TEXT = flags.DEFINE_string("text", None, "A text; None: the source of the standard library.")
_CORES = flags.DEFINE_list("cores", "2,1", "On how many cores to measure.")
_MODELS = flags.DEFINE_list("cpu_models", "nanogpt,decoder", "Of MODELS.")

CHARACTERS = 256  # the most common ones; any other is the last
# (family, preset, rows, length, turns are so many times shorter, overrides)
MODELS = {
  "nanogpt": (
    *("gpt2", "gpt2_124m", 12, 64, 1),
    {
      **{"model.layers": 4, "model.heads": 4, "model.kv_heads": 4, "model.head_size": 32},
      **{"model.model_size": 128, "model.feedforward_size": 512, "model.max_positions": 64},
      **{"model.activation": "gelu_erf", "model.biases": "none"},
    },
  ),
  "decoder": (
    *("llama", "lm", 16, 256, 50),
    {
      **{"model.layers": 4, "model.heads": 8, "model.kv_heads": 4, "model.head_size": 32},
      **{"model.model_size": 256, "model.feedforward_size": 1024, "model.tied_embeddings": True},
    },
  ),
}


def write_text(folder: pathlib.Path, given: str | None) -> int:
  """Writes train.npy and validation.npy, ids of characters; returns how many characters it has."""
  if given:
    text = pathlib.Path(given).read_text()
  else:
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    text = "".join(file.read_text(errors="replace") for file in files)
  common = [one for one, _ in collections.Counter(text).most_common(CHARACTERS - 1)]
  ids = {one: number for number, one in enumerate(sorted(common))}
  found = np.array([ids.get(one, len(ids)) for one in text], np.uint16)
  split = len(found) * 9 // 10
  np.save(folder / "train.npy", found[:split])
  np.save(folder / "validation.npy", found[split:])
  return len(set(text))


def job(name: str, text: pathlib.Path, parameters: str, steps: int) -> dict:
  """Returns what both sides are told, see benchmarks/gpu_protocol.py; PyTorch's sizes are added."""
  family, preset, rows, length, _, overrides = MODELS[name]
  keys = {"learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-8}
  keys |= {"weight_decay": 0.1, "clip_norm": 1.0, "warmup_steps": max(1, steps // 20)}
  overrides = {
    **overrides,
    **{f"optimizer.{key}": value for key, value in keys.items()},
    "optimizer.schedule": "cosine",
    "training.steps": steps,
    "training.compute_dtype": "float32",
    "training.rematerialization": "none",
    "model.vocabulary_size": CHARACTERS,
    "data.sequence_length": length,
    "data.global_batch_size": rows,
  }
  return {
    "family": family,
    "recipe": f"model={preset},data=python_source",
    "overrides": overrides,
    "rows": rows,
    "seed": 0,
    "compute_dtype": "float32",
    "text": str(text),
    "optimizer": {**keys, "steps": steps},
    "parameters": parameters,
    "compile": False,
  }


def measure(name: str, text: pathlib.Path, cores: int) -> bool:
  """Prints the times and the loss curves of a model; returns whether the losses agree."""
  steps = max(1, gpu.STEPS.value // MODELS[name][4])
  which = sorted(os.sched_getaffinity(0))[:cores]
  told = job(name, text, "", gpu.TURNS.value * steps + 2)  # two compile
  turns, (facts, reference) = gpu.in_turns(gpu.sides(which), told, steps, validate=True)
  libraries = facts["library"], reference["library"]
  ratio, of_processor = (
    timing.ratio(*([one[clock] for one in runs] for runs in zip(*turns, strict=True)))
    for clock in ("seconds", "processor")
  )
  print(f"ratio {ratio:.3f}  ({name}, {len(which)} cores, {facts['parameters']:,} parameters)")
  print(f"  ratio of processor times {of_processor:.3f}; {facts['compiler_options']}")
  for side, runs in zip(libraries, zip(*turns, strict=True), strict=True):
    wall, processor = ([1e3 * one[key] / steps for one in runs] for key in ("seconds", "processor"))
    print(
      f"  {side}: median {statistics.median(wall):.1f} ms per iteration, least {min(wall):.1f}; "
      f"of the processor {statistics.median(processor):.1f}"
    )
  print("  iteration  loss: ours  PyTorch  validation: ours  PyTorch")
  for number, (a, b) in enumerate(turns, start=1):
    print(
      f"  {number * steps + 2:9}{a['loss']:12.4f}{b['loss']:9.4f}{a['validation']:18.4f}"
      f"{b['validation']:9.4f}",
      flush=True,
    )
  return gpu.agree(name, *(one["validation"] for one in turns[-1]))


def main(argv: list[str]) -> int:
  """Measures every model on every number of cores; returns the exit code."""
  del argv
  if unknown := [name for name in _MODELS.value if name not in MODELS]:
    raise app.UsageError(f"--cpu_models={unknown[0]}: one of {', '.join(MODELS)}")
  with tempfile.TemporaryDirectory() as folder:
    characters = write_text(pathlib.Path(folder), _TEXT.value)
    print(f"text of {characters} different characters", flush=True)
    good = [
      measure(name, pathlib.Path(folder), int(cores))
      for name in _MODELS.value
      for cores in _CORES.value
    ]
  return 0 if all(good) else 1


if __name__ == "__main__":
  app.run(main)
