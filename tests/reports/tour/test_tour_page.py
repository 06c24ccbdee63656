"""docs/tour.md is what the tour shows, and the terminal shows the same."""

import io
import pathlib
import re

import pytest
from rich.console import Console

from reports.tour import run, write
from reports.tour.run import CHAPTERS, chosen

ROOT = pathlib.Path(__file__).parents[3]
SCENES = {f"{n}-{i}": s for n, m in CHAPTERS.items() for i, s in enumerate(m.SCENES, start=1)}


# Those that start processes of their own.
SLOW = ("processes",)


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=pytest.mark.faults) if n in SLOW else n for n in CHAPTERS]
)
def test_the_page_is_not_stale(name):
  section, drawings = write.chapter(name)
  wrong = write.stale(ROOT, section, drawings)
  assert not wrong, "\n".join([*wrong, "run: python -m reports.tour.write"])
  assert "NOT the same" not in section
  assert " ms " not in section


def test_the_page_has_all_chapters_and_shows_every_picture():
  page = (ROOT / write.PAGE).read_text()
  at = [page.index(f"\n## {module.TITLE}\n") for module in CHAPTERS.values()]
  assert at == sorted(at)
  assert page.startswith(write.page([]).rstrip())
  assert page.count("\n## ") == len(CHAPTERS)
  shown = re.findall(r"!\[[^\n]*\]\(([^)]*)\)", page)
  assert shown
  assert all((ROOT / "docs" / path).exists() for path in shown)
  assert write.left_over(ROOT) == []


def test_what_is_stale_missing_or_left_over_is_found(tmp_path):
  (tmp_path / "docs/tour").mkdir(parents=True)
  page = "# The tour\n\n## A\n\nold\n\n## B\n\n![b](tour/b-1.svg)\n"
  for name, text in (("tour.md", page), ("tour/b-1.svg", "b"), ("tour/c-1.svg", "c")):
    (tmp_path / "docs" / name).write_text(text)
  section, drawings = "## A\n\nnew\n", {"docs/tour/a-1.svg": "a"}
  assert write.stale(tmp_path, section, drawings) == [
    "docs/tour.md: ## A is stale",
    "docs/tour/a-1.svg is stale",
  ]
  section = "## B\n\n![b](tour/b-1.svg)\n"
  assert write.stale(tmp_path, section, {"docs/tour/b-1.svg": "b"}) == []
  assert write.stale(tmp_path, section, {"docs/tour/b-1.svg": "other"}) != []
  assert write.left_over(tmp_path) == ["docs/tour/c-1.svg"]


def test_the_table_of_contents_leads_to_headings():
  page = (ROOT / write.PAGE).read_text()
  headings = {write.anchor(line.lstrip("# ")) for line in page.splitlines() if line[:1] == "#"}
  links = re.findall(r"\]\(#(.*?)\)", page)
  assert len(links) == len(CHAPTERS)
  assert set(links) <= headings


@pytest.mark.parametrize("name", SCENES)
def test_code_is_that_of_the_function_that_runs_and_fits_the_terminal(name):
  scene = SCENES[name]
  assert f"def {scene.code.__name__}(" in scene.source
  assert '"""' not in scene.source
  assert max(map(len, scene.source.splitlines())) <= run.WIDTH - 4
  compile(scene.source, name, "exec")


def test_the_terminal_shows_title_code_picture_and_findings():
  out = io.StringIO()
  run.show(chosen("vmap_to_mesh"), console=Console(file=out, width=run.WIDTH))
  text = out.getvalue()
  assert max(map(len, text.splitlines())) <= run.WIDTH
  for part in (
    "vmap_to_mesh: From vmap to a mesh",
    "jax.vmap makes it a function of a batch",
    "2. The same over devices",
    ' def batch_over_devices(spec=("data", None)):',
    "over data (8 x 2)",
    "Notice",
    "No communication: there is no collective in the compiled program.",
  ):
    assert part in text
  assert "Collectives" not in text


def test_times_are_shown_in_the_terminal():
  out = io.StringIO()
  [shown] = [s for n, s in SCENES.items() if n == "network-2"]
  console = Console(file=out, width=run.WIDTH)
  console.print(run.outcome(shown.play(), width=run.WIDTH))
  assert re.search(r"dp4_tp2: [\d.]+ ms a step, at best\.", out.getvalue())


def test_an_unknown_chapter_is_refused_with_the_nearest():
  with pytest.raises(
    ValueError, match=r"unknown chapter 'colectives'; there are arrays, .*did you"
  ):
    run.main("colectives")
