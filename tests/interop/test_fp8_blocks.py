"""FP8 weights with scales of blocks, beside values that are known."""

import ml_dtypes
import numpy as np

from interop import fp8_blocks

# Bits of E4M3: sign, four of the exponent (bias 7), three of the mantissa.
KNOWN = {
  0b0_0000_000: 0.0,
  0b0_0000_001: 2**-9,
  0b0_0001_000: 2**-6,
  0b0_0111_000: 1.0,
  0b0_0111_100: 1.5,
  0b1_1000_001: -2.25,
  0b0_1111_110: 448.0,
}


def test_bytes_are_the_values_of_the_format():
  bits = np.array([[*KNOWN]], np.uint8)
  found = fp8_blocks.decoded(bits, np.ones((1, 1), np.float32), (1, len(KNOWN)))
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, [[*KNOWN.values()]])
  assert np.isnan(fp8_blocks.decoded(np.array([[0x7F]], np.uint8), np.ones((1, 1)), (1, 1)))


def test_each_block_has_its_scale_and_the_last_may_be_smaller():
  ones = np.full((300, 130), 0b0_0111_000, np.uint8)
  scales = np.arange(1, 7, dtype=np.float32).reshape(3, 2) / 3
  found = fp8_blocks.decoded(ones, scales, (128, 128))
  for row, column in ((0, 0), (127, 127), (128, 0), (127, 128), (299, 129), (256, 5)):
    assert found[row, column] == scales[row // 128, column // 128]


def test_a_piece_begins_inside_of_a_block():
  random = np.random.RandomState(0)
  weights = random.standard_normal((10, 9)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
  scales = random.rand(3, 3).astype(np.float32)
  whole = fp8_blocks.decoded(weights, scales, (4, 3))
  piece = fp8_blocks.decoded(weights[5:9, 4:8], scales[1:3, 1:3], (4, 3), (1, 1))
  np.testing.assert_array_equal(piece, whole[5:9, 4:8])


def test_scales_in_bfloat16_are_multiplied_in_float32():
  scale = np.array([[1.0078125]], ml_dtypes.bfloat16)
  found = fp8_blocks.decoded(np.array([[0b0_0111_111]], np.uint8), scale, (1, 1))
  assert found == np.float32(1.875 * 1.0078125)
