"""Links of README.md and docs/*.md lead somewhere, and the README is short."""

import re

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, name, prose

LINK = re.compile(r"\]\(([^)\s]+)\)|<(?:img|a|source)[^>]*?(?:src|srcset|href)=\"([^\"]+)\"")
LINES = 120


def dead(text, page):
  """Returns the relative links of a page that lead to no file, or to no heading of it."""
  wrong = []
  for link in (a or b for a, b in LINK.findall(prose(text))):
    if re.match(r"[a-z]+:", link):
      continue
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    found = target.exists()
    if found and anchor:
      found = anchor in anchors(text if target == page else target.read_text())
    wrong += [] if found else [link]
  return wrong


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
  assert dead(page.read_text(), page) == []


def test_dead_links_are_seen():
  text = (
    "# A page\n[a](docs/none.md) [b](#a-page) [c](#b-page) [d](LICENSE) [e](https://x.org/none)\n"
    '<img src="docs/none.svg">\n```\n[f](none)\n```\n'
  )
  assert dead(text, ROOT / "README.md") == ["docs/none.md", "#b-page", "docs/none.svg"]


def test_the_index_links_every_page_once():
  index = ROOT / "docs" / "index.md"
  linked = [a for a, _ in LINK.findall(index.read_text())]
  assert sorted(linked) == sorted(page.name for page in PAGES[1:] if page != index)


def test_the_readme_is_short_and_defines_the_projects_own_terms_once():
  text = (ROOT / "README.md").read_text()
  assert len(text.splitlines()) <= LINES
  for term in ("dim", "axis", "verdict"):
    assert text.count(f"**{term}**") == 1, term


def absent(text):
  """Returns the files of this repository that a page names and that do not exist.

  A file is named by its path from the root: in prose, or in a block of commands; what the program
  prints (blocks marked `text`) may name others.
  """
  folders = "|".join(sorted(p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "runs"))
  text = re.sub(r"^```text\n.*?^```$|\]\(.*?\)", "", text, flags=re.MULTILINE | re.DOTALL)
  named = re.findall(rf"(?<![\w/.:-])((?:{folders})/[\w./-]*\.[a-z]+)\b", text)
  return sorted({path for path in named if not (ROOT / path).exists()})


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page):
  assert absent(page.read_text()) == []


def test_files_that_do_not_exist_are_seen():
  text = "`training/lop.py`, training/none.py::test and runs/none.py, https://x.org/docs/none.md\n"
  assert absent(text) == ["training/lop.py", "training/none.py"]
