"""The page of a plan: the verdict, memory against the limit, overrides to copy, human units."""

import dataclasses
import importlib
import re

import pytest

from partitioning.rules import size_text
from planning import memory, plan
from planning.step_time import HostTraffic, by_axes
from planning.timeline import Timeline
from reports import plan_report
from reports.html import words
from reports.plan_report import TIMELINE_WIDTH
from runtime import units
from tests.reports.test_layout_page import Reader
from tests.reports.test_timeline_text import GAP, LAYER
from training import compiler_options


def make(strategy, topology, constants=""):
  config = importlib.import_module(f"configs.{strategy}").get_config("mlp")
  config.planning.constants = constants
  here = ()
  return plan.make(config, topology, title="<script>a()", here=here)


@pytest.fixture(scope="module")
def fits():
  return make("dp4_tp2", "h100:8")


def bars(text):
  """Returns (percents of the parts, percent of the limit) of each stacked bar."""
  found = re.findall(r'<div class="stack".*?</div>', text, re.DOTALL)
  return [
    ([float(x) for x in re.findall(r"<i [^>]*width:([\d.e-]+)%", bar)], re.findall(r"<b.*?%", bar))
    for bar in found
  ]


def test_the_verdict_the_numbers_and_the_command_are_on_the_page(fits):
  text = plan_report.html(fits, command='main.py plan "<b>"')
  read = Reader(text)
  said = "".join(read.said)
  assert plan_report.verdict(fits) in said
  assert 'main.py plan "<b>"' in said
  assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", said)
  low, expected, high = map(units.seconds, fits.step_seconds)
  assert f"a step{expected} ({low} to {high})" in "".join(said.split("\n")).replace("\xa0", " ")
  assert plan_report.constants(fits) in said


def lanes_of(text):
  """Returns name -> (kind, left and width in percent) of the bars, of each lane."""
  found = re.findall(r'<div class="lane".*?aria-label="(.*?)">(.*?)</div>', text)
  bar = r'<i class="(\w+)" style="left:([\d.e-]+)%;width:([\d.e-]+)%'
  return {
    name: [(kind, float(left), float(width)) for kind, left, width in re.findall(bar, row)]
    for name, row in found
  }


def test_the_time_of_a_step_is_a_picture_on_one_scale(fits):
  """Each length is seconds over the upper end of the range; what is waited for is marked."""
  [one, *others] = fits.times.sent
  waiting = dataclasses.replace(one, exposed_seconds=one.seconds / 4)
  times = dataclasses.replace(fits.times, sent=(waiting, *others))
  times = dataclasses.replace(times, step=times.step + waiting.exposed_seconds - fits.times.exposed)
  text = plan_report.html(dataclasses.replace(fits, times=times))
  lanes = lanes_of(text)
  share = 100 / dataclasses.replace(fits, times=times).step_seconds[2]
  step = lanes["step: computing, waiting for collectives"]
  assert [kind for kind, *_ in step] == ["computing", "wait"]
  assert sum(width for *_, width in step) == pytest.approx(share * times.step, abs=0.01)
  assert step[1][1] == pytest.approx(step[0][2], abs=0.01)  # one begins where the other ends
  [(kind, left, width)] = lanes["compute alone"]
  assert (kind, left) == ("matmul", 0)
  assert width == pytest.approx(share * times.compute, abs=0.01)
  for row in by_axes(times.sent):
    bars = lanes[f"{row['axis']}, {row['kind']}"]
    assert sum(width for *_, width in bars) == pytest.approx(share * row["seconds"], abs=0.01)
  assert "Timeline of a layer</h2>" not in text  # by formula there is none


def test_a_plan_by_formula_has_no_compiler_options(fits, monkeypatch):
  assert fits.program is None
  # If the CPU had some, in whose place the GPUs are.
  monkeypatch.setattr(compiler_options, "of_device", lambda device: {"xla_of_cpus": True})
  assert fits.job.compiler_defaults
  assert fits.as_json()["compiler_options"] == {}
  assert "compiler_options" not in plan_report.text(fits)


def test_transfers_to_and_from_the_host_and_whether_they_are_hidden(fits):
  """On the page and in the text; without any there is no section."""
  assert "host memory" not in plan_report.html(fits) + plan_report.text(fits)
  out = HostTraffic("to host", 3 * 2**20, 0.004, 0.0, "activations")
  back = HostTraffic("from host", 3 * 2**20, 0.004, 0.002, "activations")
  times = dataclasses.replace(fits.times, host=(out, back))
  moving = dataclasses.replace(fits, times=times, host_memory={"activations": 5 * 2**20})
  rows = [row[:5] for row in Reader(plan_report.html(moving)).rows]
  assert ["to host", "activations", "3.0 MiB", "4.0", "0.0"] in rows
  assert ["from host", "activations", "3.0 MiB", "4.0", "2.0"] in rows
  text = plan_report.text(moving)
  assert (
    "6.0 MiB moved per step and device over 64 GB/s each way, 75 % hidden (exposed 2 ms)" in text
  )
  assert re.search("in the host's memory: activations +5.0 MiB", text)
  assert moving.as_json()["host_traffic"][1]["exposed_seconds"] == 0.002


def test_the_timeline_of_a_layer_and_the_waits_with_their_lines(fits):
  assert "none without a compiled program" in "".join(Reader(plan_report.html(fits)).said)
  shown = Timeline((LAYER,), (GAP,), ("no loop over 4 layers in the backward pass",))
  text = plan_report.html(dataclasses.replace(fits, timeline=shown))
  read = Reader(text)
  said = "".join(read.said)
  assert plan_report.head(LAYER) in said
  assert "no loop over 4 layers in the backward pass" in said
  bars = lanes_of(text[text.index("Timeline of a layer</h2>") :])
  assert list(bars) == ["compute", *LAYER.transfers]
  kinds = ["matmul", "memory", "inner", "matmul", "wait", "wait"]
  assert [kind for kind, *_ in bars["compute"]] == kinds
  assert float(bars["from host"][0][1]) == pytest.approx(100 * 44 / TIMELINE_WIDTH, abs=1e-3)
  waits = [row for row in read.rows if row[0].startswith(GAP.what)]
  assert [[cell.replace("\u200b", "") for cell in row] for row in waits] == [
    [f"{GAP.what} {GAP.when}", GAP.line, "32", "320 ms"]
  ]
  assert dataclasses.replace(fits, timeline=shown).as_json()["timeline"]["layers"][0]["runs"] == 32


def test_what_is_in_a_title_is_text_and_no_markup(fits):
  text = plan_report.html(dataclasses.replace(fits, warnings=("<img src=x>",)))
  assert "<script>a()" not in text
  assert "<img" not in text
  said = "".join(Reader(text).said)
  assert "Plan: <script>a() on h100:8" in said
  assert "warning: <img src=x>" in said


def test_memory_is_one_bar_against_the_limit_and_a_small_one_is_enlarged(fits):
  limit, peak = fits.topology.usable_bytes, fits.memory_at_once
  text = plan_report.html(fits)
  [(parts, none)] = bars(text)
  assert sum(parts) == pytest.approx(100)
  assert none == []
  share = f"{size_text(peak)} of {size_text(int(limit))} ({100 * peak / limit:.3g} %); the bar is"
  assert share in "".join(Reader(text).said)
  tight = dataclasses.replace(fits.topology.chip, hbm_bytes=4 * peak / 0.92)
  tight = dataclasses.replace(fits, topology=dataclasses.replace(fits.topology, chip=tight))
  [(parts, line)] = bars(plan_report.html(tight))
  assert sum(parts) == pytest.approx(25)
  assert line == ['<b style="left:0;width:100.0%']
  there = memory.at_peak(fits.memory)
  assert sum(there.values()) == peak <= sum(fits.memory.values())
  assert len(parts) == len([size for size in there.values() if size])


def test_overrides_of_a_plan_that_does_not_fit_can_be_copied():
  found = make("dp8", "h100:8", "h100.hbm_bytes=5e5")
  text = plan_report.html(found)
  assert not found.fits
  assert found.advice.fitting
  for one in found.advice.fitting:
    assert (
      f'<div class="copy"><code>{words(one.overrides)}</code><button type="button">copy' in text
    )
    assert f"{size_text(one.bytes)} per device" in text
  span = '<span class="word">--config.mesh.data=1</span> <span class="word">--config.mesh.fsdp=8'
  assert span in text
  [(parts, line)] = bars(text)
  assert sum(parts) == pytest.approx(100)
  assert 0 < float(line[0].split("width:")[1].rstrip("%")) < 100
  assert text.count("Not computed: it does not fit.") == 2
