"""The tables of tensors: against folders that transformers has written, and their logits."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from interop import hf_config, name_maps
from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job
from tests.interop import folders


@functools.cache
def described(name):
  return hf_config.read(folders.config_of(name), name)


@functools.cache
def job_of(name):
  """Returns a float64 job of a folder, with a padded vocabulary."""
  keys = {f"model.{k}": v for k, v in described(name).model.items() if v is not None}
  keys |= {"model.vocabulary_multiple": 8, "data.sequence_length": folders.LENGTH}
  keys |= {"data.global_batch_size": 2, "training.parameter_dtype": "float64"}
  with jax.enable_x64(True):
    return make_job("single", "lm", **keys)


@functools.cache
def stored(name):
  return folders.tensors_of(folders.FOLDER / name / "model.safetensors")


def matched(name, shapes):
  return name_maps.match(shapes, job_of(name).config, described(name).model_type)


def shapes_of(name):
  return {tensor: array.shape for tensor, array in stored(name).items()}


def read_with_numpy(name):
  """Returns our names -> arrays of a folder, by a plain reading of the table."""
  sizes = name_maps.sizes_of(job_of(name).config)
  arrays = {n: np.zeros(x.shape) for n, x in named_leaves(job_of(name).state.params).items()}
  for tensor_name, tensor in matched(name, shapes_of(name))[0].tensors.items():
    for part in tensor.parts:
      ends = [np.prod([sizes[letter] for letter in axis], dtype=int) for axis in part.axes]
      one = stored(name)[tensor_name].astype(np.float64)
      one = np.take(one, range(part.start, part.start + ends[tensor.axis]), axis=tensor.axis)
      order = "".join(part.axes)
      one = one.reshape([sizes[letter] for letter in order])
      one = one.transpose([order.index(letter) for letter in part.letters])
      ours = arrays[part.parameter] if part.layer is None else arrays[part.parameter][part.layer]
      ours[tuple(slice(0, size) for size in one.shape)] = one
  return arrays


@pytest.mark.parametrize("name", folders.NAMES)
def test_logits_of_a_folder_are_those_of_transformers(name):
  job, arrays = job_of(name), read_with_numpy(name)
  leaves = [arrays[leaf] for leaf in named_leaves(job.state.params)]
  with jax.enable_x64(True), job.tracing():
    params = jax.tree.unflatten(jax.tree.structure(job.state.params), leaves)
    ours = jax.jit(lambda p, x: nnx.merge(job.program.graphdef, p)(x))(params, folders.tokens())
  wanted = folders.logits_of(name)
  assert np.abs(np.asarray(ours)[..., : folders.VOCABULARY] - wanted).max() < 1e-10


@pytest.mark.parametrize("name", folders.NAMES)
def test_what_was_read_is_joined_to_the_same_tensors(name):
  sizes, arrays = name_maps.sizes_of(job_of(name).config), read_with_numpy(name)

  def array(parameter, layer):
    return arrays[parameter] if layer is None else arrays[parameter][layer]

  found, wrong = matched(name, shapes_of(name))
  assert not wrong
  assert {*found.tensors} == {*stored(name)}
  for tensor_name, tensor in found.tensors.items():
    assert tensor_name == tensor.name
    np.testing.assert_array_equal(
      name_maps.joined(tensor, sizes, array), stored(name)[tensor_name].astype(np.float64)
    )


def test_missing_unknown_and_wrong_tensors_are_all_named():
  shapes = shapes_of("llama")
  del shapes["model.norm.weight"]
  shapes["model.layers.1.mlp.up_proj.weight"] = (24, 15)
  shapes["model.layers.2.mlp.up_proj.weight"] = (24, 16)
  _, wrong = matched("llama", shapes)
  assert wrong == [
    "model.norm.weight is missing; it would have shape [16]",
    "model.layers.1.mlp.up_proj.weight has shape [24, 15], and the config says [24, 16]",
    "model.layers.2.mlp.up_proj.weight is not known: no part of a model of type 'llama'",
  ]


def test_buffers_are_left_out():
  shapes = {**shapes_of("gpt2"), "transformer.h.0.attn.bias": (1, 1, 16, 16)}
  found, wrong = matched("gpt2", shapes)
  assert not wrong
  assert "transformer.h.0.attn.bias" not in found.tensors


def test_logits_that_are_stored_beside_a_tied_embedding_are_a_copy():
  found, wrong = matched("gpt2", {**shapes_of("gpt2"), "lm_head.weight": (37, 16)})
  assert not wrong
  assert (found.copies, found.embedding) == ("lm_head.weight", "transformer.wte.weight")
  assert matched("gpt2", shapes_of("gpt2"))[0].copies == ""


def test_a_folder_may_leave_the_prefix_out():
  shapes = {name.removeprefix("transformer."): x for name, x in shapes_of("gpt2").items()}
  found, wrong = matched("gpt2", shapes)
  assert not wrong
  assert found.tensors["wte.weight"].name == "transformer.wte.weight"


def test_a_model_with_more_than_the_family_has_is_refused():
  config = job_of("llama").config.copy_and_resolve_references()
  with config.unlocked():
    config.model.post_norms = True
  with pytest.raises(ValueError, match=r"'llama' has no tensor for layers/attention_post_norm"):
    name_maps.tensors(config, "llama")


def test_a_table_row_is_all_that_a_new_family_needs():
  rows = dict(name_maps.LLAMA.rows)
  rows["model.layers.{}.self_attn.kv.weight"] = (
    "KH+KH D",
    ("layers/attention/key/kernel", "layers/attention/value/kernel"),
  )
  for name in ("k_proj", "v_proj"):
    del rows[f"model.layers.{{}}.self_attn.{name}.weight"]
  names = dataclasses.replace(name_maps.LLAMA, rows=rows)
  name_maps.FAMILIES["test"] = names
  try:
    found = name_maps.tensors(job_of("llama").config, "test")
  finally:
    del name_maps.FAMILIES["test"]
  one = found["model.layers.1.self_attn.kv.weight"]
  assert (one.shape, [part.start for part in one.parts]) == ((16, 16), [0, 8])
