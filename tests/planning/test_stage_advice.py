"""What a plan says of kernels that a pipeline gathers in every tick, beside sums made by hand."""

import dataclasses
import re

import pytest

from configs import single
from planning import aot, suggestions, traced_step
from planning.step_facts import of_job
from reports import plan_report
from tests.helpers.jobs import SMALL
from tests.planning import test_suggestions
from tests.planning.test_passes import KERNELS, ROUNDS, D, L, M, S, V

OURS = {**SMALL["lm"], "model.layers": L, "mesh.stage": S, "mesh.fsdp": 4}
KIB, WIDE = 1024, 2  # a GPU computes in bfloat16


def stage_gathers(**keys):
  config = single.get_config("lm")
  config.update_from_flattened_dict({**OURS, "training.microbatches": M, **keys})
  target = aot.target_of(config, "h100:8")
  job = target.job()
  return suggestions.stage_gathers_advice(target, job, traced_step.by_the_layers(of_job(job)))


def test_a_plan_compares_gathers_of_each_tick_with_one_per_step():
  said = stage_gathers(**{"training.pipeline_gather": "tick"})
  assert "--config.training.pipeline_gather=tick (as here): " in said
  assert "--config.training.pipeline_gather=step: " in said
  assert "--config.mesh.data=4 --config.mesh.fsdp=1" in said
  assert """--config.partitioning.optimizer.model='("fsdp","data")'""" in said
  found = re.findall(r"([\d.]+) (KiB|MiB) in", said)
  tick, step, data = (float(size) * (KIB if unit == "MiB" else 1) for size, unit in found)
  # Of a pass three gathers and a scatter of a chunk; of a step a gather, gradients in float32.
  of_ticks = 4 * ROUNDS * L // S * KERNELS * WIDE / KIB
  assert of_ticks < tick < 1.3 * of_ticks  # with the table, the head and the norms
  once = (L // S * KERNELS + 2 * V * D) / KIB
  assert step == pytest.approx((WIDE + 4) * once, rel=0.05)  # the table in float32
  assert data < tick


def test_without_kernels_to_gather_it_says_nothing():
  assert stage_gathers(**{"mesh.fsdp": 1, "mesh.data": 4}) == ""
  no_stages = {"mesh.stage": 1, "training.microbatches": 1, "mesh.fsdp": 8}
  assert stage_gathers(**no_stages) == ""


def test_it_is_printed_after_the_verdict():
  found = test_suggestions.make("dp8", "h100:8", recipe="mlp")
  found = dataclasses.replace(found, per_tick="kernels are gathered")
  assert "\n  kernels are gathered\n" in plan_report.text(found)
  assert found.as_json()["per_tick"] == "kernels are gathered"
