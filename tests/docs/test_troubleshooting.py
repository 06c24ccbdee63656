"""Messages on pages of the documentation are those that the code has."""

import functools
import re
import subprocess

import pytest

from tests.docs.pages import PAGES, ROOT, name

LEAST = 15  # characters of wording, without what is filled in, that a message shares with the code
# What a string says stands between two of these; parsing the code would take ten times as long.
ENDS = re.compile(r"[\"'\n]|\\.|\{[^{}\n]*\}")
COMMON = ("did you mean",)  # ends many messages


@functools.cache
def wordings() -> frozenset[str]:
  """Returns what the strings of the code say between the places that are filled in."""
  listed = subprocess.run(
    ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
  )
  files = [ROOT / path for path in listed.stdout.split() if not path.startswith("tests/")]
  content = "\n".join(file.read_text() for file in files if file.exists())
  strings = {one for one in ENDS.split(content) if len(one) >= LEAST and " " in one.strip()}
  return frozenset(one for one in strings if not any(common in one for common in COMMON))


def unknown(page: str) -> list[str]:
  """Returns the first lines of messages on a page whose wording is nowhere in the code."""
  blocks = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
  lines = [block.splitlines()[0] for block in blocks]
  return [line for line in lines if not any(wording in line for wording in wordings())]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_messages_are_those_of_the_code(page):
  assert unknown(page.read_text()) == []


def test_a_message_that_the_code_does_not_have_is_seen():
  page = (ROOT / "docs" / "troubleshooting.md").read_text()
  assert page.count("```text") >= 15
  changed = page.replace("unknown config key", "unknown configuration key")
  assert changed != page
  assert len(unknown(changed)) == 1
