"""Files of weights: their bytes, how tensors are split over them, and their index."""

import errno
import json

import ml_dtypes
import numpy as np
import pytest
from etils import epath

from interop import safetensors_writer
from interop.safetensors_writer import Tensor, WeightFile, Writer, index, split
from tests.training.checkpointing.test_full_disk import full_disk

TENSORS = [
  Tensor("a.weight", (3, 5), "float32"),
  Tensor("b", (), "float64"),
  Tensor("ä", (7,), "bfloat16"),
  Tensor("none", (0, 4), "float32"),
]


def arrays():
  random = np.random.default_rng(3)
  return {
    "a.weight": random.standard_normal((5, 3)).astype(np.float32).T,  # not contiguous
    "b": np.float64(0.1).reshape(()),
    "ä": random.standard_normal(7).astype(ml_dtypes.bfloat16),
    "none": np.zeros((0, 4), np.float32),
  }


def parsed(path):
  """Reads a file as the format's page describes it, without our code."""
  content = path.read_bytes()
  size = int.from_bytes(content[:8], "little")
  header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
  kinds = {"F32": np.float32, "F64": np.float64, "BF16": ml_dtypes.bfloat16}
  assert header.pop("__metadata__") == {"format": "pt"}
  assert (8 + size) % 8 == 0
  found = {}
  for name, entry in header.items():
    begin, end = entry["data_offsets"]
    found[name] = np.frombuffer(data[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
  assert max(entry["data_offsets"][1] for entry in header.values()) == len(data)
  return found


@pytest.mark.parametrize("block", [2**26, 16])
def test_a_file_has_the_tensors_bit_by_bit(block, tmp_path, monkeypatch):
  monkeypatch.setattr(safetensors_writer, "BLOCK_BYTES", block)
  [file] = split(TENSORS)
  assert file.name == "model.safetensors"
  wanted = arrays()
  with Writer(epath.Path(tmp_path), file) as writer:
    for tensor in file.tensors:
      writer.add(wanted[tensor.name])
  found = parsed(tmp_path / file.name)
  assert list(found) == list(wanted)
  for name, array in wanted.items():
    assert found[name].dtype == array.dtype
    assert found[name].tobytes() == np.ascontiguousarray(array).tobytes()


def test_files_are_filled_up_to_their_limit_and_a_larger_tensor_is_alone():
  sizes = [3, 3, 4, 12, 1, 9]
  tensors = [Tensor(f"t{n}", (size,), "float32") for n, size in enumerate(sizes)]
  found = split(tensors, most_bytes=40)
  assert [[t.name for t in file.tensors] for file in found] == [
    ["t0", "t1", "t2"],
    ["t3"],
    ["t4", "t5"],
  ]
  assert [file.name for file in found] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
  assert index(found) == {
    "metadata": {"total_size": 4 * sum(sizes)},
    "weight_map": {tensor.name: file.name for file in found for tensor in file.tensors},
  }
  assert safetensors_writer.MOST_BYTES == 5_000_000_000


def test_a_full_disk_is_named_with_the_file(tmp_path):
  file = WeightFile("model.safetensors", (Tensor("a", (4096,), "float32"),))
  writer = Writer(epath.Path(tmp_path), file)
  with full_disk(1000), pytest.raises(OSError, match=r"model\.safetensors") as failure, writer:
    writer.add(np.zeros(4096, np.float32))
  assert failure.value.errno == errno.EFBIG


def test_a_file_without_all_of_its_tensors_is_our_mistake(tmp_path):
  [file] = split(TENSORS)
  with (
    pytest.raises(AssertionError, match=r"without a\.weight"),
    Writer(epath.Path(tmp_path), file),
  ):
    pass
