"""The verb `search`: its result on a topology, what it keeps, its exit codes and refusals."""

import dataclasses
import json
import re

import jax
import psutil
import pytest

from commands import flags, plan_process, plan_worker, search_process
from commands import search as verb
from configs import dp4_tp2
from planning import aot, search
from planning.search_results import Estimate
from tests.helpers.cli import QUICKLY
from tests.helpers.jobs import SMALL
from tests.helpers.terminals import Terminal
from tests.helpers.terminals import main as command
from tests.reports.test_search_text import FOUND, NOTHING

AXES = ("data", "tensor")
BYTES = dict.fromkeys(("peak_bytes_per_device", "allocated_bytes_per_device"), 1000)
MLP = ["--config=configs/dp4_tp2.py:mlp", "--config.model.model_size=16"]


def small(tmp_path, recipe="mlp", **changes):
  config = dp4_tp2.get_config(recipe)
  config.planning.cache_dir = str(tmp_path / "plans")
  config.update_from_flattened_dict({**SMALL[recipe], **changes})
  return config


@pytest.fixture
def answers(monkeypatch):
  """Has the worker's answers computed in this process; returns the requests."""
  requests = []

  def answer(request, **_):
    here = tuple(jax.devices()) if request["topology"] is None else ()
    target = aot.target_of(request["config"], request["topology"] or "cpu:8", here=here)
    given = search.Formulas(target, search.limit_of(target))
    with open("/dev/null", "wb") as pipe:
      request = {**request, "phases": pipe.fileno()}
      requests.append(request)
      found = getattr(plan_worker, f"_{request['task']}")(request, given)
    return json.loads(json.dumps(found))

  monkeypatch.setattr(plan_process, "answer", answer)
  return requests


def asked(config, **more):
  return search_process.Asked(config, "dp4_tp2_mlp", **more)


def compiler(monkeypatch, seconds, *, fits=True):
  """Has plans made by a function from a config to seconds; returns the configs."""
  configs = []

  def made(config, topology, **_):
    configs.append(config)
    times = {"expected": seconds(config)} if fits else None
    return {"plan": {"fits": fits, **BYTES, "step_seconds": times}}

  monkeypatch.setattr(plan_process, "made", made)
  monkeypatch.setattr(aot, "compiled_here", lambda *_: True)
  return configs


@pytest.mark.long
def test_gpus_are_searched_by_formula(main, tmp_path):
  cache = f"--config.planning.cache_dir={tmp_path / 'plans'}"
  code, out, err = main(
    *("search", *MLP, "--topology=h100:8,h200:8", "--price=h100=2", "--price=h200=9"),
    "--axes=data,tensor",
    *(f"--workdir={tmp_path / 'run'}", cache),
  )
  assert (code, err) == (0, ""), (out, err)
  assert "8 devices of h100:8: " in out
  assert "nothing was compiled or run" in out
  assert "cheapest of all: 8 devices of h100:8" in out
  found = json.loads((tmp_path / "run" / "search.json").read_text())["topologies"]
  assert [one["topology"] for one in found] == ["h100:8", "h200:8"]
  best = found[0]["settings"][0]
  assert best["step_seconds"] == min(
    one["step_seconds"] for one in found[0]["by_formula"] if one["fits"]
  )
  command = next(line for line in out.splitlines() if line.startswith("to train on h100:8"))
  assert command.endswith(f"{' '.join(MLP)} {cache} {best['overrides']}".strip())
  page = (tmp_path / "run" / "search.html").read_text()
  assert page.count("<svg viewBox") == 2


def test_the_best_by_formula_are_compiled_and_the_compilers_best_wins(
  answers, monkeypatch, tmp_path, capsys
):
  config = small(tmp_path)
  configs = compiler(monkeypatch, lambda one: 1.0 if one.mesh.tensor > 2 else 2.0)
  # Not all are: those are left out of which the formulas do not expect to be the fastest.
  found = search_process.of_topology(asked(config, compilations=4, axes=AXES), "h100:8")
  assert 1 < len(configs) <= 4
  assert configs[0].mesh == config.mesh  # the config as given
  assert found.source == "compiler"
  assert found.as_given.seconds == 2.0
  assert capsys.readouterr().out.count(" by compiler: ") == len(configs)
  none = search_process.of_topology(asked(config, compilations=0, axes=AXES), "h100:8")
  assert none.source == "formula"


def test_a_stopped_search_goes_on_where_it_was(answers, monkeypatch, tmp_path):
  config = small(tmp_path)
  whole = search_process.of_topology(asked(config, axes=AXES), "h100:8")
  [kept] = (tmp_path / "plans").glob("*.search.jsonl")
  lines = kept.read_text().splitlines()
  assert len(lines) >= len(whole.estimates)
  kept.write_text("\n".join([*lines[:2], lines[2][:30]]))  # killed while it wrote
  estimated = []
  real = search.Formulas._estimate

  def estimate(self, setting):
    estimated.append(setting)
    return real(self, setting)

  monkeypatch.setattr(search.Formulas, "_estimate", estimate)
  again = search_process.of_topology(asked(config, axes=AXES), "h100:8")
  assert len(estimated) == len(lines) - 2
  assert [row.estimate for row in again.rows] == [row.estimate for row in whole.rows]
  estimated.clear()
  search_process.of_topology(asked(config, axes=AXES), "h100:8")
  assert not estimated


def test_a_compilation_that_fails_is_reported_and_the_search_goes_on(
  answers, monkeypatch, tmp_path
):
  config, calls = small(tmp_path), []

  def made(config, topology, **_):
    calls.append(config)
    if len(calls) == 1:
      raise RuntimeError("error: the compiler crashed\nmore")
    times = {"expected": 1.0}
    return {"plan": {"fits": True, **BYTES, "step_seconds": times}}

  monkeypatch.setattr(plan_process, "made", made)
  monkeypatch.setattr(aot, "compiled_here", lambda *_: True)
  found = search_process.of_topology(asked(config, compilations=2, axes=AXES), "h100:8")
  assert len(calls) == 2
  assert [row.failed for row in found.rows] == ["", "the compiler crashed"]


def test_where_nothing_fits_it_says_what_would(answers, monkeypatch, tmp_path):
  # By the compiler, although formulas say that all do.
  compiler(monkeypatch, lambda one: 1.0, fits=False)
  config = small(tmp_path)
  found = search_process.of_topology(asked(config, compilations=2, axes=AXES), "h100:8")
  assert not found.fits
  assert answers[-1]["task"] == "nearest"
  assert answers[-1]["scale"] == pytest.approx(1000 / _estimate_of(found, answers[-1]).bytes)
  for more, name, size in found.nearest:
    assert more
    assert size <= 80 * 2**30
    assert name in ("", "h100:16")


def _estimate_of(found, request) -> Estimate:
  return next(one for one in found.estimates if one.setting == request["setting"])


def test_a_stopped_search_does_not_repeat_its_short_runs(answers, monkeypatch, tmp_path, capsys):
  ran = []

  def measure(jobs, limit, rounds, progress):
    ran.append(len(jobs))
    if len(ran) == 3:
      raise KeyboardInterrupt
    return [search.Run(9, job.mesh.shape["tensor"] / rounds) for job in jobs]

  monkeypatch.setattr(search, "measure", measure)
  config = small(tmp_path, **{"compilation_cache_dir": ""})
  with pytest.raises(KeyboardInterrupt):
    search_process.of_topology(asked(config, compilations=4, axes=AXES), None)
  found = search_process.of_topology(asked(config, compilations=4, axes=AXES), None)
  assert ran == [1, 1, 1, 1, 1, 3]  # the third again, the fourth, and the best three
  assert len(found.tried) == 4
  assert (found.source, found.topology) == ("short run", "cpu:8")
  assert found.best.seconds == min(row.seconds for row in found.rows)
  assert capsys.readouterr().out.count("1 by short run: ") == 2
  ran[:] = [0, 0, 0]
  search_process.of_topology(asked(config, compilations=4, axes=AXES), None)
  assert ran[3:] == [1, 1, 1, 1, 3]  # it had ended: a new one measures anew


def test_a_search_tells_how_long_it_will_take(tmp_path):
  config, told, phases = small(tmp_path), [], []
  formulas = search.Formulas(aot.target_of(config, "h100:8", here=()), 80 * 2**30)
  looked = search.Search(formulas, AXES, progress=phases.append, tell=told.append)
  looked.run()
  [text] = told
  assert re.fullmatch(r"4 meshes, about \d+ settings by formula, about \d:\d\d left", text), text
  expected = int(text.split()[3])
  assert len(formulas.used) / 2 <= expected <= 2 * len(formulas.used)
  assert all(re.search(r", about \d:\d\d left$", phase) for phase in phases[:-4])
  again = search.Search(dataclasses.replace(formulas, used={}, seconds=[]), AXES, tell=told.append)
  again.run()
  assert told[1].endswith(f" settings by formula, {expected} of them known from an earlier search")


def test_exit_code_3(parse, monkeypatch, tmp_path):
  """As the verb returns it, where a topology fits and where none does."""
  parse("search", *MLP, "--topology=h100:8,h200:8", f"--workdir={tmp_path / 'run'}")
  for results, code in (([FOUND, FOUND], 0), ([NOTHING, NOTHING], 3), ([NOTHING, FOUND], 0)):
    left = iter(results)
    monkeypatch.setattr(search_process, "of_topology", lambda *_, left=left: next(left))
    assert verb.run() == code


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--compilations=-1"], "--compilations=-1: at least 0"),
    (["--global_batch_sizes=64,x"], "'x' is no number of rows, such as 64,128"),
    ([f"--global_batch_sizes={10**12}"], "1000000000000 is too many rows; at most 16,777,216"),
    (["--topology=v9p-128"], "unknown device 'v9p-128'"),
    (["--topology=h100:8,h100:8"], "a topology is given twice"),
    (["--topology=h100:8", "--price=v5p=4"], "no topology has 'v5p'; searched are h100"),
    (["--price=v5p=4"], "--price=CHIP=PRICE goes with --topology"),
  ],
)
def test_bad_flags_are_refused(parse, arguments, message):
  parse("search", *MLP, *arguments)
  with pytest.raises(ValueError, match=re.escape(message)):
    verb._asked(flags.CONFIG.value.planning)


@pytest.mark.long
def test_ctrl_c_ends_it_at_once_and_leaves_estimates_but_no_worker(tmp_path):
  arguments = ["search", *MLP, "--topology=h100:8", f"--workdir={tmp_path / 'run'}"]
  cache = f"--config.planning.cache_dir={tmp_path / 'plans'}"
  with Terminal(command(*arguments, cache), environment={"TMPDIR": str(tmp_path)}) as terminal:
    terminal.wait_for("mesh 4 of ")
    started = psutil.Process(terminal.popen.pid).children(recursive=True)
    assert started
    terminal.press()
    assert terminal.end() == 75
    left = psutil.wait_procs(started, timeout=20)[1]
    text = terminal.text()
  assert not left
  assert "search: h100:8: mesh" in text
  assert "Traceback" not in text
  assert not (tmp_path / "run" / "search.json").exists()
  [kept] = (tmp_path / "plans").glob("*.search.jsonl")
  assert len(kept.read_text().splitlines()) >= 3


@pytest.mark.long
def test_simulated_devices_are_really_run(main, tmp_path):
  code, out, err = main(
    *("search", *MLP, QUICKLY, "--simulate", "--compilations=2", "--axes=data,fsdp"),
    *(f"--workdir={tmp_path / 'run'}", f"--config.planning.cache_dir={tmp_path / 'plans'}"),
  )
  assert (code, err) == (0, ""), (out, err)
  assert "time measured in short runs" in out
  [found] = json.loads((tmp_path / "run" / "search.json").read_text())["topologies"]
  assert found["topology"] == "cpu:8"
  assert [one["source"] for one in found["settings"]] == ["short run"] * 2
  assert all(0 < one["step_seconds"] < 5 for one in found["settings"])
  assert all(one["mesh"]["tensor"] == 2 for one in found["settings"])  # not searched
  assert sum(one["as_given"] for one in found["settings"]) == 1
