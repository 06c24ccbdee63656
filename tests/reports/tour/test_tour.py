"""docs/tour.md is what the tour shows, and the terminal shows the same."""

import io
import pathlib
import re
import sys

import numpy as np
import pytest
from rich.console import Console

from reports.tour import collectives, processes, run, scene, write
from reports.tour.run import CHAPTERS, chosen

ROOT = pathlib.Path(__file__).parents[3]
SLOW = ("processes",)  # chapters that start processes of their own


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=pytest.mark.faults) if n in SLOW else n for n in CHAPTERS]
)
def test_the_page_is_what_a_chapter_shows(name):
  section, pictures = write.chapter(name)
  assert section in (ROOT / write.PAGE).read_text(), "run: python -m reports.tour.write"
  there = {str(path.relative_to(ROOT)) for path in (ROOT / write.FOLDER).glob(f"{name}-*")}
  assert there == {*pictures}
  assert [path for path, text in pictures.items() if (ROOT / path).read_text() != text] == []


def test_the_page_has_all_chapters_and_links_to_them():
  page = (ROOT / write.PAGE).read_text()
  assert page.startswith(write.page([]).rstrip())
  titles = [module.TITLE for module in CHAPTERS.values()]
  assert re.findall(r"^## (.*)$", page, re.MULTILINE) == titles
  links = re.findall(r"\]\(#(.*?)\)", page)
  assert links == [re.sub("[^a-z0-9]+", "-", title.lower()) for title in titles]
  assert len(re.findall(r"!\[", page)) == len([*(ROOT / write.FOLDER).glob("*")])


def test_code_is_that_of_the_function_that_runs_and_fits_the_terminal():
  for one in (one for module in CHAPTERS.values() for one in module.SCENES):
    assert f"def {one.code.__name__}(" in one.source
    assert '"""' not in one.source
    assert max(map(len, one.source.splitlines())) <= run.WIDTH - 4
    compile(one.source, one.title, "exec")


def test_the_terminal_shows_title_code_picture_findings_and_times():
  console = Console(file=io.StringIO(), width=run.WIDTH)
  run.show(chosen("vmap_to_mesh"), console=console)
  console.print(run.outcome(scene.Shown(measured=["1.5 ms a step"]), width=run.WIDTH))
  text = console.file.getvalue()
  assert max(map(len, text.splitlines())) <= run.WIDTH
  for part in (
    "vmap_to_mesh: From vmap to a mesh",
    "jax.vmap makes it a function of a batch",
    "2. The same over devices",
    " def batch_over_devices():",
    "over data (8 x 2)",
    "Notice",
    "Sent: nothing.",
    "1.5 ms a step",
  ):
    assert part in text
  assert "Collectives" not in text


def test_an_unknown_chapter_is_refused_with_the_nearest():
  with pytest.raises(ValueError, match=r"unknown chapter .*arrays, .* did you"):
    chosen("colectives")


# ------------------------------ what is compared ------------------------------


@pytest.mark.parametrize(
  ("ours", "rounded"),
  [([1.0, 2.0], True), ([1.0, 2.0 + 1e-7], True), ([1.0, 2.1], False), ([1.0, np.nan], False)],
)
def test_arrays_that_differ_stop_the_tour(ours, rounded):
  theirs = np.array([1.0, 2.0])
  for compare, equal in ((scene.same, ours == [1.0, 2.0]), (scene.close, rounded)):
    if equal:
      assert compare(np.array(ours), theirs).startswith("the same, to ")
    else:
      with pytest.raises(AssertionError):
        compare(np.array(ours), theirs)
  with pytest.raises(AssertionError):
    scene.close(np.ones((2, 2)), np.ones(2))


def test_a_collective_that_does_something_else_stops_the_tour():
  x = collectives.numbered(4, 2)
  wrong = lambda: collectives._tell(*collectives.exchange(collectives.permute, x), x)  # noqa: E731
  with pytest.raises(AssertionError):
    scene.Scene("a", collectives.permute, run=wrong).play()


def python(script):
  """Returns a command that starts faster without the installed packages."""
  return [sys.executable, "-S", "-c", script]


def test_an_argument_of_process_1_alone():
  command = [*python("import sys; print(sys.argv[1:])"), "--rows=1"]
  codes, out, _ = processes.launched(command, second="--rows=2")
  lines = sorted(line for line in out.splitlines() if line.startswith("["))
  assert lines == ["[0] ['--rows=1']", "[1] ['--rows=1', '--rows=2']"]
  assert codes == [0, 0]


@pytest.mark.long
def test_what_hangs_is_ended(monkeypatch):
  # In 3 s both are up also on a busy machine; a launcher stopped while it starts them has no run.
  monkeypatch.setattr(processes, "LIMIT_SECONDS", 3)
  script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
  with pytest.raises(RuntimeError, match="process 0 hangs"):
    processes.launched(python(script))
