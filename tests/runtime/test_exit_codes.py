"""Exit codes have one definition, and the rest of the project uses its names."""

import ast
import pathlib
import re

import pytest

from runtime import exit_codes

ROOT = pathlib.Path(__file__).parent.parent.parent
ELSEWHERE = {"tests", "docs", "examples"}  # an example imports nothing of ours
ENDS = {"exit", "_exit", "leave", "SystemExit"}
SIGNS = re.compile(r"(exit|leave|SystemExit)\(\s*[0-9]|\b75\b")  # what is not parsed for nothing


def literal_codes(source):
  """Returns the lines in which a process ends with a number, or a number stands for `STOPPED`."""
  lines = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Call):
      name = getattr(node.func, "attr", getattr(node.func, "id", ""))
      first = node.args[0] if node.args else None
      if name in ENDS and isinstance(first, ast.Constant) and isinstance(first.value, int):
        lines.append(node.lineno)
    elif isinstance(node, ast.Constant) and node.value is not True and node.value == 75:
      lines.append(node.lineno)
  return lines


def test_the_codes_are_those_that_supervisors_know():
  names = ("DONE", "FAILED", "REFUSED", "CHECK_FAILED", "STOPPED", "INTERRUPTED")
  assert [getattr(exit_codes, name) for name in names] == [0, 1, 2, 3, 75, 130]
  assert {*exit_codes.MEANINGS} == {0, 1, 2, 3, 75, 130}


def test_no_process_ends_with_a_number_that_is_written_out():
  paths = [
    path
    for path in (ROOT / "main.py", *ROOT.glob("[a-z]*/**/*.py"))
    if path.relative_to(ROOT).parts[0] not in ELSEWHERE and path.name != "exit_codes.py"
  ]
  assert len(paths) > 100
  texts = {path.relative_to(ROOT): path.read_text() for path in paths}
  texts = {path: text for path, text in texts.items() if SIGNS.search(text)}
  found = [f"{path}:{line}" for path, text in texts.items() for line in literal_codes(text)]
  assert not found, "use the names of runtime/exit_codes.py: " + ", ".join(found)


@pytest.mark.parametrize("source", ["sys.exit(1)", "groups.leave(1, x=3)", "code == 75", "exit(2)"])
def test_a_number_that_is_written_out_is_found(source):
  assert literal_codes(f"x = 3\n{source}") == [2]
  assert SIGNS.search(source)
  assert literal_codes("leave(exit_codes.FAILED, patience_seconds=3)\nx = 0.75") == []


@pytest.mark.parametrize(
  ("said", "passes"),
  [
    ("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7", True),
    ("AWS Error ACCESS_DENIED during HeadObject operation: No response body.", False),
    ("google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with ... error", True),
    ("google::cloud::Status(PERMISSION_DENIED: Permanent error, with ... error", False),
  ],
)
def test_a_bucket_that_does_not_answer_may_do_so_later(said, passes):
  """Messages of pyarrow's file systems, whose OSErrors have no number."""
  refusal = ValueError("data.files: s3://b/x cannot be read")
  refusal.__cause__ = OSError(said)
  assert exit_codes.retryable(refusal) == passes
