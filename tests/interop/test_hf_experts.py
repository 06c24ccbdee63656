"""Mixtures of experts: keys of config.json, and folders whose experts are stored in other ways."""

import json
import pathlib
import shutil
import subprocess

import jax
import ml_dtypes
import numpy as np
import pytest

from interop import hf_config, hf_parts, name_maps, read_weights
from interop.safetensors_file import Reader
from models import model_spec
from tests.interop import folders
from tests.interop.folders import job_of, read_with_numpy
from tests.interop.test_export import exported
from tests.interop.test_quantization import by_hand
from tests.models.write_families import PYTHONS

KEY = "checkpoint.initialize_from"
# As published, without the keys that any file has.
SHARED = {"vocab_size": 37, "hidden_size": 16, "num_attention_heads": 4}
MIXTRAL = {"model_type": "mixtral", **SHARED}
QWEN = {"model_type": "qwen3_moe", **SHARED, "num_hidden_layers": 6}
GPT_OSS = {"model_type": "gpt_oss", **SHARED, "num_hidden_layers": 3}
DEEPSEEK_V2 = {"model_type": "deepseek_v2", **SHARED, "num_experts_per_tok": 6}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", **SHARED}


def read(theirs, **keys):
  return hf_config.read({**theirs, **keys}, "config.json").model


def refusal(theirs, **keys):
  with pytest.raises(ValueError, match="cannot be built") as caught:
    read(theirs, **keys)
  return str(caught.value).splitlines()[1].strip()


@pytest.mark.parametrize(
  ("theirs", "wanted"),
  [
    (MIXTRAL, {"experts": 8, "experts_per_token": 2, "expert_feedforward_size": 14_336}),
    (QWEN, {"experts": 128, "experts_per_token": 8, "router_normalized": False, "dense_layers": 0}),
    (QWEN | {"num_local_experts": 5}, {"experts": 5}),
    (
      GPT_OSS,
      {
        "experts": 128,
        "gate_limit": 7.0,
        "up_offset": 1.0,
        "activation": "gelu_sigmoid",
        "biases": "attention",
        "global_every": 2,
        "window": 128,
        "rotary_base": 150_000.0,
      },
    ),
    (DEEPSEEK_V2, {"experts": 64, "shared_feedforward_size": 2814, "router_groups": 1}),
    (
      DEEPSEEK_V2 | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
      {"router_groups": 8, "router_top_groups": 3, "router_group_score": "max"},
    ),
    (
      DEEPSEEK_V3,
      {
        "experts": 256,
        "dense_layers": 3,
        "expert_feedforward_size": 2048,
        "shared_feedforward_size": 2048,
        "router_scores": "sigmoid",
        "router_correction": True,
        "router_scale": 2.5,
        "router_groups": 8,
        "router_top_groups": 4,
        "router_group_score": "top2",
      },
    ),
    (DEEPSEEK_V3 | {"first_k_dense_replace": 61}, {"experts": 0, "router_correction": False}),
  ],
)
def test_keys_and_defaults_of_each_model_type(theirs, wanted):
  found = read(theirs)
  assert {key: found[key] for key in wanted} == wanted


def test_gpt_oss_positions_are_scaled_where_a_file_says_nothing():
  kind, numbers = read(GPT_OSS)["rotary_scaling"]
  assert (kind, numbers["factor"], numbers["truncate"]) == ("yarn", 32.0, False)


@pytest.mark.parametrize(
  ("keys", "found"),
  [
    ({}, (0, 1)),
    ({"decoder_sparse_step": 3}, (0, 3)),
    ({"mlp_only_layers": [0, 1]}, (2, 1)),
    ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, (2, 2)),
    ({"num_hidden_layers": 3, "decoder_sparse_step": 2}, (0, 2)),
    ({"mlp_only_layers": [1, 4]}, (0, 1, 1, 4)),
    ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (0, 1, 0, 2, 3, 4)),
  ],
)
def test_layers_without_experts(keys, found):
  model = read(QWEN, **keys)
  assert (model["dense_layers"], model["sparse_every"], *model["mlp_only_layers"]) == found
  back = hf_config.write({**model, "head_size": 4}, 32, "qwen3_moe")
  again = read(back)
  assert hf_parts.sparse_of(again) == hf_parts.sparse_of(model)


def test_what_cannot_be_expressed_is_refused():
  assert refusal(QWEN, decoder_sparse_step=7).startswith(
    "decoder_sparse_step=7, mlp_only_layers=[]: none of the 6 layers has experts"
  )
  assert refusal(QWEN, num_local_experts=4, num_experts=5) == (
    "num_experts=5 contradicts num_local_experts"
  )
  assert refusal(GPT_OSS, swiglu_alpha=1.0).startswith("swiglu_alpha=1.0: ")
  assert refusal({**MIXTRAL, "model_type": "olmoe"}, clip_qkv=0) == (
    "clip_qkv=0: a number above 0 is needed"
  )
  assert refusal(DEEPSEEK_V2, topk_method="noaux_tc").startswith(
    "topk_method='noaux_tc': greedy or"
  )
  assert refusal(DEEPSEEK_V2, norm_topk_prob=True) == "norm_topk_prob=True: only False is read"
  assert refusal(DEEPSEEK_V3, scoring_func="softmax").startswith("scoring_func='softmax': only sig")
  assert refusal(DEEPSEEK_V3, moe_layer_freq=2) == "moe_layer_freq=2: only 1 is read"


def test_shared_experts_of_a_width_between_two_are_not_written():
  model = {**read(DEEPSEEK_V3), "shared_feedforward_size": 2049}
  with pytest.raises(ValueError, match=r"shared_feedforward_size=2049 \(it would be 2048\)"):
    hf_config.write(model, 64, "deepseek_v3")


# ------------------------------ folders ------------------------------


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


@pytest.mark.parametrize("name", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def test_experts_in_one_tensor_are_those_with_tensors_of_their_own(name, folder):
  tensors, merged = stored(name), {}
  table = job_of(name).config.model
  where, names = "mlp", ("gate_proj", "up_proj", "down_proj")
  if name == "mixtral":
    where, names = "block_sparse_moe", ("w1", "w3", "w2")
  for layer in range(table.dense_layers, table.layers):
    start = f"model.layers.{layer}.{where}"
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
EXPERTS = {
  "4": ("deepseek_v2", "deepseek_v3", "mixtral", "olmoe", "qwen3_moe"),
  "5": ("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen3_moe"),
}


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
