"""Quantized weights: the entries that make a tensor, and a folder with some of them."""

import json

import ml_dtypes
import numpy as np
import pytest

from interop import export, hf_config, quantization, read_weights
from interop.hf_quantization import block_shape
from interop.safetensors_file import Reader, read_header
from partitioning.rules import named_leaves
from tests.interop import folders
from tests.interop.folders import job_of, read_with_numpy

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
  source = read_weights.open_folder(str(folder), job.config, KEY)
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
  written = export.model_config(job_of("llama").config, "float32", end=2, start=1, source=config)
  assert "quantization_config" not in written
  assert hf_config.read(config, "F").block == (4, 6)


def entries(tmp_path, **arrays):
  folders.write_tensors(tmp_path / "a.safetensors", arrays)
  return read_header(tmp_path / "a.safetensors")


def test_entries_become_tensors_by_their_names_and_dtypes(tmp_path):
  random = np.random.RandomState(0)
  found, wrong = quantization.combined(
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
  _, wrong = quantization.combined(
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
    read_weights.open_folder(str(folder), job_of("llama").config, KEY)


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
  found, _ = quantization.combined(
    entries(tmp_path, w=np.stack(weights), w_scale_inv=np.stack(scales)), (4, 6)
  )
  with Reader() as reader:
    block = found["w"].part(1).block(reader, slice(2, 9), slice(5, 7))
    np.testing.assert_array_equal(block, values[1][2:9, 5:7])
