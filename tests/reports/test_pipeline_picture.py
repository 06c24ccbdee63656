"""The picture of a pipeline schedule: drawn by hand where it is small, counted where it is not."""

import pytest

from partitioning.parallel.pipeline_schedule import Schedule
from reports import layout_page, layout_text, pipeline_picture
from tests.helpers.jobs import make_job

SMALL = Schedule("1f1b", 3, 4)
# Stage 2 has the backward pass of a microbatch in the tick of its forward pass, stage 0 four later.
BY_HAND = """\
pipeline 1f1b: 4 microbatches, 3 stages; 8 ticks; bubble 2/6 = 33.3 %
           F F F B F B F B F B B B
  stage 0  0 1 2 ░ 3 ░ ░ 0 ░ 1 2 3
  stage 1  ░ 0 1 ░ 2 0 3 1 ░ 2 3 ░
  stage 2  ░ ░ 0 0 1 1 2 2 3 3 ░ ░
  F forward, B backward pass of a microbatch; ░ bubble
  layers of stage 0: 0-1; stage 1: 2-3; stage 2: 4-5"""
SCHEDULES = (
  SMALL,
  Schedule("gpipe", 4, 3),
  Schedule("interleaved", 4, 8, 3),
  Schedule("1f1b", 16, 500),
  Schedule("interleaved", 18, 36, 7),
)


def test_a_small_schedule_is_drawn_as_by_hand():
  assert pipeline_picture.text(SMALL, 6) == BY_HAND
  brief = pipeline_picture.text(SMALL, 6, picture=False).splitlines()
  assert brief == [BY_HAND.splitlines()[0], BY_HAND.splitlines()[-1]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cells_without_a_pass_are_the_bubble(schedule):
  every = pipeline_picture.columns(schedule)
  cells = [
    pipeline_picture.at(schedule, stage, column)
    for stage in range(schedule.stages)
    for column in every
  ]
  assert cells.count(None) == pytest.approx(schedule.bubble * len(cells))
  assert len({(n // len(every), one) for n, one in enumerate(cells) if one}) == (
    2 * schedule.stages * schedule.microbatches * schedule.chunks
  )


@pytest.mark.parametrize(
  ("schedule", "width"), [*zip(SCHEDULES, (60, 80, 100, 60, 80), strict=True)]
)
def test_lines_fit_the_terminal_and_say_what_is_left_out(schedule, width):
  layers = 2 * schedule.stages * schedule.chunks
  lines = pipeline_picture.text(schedule, layers, width=width).splitlines()
  assert max(map(len, lines)) <= width
  head = next(line for line in lines if set(line.split()) <= {"F", "B", "…"}).split()
  missing = len(pipeline_picture.columns(schedule)) - len(head)
  said = f"… {missing + 1} columns left out"
  assert (said in " ".join(" ".join(lines).split())) == ("…" in head) == (missing > 0)
  assert [line for line in lines if line.strip() == "(7 more)"] == (
    ["  (7 more)"] if schedule.stages == 18 else []
  )


def test_chunks_are_dealt_out_in_turn_and_stored_in_order():
  schedule = Schedule("interleaved", 2, 4, 3)
  assert pipeline_picture.layers_text(schedule, 12, 0) == "0-1, 4-5, 8-9 (stores 0-5)"
  assert pipeline_picture.layers_text(schedule, 6, 1) == "1, 3, 5 (stores 3-5)"
  for one in SCHEDULES:
    layers = 4 * one.stages * one.chunks
    parts = [pipeline_picture.chunk_layers(one, layers, stage) for stage in range(one.stages)]
    dealt = [number for turn in zip(*parts, strict=True) for part in turn for number in part]
    assert dealt == list(range(layers))


def test_a_page_has_a_bar_for_each_pass_as_long_as_it_takes():
  shown = pipeline_picture.for_page(SMALL, 6)
  assert [row["name"] for row in shown["rows"]] == ["stage 0", "stage 1", "stage 2"]
  bars = {bar["title"]: bar for row in shown["rows"] for bar in row["bars"]}
  assert len(bars) == 3 * 2 * 6
  forward = bars["stage 1, tick 2: forward pass of microbatch 1, layers 2-3"]
  backward = bars["stage 1, tick 4: backward pass of microbatch 1, layers 2-3"]
  waiting = bars["stage 2, tick 0: no forward pass"]
  assert (forward["kind"], backward["kind"], waiting["kind"]) == ("forward", "backward", "bubble")
  assert (forward["text"], waiting["text"]) == ("1", "")
  assert backward["width"] == pytest.approx(3 * forward["width"])
  assert waiting["width"] == pytest.approx(forward["width"])
  assert sum(bar["width"] for bar in shown["rows"][1]["bars"]) == pytest.approx(100)
  assert sum("no " in title for title in bars) == 3 * 2 * 2
  assert shown["title"] == BY_HAND.splitlines()[0]
  assert shown["layers"] == ["0-1", "2-3", "4-5"]


def test_layouts_show_it_and_which_layers_are_where():
  keys = {"model.layers": 4, "training.microbatches": 4, "mesh.stage": 2}
  job = make_job("single", "lm", **keys, **{"training.pipeline": "interleaved"})
  drawn = pipeline_picture.text(Schedule("interleaved", 2, 4, 2), 4)
  assert drawn in layout_text.job_text(job)
  brief = layout_text.job_text(job, whole=False)
  assert drawn.splitlines()[0] in brief
  assert " F " not in brief
  side = layout_page.Side("one", job)
  [shown] = layout_page.pipelines([side, side])
  assert shown["layers"] == ["0, 2 (stores 0-1)", "1, 3 (stores 2-3)"]
  assert layout_page.pipelines([layout_page.Side("two", make_job("dp8", "lm"))]) == []
