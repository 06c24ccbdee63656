"""Quantized weights beside values that are known, and folders with some of them."""

import json

import ml_dtypes
import numpy as np
import pytest

from interop import export, hf_config, read_weights
from interop.hf_config import block_shape
from interop.safetensors_file import Reader, read_header
from models import model_spec
from partitioning.rules import named_leaves
from tests.interop import folders
from tests.interop.folders import job_of, read_with_numpy

# ------------------------------ float8 with a scale for each block ------------------------------

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
  found = read_weights.decoded_fp8(bits, np.ones((1, 1), np.float32), (1, len(KNOWN)))
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, [[*KNOWN.values()]])
  assert np.isnan(read_weights.decoded_fp8(np.array([[0x7F]], np.uint8), np.ones((1, 1)), (1, 1)))


def test_a_piece_begins_inside_of_a_block():
  random = np.random.RandomState(0)
  weights = random.standard_normal((10, 9)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
  scales = random.rand(3, 3).astype(np.float32)
  whole = read_weights.decoded_fp8(weights, scales, (4, 3))
  piece = read_weights.decoded_fp8(weights[5:9, 4:8], scales[1:3, 1:3], (4, 3), (1, 1))
  np.testing.assert_array_equal(piece, whole[5:9, 4:8])


def test_scales_in_bfloat16_are_multiplied_in_float32():
  scale = np.array([[1.0078125]], ml_dtypes.bfloat16)
  found = read_weights.decoded_fp8(np.array([[0b0_0111_111]], np.uint8), scale, (1, 1))
  assert found == np.float32(1.875 * 1.0078125)


# ------------------------------ MXFP4 ------------------------------

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


def drawn_mxfp4():
  """Returns (blocks [3, 5, 2, 16], scales [3, 5, 2]) of three matrices [5, 64]."""
  random = np.random.RandomState(0)
  blocks = random.randint(0, 256, (3, 5, 2, 16)).astype(np.uint8)
  scales = random.randint(90, 150, (3, 5, 2)).astype(np.uint8)
  scales[0, :3, 0] = 0, 1, 252  # the smallest, and the largest of which 6 times is finite
  return blocks, scales


def test_values_are_those_by_hand_and_bfloat16_has_them_all():
  found = read_weights.decoded_mxfp4(*drawn_mxfp4())
  assert found.dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(found.astype(np.float64), by_hand(*drawn_mxfp4()))
  assert np.signbit(
    read_weights.decoded_mxfp4(np.full((1, 16), 0x88, np.uint8), np.full(1, 127, np.uint8))
  ).all()


def test_what_is_read_in_pieces_is_the_same(tmp_path):
  blocks, scales = drawn_mxfp4()
  folders.write_tensors(tmp_path / "a", {"w_blocks": blocks, "w_scales": scales})
  found, _ = read_weights.combined(read_header(tmp_path / "a"), (1, 1))
  one, wanted = found["w_blocks"].part(2), by_hand(blocks, scales)[2]
  assert one.shape == (5, 64)
  with Reader() as reader:
    for rows, columns in (((0, 5), (0, 64)), ((1, 3), (7, 40)), ((4, 5), (33, 34))):
      piece = one.block(reader, slice(*rows), slice(*columns))
      np.testing.assert_array_equal(piece.astype(np.float64), wanted[slice(*rows), slice(*columns)])


# ------------------------------ tensors of several entries ------------------------------

KEY = "checkpoint.initialize_from"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 6]}


def drawn(shape, block, seed):
  """Returns (float8 bytes, scales) of a matrix, and its values by loops over the blocks."""
  random = np.random.RandomState(seed)
  weights = random.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
  scales = (
    random.rand(*(-(-size // part) for size, part in zip(shape, block, strict=True))) + 0.5
  ).astype(np.float32)
  values = weights.astype(np.float32)
  for row in range(scales.shape[0]):
    for column in range(scales.shape[1]):
      there = (
        slice(row * block[0], (row + 1) * block[0]),
        slice(column * block[1], (column + 1) * block[1]),
      )
      values[there] *= scales[row, column]
  return weights, scales, values


@pytest.fixture
def folder(tmp_path):
  """Returns the folder of the Llama fixture in which all matrices of the layers are in FP8."""
  found = tmp_path / "Llama"
  found.mkdir()
  config = {**folders.config_of("llama"), "quantization_config": FP8}
  (found / "config.json").write_text(json.dumps(config))
  arrays = {}
  for name, array in folders.tensors_of(folders.FOLDER / "llama" / "model.safetensors").items():
    arrays[name] = array
    if ".layers." in name and array.ndim == 2:
      arrays[name], arrays[f"{name}_scale_inv"], _ = drawn(array.shape, (4, 6), len(name))
  folders.write_tensors(found / "model.safetensors", arrays)
  return found


def test_a_folder_in_fp8_is_read_in_any_pieces(folder, monkeypatch):
  job = job_of("llama", "dp4_tp2", "float32")
  source = read_weights.open_folder(str(folder), model_spec(job.config), KEY)
  plain = read_with_numpy("llama")
  for piece_bytes in (2**23, 100):
    monkeypatch.setattr(read_weights, "PIECE_BYTES", piece_bytes)
    found = named_leaves(read_weights.read(source, job.placed_state.params))
    for ours, theirs in (("up", "up_proj"), ("down", "down_proj")):
      for layer in range(2):
        name = f"model.layers.{layer}.mlp.{theirs}.weight"
        shape = plain[f"layers/mlp/{ours}/kernel"].shape[:0:-1]
        values = drawn(shape, (4, 6), len(name))[2]
        np.testing.assert_array_equal(found[f"layers/mlp/{ours}/kernel"][layer], values.T)
    np.testing.assert_array_equal(found["embed/table"][:37], plain["embed/table"][:37])


def test_an_exported_config_does_not_say_that_weights_are_quantized(folder):
  config = json.loads((folder / "config.json").read_text())
  keys, length = job_of("llama").config.model.to_dict(), folders.LENGTH
  written = export.model_config(keys, length, "float32", end=2, start=1, source=config)
  assert "quantization_config" not in written
  assert hf_config.read(config, "F").block == (4, 6)


def entries(tmp_path, **arrays):
  folders.write_tensors(tmp_path / "a.safetensors", arrays)
  return read_header(tmp_path / "a.safetensors")


def test_entries_become_tensors_by_their_names_and_dtypes(tmp_path):
  random = np.random.RandomState(0)
  found, wrong = read_weights.combined(
    entries(
      tmp_path,
      experts_blocks=random.randint(0, 256, (3, 5, 2, 16)).astype(np.uint8),
      experts_scales=np.full((3, 5, 2), 127, np.uint8),
      weight=random.standard_normal((2, 9, 7)).astype(ml_dtypes.float8_e4m3fn),
      weight_scale_inv=np.ones((2, 3, 2), np.float32),
      plain=np.ones((4, 5), np.float32),
    ),
    (4, 6),
  )
  assert not wrong
  shapes = {name: (one.dtype, one.shape, one.size) for name, one in found.items()}
  assert shapes == {
    "experts_blocks": ("BF16", (3, 5, 64), 3 * 5 * 64 * 2),
    "weight": ("BF16", (2, 9, 7), 2 * 9 * 7 * 4),
    "plain": ("F32", (4, 5), 80),
  }


def test_scales_that_do_not_fit_are_all_named(tmp_path):
  _, wrong = read_weights.combined(
    entries(
      tmp_path,
      a_blocks=np.zeros((5, 2, 16), np.uint8),
      a_scales=np.zeros((5, 3), np.uint8),
      b_blocks=np.zeros((5, 2, 8), np.uint8),
      b_scales=np.zeros((5, 2), np.uint8),
      c=np.zeros((9, 7), ml_dtypes.float8_e4m3fn),
      c_scale_inv=np.zeros((2, 2), np.float32),
    ),
    (4, 6),
  )
  assert wrong == [
    "a_scales is U8[5, 3], and a_blocks U8[5, 2, 16] needs U8[5, 2]",
    "b_blocks has 8 bytes in a block; 16 are read",
    "c_scale_inv is F32[2, 2], and c F8_E4M3[9, 7] needs F32[3, 2]",
  ]


def test_fp8_without_scales_is_refused(folder):
  path = folder / "model.safetensors"
  arrays = folders.tensors_of(path)
  del arrays["model.layers.0.mlp.up_proj.weight_scale_inv"]
  folders.write_tensors(path, arrays)
  with pytest.raises(ValueError, match=r"0\.mlp\.up_proj\.weight is stored as F8_E4M3; read are"):
    read_weights.open_folder(str(folder), model_spec(job_of("llama").config), KEY)


@pytest.mark.parametrize(
  ("given", "block"),
  [
    (None, (128, 128)),
    ({"quant_method": "mxfp4", "modules_to_not_convert": []}, (128, 128)),
    (FP8, (4, 6)),
    ({"quant_method": "fp8", "weight_block_size": None}, None),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, None),
    ({**FP8, "fmt": "e5m2"}, None),
    ({"quant_method": "gptq"}, None),
    ("fp8", None),
  ],
)
def test_which_quantization_is_read(given, block):
  if block:
    assert block_shape(given) == block
  else:
    with pytest.raises(ValueError, match="the weights are quantized; take the folder of the unq"):
      block_shape(given)


def test_parts_along_a_leading_dim(tmp_path):
  weights, scales, values = zip(*(drawn((9, 7), (4, 6), seed) for seed in range(3)), strict=True)
  found, _ = read_weights.combined(
    entries(tmp_path, w=np.stack(weights), w_scale_inv=np.stack(scales)), (4, 6)
  )
  with Reader() as reader:
    block = found["w"].part(1).block(reader, slice(2, 9), slice(5, 7))
    np.testing.assert_array_equal(block, values[1][2:9, 5:7])
