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
import dataclasses
import os
import pathlib
import tempfile

import numpy as np
from absl import app, flags

from benchmarks import gpu

flags.set_default(gpu.TURNS, 10)
flags.set_default(gpu.STEPS, 200)
_TEXT = flags.DEFINE_string("text", None, "A text; None: the source of the standard library.")
_CORES = flags.DEFINE_list("cores", "2,1", "On how many cores to measure.")
_MODELS = flags.DEFINE_list("cpu_models", "nanogpt,decoder", "Of MODELS.")

CHARACTERS = 256  # the most common ones; any other is the last
# The model, and how many times shorter its turns are.
MODELS = {
  "nanogpt": (
    gpu.Model(
      *("gpt2", "gpt2_124m", 12, 64),
      {
        **{"model.layers": 4, "model.heads": 4, "model.kv_heads": 4, "model.head_size": 32},
        **{"model.model_size": 128, "model.feedforward_size": 512, "model.biases": "none"},
        **{"model.activation": "gelu_erf", "model.vocabulary_size": CHARACTERS},
      },
    ),
    1,
  ),
  "decoder": (
    gpu.Model(
      *("llama", "lm", 16, 256),
      {
        **{"model.layers": 4, "model.heads": 8, "model.kv_heads": 4, "model.head_size": 32},
        **{"model.model_size": 256, "model.feedforward_size": 1024, "model.tied_embeddings": True},
        "model.vocabulary_size": CHARACTERS,
      },
    ),
    50,
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


def measure(name: str, text: pathlib.Path, cores: int) -> bool:
  """Prints the times and the loss curves of a model; returns whether the losses agree."""
  model, shorter = MODELS[name]
  each = max(1, gpu.STEPS.value // shorter)
  steps = gpu.TURNS.value * each + 2  # two compile
  optimizer = {"learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-8}
  optimizer |= {"weight_decay": 0.1, "clip_norm": 1.0, "warmup_steps": max(1, steps // 20)}
  run = {"optimizer.schedule": "cosine", "training.steps": steps}
  run["training.rematerialization"] = "none"
  model = dataclasses.replace(model, overrides={**model.overrides, **run})
  told = gpu.told(model, {**optimizer, "steps": steps}, "float32", text=str(text), compile=False)
  which = sorted(os.sched_getaffinity(0))[:cores]
  turns, facts = gpu.in_turns(gpu.sides(which), told, each, validate=True)
  agree = gpu.report(f"{name}, {len(which)} cores", turns, facts, each, "validation")
  print("  iteration  loss: ours  PyTorch  validation: ours  PyTorch")
  for number, (a, b) in enumerate(turns, start=1):
    print(
      f"  {number * each + 2:9}{a['loss']:12.4f}{b['loss']:9.4f}{a['validation']:18.4f}"
      f"{b['validation']:9.4f}",
      flush=True,
    )
  return agree


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
