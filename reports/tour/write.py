"""Writes docs/tour.md and its pictures: `python -m reports.tour.write`."""

import pathlib
from collections.abc import Iterable

from reports import drawings as pictures
from reports.tour import run
from reports.tour.run import CHAPTERS
from reports.tour.scene import Scene

ROOT = pathlib.Path(__file__).parents[2]
PAGE = "docs/tour.md"
FOLDER = "docs/tour"

HEAD = """# The tour

What sharding does, shown by small examples on eight devices. `python -m reports.tour.write` writes
this page from the results of a run; do not edit. To run it yourself, in a terminal:

```
python main.py tour
python main.py tour --chapter=collectives
```

Unless there are eight accelerators, it simulates eight devices on the CPU. Times depend on the
machine and are shown when you run it.
"""


def chapter(name: str) -> tuple[str, dict[str, str]]:
  """Runs a chapter; returns its section of the page, and path -> SVG."""
  module, found = CHAPTERS[name], {}
  lines = [f"## {module.TITLE}", "", f"`--chapter={name}`", "", module.OPENING.strip()]
  for number, scene in enumerate(module.SCENES, start=1):
    text, drawings = _scene(f"{name}-{number}", scene)
    lines += ["", f"### {number}. {scene.title}", "", text]
    found.update(drawings)
  return "\n".join(lines) + "\n", found


def page(sections: Iterable[str]) -> str:
  """Returns the page: its head, a table of contents, and the sections of all chapters."""
  contents = "\n".join(f"- [{m.TITLE}](#{anchor(m.TITLE)})" for m in CHAPTERS.values())
  return "\n".join([HEAD, contents, "", "\n".join(sections)])


def _scene(stem: str, scene: Scene) -> tuple[str, dict[str, str]]:
  """Returns the Markdown of a scene, and path -> SVG."""
  shown = scene.play()
  drawings, images = {}, []
  for number, drawing in enumerate(shown.pictures, start=1):
    file = f"{stem}-{number}.svg"
    drawings[f"{FOLDER}/{file}"] = pictures.svg(drawing)
    images.append(f"![{drawing.title}]({pathlib.Path(FOLDER).name}/{file})")
  parts = [scene.markdown, *(["\n".join(images)] if images else [])]
  times = ["Times: shown when you run it."] if shown.measured else []
  return "\n\n".join([*parts, shown.markdown(times)]), drawings


def anchor(title: str) -> str:
  """Returns the anchor that a heading gets: lower case, dashes, no other marks."""
  kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -")
  return kept.replace(" ", "-")


def stale(root: pathlib.Path, section: str, drawings: dict[str, str]) -> list[str]:
  """Returns a line for each part of a chapter that is stale in the files below `root`."""
  wrong = [] if section in _read(root / PAGE) else [f"{PAGE}: {section.splitlines()[0]} is stale"]
  return wrong + [f"{p} is stale" for p, text in drawings.items() if _read(root / p) != text]


def left_over(root: pathlib.Path) -> list[str]:
  """Returns the picture files that the page does not use."""
  text = _read(root / PAGE)
  names = [path.name for path in sorted((root / FOLDER).glob("*"))]
  return [f"{FOLDER}/{name}" for name in names if f"/{name})" not in text]


def _read(path: pathlib.Path) -> str:
  return path.read_text() if path.exists() else ""


def main(root: pathlib.Path = ROOT) -> None:
  """Writes the page and the pictures, and removes those that no scene has any more."""
  run.start(simulate=True)
  sections, drawings = zip(*map(chapter, CHAPTERS), strict=True)
  written = {PAGE: page(sections)}
  for of_one in drawings:
    written.update(of_one)
  for path, text in written.items():
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
  for path in left_over(root):
    (root / path).unlink()
  print(f"wrote {PAGE} and {len(written) - 1} pictures in {FOLDER}")


if __name__ == "__main__":
  main()
