"""Rounding errors of Gated DeltaNet's recurrence beside those of transformers. Prints a table.

  python -m benchmarks.recurrence_error [--recurrence_python=PYTHON]

Each computes outputs of the same tokens, whose numbers float32 or bfloat16 have exactly, and the
error is that of the complete array relative to the recurrence token after token in NumPy and
float64, which shares nothing with either. Keys are of independent directions, or near to one
another; decays are near 1, as drawn for a new model, or every eighth token forgets nearly all.
PYTHON has transformers 5 and torch, and runs `torch_chunk_gated_delta_rule`; without it there is
this project's column alone.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl import app, flags

from models import recurrence
from tests.models import numpy_decoder

_PYTHON = flags.DEFINE_string("recurrence_python", "", "A Python with transformers 5.")
_LENGTH = flags.DEFINE_integer("recurrence_length", 2048, "Tokens.", 1)

HEADS, SIZE = 4, 64
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KEYS, DECAYS = ("independent", "alike"), ("weak", "strong")
THEIRS = """
import json, sys
import numpy as np, torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule
with np.load(sys.argv[1]) as given:
  cases, found = json.loads(str(given["cases"])), {}
  for name, dtype in cases.items():
    q, k, v, g, beta = (torch.from_numpy(given[f"{name}/{n}"]) for n in range(5))
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q * q.shape[-1] ** 0.5, k, v))
    found[name] = rule(q, k, v, g=g, beta=beta)[0].double().numpy()
np.savez(sys.argv[2], **found)
"""


def drawn(keys: str, decays: str, dtype: str, length: int) -> list[np.ndarray]:
  """Returns queries, keys, values, logarithms of decays and strengths, in float32."""
  random = np.random.default_rng(0)
  q, k, v = random.standard_normal((3, 1, length, HEADS, SIZE))
  if keys == "alike":
    k = random.standard_normal((1, 1, HEADS, SIZE)) + 0.3 * k
  q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
  log_decay = -np.exp(random.uniform(np.log(1e-3), np.log(0.1), (1, length, HEADS)))
  if decays == "strong":
    log_decay[:, ::8] = -20.0
  strength = 1 / (1 + np.exp(-random.standard_normal((1, length, HEADS))))
  rounded = [x.astype(DTYPES[dtype]).astype(np.float32) for x in (q * SIZE**-0.5, k, v)]
  return [*rounded, log_decay.astype(np.float32), strength.astype(np.float32)]


def exact(arrays: list[np.ndarray]) -> np.ndarray:
  """Returns the outputs in float64."""
  start, wide = np.zeros((SIZE, SIZE)), [x.astype(np.float64) for x in arrays]
  heads = [numpy_decoder.recurrence(*(x[0, :, n] for x in wide), start)[0] for n in range(HEADS)]
  return np.stack(heads, axis=1)[None]


def ours(arrays: list[np.ndarray], dtype: str) -> np.ndarray:
  """Returns the outputs, as a layer in this compute dtype has them."""
  start = jnp.zeros((1, HEADS, SIZE, SIZE), jnp.float32)
  found = jax.jit(lambda *x: recurrence.recurrence(*x, start, delta=True)[0])(*arrays)
  return np.asarray(found.astype(dtype)).astype(np.float64)


def theirs(cases: dict[str, str], given: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
  """Returns name -> the outputs of transformers."""
  arrays = {f"{name}/{n}": x for name, one in given.items() for n, x in enumerate(one)}
  with tempfile.TemporaryDirectory() as folder:
    before, after = (str(pathlib.Path(folder) / name) for name in ("given.npz", "found.npz"))
    np.savez(before, cases=json.dumps(cases), **arrays)
    subprocess.run([_PYTHON.value, "-c", THEIRS, before, after], check=True)
    with np.load(after) as found:
      return dict(found)


def main(argv: list[str]) -> int:
  """Prints the table."""
  del argv
  cases = {f"{k}, {d}, {dtype}": (k, d, dtype) for dtype in DTYPES for k in KEYS for d in DECAYS}
  given = {name: drawn(*case, _LENGTH.value) for name, case in cases.items()}
  others = theirs({n: case[2] for n, case in cases.items()}, given) if _PYTHON.value else {}
  print(f"{_LENGTH.value} tokens, {HEADS} heads of {SIZE}: error relative to NumPy in float64")
  print(f"{'keys, decays, dtype':32} {'this project':>14} {'transformers':>14}")
  for name, (_, _, dtype) in cases.items():
    wanted = exact(given[name])
    found = [ours(given[name], dtype), *([others[name]] if name in others else [])]
    errors = [np.linalg.norm(x - wanted) / np.linalg.norm(wanted) for x in found]
    print(f"{name:32} " + " ".join(f"{error:14.2e}" for error in errors))
  return 0


if __name__ == "__main__":
  sys.exit(app.run(main))
