"""Folders of mixtures of experts, which are stored in several ways."""

import json
import pathlib
import shutil
import subprocess

import jax
import ml_dtypes
import numpy as np
import pytest

from interop import hf_config, name_maps, read_weights
from interop.safetensors_file import Reader
from models import model_spec
from tests.interop import folders
from tests.interop.folders import job_of, read_with_numpy
from tests.interop.test_export import exported
from tests.interop.test_quantization import by_hand
from tests.models.write_families import PYTHONS

KEY = "checkpoint.initialize_from"


@pytest.fixture
def folder(tmp_path):
  """Returns a function that copies a folder with other tensors."""

  def copied(name, tensors):
    found = tmp_path / name
    shutil.copytree(folders.FOLDER / name, found)
    folders.write_tensors(found / "model.safetensors", tensors)
    return read_weights.open_folder(str(found), model_spec(job_of(name).config), KEY)

  return copied


def stored(name):
  return dict(folders.tensors_of(folders.FOLDER / name / "model.safetensors"))


def whole(source, name):
  """Returns a parameter of a folder."""
  shape = read_with_numpy(source)[name].shape
  return tuple((0, size) for size in shape)


def test_experts_in_one_tensor_are_those_with_tensors_of_their_own(folder):
  tensors, merged, name, names = stored("mixtral"), {}, "mixtral", ("w1", "w3", "w2")
  table = job_of(name).config.model
  for layer in range(table.layers):
    start = f"model.layers.{layer}.block_sparse_moe"
    kernels = [
      np.stack([tensors.pop(f"{start}.experts.{e}.{one}.weight") for e in range(table.experts)])
      for one in names
    ]
    merged[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate(kernels[:2], axis=1)
    merged[f"model.layers.{layer}.mlp.experts.down_proj"] = kernels[2]
    merged[f"model.layers.{layer}.mlp.gate.weight"] = tensors.pop(f"{start}.gate.weight")
  source = folder(name, {**tensors, **merged})
  with Reader() as reader:
    for ours, array in read_with_numpy(name).items():
      index = whole(name, ours)
      [found] = read_weights.local_shards(reader, source, ours, np.float64, [index])
      np.testing.assert_array_equal(found, array, err_msg=ours)


def test_a_shard_of_experts_reads_those_alone():
  job = job_of("gpt_oss")
  source = read_weights.open_folder(str(folders.FOLDER / "gpt_oss"), model_spec(job.config), KEY)
  index = ((1, 2), (2, 4), (0, 20), (0, 16))
  with Reader() as reader:  # two of four experts, of one layer; in bfloat16
    read_weights.local_shards(reader, source, "layers/experts/down/kernel", np.float32, [index])
  assert reader.bytes_read == 2 * 20 * 16 * 2


def test_experts_in_mxfp4_are_those_decoded_by_hand(folder, tmp_path):
  """With inputs of one group of MXFP4, and of two."""
  keys = {"model_size": 32, "expert_feedforward_size": 64, "feedforward_size": 64, "experts": 4}
  job = job_of("gpt_oss", **{f"model.{key}": value for key, value in keys.items()})
  config, random = hf_config.write(job.config.model, 64, "gpt_oss"), np.random.RandomState(0)
  tensors, wanted = {}, {}
  for name, tensor in name_maps.tensors(model_spec(job.config), "gpt_oss").items():
    tensors[name] = random.standard_normal(tensor.shape).astype(ml_dtypes.bfloat16)
    if name.endswith("_proj"):
      del tensors[name]
      experts, inputs, outputs = tensor.shape
      blocks = random.randint(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
      scales = random.randint(118, 130, blocks.shape[:-1]).astype(np.uint8)
      tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
      wanted[name] = by_hand(blocks, scales).transpose(0, 2, 1)  # [E, in, out]
  (tmp_path / "config.json").write_text(
    json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}})
  )
  folders.write_tensors(tmp_path / "model.safetensors", tensors)
  source = read_weights.open_folder(str(tmp_path), model_spec(job.config), KEY)

  def shards(reader, parameter, *shape):
    index = ((2, 3), *((0, size) for size in shape))
    return read_weights.local_shards(reader, source, parameter, np.float64, [index])[0][0]

  start = "model.layers.2.mlp.experts."
  with Reader() as reader:
    both = wanted[f"{start}gate_up_proj"]
    found = shards(reader, "layers/experts/gate/kernel", 4, 32, 64)
    np.testing.assert_array_equal(found, both[..., ::2])
    found = shards(reader, "layers/experts/up/kernel", 4, 32, 64)
    np.testing.assert_array_equal(found, both[..., 1::2])
    found = shards(reader, "layers/experts/down/kernel", 4, 64, 32)
    np.testing.assert_array_equal(found, wanted[f"{start}down_proj"])


def test_layers_that_only_training_has_are_passed_over(folder):
  more = {
    f"model.layers.3.{name}": np.zeros((2, 2), np.float32) for name in ("eh_proj.weight", "x")
  }
  source = folder("deepseek_v3", {**stored("deepseek_v3"), **more})
  assert {*source.parts} == {*read_with_numpy("deepseek_v3")}


# ------------------------------ export ------------------------------

# Version 4 has a limit of 7 in gpt-oss whatever the config says, and the fixture's is lower.
IN_4 = ("deepseek_v2", "deepseek_v3", "glm4_moe", "llama4", "mixtral", "olmoe", "qwen3_moe")
EXPERTS = {"4": IN_4, "5": (*IN_4, "gpt_oss")}


@pytest.mark.long
def test_experts_that_a_mesh_splits_are_exported_as_they_were_stored(tmp_path):
  with jax.enable_x64(True):
    job = job_of("mixtral", "single", **{"mesh.expert": 2, "mesh.tensor": 2})
    arrays, source = read_with_numpy("mixtral"), folders.config_of("mixtral")
    found, _ = exported(tmp_path / "to", job, arrays, "bfloat16", source)
  assert found.keys() == stored("mixtral").keys()
  for name, array in stored("mixtral").items():
    assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.transformers
@pytest.mark.parametrize("version", EXPERTS)
def test_transformers_loads_what_is_exported_with_the_same_logits(version, tmp_path):
  np.savez(tmp_path / "given.npz", tokens=folders.tokens())
  paths = [tmp_path / name for name in EXPERTS[version]]
  for path in paths:
    with jax.enable_x64(True):
      arrays, source = read_with_numpy(path.name), folders.config_of(path.name)
      exported(path, job_of(path.name), arrays, "float64", source)
  script = pathlib.Path(__file__).parent / "their_loading.py"
  command = [PYTHONS[version], script, "float64", tmp_path / "given.npz", tmp_path / "found.npz"]
  subprocess.run([*command, *paths], check=True)
  with np.load(tmp_path / "found.npz") as found:
    for path in paths:
      assert np.abs(found[path.name] - folders.logits_of(path.name)).max() < 1e-10, path.name
