"""MXFP4 beside values by hand, and beside the decoding of `transformers`."""

import pathlib
import subprocess

import ml_dtypes
import numpy as np
import pytest

from interop import mxfp4, quantization
from interop.safetensors_file import Reader, read_header
from tests.interop import folders
from tests.models.write_families import PYTHONS

FOUR_BITS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def by_hand(blocks, scales):
  """Returns float64 [..., 32 G], value by value."""
  found = np.zeros((*scales.shape, 32))
  for index in np.ndindex(blocks.shape):
    factor = 2.0 ** (int(scales[index[:-1]]) - 127)
    low, high = blocks[index] & 15, blocks[index] >> 4
    found[(*index[:-1], 2 * index[-1])] = FOUR_BITS[low] * factor
    found[(*index[:-1], 2 * index[-1] + 1)] = FOUR_BITS[high] * factor
  return found.reshape(*scales.shape[:-1], -1)


def drawn():
  """Returns (blocks [3, 5, 2, 16], scales [3, 5, 2]) of three matrices [5, 64]."""
  random = np.random.RandomState(0)
  blocks = random.randint(0, 256, (3, 5, 2, 16)).astype(np.uint8)
  scales = random.randint(90, 150, (3, 5, 2)).astype(np.uint8)
  scales[0, :3, 0] = 0, 1, 252  # the smallest, and the largest of which 6 times is finite
  return blocks, scales


def test_values_are_those_by_hand_and_bfloat16_has_them_all():
  found = mxfp4.decoded(*drawn())
  assert found.dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(found.astype(np.float64), by_hand(*drawn()))
  assert np.signbit(
    mxfp4.decoded(np.full((1, 16), 0x88, np.uint8), np.full(1, 127, np.uint8))
  ).all()


def test_the_low_bits_come_first():
  block = np.zeros((1, 16), np.uint8)
  block[0, 0], block[0, 15] = 0x72, 0xF1
  found = mxfp4.decoded(block, np.array([128], np.uint8)).astype(float)
  assert found[:3].tolist() == [2.0, 12.0, 0.0]
  assert found[30:].tolist() == [1.0, -12.0]


def test_what_is_read_in_pieces_is_the_same(tmp_path):
  blocks, scales = drawn()
  folders.write_tensors(tmp_path / "a", {"w_blocks": blocks, "w_scales": scales})
  found, _ = quantization.combined(read_header(tmp_path / "a"), (1, 1))
  one, wanted = found["w_blocks"].part(2), by_hand(blocks, scales)[2]
  assert one.shape == (5, 64)
  with Reader() as reader:
    for rows, columns in (((0, 5), (0, 64)), ((1, 3), (7, 40)), ((4, 5), (33, 34))):
      piece = one.block(reader, slice(*rows), slice(*columns))
      np.testing.assert_array_equal(piece.astype(np.float64), wanted[slice(*rows), slice(*columns)])


@pytest.mark.transformers
def test_the_library_decodes_the_same(tmp_path):
  blocks, scales = drawn()
  np.savez(tmp_path / "given.npz", blocks=blocks, scales=scales)
  script = pathlib.Path(__file__).parent / "their_mxfp4.py"
  subprocess.run([PYTHONS["5"], script, tmp_path], check=True)
  theirs = np.load(tmp_path / "decoded.npy")  # transposed
  ours = mxfp4.decoded(blocks, scales).astype(np.float32).transpose(0, 2, 1)
  np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
