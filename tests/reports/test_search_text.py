"""A search as text, as a picture and as a page: the same numbers in each."""

import html
import re

import pytest

from planning.search_results import COMPILER, Estimate, Found, Tried
from reports import search_report

GIB = 2**30


def estimate(seconds, gib, *, tables="full", **setting):
  return Estimate(
    {**setting, "training.rematerialization": tables},
    mesh={"fsdp": setting.get("mesh.fsdp", 64)},
    bytes=round(gib * GIB),
    seconds=seconds,
    tokens=524_288,
    rematerialization=tables,
  )


FAST = estimate(1.2, 70, tables="none", **{"training.loss_chunks": 4})
SMALL, LARGE = estimate(1.5, 6), estimate(1.0, 96, tables="dots", **{"mesh.fsdp": 32})
TRIED = [Tried(SMALL, 5 * GIB, 1.404), Tried(FAST, 65 * GIB, 1.1), Tried(LARGE, 100 * GIB, None)]
VALUES = {
  **{"topology": "v5p:4x4x4", "note": "v5p-128 is v5p:4x4x4", "chip": "v5p", "chips": 64.0},
  **{"devices": 64, "limit": 95.0 * GIB, "compiled": True, "budget": 1e12, "unit": "tokens"},
  **{"given": SMALL.key, "refused": {"heads are 12": 7}, "estimates": [FAST, SMALL, LARGE]},
}
FOUND = Found(**VALUES, tried=TRIED, source=COMPILER, price=2.0)
NOTHING = Found(
  **{**VALUES, "limit": 1.0 * GIB, "given": None},
  nearest=[({"mesh.fsdp": 128}, "v5p:4x4x8", 2**29)],
)


def test_the_verdict_names_the_fastest_next_to_the_config_as_given():
  said = search_report.text([FOUND], "python main.py --config=configs/fsdp.py")
  # 1e12 tokens at 524,288 in 1.1 s, by 64 chips at 2 each an hour.
  cost = 1e12 / 524_288 * 1.1 / 3600 * 64 * 2
  assert (
    "fastest: fsdp=64, rematerialization none, training.loss_chunks=4, 1,100 ms per step, "
    f"7,447 tokens/s per device, 65.0 GiB, {cost:,.2f} for 1e+12 tokens; "
    "1.28 times as fast as the config as given (1,404 ms)"
  ) in said.replace("1 trillion", "1e+12")
  assert "3 settings by formula, 3 by the compiler, 7 refused; limit 95.0 GiB per device" in said
  assert "v5p-128 is v5p:4x4x4" in said
  rows = re.findall(r"^ *((?:as given )?\d\*?) +(fsdp=\d+) .*$", said, re.MULTILINE)
  assert rows == [("1*", "fsdp=64"), ("as given 2*", "fsdp=64"), ("3", "fsdp=32")]
  assert "does not fit" in said
  assert "  1: --config.training.loss_chunks=4 --config.training.rematerialization=none" in said
  assert said.splitlines()[-1] == (
    "to train on v5p:4x4x4: python main.py --config=configs/fsdp.py "
    "--config.training.loss_chunks=4 --config.training.rematerialization=none"
  )


def test_the_table_shows_what_differs_and_one_row_of_those_that_are_alike():
  same = [estimate(1.0 + n / 200, 40 + n, **{"training.loss_chunks": 2**n}) for n in range(4)]
  smaller = [estimate(1.1 + n / 10, 30 - n, tables=f"full,x{n}=save") for n in range(6)]
  given = estimate(2.0, 5, **{"training.loss_chunks": 64})
  found = Found(**{**VALUES, "estimates": [*same, *smaller, given], "given": given.key})
  assert len(found.rows) == 11
  # 1.005 s of 1.0 s are alike, 1.015 s are not; of the rest the fastest, and the config as given.
  assert list(search_report.listed(found)) == [1, 4, 5, 6, 7, 11]
  lines = search_report.text([found], "python main.py").splitlines()
  [titles] = [line for line in lines if "rematerialization, others" in line]
  assert "microbatches" not in titles  # one in all rows
  assert "mesh" not in titles
  assert "all of them: mesh fsdp=64" in lines
  rows = [line.split() for line in lines if re.match(r" +(as given )?\d+\*? +[\d.]+ GiB", line)]
  assert len(rows) == 6
  assert [row[-1] for row in rows[:3]] == ["loss_chunks=1", "loss_chunks=8", "full,x0=save"]
  assert "5 more on the page, within 1% of one of these, or slower" in lines
  assert sum(line.startswith("  11: --config.") for line in lines) == 1


def test_nothing_fits():
  said = search_report.text([NOTHING], "python main.py")
  assert "nothing fits: the setting with the least memory needs 6.0 GiB per device" in said
  assert (
    "would fit, with 512.0 MiB per device by formula: --topology=v5p:4x4x8 --config.mesh.fsdp=128"
  ) in said
  assert "to train on" not in said


def test_of_several_topologies_the_fastest_and_the_cheapest():
  # By formula, 1.2 s.
  values = {**VALUES, "topology": "v6e:16x16", "chips": 256.0, "over": {"mesh_dcn.data": 2}}
  other = Found(**values, price=2.0)
  lines = search_report.summary([FOUND, other, NOTHING], "python main.py")
  assert lines[0].startswith("fastest of all: 64 devices of v5p:4x4x4, ")
  assert lines[1].startswith("cheapest of all: 64 devices of v5p:4x4x4, ")
  assert [line.split(":")[0] for line in lines[2:]] == ["to train on v5p", "to train on v6e"]
  assert lines[3].endswith(" --config.mesh_dcn.data=2")


@pytest.mark.parametrize(
  ("tried", "expected"),
  [
    (TRIED[0], "1 by compiler: fsdp=64, rematerialization full: 1,404 ms per step, 5.0 GiB"),
    (TRIED[2], "1 by compiler: fsdp=32, rematerialization dots: does not fit, 100.0 GiB"),
    (Tried(SMALL, 0, None, "no"), "1 by compiler: fsdp=64, rematerialization full: failed: no"),
  ],
)
def test_each_setting_is_reported_as_it_is_found(tried, expected):
  assert search_report.tried_line(1, tried, COMPILER) == expected


def points(drawn, place):
  """Returns where the point of a setting is, in the picture's pixels."""
  point = re.search(
    rf'id="search-setting{place}">.*?<use [^>]*x="([^"]+)" y="([^"]+)"', drawn, re.S
  )
  return float(point[1]), float(point[2])


def test_the_picture_has_memory_to_the_right_and_time_up():
  drawn = search_report.picture(FOUND)
  fast, small = points(drawn, 1), points(drawn, 2)
  assert fast[0] > small[0]  # more memory
  assert fast[1] > small[1]  # less time: y grows downwards
  assert drawn == search_report.picture(FOUND)
  assert search_report.picture(NOTHING) == ""


def test_the_page_has_verdict_picture_table_and_overrides():
  page = search_report.html([FOUND, NOTHING], title="Search: <x>", command="python main.py search")
  text = html.unescape(page)
  assert "Search: &lt;x&gt;" in page
  assert search_report.verdict(FOUND) in text
  assert search_report.verdict(NOTHING) in text
  assert search_report.picture(FOUND, "search0") in page
  copied = re.sub("</?span[^>]*>", "", text)
  for row in FOUND.rows:
    assert search_report.overrides(row) in copied
  assert "7 times: heads are 12" in text
  assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", page)


def test_labels_that_would_overlap_are_one():
  near = [estimate(1.0 + n / 1000, 36, **{"mesh.fsdp": n}) for n in range(3)]
  far = estimate(1.3, 10, **{"mesh.fsdp": 9})
  tried = [Tried(one, one.bytes, one.seconds) for one in [*near, far]]
  svg = search_report.picture(Found(**VALUES, tried=tried, source=COMPILER))
  assert re.findall(r">([\d,-]+)</text>", svg)[-2:] == ["4", "1-3"]
  assert svg.count("<title>") == 4
