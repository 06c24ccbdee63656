"""The model folders in fixtures/, which `write_folders.py` has written, read with NumPy alone."""

import functools
import json
import pathlib
import struct

import jax
import ml_dtypes
import numpy as np

from interop import hf_config, name_maps
from models import model_spec
from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job

FOLDER = pathlib.Path(__file__).parent / "fixtures"
NAMES = tuple(sorted(path.name for path in FOLDER.iterdir()))
VERSIONS = ("config.json", "config_5.json")  # as transformers 4.57 and 5 write it
DTYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F8_E4M3": ml_dtypes.float8_e4m3fn,
  "U8": np.uint8,
}
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


# ------------------------------ as ours ------------------------------


@functools.cache
def described(name: str) -> hf_config.Described:
  """Returns what a folder's config.json says."""
  return hf_config.read(config_of(name), name)


@functools.cache
def job_of(name: str, strategy: str = "single", dtype: str = "float64", **more):
  """Returns a job of a folder's model, with a padded vocabulary; `more` are dotted keys."""
  keys = {f"model.{k}": v for k, v in described(name).model.items() if v is not None}
  keys |= {"model.vocabulary_multiple": 8, "data.sequence_length": LENGTH}
  keys |= {"data.global_batch_size": 8, "training.parameter_dtype": dtype, **more}
  with jax.enable_x64(True):
    return make_job(strategy, "lm", **keys)


def read_with_numpy(name: str) -> dict[str, np.ndarray]:
  """Returns our names -> float64 arrays of a folder, by a plain reading of the table."""
  job, stored = job_of(name), tensors_of(FOLDER / name / "model.safetensors")
  spec = model_spec(job.config)
  sizes = name_maps.sizes_of(spec)
  arrays = {n: np.zeros(x.shape) for n, x in named_leaves(job.state.params).items()}
  shapes = {n: x.shape for n, x in stored.items()}
  matched, wrong = name_maps.match(shapes, spec, described(name).model_type)
  assert not wrong, wrong
  for tensor_name, tensor in matched.tensors.items():
    for part in tensor.parts:
      one = stored[tensor_name].astype(np.float64)
      one = one if part.matrix is None else one[part.matrix]
      if one.ndim > len(part.axes):  # axes of one element, such as those of a convolution
        one = one.reshape((len(one), -1) if len(part.axes) > 1 else -1)
      for axis in range(len(part.axes)):
        one = np.take(one, part.where[axis], axis=axis)
      order = "".join(part.axes)
      one = one.reshape([sizes[letter] for letter in order])
      one = one.transpose([order.index(letter) for letter in part.letters])
      ours = arrays[part.parameter][part.place]
      ours[tuple(slice(0, size) for size in one.shape)] = one
  return arrays


# ------------------------------ writing ------------------------------


def write_tensors(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
  """Writes a safetensors file."""
  header, start = {}, 0
  names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
  for name, array in arrays.items():
    ends = [start, start := start + array.nbytes]
    header[name] = {"dtype": names[array.dtype], "shape": [*array.shape], "data_offsets": ends}
  text = json.dumps(header).encode()
  content = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
  path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def write_folder(folder: pathlib.Path, job, model_type: str, **more) -> None:
  """Writes a folder of a job's model with random weights; `more` are keys of its config.json."""
  folder.mkdir(parents=True, exist_ok=True)
  written = hf_config.write(job.config.model, 64, model_type)
  (folder / "config.json").write_text(json.dumps({**written, **more}))
  random = np.random.RandomState(0)
  wanted = name_maps.tensors(model_spec(job.config), model_type)
  write_tensors(
    folder / "model.safetensors",
    {n: (0.1 * random.standard_normal(x.shape)).astype(np.float32) for n, x in wanted.items()},
  )
