"""Weights in shards: logits as transformers has them, on meshes, and what each shard reads."""

import ctypes
import gc
import itertools
import json
import math
import pathlib
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from interop import hf_config, name_maps, read_weights
from interop.safetensors_file import Reader
from models import model_spec, transformer
from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job
from tests.interop import folders
from tests.interop.folders import described, job_of, read_with_numpy

KEY = "checkpoint.initialize_from"
# Of each kind of tensors: dense, fused, of experts in their ways, of convolutions, of two stacks.
MESHES = {
  "falcon_h1": "dp2_fsdp2_tp2",
  "gpt2": "fsdp8",
  "gpt_oss": "dp4_tp2",
  "kimi_linear": "dp4_tp2",
  "llama4": "dp2_fsdp2_tp2",
  "mixtral": "fsdp8",
  "phi3": "dp2_fsdp2_tp2",
  "qwen3_next": "dp2_fsdp2_tp2",
}


def opened(name, job):
  return read_weights.open_folder(str(folders.FOLDER / name), model_spec(job.config), KEY)


def assert_read(params, name):
  """Every parameter is what NumPy alone reads of the folder."""
  wanted = read_with_numpy(name)
  for leaf_name, leaf in named_leaves(params).items():
    np.testing.assert_array_equal(np.asarray(leaf), wanted[leaf_name], err_msg=leaf_name)


@pytest.mark.parametrize("name", MESHES)
def test_each_device_of_a_mesh_gets_its_shards(name):
  job = job_of(name, MESHES[name])
  with jax.enable_x64(True):
    assert_read(read_weights.read(opened(name, job), job.placed_state.params), name)


@pytest.mark.parametrize("name", folders.NAMES)
def test_logits_are_those_of_transformers_and_tensors_come_back_to_the_bit(name):
  job = job_of(name)
  spec, source = model_spec(job.config), opened(name, job)
  with jax.enable_x64(True):
    params = read_weights.read(source, job.placed_state.params)
    assert_read(params, name)

    def forward(params, tokens_BT):
      return nnx.merge(job.program.graphdef, params)(tokens_BT)

    given = params, folders.tokens()
    ours = np.asarray(job.compile(forward, *given).function(*given))
  theirs = folders.logits_of(name)
  assert np.abs(ours[..., : folders.VOCABULARY] - theirs).max() < 1e-10
  stored = folders.tensors_of(folders.FOLDER / name / "model.safetensors")
  arrays, sizes = read_with_numpy(name), name_maps.sizes_of(spec)
  found, wrong = name_maps.match(
    {one: x.shape for one, x in stored.items()}, spec, described(name).model_type
  )
  assert not wrong
  for one, tensor in found.tensors.items():
    back = name_maps.joined(tensor, sizes, lambda ours, place: arrays[ours][place])
    np.testing.assert_array_equal(back, stored[one].astype(np.float64), err_msg=one)


@pytest.mark.parametrize(
  "name",
  ["llama4", "nemotron_h", "olmo_hybrid", pytest.param("ministral3", marks=pytest.mark.long)],
)
def test_a_cache_and_a_packed_row_give_the_same_logits(name):
  job = job_of(name, **{"model.separate_documents": True})
  pieces, documents = (8, 4), (7, 5)
  numbers = np.tile(np.repeat((1, 2), documents).astype(np.int32), (2, 1))

  def forward(params, tokens_BT):
    model = nnx.merge(job.program.graphdef, params)
    cache, start, found = transformer.empty_cache(model_spec(job.config), 2, folders.LENGTH), 0, []
    for width in pieces:
      given = tokens_BT[:, start : start + width], jnp.full(2, width, jnp.int32)
      logits_BV, cache = model.extend(*given, cache)
      found.append(logits_BV)
      start += width
    alone = model(tokens_BT[:, documents[0] :])
    return model(tokens_BT), found, model(tokens_BT, segments_BT=numbers), alone

  with jax.enable_x64(True):
    params = read_weights.read(opened(name, job), job.placed_state.params)
    given = folders.tokens()
    whole, found, packed, alone = job.compile(forward, params, given).function(params, given)
  for end, logits_BV in zip(np.cumsum(pieces) - 1, found, strict=True):
    np.testing.assert_allclose(logits_BV, whole[:, end], atol=1e-12)
  np.testing.assert_allclose(packed[:, : documents[0]], whole[:, : documents[0]], atol=1e-12)
  np.testing.assert_allclose(packed[:, documents[0] :], alone, atol=1e-12)
  assert np.abs(whole[:, documents[0] :] - alone).max() > 1e-3


def test_another_dtype_than_the_files_is_rounded_once():
  job = job_of("gemma3", "fsdp8", "float32")  # float64 in the file
  params = read_weights.read(opened("gemma3", job), job.placed_state.params)
  for name, array in read_with_numpy("gemma3").items():
    found = np.asarray(named_leaves(params)[name])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, array.astype(np.float32))


@pytest.mark.parametrize("piece_bytes", [1, 100])
def test_shards_of_small_pieces_are_the_same(monkeypatch, piece_bytes):
  monkeypatch.setattr(read_weights, "PIECE_BYTES", piece_bytes)
  for name in ("phi3", "gpt2", "gpt_oss", "qwen3_next"):
    job = job_of(name)
    source = opened(name, job)
    for parameter, array in read_with_numpy(name).items():
      # Each dim in uneven parts, of which the second and the last are read.
      ends = [sorted({0, size // 3, size // 2, size}) for size in array.shape]
      parts = [[*itertools.pairwise(cuts)] for cuts in ends]
      chosen = [tuple(part[min(1, len(part) - 1)] for part in parts)]
      chosen.append(tuple(part[-1] for part in parts))
      with Reader() as reader:
        found = read_weights.local_shards(reader, source, parameter, np.float64, chosen)
      for index, shard in zip(chosen, found, strict=True):
        np.testing.assert_array_equal(shard, array[tuple(slice(*one) for one in index)])


def test_a_shard_reads_its_own_rows_only():
  job = job_of("llama")
  source = opened("llama", job)
  with Reader() as reader:  # an eighth of the vocabulary: 5 of 37 rows of 16 float32
    read_weights.local_shards(reader, source, "embed/table", np.float32, [((5, 10), (0, 16))])
  assert reader.bytes_read == 5 * 16 * 4
  with Reader() as reader:  # one of two layers, two of four heads
    index = ((1, 2), (0, 16), (2, 4), (0, 4))
    read_weights.local_shards(reader, source, "layers/attention/query/kernel", np.float32, [index])
  assert reader.bytes_read == 2 * 4 * 16 * 4


# ------------------------------ refusals ------------------------------


@pytest.fixture
def folder(tmp_path):
  return shutil.copytree(folders.FOLDER / "llama", tmp_path / "Llama")


def refusal(folder, name="llama"):
  with pytest.raises(ValueError, match=r".") as caught:
    read_weights.open_folder(str(folder), model_spec(job_of(name).config), KEY)
  return str(caught.value).splitlines()


def rewritten(folder, **changes):
  """Writes a folder's tensors anew, with others in place of some; None: without it."""
  arrays = {**folders.tensors_of(folder / "model.safetensors"), **changes}
  kept = {name: array for name, array in arrays.items() if array is not None}
  folders.write_tensors(folder / "model.safetensors", kept)


def test_all_tensors_that_differ_are_in_one_message(folder):
  rewritten(
    folder,
    **{
      "model.norm.weight": None,
      "lm_head.weight": np.zeros((38, 16), np.float32),
      "model.layers.0.self_attn.q_proj.bias": np.zeros(16, np.float32),
    },
  )
  assert refusal(folder) == [
    f"{KEY}: the weights of {folder} are not those of the model (3 things differ):",
    "  model.norm.weight is missing; it would have shape [16]",
    "  lm_head.weight has shape [38, 16], and the config says [37, 16]",
    "  model.layers.0.self_attn.q_proj.bias is not known: no part of a model of type 'llama'",
  ]


def test_a_model_of_other_sizes_is_refused_by_its_keys(folder):
  lines = refusal(folders.FOLDER / "qwen3", "llama")
  assert "  model.head_size=4, and the folder has 6" in lines
  assert "  model.query_key_norm=False, and the folder has True" in lines


def test_integers_and_eight_bits_are_not_read(folder):
  content = (folder / "model.safetensors").read_bytes().replace(b'"F32"', b'"I32"')
  (folder / "model.safetensors").write_bytes(content)
  assert "lm_head.weight is stored as I32; read are F64, F32, BF16, F16" in "\n".join(
    refusal(folder)
  )


@pytest.mark.parametrize("changed", [False, True])
def test_logits_beside_a_tied_embedding_must_be_the_embedding(tmp_path, changed):
  folder = shutil.copytree(folders.FOLDER / "gpt2", tmp_path / "GPT")
  table = folders.tensors_of(folder / "model.safetensors")["transformer.wte.weight"].copy()
  table[-1, -1] += changed
  rewritten(folder, **{"lm_head.weight": table})
  if changed:
    [_, line] = refusal(folder, "gpt2")
    assert line.startswith(
      "  lm_head.weight is not transformer.wte.weight, and tie_word_embeddings"
    )
    assert line.endswith('says that it is; set "tie_word_embeddings": false in config.json')
  else:
    source = read_weights.open_folder(str(folder), model_spec(job_of("gpt2").config), KEY)
    assert {*source.parts} == {*named_leaves(job_of("gpt2").state.params)}


def test_keys_that_change_no_shape_are_only_told(folder):
  config = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0}))
  source = read_weights.open_folder(str(folder), model_spec(job_of("llama").config), KEY)
  assert read_weights.differing_keys(model_spec(job_of("llama").config), source.described) == [
    "model.rotary_base=500.0, and the folder has 7.0"
  ]


# ------------------------------ memory ------------------------------


def peak_bytes():
  """Returns the largest resident memory of this process since it was last reset."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def write_holes(folder, job, model_type):
  """Writes a folder in bfloat16 whose weights are a hole in a file, which reads as zeros."""
  folder.mkdir()
  written = hf_config.write(job.config.model, 64, model_type)
  (folder / "config.json").write_text(json.dumps(written))
  header, start = {}, 0
  for name, tensor in name_maps.tensors(model_spec(job.config), model_type).items():
    ends = [start, start := start + 2 * math.prod(tensor.shape)]
    header[name] = {"dtype": "BF16", "shape": [*tensor.shape], "data_offsets": ends}
  text = json.dumps(header).encode()
  with (folder / "model.safetensors").open("wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    file.truncate(8 + len(text) + start)
  return start


@pytest.mark.parametrize(
  ("strategy", "rows", "width", "layers", "least_mib", "slack_mib"),
  [
    ("fsdp8", 2**16, 512, 4, 96, 48),
    pytest.param("fsdp8", 2**17, 2048, 6, 1024, 256, marks=pytest.mark.faults),
    pytest.param("tp8", 2**17, 2048, 6, 1024, 256, marks=pytest.mark.faults),
  ],
)
def test_memory_is_that_of_the_shards_and_one_more(
  tmp_path, strategy, rows, width, layers, least_mib, slack_mib
):
  keys = {"layers": layers, "model_size": width, "feedforward_size": 4 * width, "heads": 8}
  keys |= {"kv_heads": 8, "head_size": width // 8, "vocabulary_size": rows, "tied_embeddings": True}
  job = make_job(strategy, "lm", **{f"model.{key}": value for key, value in keys.items()})
  assert write_holes(tmp_path / "Big", job, "llama") >= least_mib * 2**20
  source = read_weights.open_folder(str(tmp_path / "Big"), model_spec(job.config), KEY)
  abstract = job.placed_state.params
  gc.collect()
  ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would be used again
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
  before = peak_bytes()
  params = read_weights.read(source, abstract)
  grown = peak_bytes() - before
  sizes = [
    shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards
  ]
  assert grown <= sum(sizes) + max(sizes) + slack_mib * 2**20, (grown, sum(sizes), max(sizes))
