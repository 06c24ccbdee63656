"""The size of the tree, as docs/architecture.md has it: `python -m tests.measures [FOLDER]`.

Prints, for this checkout or another one: files and lines of the product and of the tests, functions
and methods with an argument `config` or `job` by package, and what the default job imports.
"""

import ast
import collections
import json
import pathlib
import subprocess
import sys
import tempfile

from tests.test_borders import COMMAND, PROGRAM


def files(root: pathlib.Path) -> dict[str, list[pathlib.Path]]:
  """Returns top-level package, or file -> its Python files; without hidden folders."""
  found = collections.defaultdict(list)
  for path in sorted(root.rglob("*.py")):
    top = path.relative_to(root).parts[0]
    if not top.startswith("."):
      found[top].append(path)
  return found


def lines(paths: list[pathlib.Path]) -> int:
  """Returns the number of lines of files."""
  return sum(path.read_text().count("\n") for path in paths)


def functions(path: pathlib.Path, argument: str) -> int:
  """Returns how many functions and methods of a file have an argument of this name."""
  count = 0
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      given = node.args
      names = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
      count += argument in names
  return count


def imported(root: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files that the default job has imported before its first step."""
  with tempfile.TemporaryDirectory() as folder:
    run = subprocess.run(
      [sys.executable, "-c", PROGRAM, *COMMAND, f"--workdir={folder}/run"],
      cwd=root,
      check=True,
      stdout=subprocess.PIPE,
      text=True,
    )
  names = [name.replace(".", "/") for name in json.loads(run.stdout.splitlines()[-1])]
  candidates = [root / end for name in names for end in (f"{name}.py", f"{name}/__init__.py")]
  return [path for path in candidates if path.exists()]


def main() -> None:
  """Prints the measures."""
  root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
  found = files(root)
  tests = found.pop("tests")
  product = [path for paths in found.values() for path in paths]
  print(f"product: {len(product)} files, {lines(product)} lines")
  print(f"tests: {len(tests)} files, {lines(tests)} lines")
  for argument in ("config", "job"):
    # The `config` of an example is a dataclass of its own.
    packages = {top: paths for top, paths in found.items() if top != "examples"}
    counts = {t: sum(functions(path, argument) for path in p) for t, p in packages.items()}
    most = sorted(counts.items(), key=lambda one: -one[1])
    by_package = ", ".join(f"{top} {count}" for top, count in most if count)
    print(f"functions with an argument `{argument}`: {sum(counts.values())} ({by_package})")
  loaded = imported(root)
  print(f"imported by the default job: {len(loaded)} modules, {lines(loaded)} lines")


if __name__ == "__main__":
  main()
