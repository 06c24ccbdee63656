"""Folders of every family and option whose logits tests/models compares: their config, their names.

The configs and the tensors here are written by tests/models/write_families.py, by other tables.
"""

import functools

import numpy as np
import pytest

from interop import hf_config, name_maps
from models import model_spec
from tests.models import families, write_families
from tests.models.families import FAMILIES, KEPT

# What no model_type has: GPT-2 is read and written whatever its activation is.
NAMES = [name for name in FAMILIES if name not in ("llama2", "gpt2_positions")]


@functools.cache
def job_of(family):
  return families.job_of(family)


def theirs_of(family):
  """Returns (config.json, name -> tensor) as these tables write them."""
  config = job_of(family).config
  model = {key: config.model[key] for key in hf_config.KEYS}
  model_type = write_families.their_config(family)["model_type"]
  written = hf_config.write(model, families.LENGTH, model_type)
  arrays, sizes = families.drawn(job_of(family)), name_maps.sizes_of(model_spec(config))
  tensors = {
    name: name_maps.joined(tensor, sizes, lambda name, place: arrays[name][place])
    for name, tensor in name_maps.tensors(model_spec(config), model_type).items()
  }
  return {**written, "pad_token_id": 0}, tensors  # by default some have one beyond 61 tokens


@pytest.mark.parametrize("family", NAMES)
def test_a_config_is_read_as_the_model_that_it_is(family):
  found = hf_config.canonical(hf_config.read(write_families.their_config(family), family).model)
  model = job_of(family).config.model
  wanted = hf_config.canonical({key: model[key] for key in hf_config.KEYS})
  for key in wanted:
    assert hf_config.same_value(found[key], wanted[key]), key


@pytest.mark.parametrize("family", NAMES)
def test_what_is_written_has_the_names_and_arrays_of_the_library(family):
  written, tensors = theirs_of(family)
  wanted = write_families.converted(family, families.drawn(job_of(family)))
  assert tensors.keys() == wanted.keys()
  for name, array in wanted.items():
    np.testing.assert_array_equal(tensors[name], array, err_msg=name)
  assert written["model_type"] == write_families.their_config(family)["model_type"]


@pytest.mark.transformers
@pytest.mark.parametrize("version", write_families.PYTHONS)
def test_the_library_computes_the_same_logits_from_what_is_written(version):
  known = write_families.known_to(version)
  folders = {family: theirs_of(family) for family in NAMES if family in known}
  found = write_families.library_logits(folders, version)
  with np.load(write_families.FILE) as fixture:
    for family, logits in found.items():
      wanted = fixture[family]
      assert np.abs(logits[:, KEPT] - wanted).max() <= 1e-10 * np.abs(wanted).max(), family
