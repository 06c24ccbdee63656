"""Settings by formula: the same numbers as a plan's, the fastest found, and the limits kept."""

import copy
import dataclasses
import itertools

import pytest

from configs import dp4_tp2
from planning import aot, plan, search, search_space
from planning.search_results import Estimate
from planning.search_space import REMATERIALIZATION
from planning.topology import parse
from runtime.chips import overridden
from tests.helpers.jobs import SMALL

CHIPS, _ = overridden("")


def small(recipe="mlp", **changes):
  config = dp4_tp2.get_config(recipe)
  config.update_from_flattened_dict({**SMALL[recipe], **changes})
  return config


def formulas(config, name="h100:8", limit=None) -> search.Formulas:
  here = ()
  target = aot.target_of(config, name, here=here)
  return search.Formulas(target, search.limit_of(target) if limit is None else limit)


def looked(config, names=("data", "fsdp"), most=2, **more) -> search.Search:
  found = search.Search(formulas(config, **more), names, most=most)
  found.run()
  return found


@pytest.fixture(scope="module", autouse=True)
def _few_tables():
  """Two of the tables: each is a trace or two."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(search_space, "TABLES", ("none", "full"))
    yield


@pytest.fixture(scope="module")
def decoder() -> search.Search:
  return looked(small("lm"))


def test_the_numbers_are_those_of_a_plan(decoder):
  """Also where the trace of another mesh with the same part of the model is used again."""
  here = ()
  changes = {"mesh.data": 2, "mesh.fsdp": 2, "training.rematerialization": "none"}
  one = decoder.formulas.estimate(changes)
  assert len(decoder.formulas._layers) < len(decoder.formulas.known)
  config = small("lm", **changes)
  expected = plan.make(config, "h100:8", here=here)
  assert one.bytes == expected.peak_bytes
  assert one.seconds == expected.step_seconds[1]
  assert one.tokens == expected.tokens
  assert one.mesh == {"data": 2, "fsdp": 2, "tensor": 2}


def test_the_fastest_is_that_of_all_settings(decoder):
  """By looking into every mesh and table, also those that the search has left out."""
  every = formulas(small("lm"))
  every.known = dict(decoder.formulas.known)
  for data, table in itertools.product((1, 2, 4), search_space.TABLES):
    mesh = {"mesh.data": data, "mesh.fsdp": 4 // data}
    every.estimate({**mesh, "training.rematerialization": table})
  fit = [one for one in every.used.values() if not one.refused]
  assert decoder.fastest()[0].seconds <= min(one.seconds for one in fit)
  assert len(fit) == 3 * len(search_space.TABLES)


def test_microbatches_bring_it_below_the_limit():
  """The rows of a device are divided as often as needed, and no more."""
  config = small(**{"data.global_batch_size": 8192})
  whole = formulas(config).estimate({})
  assert whole.of_rows > 3 * whole.sums  # else nothing is saved
  limit = whole.bytes + whole.sums - 0.6 * whole.of_rows
  found = search.Search(formulas(config, limit=limit), ("data", "fsdp"))
  one = found._of_table({"mesh.data": 4, "mesh.fsdp": 1}, "none")
  assert whole.bytes > limit >= one.bytes
  assert one.microbatches == 4  # half of the rows would be too many
  assert one.setting == {"training.gradient_accumulation_steps": 4}


@pytest.fixture(scope="module")
def staged() -> search.Search:
  """Of 8 devices that have 4 rows: without stages there is nothing to do for half of them."""
  config = small("lm", **{"data.global_batch_size": 4, "model.layers": 4, "mesh.tensor": 1})
  return looked(config, ("data", "fsdp", "stage"), most=1)


def test_stages_are_found_where_there_are_fewer_rows_than_devices(staged):
  best = staged.fastest()[0]
  assert best.mesh["stage"] > 1
  reasons = search.refusals(staged.formulas.used)  # counted, and left out
  assert any(count and "global_batch_size=4" in why for why, count in reasons.items())
  assert not any(one.refused for one in staged.fastest())
  every = [
    staged.formulas.estimate({"mesh.data": 8 // n, "mesh.stage": n, REMATERIALIZATION: "none"})
    for n in (2, 4)
  ]
  assert not any(one.refused for one in every)
  assert best.seconds <= min(one.seconds for one in every)


def test_a_setting_of_stages_has_the_numbers_of_its_plan(staged):
  one = staged.fastest()[0]
  changes = {"data.global_batch_size": 4, "model.layers": 4, "mesh.tensor": 1, **one.setting}
  here = ()
  expected = plan.make(small("lm", **changes), "h100:8", here=here)
  assert one.bytes == expected.peak_bytes
  assert one.seconds == expected.step_seconds[1]


@pytest.fixture(scope="module")
def two() -> search.Formulas:
  """Of two devices, and a config with two layers."""
  changes = {"data.global_batch_size": 64, "mesh.tensor": 1}
  return formulas(small("lm", **changes), "h100:2")


def test_bounds_of_stages_are_below_their_times(two):
  """Also with more microbatches, whose bubble is smaller."""
  found = search.Search(two, ("data", "stage"))
  settings = [{"mesh.data": 2, "mesh.stage": 1}, {"mesh.data": 1, "mesh.stage": 2}]
  (_, _, known), (bound, _, guessed) = found._bounds(settings, "none")
  assert (known, guessed) == (True, False)
  closer = found._bound(settings[1], "none")
  assert 0 < bound < closer
  changes = {"training.microbatches": 32, REMATERIALIZATION: "none"}  # 8 are the default
  for more in ({}, changes):
    one = two.estimate({**settings[1], REMATERIALIZATION: "none", **more})
    assert closer <= one.seconds_per_token


def test_microbatches_of_a_pipeline_bring_it_below_the_limit(two):
  setting = {"mesh.data": 1, "mesh.stage": 2}
  whole = two.estimate({**setting, REMATERIALIZATION: "none"})
  assert whole.microbatches == 8
  limit = whole.bytes - 0.7 * whole.of_rows
  found = search.Search(dataclasses.replace(two, limit=limit, used={}), ("data", "stage"))
  one = found._of_table(setting, "none")
  assert one.bytes <= limit < whole.bytes
  assert one.microbatches == 32  # half of the rows would be too many
  assert one.setting["training.microbatches"] == 32
  assert "training.gradient_accumulation_steps" not in one.setting


def test_without_stages_nothing_is_said_of_pipelines():
  changes = {"mesh.stage": 2, "training.pipeline": "interleaved", "training.microbatches": 4}
  config = small("lm", **changes, **{"model.layers": 4, "mesh.tensor": 1})
  found = search.Search(formulas(config, "h100:2"), ("data", "stage"))
  without, with_stages = found._meshes(config)[::-1]
  assert with_stages == {"mesh.data": 1, "mesh.stage": 2}
  assert found.formulas.job(with_stages).program.pipeline.chunks == 2
  assert without["training.pipeline"] == "1f1b"
  assert found.formulas.job(without).program.pipeline is None  # not refused


def test_what_was_estimated_before_is_not_estimated_again(monkeypatch):
  config = small()
  first = looked(config)
  again = formulas(config)
  again.known = dict(first.formulas.known)
  other = Estimate({"mesh.tensor": 8, "mesh.data": 1}, mesh={"tensor": 8}, seconds=1e-9, tokens=1)
  again.known[other.key] = other  # of a search with other axes
  monkeypatch.setattr(again, "_estimate", lambda setting: pytest.fail(str(setting)))
  found = search.Search(again, ("data", "fsdp"), most=2)
  found.run()
  assert found.fastest()[0] == first.fastest()[0]
  assert other not in found.fastest()


def test_other_batch_sizes_are_compared_per_token():
  config = small()
  found = search.Search(formulas(config), ("data",), (16, 32), most=2)
  found.run()
  rows = {one.setting.get("data.global_batch_size", 16) for one in found.fastest()}
  assert rows == {16, 32}
  assert found.fastest()[0].tokens == 32  # the same time per step and pass over the parameters


def test_the_configs_own_setting():
  config = small()
  assert search.Search(formulas(config), ()).given == "{}"
  config.mesh.update({"data": -1, "tensor": 1})
  assert search.Search(formulas(config), ()).given == '{"mesh.data": 8}'
  config.mesh.update({"data": 3})
  assert search.Search(formulas(config), ()).given is None


def test_the_budget_is_that_of_the_config():
  config = small("lm")
  assert search.Search(formulas(config), ()).budget == config.training.steps * 16 * 12
  config.planning.token_budget = 1e9
  assert search.Search(formulas(config), ()).budget == 1e9
  assert search.Search(formulas(small()), ()).unit == "examples"


def test_slices_in_the_topologys_name_are_an_override_of_the_run():
  config = small()
  assert search.Search(formulas(config), ()).over == {}
  two = search.Search(formulas(config, "2xv5e:2x2"), ())
  assert two.over == {"mesh_dcn.data": 2}
  assert two.devices == 8
  config.mesh_dcn.fsdp = 2
  assert search.Search(formulas(config, "2xv5e:2x2"), ()).over == {}


def test_the_limit():
  config = small()
  target = formulas(config, limit=1.0).target
  assert search.limit_of(target) == target.topology.usable_bytes == 0.92 * CHIPS["h100"].hbm_bytes
  config.memory_limit_gib = 2.0
  assert search.limit_of(target) == 2 * 2**30
  simulated = dataclasses.replace(target, topology=parse("cpu:8", CHIPS))
  assert search.limit_of(simulated) == 2**30 / 4  # they share the machine's
  config.memory_limit_gib = 0.0
  with pytest.raises(ValueError, match="memory_limit_gib=0: above 0"):
    search.limit_of(target)


def test_what_would_fit_is_named_where_nothing_does():
  """Here microbatches; the memory is that of their own estimate."""
  config = small(**{"data.global_batch_size": 8192})
  whole = formulas(config).estimate({})
  small_chip = dataclasses.replace(CHIPS["h100"], hbm_bytes=whole.bytes * 0.7)
  topology = dataclasses.replace(parse("h100:8", CHIPS), chip=small_chip)
  tried = formulas(copy.deepcopy(config), limit=small_chip.hbm_bytes)
  tried.target = dataclasses.replace(tried.target, topology=topology)
  ways = search.nearest(tried, {}, 1.0)
  assert ways
  more, name, size = ways[0]
  assert name == ""
  assert size <= small_chip.hbm_bytes < whole.bytes
  assert formulas(config).estimate(more).bytes == size
