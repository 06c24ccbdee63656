"""What both sides of benchmarks/gpu.py share: a description, its batches, names, lines of JSON.

A side is a process. It reads the description, a line of JSON on its standard input, and answers
each line `{"steps": N}` with the seconds of N steps, also of the processor, and the last loss (with
`"validate": true` the validation loss afterwards, too), and `{"facts": true}` with versions and
sizes. This module imports NumPy alone: the sides have different libraries.

The description:
  family: gpt2 or llama.
  compute_dtype: of matmuls, bfloat16 or float32.
  recipe, overrides: of the application's config.
  sizes: for PyTorch, by the application's `facts`: width, layers, heads, kv_heads, head_size,
    feedforward, vocabulary (padded), length (tokens of a row), rotary_base, epsilon,
    activation, biases (of the linear layers).
  rows: of a batch. seed: of the tokens.
  text: folder of train.npy and validation.npy, ids of tokens; None: some batches by Zipf's law.
  optimizer: learning_rate, beta_1, beta_2, epsilon, weight_decay, clip_norm, warmup_steps,
    steps (of a cosine to a tenth; None: the rate is constant).
  parameters: folder of the .npy files that both start from, which the application writes; "":
    the application is alone.
  compile: whether PyTorch compiles.
"""

import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

BATCHES = 8  # which are repeated
VALIDATION_BATCHES = 20  # as many as nanoGPT's setting for CPUs


def batches(description: dict) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns tokens and targets, int32 [rows, length], of the batches that are repeated."""
  generator = np.random.default_rng(description["seed"])
  sizes = description["sizes"]
  shape = (BATCHES, description["rows"], sizes["length"] + 1)
  # Zipf's law, as of words: the loss then falls, and a wrong gradient shows.
  ranks = np.minimum(generator.zipf(1.3, shape), sizes["vocabulary"]) - 1
  return [(one[:, :-1], one[:, 1:]) for one in ranks.astype(np.int32)]


def train_batch(description: dict) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
  """Returns step -> tokens and targets, int32 [rows, length]."""
  if description["text"] is None:
    repeated = batches(description)
    return lambda step: repeated[step % BATCHES]
  return functools.partial(windows, description, "train")


def windows(description: dict, split: str, number: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens and targets, int32 [rows, length], from random places of a split of the text."""
  ids = np.load(pathlib.Path(description["text"]) / f"{split}.npy", mmap_mode="r")
  length = description["sizes"]["length"]
  generator = np.random.default_rng((description["seed"], number))
  starts = generator.integers(len(ids) - length, size=description["rows"])
  rows = ids[starts[:, None] + np.arange(length + 1)].astype(np.int32)
  return rows[:, :-1], rows[:, 1:]


def validation_batches(description: dict) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns the batches that a text's validation loss is the mean of."""
  return [windows(description, "validation", number) for number in range(VALIDATION_BATCHES)]


def torch_names(sizes: dict) -> dict[str, tuple[str, int | None, bool]]:
  """Returns PyTorch's name -> (file of the application's array, layer in it, is it transposed)."""
  gpt = sizes["family"] == "gpt2"
  norm = {"weight": "scale", **({"bias": "bias"} if gpt else {})}
  linear = {"weight": "kernel", **({"bias": "bias"} if sizes["biases"] else {})}
  found = {"embed.weight": ("embed.table", None, False)}
  if gpt:
    found["positions.weight"] = ("positions.table", None, False)
  found |= {f"final_norm.{a}": (f"final_norm.{b}", None, False) for a, b in norm.items()}
  parts = {f"attention.{name}": name for name in ("query", "key", "value", "out")}
  parts |= {f"mlp.{name}": name for name in ("gate", "up", "down") if name != "gate" or not gpt}
  for layer in range(sizes["layers"]):
    for name in ("attention_norm", "mlp_norm"):
      for a, b in norm.items():
        found[f"layers.{layer}.{name}.{a}"] = (f"layers.{name}.{b}", layer, False)
    for file, name in parts.items():
      for a, b in linear.items():
        found[f"layers.{layer}.{name}.{a}"] = (f"layers.{file}.{b}", layer, a == "weight")
  return found


def decays(name: str) -> bool:
  """Returns whether weight decay is for a parameter of PyTorch: not for norms and biases."""
  return name.endswith(".weight") and "norm" not in name


def serve(make: Callable[[dict], Any]) -> None:
  """Builds a side, which has `run` and `facts`, from the first line, and answers the others."""
  answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer

  def answer(value: dict) -> None:
    print(json.dumps(value), file=answers, flush=True)

  side = make(json.loads(sys.stdin.readline()))
  answer(side.run(2))  # compiles
  for line in sys.stdin:
    question = json.loads(line)
    answer(side.facts() if question.pop("facts", False) else side.run(**question))
