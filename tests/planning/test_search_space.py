"""The settings that are searched: all meshes, tables that the model knows, whole microbatches."""

import math

import pytest

from configs import dp4_tp2, fsdp
from configs.schema import finalize
from planning import search_space
from planning.search_space import Space


def test_all_factorizations_of_the_devices_are_tried_once():
  config = finalize.finalize(dp4_tp2.get_config("lm"), "tpu")
  names = Space(config).axes()
  assert names == ("data", "fsdp", "stage", "context", "tensor")
  found = Space(config).meshes(names, 8)
  assert len({tuple(one.values()) for one in found}) == len(found) == math.comb(3 + 4, 4)
  assert all(math.prod(one.values()) == 8 for one in found)


def test_other_axes_keep_the_size_of_the_config():
  config = finalize.finalize(dp4_tp2.get_config("lm"), "tpu")
  names = Space(config).axes(("fsdp", "data"))
  assert names == ("data", "fsdp")
  assert Space(config).meshes(names, 8) == [  # beside tensor=2
    {"data": 1, "fsdp": 4},
    {"data": 2, "fsdp": 2},
    {"data": 4, "fsdp": 1},
  ]
  with pytest.raises(ValueError, match=r"mesh\.tensor=2: 7 devices cannot be divided by 2"):
    Space(config).meshes(names, 7)


def test_stages_divide_the_layers():
  config = dp4_tp2.get_config("lm")

  def found(layers):
    meshes = Space(config).meshes(("data", "stage"), 24, layers)
    return {one["stage"]: one["data"] for one in meshes}

  assert found(6) == {1: 12, 2: 6, 3: 4, 6: 2}  # beside tensor=2
  assert found(1) == {1: 12}
  config.mesh_dcn.stage = 2  # of 2 slices: with each stage of a slice another one
  assert found(6) == {1: 12, 3: 4}
  assert Space(config).stages({"mesh.stage": 3}) == 6
  assert Space(config).stages({}) == 2


def test_axes_that_cannot_be_searched_are_refused():
  with pytest.raises(ValueError, match=r"--axes=dat: unknown axis 'dat'; .*did you mean 'data'"):
    Space(dp4_tp2.get_config("lm")).axes(("dat",))
  config = fsdp.get_config("lm")
  config.model.layers = 4
  with pytest.raises(ValueError, match=r"mesh\.fsdp=-1: fsdp is not searched"):
    Space(config).axes(("data",))


def test_only_models_with_a_use_for_an_axis_get_it():
  assert Space(dp4_tp2.get_config("mlp")).axes() == ("data", "fsdp", "tensor")


@pytest.mark.parametrize(
  ("recipe", "given", "expected"),
  [
    ("mlp_tutorial", "none", ("none",)),
    ("lm", "none", search_space.TABLES),
    ("lm", "full,query=save", (*search_space.TABLES, "full,query=save")),
  ],
)
def test_tables_of_a_model_and_the_configs_own(recipe, given, expected):
  config = dp4_tp2.get_config(recipe)
  config.training.rematerialization = given
  assert Space(finalize.finalize(config, "tpu")).tables() == expected


def test_tables_that_name_what_a_model_lacks_are_left_out():
  config = dp4_tp2.get_config("lm")
  config.model.gated = False
  found = Space(finalize.finalize(config, "tpu")).tables()
  assert found == tuple(table for table in search_space.TABLES if "gate=" not in table)
  assert search_space.least(found) == "full,layer_input=offload"


def test_microbatches_divide_the_rows_of_a_device():
  assert search_space.microbatches(12) == [1, 2, 3, 4, 6, 12]


def test_variants_change_one_thing_each():
  config = finalize.finalize(dp4_tp2.get_config("lm"), "tpu")
  setting = {"mesh.fsdp": 8}
  assert list(Space(config).variants(setting, 4)) == [
    {"mesh.fsdp": 8, "partitioning.reshard_after_forward": False},
    {"mesh.fsdp": 8, "training.loss_chunks": 2},
    {"mesh.fsdp": 8, "training.loss_chunks": 8},
  ]
  more = [*Space(config).variants(setting, 4, 16)]
  assert {"mesh.fsdp": 8, "training.microbatches": 16} in more
  # Nothing is gathered without fsdp, and one chunk has no half.
  assert list(Space(config).variants({}, 1)) == [{"training.loss_chunks": 2}]


def test_overrides_are_what_differs():
  config = dp4_tp2.get_config("lm")
  setting = {"mesh.data": 4, "mesh.fsdp": 2, "training.rematerialization": "dots"}
  changed = Space(config).changed(setting)
  assert search_space.text(changed) == (
    "--config.mesh.fsdp=2 --config.training.rematerialization=dots"
  )


# ---- Pipeline stages ----


def test_without_stages_what_a_config_says_of_them_is_left_out():
  config = dp4_tp2.get_config("lm")
  assert Space(config).without_pipeline() == {}
  config.training.update({"pipeline": "gpipe", "microbatches": 4})
  assert Space(config).without_pipeline() == {
    "training.pipeline": "1f1b",
    "training.microbatches": 1,
  }


def test_ticks_are_those_of_the_schedule():
  """A step of M microbatches in v chunks on S stages has M v + S - 1 ticks (arXiv:2104.04473)."""
  assert search_space.ticks_of_step(4, 12, 1) * 12 == pytest.approx(12 + 4 - 1)
  assert search_space.ticks_of_step(4, 12, 2) * 24 == pytest.approx(24 + 4 - 1)
  assert search_space.ticks_of_step(1, 12, 1) == 1


def test_a_bound_of_what_stages_compute():
  # Layers: a forward pass more than three (or of attention 2 of 7 matmuls), and the bubble.
  assert search_space.least_by_stages(4, 12, 1) == pytest.approx(9 / 7 * 15 / 12)
  # What is before and after the layers, on each of two stages.
  assert search_space.least_by_stages(2, 1, 1) == 2


def test_numbers_of_microbatches_above_one():
  config = dp4_tp2.get_config("lm")
  assert Space(config).chunks_of_stage() == 1
  assert Space(config).more_microbatches(3, 12, 3) == [4, 6, 12]
  config.training.pipeline = "interleaved"
  assert Space(config).chunks_of_stage() == 2
  assert Space(config).more_microbatches(3, 12, 3) == [6, 12]


def test_inputs_that_more_microbatches_make_smaller():
  config, parts = dp4_tp2.get_config("lm"), {"saved inputs of chunks": 5}
  assert Space(config).divided_inputs(parts) == 5
  assert Space(config).divided_inputs({}) == 0
  config.training.pipeline = "gpipe"  # keeps those of all microbatches
  assert Space(config).divided_inputs(parts) == 0
