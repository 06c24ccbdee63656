"""The page of several runs: its table, its order, what differs, and losses that compare."""

import json
import math
import re

import pytest
from etils import epath

from reports import run_charts, run_files, run_index
from tests.reports import runs
from tests.reports.test_layout_page import Reader

COMMAND = "python main.py train --config=configs/dp8.py "


def write(folder, loss, *, given="", config=(), more=(), bits=1.0):
  """Writes and reads a run that ends with an evaluation of this loss, after a better one."""
  lines = [runs.step(number) for number in (10, 20, 30)]
  for number, value in ((10, 7.0), (20, loss - 0.5), (30, loss)):
    lines.append({**runs.sampled(number, value), "eval_bits_per_byte": value * bits})
  settings = json.loads(json.dumps(runs.CONFIG))
  for key, value in dict(config).items():
    section, name = key.split(".")
    settings.setdefault(section, {})[name] = value
  start = {**runs.START, "step": 0, "time": 1.0, "command": COMMAND + given}
  runs.write(folder, metrics=[*lines, *more], history=[start], config=settings)
  return run_files.read(folder)


def columns(found):
  return [(one.title, *(cell.text for cell in one.cells)) for one in run_index.table(found)]


def test_the_best_run_is_first_with_its_metrics_and_cost(tmp_path):
  times = {"step": 30, **runs.TIMES, "done": True}
  price = {"planning.price_per_chip_hour": 3.0}
  worse = write(tmp_path / "worse", 4.0, given="seed=4", config=price)
  better = write(tmp_path / "better", 3.0, more=[times], config=price)
  none = run_files.read(
    runs.write(tmp_path / "none", metrics=[runs.step(10)], history=None, config={"seed": 5})
  )
  found = run_index.ordered([none, worse, better])
  assert [run.name for run in found] == ["better", "worse", "none"]
  hours = 120 / 3600 * 8  # TIMES has two minutes, START eight devices
  assert columns(found) == [
    ("state", "done", "running or killed", "running or killed"),
    ("step", "30 of 60", "30 of 60", "10"),
    ("evaluation loss, best", "2.5000 ± 0.1250", "3.5000 ± 0.1250", ""),
    ("last", "3.0000 ± 0.1250", "4.0000 ± 0.1250", ""),
    ("training loss, best", "3.5000", "3.5000", "4.5000"),
    ("last", "3.5000", "3.5000", "4.5000"),
    ("seed", "3", "3", "5"),
    ("time", "2:00", "", ""),
    ("device hours", f"{hours:.3g}", "", ""),
    ("cost", f"{3 * hours:.2f}", "", ""),
  ]
  wide = run_index.terminal([none, worse, better], 200).splitlines()
  assert wide[0].split("  ")[0] == "run"
  first = re.split("  +", wide[1])
  assert first == ["better", "done", "30 of 60", "2.5000 ± 0.1250", "3.5000", "3", "2:00"]
  narrow = run_index.terminal([worse, better, none], 62).splitlines()
  assert max(map(len, narrow)) <= 62
  # Of what is left out, config keys are the first, and metrics the last.
  assert re.split("  +", narrow[1]) == ["better", "30 of 60", "2.5000 ± 0.1250", "3.5000"]
  assert run_index.terminal([worse], 1) == "run\nworse"


def test_columns_are_of_keys_that_a_command_has_set(tmp_path):
  # Warm-up follows from the rest; the rate is in the command of one run, and another's default.
  one = write(tmp_path / "a", 3.0, config={"optimizer.learning_rate": 0.1, "optimizer.warmup": 3})
  given = "--config.optimizer.learning_rate=0.2 seed=3"
  changed = {"optimizer.learning_rate": 0.2, "optimizer.warmup": 4}
  other = write(tmp_path / "b", 3.5, given=given, config=changed)
  assert run_index.varied([one, other]) == [("optimizer.learning_rate", ["0.1", "0.2"])]
  third = write(tmp_path / "c", 3.5, config={"mesh.data": 2, "mesh.tensor": 4, "model.layers": 5})
  assert run_index.varied([one, third])[0] == ("mesh", ["one device", "data=2 x tensor=4"])
  assert ("model.layers", ["no such key", "5"]) in run_index.varied([one, third])


def test_losses_of_unlike_tokenizers_are_in_bits_per_byte(tmp_path):
  one = write(tmp_path / "a", 3.0, bits=1 / math.log(2))  # a token is a byte
  like = write(tmp_path / "b", 4.0, bits=1 / math.log(2))
  assert not run_index.unlike_tokenizers([one, like])
  (tmp_path / "c" / "tokenizer").mkdir(parents=True)
  (tmp_path / "c" / "tokenizer" / "tokenizer.json").write_text("{}")
  other = write(tmp_path / "c", 4.0, bits=1 / (4 * math.log(2)))  # and here, four
  assert run_index.unlike_tokenizers([one, other])
  assert [run.name for run in run_index.ordered([one, other])] == ["c", "a"]
  assert "bits per byte, best" in dict(column[:2] for column in columns([one, other]))
  charts = dict(run_charts.of_runs([one, other], ["a", "c"], unlike=True))
  assert "eval_loss" not in charts
  assert charts["loss"].title == "training loss, bits per byte"
  nats = [value for _, value in one.points("loss")]
  for line, size in zip(charts["loss"].lines, (1, 4), strict=True):
    expected = [value / (size * math.log(2)) for value in nats]
    assert [value for _, value in line.points] == pytest.approx(expected)
  text = run_index.html([one, other], page=epath.Path(tmp_path / "index.html"))
  assert "The tokenizers differ, so losses are in bits per byte" in text


def test_the_page_links_to_the_pages_that_are_there(tmp_path):
  found = [write(tmp_path / name, 3.0 + place) for place, name in enumerate(("a b", "<i>", "c"))]
  (tmp_path / "a b" / "run.html").write_text("")
  text = run_index.html(found, page=epath.Path(tmp_path / "index.html"))
  read = Reader(text)
  assert [link for link in read.links if not link.startswith("#")] == ["a%20b/run.html"]
  assert {"a b", "<i>", "c"} <= {row[0].strip() for row in read.rows}
  assert text.count("<polyline") == 3
  assert "http" not in text.replace("http-equiv", "")
  below = run_index.html(found, page=epath.Path(tmp_path / "pages" / "x.html"))
  assert Reader(below).links[0] == "../a%20b/run.html"


def test_a_sparkline_spans_its_box():
  drawn = run_index.sparkline([(10, 4.0), (20, 1.0), (50, 2.5)])
  places = [float(text) for text in re.findall(r"[\d.]+", str(drawn).split("points=")[1])]
  assert places == [2, 2, 26, 18, 98, 10]
  assert run_index.sparkline([(1, 1.0)]) == ""


def test_more_runs_than_colors_have_a_row_each_and_the_first_have_curves(tmp_path):
  found = [write(tmp_path / f"r{place}", 3.0 + place) for place in range(9)]
  text = run_index.html(found, page=epath.Path(tmp_path / "index.html"))
  assert "<h1>9 runs</h1>" in text
  assert "the charts are of the first 8" in text
  first = text[text.index("<figure") : text.index("</figure>")]
  assert ("r7</span>" in first, "r8</span>" in first) == (True, False)


def test_runs_are_overlaid_and_their_differences_listed(tmp_path):
  folder = runs.write(tmp_path / "a run")
  config = json.loads(json.dumps(runs.CONFIG))
  config["seed"] = 4
  config["training"]["more"] = 1
  other = runs.write(tmp_path / "other <b>", config=config, metrics=runs.METRICS[:2], history=None)
  both = [run_files.read(folder), run_files.read(other)]
  page = epath.Path(tmp_path / "index.html")
  text = run_index.html(both, page=page)
  read = Reader(text)
  assert ["seed", "3", "4"] in read.rows
  assert ["training.more", "no such key", "1"] in read.rows
  assert not [row for row in read.rows if row[0] == "training.steps"]
  assert ["loss", "3", "4"] in read.rows  # the last values, of steps 40 and 20
  first = text[text.index("training loss</b>") : text.index("gradient norm")]
  assert "<title>other &lt;b&gt;</title>" in first
  assert "None: the configs are the same." in run_index.html([both[0]] * 2, page=page)
