"""Writes docs/tour.md and its pictures: `python -m reports.tour.write`."""

import pathlib
from collections.abc import Iterable

from reports import drawings
from reports.tour import run
from reports.tour.run import CHAPTERS

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
  module, pictures = CHAPTERS[name], {}
  parts = [f"## {module.TITLE}", f"`--chapter={name}`", module.OPENING.strip()]
  for number, scene in enumerate(module.SCENES, start=1):
    shown, images = scene.play(), []
    for place, drawing in enumerate(shown.pictures, start=1):
      file = f"{name}-{number}-{place}.svg"
      pictures[f"{FOLDER}/{file}"] = drawings.svg(drawing)
      images.append(f"![{drawing.title}](tour/{file})")
    parts += [f"### {number}. {scene.title}", scene.markdown, *(["\n".join(images)] * bool(images))]
    parts.append(shown.markdown(["Times: shown when you run it."] if shown.measured else []))
  return "\n\n".join(parts) + "\n", pictures


def page(sections: Iterable[str]) -> str:
  """Returns the page: its head, a table of contents, and the sections of all chapters."""
  anchors = {m.TITLE: m.TITLE.lower().replace(" ", "-") for m in CHAPTERS.values()}
  contents = "\n".join(f"- [{title}](#{anchor})" for title, anchor in anchors.items())
  return "\n".join([HEAD, contents, "", "\n".join(sections)])


def main() -> None:
  """Writes the page and the pictures, and removes those that no scene has any more."""
  run.start(simulate=True)
  sections, pictures = zip(*map(chapter, CHAPTERS), strict=True)
  written = {path: text for one in pictures for path, text in one.items()}
  for path in (ROOT / FOLDER).glob("*.svg"):
    path.unlink()
  for path, text in {PAGE: page(sections), **written}.items():
    (ROOT / path).write_text(text)
  print(f"wrote {PAGE} and {len(written)} pictures in {FOLDER}")


if __name__ == "__main__":
  main()
