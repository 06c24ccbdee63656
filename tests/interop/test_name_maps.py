"""The tables of tensors, against folders that transformers has written."""

import dataclasses
import functools

import numpy as np
import pytest

from interop import name_maps
from interop.hf_families import FAMILIES, Names
from models import model_spec
from tests.interop import folders
from tests.interop.folders import described, job_of, read_with_numpy

stored = functools.cache(
  lambda name: folders.tensors_of(folders.FOLDER / name / "model.safetensors")
)


def matched(name, shapes):
  return name_maps.match(shapes, model_spec(job_of(name).config), described(name).model_type)


def shapes_of(name):
  return {tensor: array.shape for tensor, array in stored(name).items()}


# Of those that test_read_weights reads among the long tests alone.
@pytest.mark.parametrize(
  "name",
  [
    "deepseek_v2",
    "deepseek_v3",
    "mixtral",
    "qwen2",
    "lfm2",
    "bamba",
    "qwen3_next",
    "nemotron_h",
    "kimi_linear",
  ],
)
def test_what_was_read_is_joined_to_the_same_tensors(name):
  sizes, arrays = name_maps.sizes_of(model_spec(job_of(name).config)), read_with_numpy(name)

  def array(parameter, place):
    return arrays[parameter][place]

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


@pytest.mark.parametrize("beginning", ["language_model.model.", "model.language_model."])
def test_the_decoder_of_a_folder_with_images(beginning):
  names = [(name, beginning + name.removeprefix("model.")) for name in stored("gemma3")]
  shapes = {theirs: stored("gemma3")[name].shape for name, theirs in names}
  vision = beginning.replace("language_model.model.", "").replace("language_model.", "")
  shapes |= {f"{vision}vision_tower.weight": (2, 2), f"{vision}multi_modal_projector.a": (2,)}
  found, wrong = matched("gemma3", shapes)
  assert not wrong
  assert {theirs: tensor.name for theirs, tensor in found.tensors.items()} == {
    theirs: name for name, theirs in names
  }


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
    name_maps.tensors(model_spec(config), "llama")


def test_a_table_row_is_all_that_a_new_family_needs():
  rows = dict(FAMILIES["llama"].names.rows)
  rows["model.layers.{}.self_attn.kv.weight"] = (
    *("KH+KH D", "layers/attention/key/kernel", "layers/attention/value/kernel"),
  )
  for name in ("k_proj", "v_proj"):
    del rows[f"model.layers.{{}}.self_attn.{name}.weight"]
  family = dataclasses.replace(FAMILIES["llama"], names=Names(rows))
  FAMILIES["test"] = family
  try:
    found = name_maps.tensors(model_spec(job_of("llama").config), "test")
  finally:
    del FAMILIES["test"]
  one = found["model.layers.1.self_attn.kv.weight"]
  assert (one.shape, [part.origin for part in one.parts]) == ((16, 16), [(0, 0), (8, 0)])
