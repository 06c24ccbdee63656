"""The command: its text, its files and its exit codes."""

import ast
import json
import pathlib
import sys

import pytest

import checks
from checks.__main__ import main
from tests.docs import pages

GIVES = """
from tests.checks import decoder

MESHES = [{{}}, decoder.MESH]

def program(mesh):
  return decoder.program(mesh, *{bugs})
"""


@pytest.fixture
def file(tmp_path):
  """Returns what writes a file with a program."""

  def write(*bugs):
    path = tmp_path / "its_step.py"
    path.write_text(GIVES.format(bugs=bugs))
    return str(path)

  return write


def test_findings_exit_with_3_and_are_written(file, tmp_path, capsys):
  found, page = tmp_path / "found.json", tmp_path / "found.html"
  words = [file("init_by_mesh"), "--attached", "--only=equality", f"--json={found}"]
  assert main([*words, f"--html={page}"]) == 3
  out = capsys.readouterr().out
  assert "1. equality, fsdp=2 x tensor=2: 7 of 8 leaves start with other values" in out
  assert out.endswith("1 finding\n")
  content = json.loads(found.read_text())
  assert content["exit_code"] == 3
  [finding] = content["findings"]
  assert finding["numbers"]["relative difference"] > 1
  shown = page.read_text()
  assert "1. equality, fsdp=2 x tensor=2: 7 of 8 leaves start with other values" in shown
  assert "its_step.py" in shown
  assert "http" not in shown


@pytest.mark.parametrize(
  ("source", "words", "message"),
  [
    ("x = 1", (), "does not define program(mesh)"),
    ("1 / 0", (), "cannot be imported: ZeroDivisionError"),
    ("def program(mesh): pass", ("--mesh=1",), "two meshes or more"),
    ("def program(mesh): pass", ("--mesh=1", "--mesh=data=64"), "64 devices, and there are 8"),
    ("def program(mesh): pass", (), "returns a NoneType, not a checks.Program"),
    ("", ("--only=speed",), "there is no speed; there are"),
    ("", ("--json=no/such/file",), "its folder does not exist"),
  ],
)
def test_what_is_no_program_is_refused(source, words, message, tmp_path, capsys):
  path = tmp_path / "its_step.py"
  path.write_text(source)
  assert main([str(path), "--attached", *words]) == 2
  assert message in capsys.readouterr().err


def test_a_file_does_not_hide_the_package_of_its_name(tmp_path, capsys):
  path = tmp_path / "sched.py"
  path.write_text("import sched\ndef program(mesh): raise ValueError(sched.scheduler.__name__)")
  assert main([str(path), "--attached", "--mesh=1", "--mesh=data=2"]) == 2
  assert "ValueError: scheduler" in capsys.readouterr().err


def test_a_description_that_does_not_fit_is_refused(tmp_path, capsys):
  path = tmp_path / "its_step.py"
  known = "import dataclasses\nfrom tests.checks import decoder\ndef program(mesh):\n"
  known += "  it = decoder.program(mesh)\n"
  known += '  describe = dataclasses.replace(it.describe, tokens="inputs")\n'
  path.write_text(known + "  return dataclasses.replace(it, describe=describe)\n")
  assert main([str(path), "--attached", "--only=leaks"]) == 2
  assert "describe names the leaf 'inputs'; there are segments, ta" in capsys.readouterr().err


def test_no_file_is_refused(capsys):
  assert main(["no_such_file.py"]) == 2
  assert "no_such_file.py: no such file" in capsys.readouterr().err
  assert main([]) == 2


def test_the_program_of_the_page_is_one(tmp_path, capsys):
  [(name, source)] = pages.files((pages.ROOT / "docs/check.md").read_text()).items()
  path = tmp_path / name
  path.write_text(source)
  assert main([str(path), "--attached", "--only=replication,budget,leaks"]) == 0
  assert "it needs describe.outputs" in capsys.readouterr().out


def test_it_needs_jax_and_numpy_alone():
  """So that it runs in another framework's environment, with this tree on its path."""
  root = pathlib.Path(checks.__file__).parent
  files = [
    *root.glob("*.py"),
    root.parent / "runtime/hlo.py",
    root.parent / "runtime/collectives.py",
  ]
  found = set()
  for file in files:
    for node in ast.walk(ast.parse(file.read_text())):
      names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
      names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
      found |= {name.split(".")[0] for name in names}
  assert found - sys.stdlib_module_names == {"checks", "jax", "numpy", "runtime"}
