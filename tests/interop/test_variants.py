"""Folders of every family and option whose logits tests/models compares: their config, their names.

The configs and the tensors here are written by tests/models/write_families.py, by other tables.
"""

import functools

import numpy as np
import pytest

from interop import hf_config, name_maps
from models import model_spec
from tests.models import families, write_families
from tests.models.families import FAMILIES

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
def test_config_and_tensors_are_those_of_the_library_in_both_directions(family):
  theirs = write_families.their_config(family)
  found = hf_config.canonical(hf_config.read(theirs, family).model)
  model = job_of(family).config.model
  given = hf_config.canonical({key: model[key] for key in hf_config.KEYS})
  for key in given:
    assert hf_config.same_value(found[key], given[key]), key
  written, tensors = theirs_of(family)
  wanted = write_families.converted(family, families.drawn(job_of(family)))
  assert tensors.keys() == wanted.keys()
  for name, array in wanted.items():
    np.testing.assert_array_equal(tensors[name], array, err_msg=name)
  assert written["model_type"] == theirs["model_type"]
