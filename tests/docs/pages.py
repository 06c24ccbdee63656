"""README.md and docs/*.md as the tests read them: prose, code blocks, headings, commands."""

import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name(page: pathlib.Path) -> str:
  """Returns a page's path from the repository's root."""
  return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[str]:
  """Returns the content of the fenced code blocks."""
  return [block.split("\n", 1)[1].removesuffix("```") for block in FENCE.findall(text)]


def files(text: str) -> dict[str, str]:
  """Returns the files that a page shows: fenced blocks with a name, such as "```python mine.py"."""
  return dict(re.findall(r"^```python (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def prose(text: str) -> str:
  """Returns a page without its fenced code blocks."""
  return FENCE.sub("", text)


def section(text: str, heading: str) -> str:
  """Returns the part of a page from a heading up to the next one of its level or above.

  Args:
    text: the page.
    heading: the complete line, such as "## Loss".
  """
  level = heading.index(" ")
  pattern = rf"^{re.escape(heading)}\n.*?(?=^#{{1,{level}}} |\Z)"
  [found] = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
  return found.rstrip("\n") + "\n"


def write_section(page: pathlib.Path, new: str) -> None:
  """Replaces the section of a page that has the heading of a new, generated one."""
  text = page.read_text()
  page.write_text(text.replace(section(text, new.partition("\n")[0]), new))


def anchors(text: str) -> set[str]:
  """Returns the anchors that GitHub gives a page's headings."""
  found = []
  for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
    words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    anchor = words.replace(" ", "-")
    found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
  return {*found}


def commands(text: str) -> list[list[str]]:
  """Returns the command lines of a page, split into words: and `python ... --flag` in prose.

  Lines that a backslash continues are joined. Comments and output are left out: a command begins
  with a program, a variable assignment or a script of processes/launch/.
  """
  lines = [line for block in blocks(text) for line in block.replace("\\\n", " ").splitlines()]
  lines += re.findall(r"`(python [^`]*--[^`]+)`", prose(text).replace("\n", " "))
  started = re.compile(r"(\S*python|make|mpirun|processes/launch/|[A-Z_]+=\S+ )")
  return [shlex.split(line, comments=True) for line in lines if started.match(line.strip())]


def applications(text: str) -> list[list[str]]:
  """Returns the arguments of every `main.py` on a page, also of those that a launcher starts."""
  found = []
  for words in commands(text):
    if "main.py" in words:
      found.append(words[words.index("main.py") + 1 :])
    elif words[0].startswith("processes/launch/") and any(word.startswith("--") for word in words):
      found.append([word for word in words if word.startswith("--")])
  return found
