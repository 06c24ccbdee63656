"""The safetensors format: headers that are not one, blocks that are read from the middle, and files
of weights: their bytes, how tensors are split over them, and their index.
"""

import errno
import json
import struct

import ml_dtypes
import numpy as np
import pytest
from etils import epath

from interop import safetensors_file
from interop.safetensors_file import (
  Reader,
  Tensor,
  WeightFile,
  index,
  pieces,
  read_header,
  split,
  write_file,
)
from tests.interop import folders
from tests.training.checkpointing.test_full_disk import full_disk


def write(path, header, content=b""):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(struct.pack("<Q", len(text)) + text + content)
  return path


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)):
  return {"dtype": dtype, "shape": [*shape], "data_offsets": [*offsets]}


@pytest.mark.parametrize(
  ("header", "content", "said"),
  [
    (b"{", b"", "Expecting property name"),
    (b"[]", b"", "its header holds a list, not a JSON object"),
    ({"a": 3}, b"", "the header's entry of a is not one"),
    ({"a": entry(shape=(2, -3))}, b"", "the header's entry of a is not one"),
    ({"a": entry(offsets=(24, 0))}, b"", "a: data_offsets=[24, 0]"),
    ({"a": entry(shape=(2, 4))}, bytes(24), "a: 24 bytes are not F32[2, 4]"),
    ({"a": entry()}, bytes(23), "it is truncated"),
    ({"a": entry()}, bytes(25), "it has 1 bytes behind its last array"),
    ({"a": entry(), "b": entry(offsets=(20, 44))}, bytes(44), "b does not begin where"),
    ({"a": entry(offsets=(4, 28))}, bytes(28), "a does not begin where"),
    (b'{"a": {"shape": [%s]}}' % b",".join([b"9" * 4000] * 2000), b"", "of 4,000 digits, and at"),
    ({"a": entry(shape=[10**18] * 64)}, bytes(24), "a: 24 bytes are not F32[1000000000000000000, "),
    ({"a": entry(shape=[1] * 10**4)}, bytes(24), "the header's entry of a is not one"),
    ({"a" * 10**6: entry()}, bytes(24), "it has a name of 1,000,000 characters; at most 1,000"),
    (dict.fromkeys(range(200_000), 0), b"", "has 200,000 entries, and at most 131,072 are read"),
  ],
)
def test_a_header_that_is_not_one_is_refused_with_the_file(tmp_path, header, content, said):
  path = write(tmp_path / "model.safetensors", header, content)
  with pytest.raises(ValueError, match="copy or download it again") as caught:
    read_header(path)
  assert said in str(caught.value)
  assert str(caught.value).startswith(f"{path}: ")
  assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
  ("content", "said"),
  [
    (b"", "it has 0 bytes"),
    (struct.pack("<Q", 10) + b"{}", "it ends inside its header: 10 of 18 bytes"),
    (struct.pack("<Q", 1 << 60) + b"{}", "does not begin with the length of a header"),
    (b"PK\x03\x04" + bytes(100), "it ends inside its header"),
  ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content, said):
  (tmp_path / "f").write_bytes(content)
  with pytest.raises(ValueError, match="or no safetensors file") as caught:
    read_header(tmp_path / "f")
  assert said in str(caught.value)


@pytest.mark.parametrize("seek_bytes", [1, safetensors_file.SEEK_BYTES])
def test_blocks_are_what_numpy_slices(tmp_path, monkeypatch, seek_bytes):
  monkeypatch.setattr(safetensors_file, "SEEK_BYTES", seek_bytes)
  matrix = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
  vector = np.arange(9, dtype=np.float64)
  path = tmp_path / "model.safetensors"
  folders.write_tensors(path, {"m": matrix, "v": vector})
  header = read_header(path)
  with Reader() as reader:
    for rows, columns in ((slice(2, 6), slice(0, 5)), (slice(0, 7), slice(1, 3))):
      np.testing.assert_array_equal(reader.block(header["m"], rows, columns), matrix[rows, columns])
    found = reader.block(header["v"], slice(3, 8), slice(0, 1))
    np.testing.assert_array_equal(found[:, 0], vector[3:8])
  # Of a long part of a row, no more than the part.
  wanted = 4 * 20 + 7 * (8 if seek_bytes == 1 else 20) + 5 * 8
  assert reader.bytes_read == wanted


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(tmp_path):
  path = tmp_path / "model.safetensors"
  folders.write_tensors(path, {"m": np.zeros((4, 4), np.float32)})
  stored = read_header(path)["m"]
  with path.open("r+b") as file:
    file.truncate(stored.start + 8)
  with Reader() as reader, pytest.raises(ValueError, match=r"model.safetensors: the file ended at"):
    reader.block(stored, slice(0, 4), slice(0, 4))


def test_pieces_are_of_whole_rows():
  assert [*pieces(3, 10, 4, 12)] == [slice(3, 6), slice(6, 9), slice(9, 10)]
  assert [*pieces(0, 2, 100, 12)] == [slice(0, 1), slice(1, 2)]


# ------------------------------ writing ------------------------------

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


@pytest.mark.parametrize("block", [2**26, 16])
def test_a_file_has_the_tensors_bit_by_bit(block, tmp_path, monkeypatch):
  monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", block)
  [file] = split(TENSORS, safetensors_file.MOST_BYTES)
  assert file.name == "model.safetensors"
  wanted = arrays()
  write_file(epath.Path(tmp_path), file, (wanted[tensor.name] for tensor in file.tensors))
  content = (tmp_path / file.name).read_bytes()
  size = int.from_bytes(content[:8], "little")
  assert size % 8 == 0
  assert json.loads(content[8 : 8 + size])["__metadata__"] == {"format": "pt"}
  found = folders.tensors_of(tmp_path / file.name)
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
  assert safetensors_file.MOST_BYTES == 5_000_000_000


def test_a_full_disk_is_named_with_the_file(tmp_path):
  file = WeightFile("model.safetensors", (Tensor("a", (4096,), "float32"),))
  with full_disk(1000), pytest.raises(OSError, match=r"model\.safetensors") as failure:
    write_file(epath.Path(tmp_path), file, [np.zeros(4096, np.float32)])
  assert failure.value.errno == errno.EFBIG
