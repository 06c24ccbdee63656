"""What a plan says of a budget, and what it advises, by formula."""

import dataclasses
import importlib
import math
import time

import jax
import pytest

from partitioning.rules import size_text
from planning import aot, plan, suggestions
from planning.topology import parse
from reports import plan_report
from runtime import chips

CONSTANTS = "planning.constants=h100.hbm_bytes={}"


def make(strategy, topology, *overrides, recipe="lm"):
  """Returns a plan of a shipped config; the overrides as on a command line."""
  config = importlib.import_module(f"configs.{strategy}").get_config(recipe)
  for override in overrides:
    key, _, value = override.removeprefix("--config.").partition("=")
    section, _, name = key.partition(".")
    config[section][name] = type(config[section][name])(value)
  return plan.make(config, topology, here=())


def llama_of(rematerialization):
  config = importlib.import_module("configs.single").get_config("lm")
  config.update_from_flattened_dict(
    {"model.gated": True, "training.rematerialization": rematerialization}
  )
  return config


def test_what_a_budget_of_tokens_costs():
  found = make("dp8", "h100:8", "planning.token_budget=1e9", "planning.price_per_chip_hour=2.5")
  hours = 1e9 / found.as_json()["tokens_per_second_per_device"] / 3600
  assert found.chip_hours == pytest.approx(hours)
  assert found.cost == pytest.approx(2.5 * hours)
  text = f"1 billion tokens take {hours:.3g} chip-hours and cost {2.5 * hours:.2f}"
  assert text in plan_report.text(found)


def test_what_would_save_time_is_printed_after_the_verdict_and_on_the_page():
  found = dataclasses.replace(make("dp8", "h100:8", recipe="mlp"), gather_once="for 3 ms of a step")
  assert "\n  for 3 ms of a step\n" in plan_report.text(found)
  assert "<p>for 3 ms of a step</p>" in plan_report.html(found)
  assert found.as_json()["gather_once"] == "for 3 ms of a step"


def test_a_network_without_layers_is_planned_and_advised_too():
  assert "examples/s per device" in plan_report.text(make("dp8", "h100:8", recipe="mlp"))
  found = make("dp8", "h100:8", "planning.constants=h100.hbm_bytes=5e5", recipe="mlp")
  assert not found.fits
  assert found.advice.fitting[0].overrides == "--config.mesh.data=1 --config.mesh.fsdp=8"


@pytest.mark.long
@pytest.mark.parametrize(
  ("topology", "memory", "advice"),
  [
    ("h100:8", 1e7, "--config.mesh.data=1 --config.mesh.fsdp=8"),
    ("h100:1", 3.26e7, "--config.training.rematerialization=dots"),
    ("h100:1", 2.61e7, "--config.training.rematerialization=full"),
    (
      *("h100:1", 2.17e7),
      "--config.training.rematerialization=full,layer_input=offload "
      "--config.optimizer.state_memory=host",
    ),
  ],
)
def test_the_advice_is_to_be_copied(topology, memory, advice):
  told = [
    *("mesh.data=-1", "data.global_batch_size=8"),
    f"planning.constants=h100.hbm_bytes={memory}",
  ]
  found = make("dp8", topology, *told)
  assert not found.fits
  assert found.advice.fitting[0].overrides == advice
  for one in found.advice.fitting:
    line = f"would fit, with {size_text(one.bytes)} per device by formula: {one.overrides}\n"
    assert line in plan_report.text(found)
  assert make("dp8", topology, *told, *advice.split()).fits


@pytest.mark.long
def test_advice_goes_from_accumulated_rows_to_fewer_rows_to_more_devices():
  found = make("single", "h100:1", "data.global_batch_size=16", CONSTANTS.format(1.2e7))
  assert not found.fits
  offloaded = "--config.training.rematerialization=full,layer_input=offload"
  on_host = f"{offloaded} --config.optimizer.state_memory=host"
  accumulated, fewer, larger = found.advice.fitting
  assert accumulated.overrides == f"{on_host} --config.training.gradient_accumulation_steps=16"
  assert fewer.overrides == f"{on_host} --config.data.global_batch_size=1"
  assert larger.overrides.startswith(f"--topology=h100:4 {on_host}")
  assert all(one.bytes <= 1.2e7 for one in found.advice.fitting)


@pytest.mark.long
def test_where_nothing_fits_the_smallest_is_named():
  found = make("dp8", "h100:8", CONSTANTS.format(1e5))
  assert not found.fits
  advice = found.advice
  assert advice.fitting == ()
  assert advice.smallest.bytes > 1e5
  text = f"none of {advice.tried} changes fits; the smallest takes"
  assert text in plan_report.text(found)
  assert advice.smallest.overrides in plan_report.text(found)


def test_a_plan_of_16384_gpus_starts_no_devices_and_takes_seconds(monkeypatch):
  began, started = time.process_time(), jax.device_count()
  monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("devices were started"))
  sizes = ("mesh.fsdp=16", "mesh.data=1024", "data.global_batch_size=16384")
  found = make("fsdp8", "h100:16384", *sizes)
  assert (found.job.mesh.size, found.fits, jax.device_count()) == (16384, True, started)
  assert {one.wire.network for one in found.sent} == {"DCN"}
  assert time.process_time() - began < 5


@pytest.mark.parametrize(
  ("given", "tried"),
  [
    ("none", ["elementwise", "dots", "full", "full,layer_input=offload"]),
    ("full,layer_input=offload", []),
    ("query=save,layer_input=offload", ["full,layer_input=offload"]),
    ("dots,gate=offload", ["full,gate=offload", "full,layer_input=offload,gate=offload"]),
  ],
)
def test_the_advice_keeps_what_a_config_offloads(given, tried):
  key = "training.rematerialization"
  job = aot.target_of(llama_of(given), "h100:1").job()
  changed = [one for _, one in suggestions.candidates(job, parse("h100:1"))]
  assert list(dict.fromkeys(one[key] for one in changed if key in one)) == tried


@pytest.mark.parametrize(
  ("topology", "over", "larger"),
  [
    # Slices that can be larger are; twice as many of those that cannot.
    ("v6e:8x8", {"mesh_dcn.data": 2}, [("v6e:16x8", 128, None), ("v6e:16x16", 256, None)]),
    ("2xv6e:16x16", {}, [("4xv6e:16x16", 256, 4), ("8xv6e:16x16", 256, 8)]),
  ],
)
def test_more_devices_are_larger_slices_or_more_of_them(topology, over, larger):
  config = importlib.import_module("configs.fsdp8").get_config("model=gpt2_124m")
  found = parse(topology)
  settings = {"mesh.fsdp": found.devices, "data.global_batch_size": 4096, **over}
  config.update_from_flattened_dict({**settings, "model.model_size": 1024, "model.heads": 16})
  target = aot.Target(config, found, chips.Rates(), ())
  others = [
    (where, changed)
    for where, changed in suggestions.candidates(target.job(), found)
    if where is not found
  ]
  names = [
    (where.name_with_slices, changed["mesh.fsdp"], changed.get("mesh_dcn.data"))
    for where, changed in others
  ]
  assert names[:2] == larger
  where, changed = others[0]
  job = dataclasses.replace(target, topology=where).changed(changed).job()
  assert job.mesh.size == where.devices * math.prod(job.devices.slices.values())
