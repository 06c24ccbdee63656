"""The model folders in fixtures/, which `write_folders.py` has written, read with NumPy alone."""

import json
import pathlib
import struct

import ml_dtypes
import numpy as np

FOLDER = pathlib.Path(__file__).parent / "fixtures"
NAMES = tuple(sorted(path.name for path in FOLDER.iterdir()))
VERSIONS = ("config.json", "config_5.json")  # as transformers 4.57 and 5 write it
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
LENGTH, VOCABULARY = 12, 37


def config_of(name: str, version: str = VERSIONS[0]) -> dict:
  """Returns the content of a folder's config.json."""
  return json.loads((FOLDER / name / version).read_text())


def tensors_of(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns name -> array of a safetensors file."""
  content = path.read_bytes()
  size = struct.unpack("<Q", content[:8])[0] + 8
  header = json.loads(content[8:size])
  header.pop("__metadata__", None)
  return {
    name: np.frombuffer(content[size:][slice(*one["data_offsets"])], DTYPES[one["dtype"]]).reshape(
      one["shape"]
    )
    for name, one in header.items()
  }


def tokens() -> np.ndarray:
  """Returns int32 [2, LENGTH]: what the logits are of."""
  return np.random.RandomState(3).randint(3, VOCABULARY, (2, LENGTH)).astype(np.int32)


def logits_of(name: str) -> np.ndarray:
  """Returns float64 [2, LENGTH, VOCABULARY], as transformers computes them in float64."""
  return np.load(FOLDER / name / "logits.npy")
