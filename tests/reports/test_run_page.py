"""The page of a run: its numbers are those of the files, whatever happened to the run."""

import dataclasses
import re
import time

import pytest

from reports import charts, layout_page, run_charts, run_files, run_page
from tests.helpers.jobs import make_job
from tests.reports import runs
from tests.reports.test_layout_page import Reader


@pytest.fixture(scope="module")
def job():
  return make_job("dp4_tp2", "mlp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, job):
  return runs.write(tmp_path_factory.mktemp("a run"), layout=layout_page.stored_layout(job))


@pytest.fixture(scope="module")
def text(folder):
  return run_page.html(run_files.read(folder), command="main.py report '<b>'")


@pytest.fixture(scope="module")
def read(text):
  return Reader(text)


def section(text, name):
  [found] = re.findall(rf'<section id="{name}">.*?</section>', text, re.DOTALL)
  return found


def rows_of(text, name):
  return Reader(section(text, name)).rows


def test_the_verdict_is_one_sentence_on_top(read):
  said = " ".join("".join(read.said).split())
  assert (
    "Step 40 of 60 when this page was written. Evaluation loss 4.0000 (3.000 bits per byte); "
    "goodput 50.0 % of 2:00 over 2 starts." in said
  )
  assert "main.py report '<b>'" in said


@pytest.mark.parametrize(
  ("history", "expected"),
  [
    ([{"event": "end", "how": "done"}], "Done: 40 of 60 steps"),
    ([{"event": "end", "how": "stopped"}], "Stopped after step 40 of 60; the same command resumes"),
    (
      [{"event": "end", "how": "failed", "why": "loss is inf", "bad_step": 41}],
      "Failed after step 40 of 60 (loss is inf)",
    ),
    (  # a start after it
      [{"event": "end", "how": "failed"}, {"event": "start"}],
      "Step 40 of 60 when this page was written",
    ),
  ],
)
def test_how_a_run_ends_is_in_the_verdict(tmp_path, history, expected):
  more = [{**one, "step": 40, "time": 1200.0} for one in history]
  run = run_files.read(runs.write(tmp_path, history=[*runs.HISTORY, *more]))
  assert run_page.verdict(run)[1].startswith(expected + ".")


def test_numbers_are_those_of_the_files(read):
  for line in runs.METRICS[:4]:
    [row] = [row for row in read.rows if row[0] == str(line["step"]) and len(row) == len(line)]
    for cell, (key, value) in zip(row, line.items(), strict=True):
      assert float(cell.replace(",", "")) == pytest.approx(value, rel=1e-4), key
  for line in runs.METRICS[4:6]:
    assert [str(line["step"]), f"{line['eval_loss']:.5g}", "3"] in read.rows


def test_every_metric_has_a_chart_with_its_marks(text):
  titles = re.findall(r"<figcaption><b>([^<]*)</b>", text)
  assert titles[:10] == [
    "loss, nats per token",
    "evaluation, bits per byte",
    "gradient norm",
    "learning rate",
    "tokens per second",
    "model FLOPs utilization (MFU)",
    "peak memory of a device, GiB",
    "time of a step, seconds",
    "input wait, share of a step",
    "share of tokens of each expert",
  ]
  loss = text[text.index("loss, nats") : text.index("evaluation, bits per byte</b>")]
  for mark in (
    "start 2 from step 20",
    "bad step 33: loss is nan",
    "rolled back from step 33 to step 20",
    "checkpoint of step 20",
    "checkpoint of step 40",
  ):
    assert loss.count(f"<title>{mark}</title>") == 2  # for wide screens and for narrow ones
  assert text.count("<title>checkpoint of step 40</title>") == 2  # in no other chart
  assert text.count("<title>start 2 from step 20</title>") == 11


def test_an_evaluation_of_other_examples_is_a_mark_that_no_line_joins(tmp_path):
  steps = [runs.step(number) for number in (10, 20, 30)]
  evaluations = [runs.sampled(10, 5.25), runs.sampled(20), runs.whole(30)]
  folder = runs.write(tmp_path / "a", metrics=[*steps, *evaluations])
  run = run_files.read(folder)
  [(_, loss), *others] = run_charts.of_run(run)
  over = ["267 of 2,670 examples", "the whole split"]
  assert [(line.label, line.points, line.joined) for line in loss.lines[1:]] == [
    (f"evaluation, {over[0]}", [(10, 5.25), (20, 5.0)], True),
    (f"evaluation, {over[1]}", [(30, 5.5)], False),
  ]
  assert {"eval_loss_stderr", "eval_share", "eval_examples"} <= {*run.keys}
  assert not [name for name, _ in others if name.startswith("eval_")]
  assert "Evaluation loss 5.5000 (the whole split)." in run_page.verdict(run)[1]
  drawn = run_page._drawn("eval_loss", loss)
  assert str(drawn["narrow"]).count("evaluation, the whole split</title>") == 1
  assert [line["joined"] for line in drawn["lines"]] == [True, True, False]
  # One with a standard error, and two runs side by side.
  other = runs.write(tmp_path / "b", metrics=[*steps, runs.sampled(10), runs.sampled(30, 4.5)])
  read = [run, run_files.read(other)]
  assert "Evaluation loss 4.5000 ± 0.1250 (267 of 2,670 examples)." in run_page.verdict(read[1])[1]
  both = dict(run_charts.of_runs([run, run], ["a", "b"]))["eval_loss"]
  assert both.title == f"evaluation loss, {over[0]}"
  assert [(line.color, line.joined) for line in both.lines] == [
    (0, True),
    (0, False),
    (1, True),
    (1, False),
  ]
  legend = run_page._legend(both.lines)
  assert [(one["label"], one["joined"]) for one in legend] == [
    ("a", True),
    ("b", True),
    ("evaluated on other examples", False),
  ]


def test_what_has_no_curve_is_a_sentence(tmp_path):
  steps = [{**runs.step(number), "data_wait_seconds": 0.0} for number in (10, 20)]
  steps = [{**one, "mfu": 0.0025, "skipped": 0} for one in steps]
  lines = [*steps, {**runs.whole(20), "eval_bits_per_byte": 2.0}]
  folder = runs.write(tmp_path, metrics=lines, history=runs.HISTORY[:1])
  text = run_page.html(run_files.read(folder))
  titles = re.findall(r"<figcaption><b>([^<]*)</b>", text)
  gone = ("input wait", "skipped", "model FLOPs", "evaluation, bits per byte")
  assert not [title for title in titles if title.startswith(gone)]
  assert "loss, nats per token" in titles
  said = re.findall(r'<p class="notes">([^<]*)</p>', text)
  assert any(
    "evaluation, bits per byte: 2 after step 20 (the whole split); "
    "model FLOPs utilization (MFU): at most 0.25 %; "
    "input wait, share of a step: 0 throughout; skipped: 0 throughout." in one
    for one in said
  ), said


def test_goodput_is_one_bar_over_all_starts(text):
  part = section(text, "goodput")
  widths = [float(x) for x in re.findall(r"width:([\d.]+)%", part)]
  assert len(widths) == 7
  assert sum(widths) == pytest.approx(100, abs=0.01)
  rows = {row[0]: row[1:] for row in rows_of(text, "goodput")}
  assert rows["step (goodput)"] == ["1:00", "50.0 %"]
  assert rows["lost to restarts"] == ["20 s", "16.7 %"]
  assert "2:00 from the first start on, over 2 starts" in part


def test_measured_time_is_beside_the_predicted_one_and_collectives_beside_their_costs(text):
  part = section(text, "step_time")
  assert "The measured step takes 1.25 times the predicted one." in part
  rows = rows_of(text, "step_time")
  assert [row[:2] for row in rows[1:5]] == [
    ["predicted, low", "160 ms"],
    ["predicted, expected", "200 ms"],
    ["predicted, high", "240 ms"],
    ["measured, median since the newest start", "250 ms"],
  ]
  assert ["tensor", "all-reduce", "17", "1.0 MiB", "12 ms", "3 ms"] in rows
  assert ["data", "all-reduce", "5", "2.0 MiB", "20 ms", "20 ms"] in rows


def test_memory_is_one_bar_against_the_limit(text, job):
  part = section(text, "memory")
  rows = {row[0]: row[1] for row in rows_of(text, "memory")[1:]}
  assert rows["peak, by the compiler"] == "50.0 GiB"
  assert rows["peak, measured"] == "60.0 GiB"
  assert rows["memory of a device"] == "95.0 GiB"
  assert {"parameters", "optimizer", "batch"} < {*rows}
  widths = [float(x) for x in re.findall(r"<i class=[^>]*width:([\d.]+)%", part)]
  assert sum(widths) == pytest.approx(100 * 50 / 95, abs=0.01)
  assert re.search(r"<b style=\"left:0;width:100.0%", part)


def test_the_layout_is_drawn_with_the_devices_of_the_job(text, job):
  read = Reader(section(text, "layout"))
  assert sorted(read.styles, key=int) == [str(i) for i in range(8)]
  assert all(len(styles) == 1 for styles in read.styles.values())
  mesh = [[cell.strip() for cell in row if cell.strip()] for row in read.drawings[0]]
  assert [row for row in mesh if row[0].isdigit()] == [
    ["0", "1"],
    ["2", "3"],
    ["4", "5"],
    ["6", "7"],
  ]
  assert "data=4 x tensor=2" in "".join(read.said)
  count = sum(  # every parameter is 2-dim or 1-dim here
    p.shape[0] * (p.shape[1] if len(p.shape) > 1 else 1)
    for p in job.placements["parameters"].values()
  )
  assert f"{count:,} parameters" in "".join(read.said)


def test_what_a_restart_has_undone_is_gone(text):
  said = section(text, "samples")
  assert "again 40" in said
  assert "undone 40" not in said
  assert "&lt;b&gt;20&lt;/b&gt;" in said
  starts = rows_of(text, "starts")[1:]
  assert [row[2] for row in starts] == ["0", "20"]
  assert [row[5] for row in starts] == ["killed", "not ended when this page was written"]
  assert [row[6] for row in starts] == ["", "code"]
  assert "1970-01-01 00:16:40 UTC" in starts[0][1]
  assert rows_of(text, "bad_steps")[1:] == [["33", "loss is nan", "20", "64 to 96"]]
  assert "2 saved: 20, 40." in section(text, "checkpoints")
  assert "On disk: 40." in section(text, "checkpoints")


def test_the_folder_stands_for_the_run_in_commands(folder):
  run = run_files.read(folder)
  commands = dict(run_page.commands_of_run(run))
  assert commands["resume"] == f"python main.py train '{folder}'"
  assert commands["evaluate"] == f"python main.py evaluate '{folder}'"
  assert commands["sample"] == f"python main.py sample '{folder}'"
  assert commands["this page"] == f"python main.py report '{folder}'"
  done = dataclasses.replace(run, config={"training.steps": 40})
  [(what, command), *_] = run_page.commands_of_run(done)
  assert (what, command) == (
    "train for longer",
    f"python main.py train '{folder}' training.steps=80",
  )


def test_the_page_needs_nothing_from_outside(text, read):
  assert "http" not in text
  assert not re.search(r"@import|url\((?!#)", text)
  assert all(link.startswith("#") for link in read.links)
  assert len(read.ids) == len({*read.ids})
  references = {*re.findall(r"url\(#([^)]*)\)", text)} | {link[1:] for link in read.links}
  assert references <= {*read.ids}
  assert "<i>" not in text.replace('<i class="', "")


@pytest.mark.parametrize(
  ("name", "content"),
  [
    ("metrics.jsonl", b'\xff\xfe\n[]\n{"step": 10, "loss": "nan", "grad_norm": 1e400}\n'),
    ("history.jsonl", b'{"event": "start", "step": 0, "time": 1}\n{"event": 3}\n[]\n\x00\n{"ev'),
    ("layout.json", b'{"mesh": {"rows": 3}, "drawings": []}'),
    ("layout.json", b"[" * 10_000),
    ("config.json", b"[1, 2]"),
  ],
)  # fmt: skip
def test_damaged_files_leave_a_page_of_the_others(tmp_path, monkeypatch, name, content):
  if name != "metrics.jsonl":
    monkeypatch.setattr(charts, "svg", lambda *arguments, **settings: "")
  runs.write(tmp_path)
  (tmp_path / name).write_bytes(content)
  Reader(run_page.html(run_files.read(tmp_path)))


def test_a_folder_that_is_no_run_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"has neither metrics\.jsonl nor config\.json"):
    run_files.read(tmp_path)
  with pytest.raises(ValueError, match="does not exist"):
    run_files.read(tmp_path / "none")


def test_a_long_run_gives_a_small_page_with_its_spikes(tmp_path):
  lines = [
    {"step": n, "loss": 1.0, "grad_norm": 1.0, "tokens_per_second": 5.0} for n in range(1, 6_001)
  ]
  lines[4_234]["loss"] = 77.0
  saves = [{"event": "saved", "step": n, "time": 1.0} for n in range(1, 6_000, 10)]
  runs.write(tmp_path, metrics=lines, history=saves)
  began = time.process_time()
  text = run_page.html(run_files.read(tmp_path))
  assert time.process_time() - began < 20  # about 2 s
  assert len(text) < 500_000
  assert "200 of 6,000 lines, evenly spaced" in text
  assert ">80</text>" in text  # the axis of the loss reaches the spike
  rows = [row[0] for row in Reader(text).rows if row[0].replace(",", "").isdecimal()]
  assert (rows[0], rows[-1]) == ("1", "6,000")
