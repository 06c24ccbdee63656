"""The tables of tensors, against folders that transformers has written."""

import functools

import pytest

from interop import name_maps
from models import model_spec
from tests.interop import folders
from tests.interop.folders import described, job_of

stored = functools.cache(
  lambda name: folders.tensors_of(folders.FOLDER / name / "model.safetensors")
)


def matched(name, shapes):
  return name_maps.match(shapes, model_spec(job_of(name).config), described(name).model_type)


def shapes_of(name):
  return {tensor: array.shape for tensor, array in stored(name).items()}


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


def test_a_norm_of_olmo_hybrid_has_its_published_name_or_that_of_transformers():
  shapes, layer = shapes_of("olmo_hybrid"), "model.layers.1."  # with attention
  written, published = f"{layer}feedforward_layer_norm.weight", f"{layer}post_attention_layernorm"
  assert f"{published}.weight" in name_maps.tensors(
    model_spec(job_of("olmo_hybrid").config), "olmo_hybrid"
  )
  shapes[f"{published}.weight"] = shapes.pop(written)
  found, wrong = matched("olmo_hybrid", shapes)
  assert not wrong
  assert found.tensors.keys() == shapes.keys()
  assert matched("olmo_hybrid", {**shapes, written: (16,)})[1] == [
    f"{written} is not known: no part of a model of type 'olmo_hybrid'"
  ]


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
