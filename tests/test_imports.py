"""Imports run one way, and none reaches into another library's private parts."""

import ast
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# Package -> the others that it may import. A new package is written down here first.
ARROWS = {
  # The entrypoint. `processes` and `runtime`: what must happen before anything slow is imported.
  "main": {"commands", "processes", "runtime"},
  "commands": {
    *("checks", "configs", "inference", "input_pipeline", "interop", "models", "partitioning"),
    "planning",
    *("processes", "reports", "reports.tour", "runtime", "training", "training.checkpointing"),
  },
  # The chapters of the tour: small examples by the project's own parts.
  "reports.tour": {
    *("configs", "input_pipeline", "models", "partitioning", "processes", "reports", "runtime"),
    "training",
  },
  # What is shown, apart from what is computed.
  "reports": {"input_pipeline", "partitioning", "planning", "runtime", "training"},
  # Its formulas are about the models' dims, and say so.
  "planning": {"configs", "models", "partitioning", "runtime", "training"},
  "inference": {"input_pipeline", "models", "partitioning", "processes", "runtime", "training"},
  "training": {
    *("input_pipeline", "interop", "models", "partitioning", "processes", "runtime"),
    "training.checkpointing",
  },
  # Model folders of Hugging Face. hf_config.py is pure JSON, and imports of these the keys of a
  # config and runtime alone.
  "interop": {"configs.keys", "models", "partitioning", "runtime", "training.checkpointing"},
  # Of runtime, the tables that extensions register in.
  "models": {"partitioning", "runtime"},
  # Of training, the table of tasks, of input_pipeline, tokenizers, and of interop, config.json:
  # nothing that is slow.
  "configs": {"configs.keys", "input_pipeline", "interop", "runtime", "training"},
  # Facts about the keys of a config, for everybody.
  "configs.keys": {"runtime"},
  # Files of one checkpoint; what is saved and when is its parent's.
  "training.checkpointing": {"configs.keys", "partitioning", "processes", "runtime"},
  "input_pipeline": {"runtime"},
  # It serves other frameworks: of ours, it reads compiled programs alone.
  "checks": {"runtime"},
  # The processes of a run.
  "processes": {"runtime"},
  # This process: its devices and what they can do, its files, its compiled programs. Of
  # partitioning, sizes of meshes.
  "runtime": {"partitioning"},
  "partitioning": set(),
}
NOT_PACKAGES = {"tests", "benchmarks", "examples", "locks"}
NAMES = {*ARROWS, *NOT_PACKAGES}

parsed = functools.cache(ast.parse)  # each file of the tree once, for all checks


@functools.cache
def imports(source, *, deferred=True):
  """Returns (line, dotted module) of every import; a name that `from` brings is part of it.

  Args:
    source: of a module.
    deferred: also those inside functions, which run later.
  """
  return [*_imports(parsed(source), deferred)]


def _imports(tree, deferred):
  for node in ast.iter_child_nodes(tree):
    if isinstance(node, ast.Import):
      yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      start = "." * node.level + (f"{node.module}." if node.module else "")
      yield from ((node.lineno, start + alias.name) for alias in node.names)
    elif deferred or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
      yield from _imports(node, deferred)


def unit(module):
  """Returns the name in `ARROWS` of what a dotted module belongs to."""
  nested = ".".join(module.split(".")[:2])
  return nested if nested in ARROWS else module.split(".")[0]


def circles(graph):
  """Returns the names of each circle of a graph, sorted: those that can all reach one another.

  Args:
    graph: name -> the names that it points to.
  """
  reached = {}
  for name in graph:
    found, ahead = set(), [name]
    while ahead:
      further = graph[ahead.pop()] - found
      found |= further
      ahead += further
    reached[name] = found
  return sorted(
    {
      tuple(sorted(one for one in found if name in reached[one]))
      for name, found in reached.items()
      if name in found
    }
  )


def file_graph(sources):
  """Returns dotted module -> the modules that it imports, also inside functions.

  A file that imports itself by a longer way is one that nobody can read, move or try alone, even
  where Python gets by because one of the imports is deferred.

  Args:
    sources: dotted module -> its source.
  """
  graph = {}
  for module, source in sources.items():
    found = set()
    for _, name in imports(source):
      while name and name not in sources:  # a name in a module
        name = name.rpartition(".")[0]
      found.add(name)
    graph[module] = found - {"", module}
  return graph


def wrong_arrows(source, package, where):
  """Returns a line for each import of a package that this package may not import."""
  wrong = []
  for line, module in imports(source):
    if module.startswith("."):
      wrong.append(f"{where}:{line}: relative import {module}; write the package's name")
    target = unit(module)
    if target in NAMES and not {target, target.split(".")[0]} & {package, *ARROWS[package]}:
      allowed = ", ".join(sorted(ARROWS[package])) or "no other package"
      wrong.append(f"{where}:{line}: {package} imports {module}; it may import {allowed}")
  return wrong


def defined(source):
  """Returns the names that a module binds itself, or passes on openly: `import X as X`."""
  names = set()
  for node in ast.walk(parsed(source)):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
      names.add(node.name)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      names.add(node.id)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
      names |= {alias.name for alias in node.names if alias.name == alias.asname}
  return names


def through_a_third(source, where, modules):
  """Returns a line for each name that is imported from a module that imported it itself.

  Args:
    source: of a file.
    where: the file.
    modules: dotted name -> the names that this module of ours defines.
  """
  tree = parsed(source)
  uses, bound = [], {}  # (line, module, name); a name of this file -> the module that it is
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom):
      for alias in node.names:
        dotted = f"{node.module}.{alias.name}"
        if dotted in modules:
          bound[alias.asname or alias.name] = dotted
        else:
          uses.append((node.lineno, node.module, alias.name))
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      uses.append((node.lineno, bound.get(node.value.id), node.attr))
  return [
    f"{where}:{line}: {name} is not defined in {module}; import it from its own"
    for line, module, name in uses
    if module in modules and name not in modules[module] and not name.startswith("__")
  ]


# The one file that may use them; it says which and why.
PRIVATE = pathlib.Path("processes/jax_internals.py")


def private_names(source, where):
  """Returns a line for each use of jax's private modules."""
  if where == PRIVATE or not ("jax._" in source or "_src" in source):  # few are parsed
    return []
  found = [(line, module) for line, module in imports(source) if module.startswith("jax._")]
  for node in ast.walk(parsed(source)) if "_src" in source else ():
    if isinstance(node, ast.Attribute) and node.attr == "_src":
      found.append((node.lineno, "jax._src"))
  return [f"{where}:{line}: {module} is private" for line, module in found]


UNSTABLE = ("jax.extend", "jax.experimental")


def unstable(source, where):
  """Yields (module, line) of each import of an API that JAX may change without notice.

  The line is a text that names the place where the reason for it is missing, else "".
  """
  lines = source.splitlines()
  for line, module in imports(source):
    if module.startswith(UNSTABLE):
      reason = lines[line - 2].strip().startswith("#")
      yield module, "" if reason else f"{where}:{line}: {module}: say above it why, and the issue"


def early_tensorflow(source, where):
  """Returns a line for each import of TensorFlow that happens as soon as the module's does."""
  if "tensorflow" not in source:
    return []
  return [
    f"{where}:{line}: {module} is imported at module level"
    for line, module in imports(source, deferred=False)
    if module.split(".")[0] == "tensorflow"
  ]


def folders():
  """Returns the top folders that hold Python files."""
  tops = (top for top in ROOT.iterdir() if top.is_dir() and not top.name.startswith("."))
  return {top.name: top for top in tops if any(top.glob("*.py"))}


def files(*, packages_only):
  """Returns (package, path) of every Python file."""
  kept = {
    name: top for name, top in folders().items() if not (packages_only and name in NOT_PACKAGES)
  }
  inside = [(name, path) for name, top in kept.items() for path in sorted(top.rglob("*.py"))]
  return [("main", ROOT / "main.py"), *inside]


def test_every_package_has_its_arrows_written_down():
  assert not {*folders()} - NOT_PACKAGES - {*ARROWS}
  assert {"configs", "models", "partitioning", "training", "input_pipeline"} <= {*folders()}


def test_arrows_make_no_circle():
  done = set()
  while len(done) < len(ARROWS):
    ready = {package for package, targets in ARROWS.items() if targets & {*ARROWS} <= done} - done
    assert ready, set(ARROWS) - done
    done |= ready


def test_imports_run_one_way():
  found = files(packages_only=True)
  assert len(found) > 20
  lines = [
    line
    for package, path in found
    for line in wrong_arrows(
      path.read_text(), unit(f"{package}.{path.parent.name}"), path.relative_to(ROOT)
    )
  ]
  assert not lines, "\n".join(lines)


def dotted(path):
  """Returns the name by which a file is imported."""
  return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_files_make_no_circle():
  found = circles(
    file_graph({dotted(path): path.read_text() for _, path in files(packages_only=True)})
  )
  assert not found, "\n".join(map(", ".join, found))


def test_a_circle_of_files_is_found_also_through_a_function():
  sources = {
    "a": "def f():\n  from b.d import e\ng = 1",
    "b": "",
    "b.d": "import c\ne = 1",
    "c": "from a import g",
    "h": "import a, numpy",
  }
  assert circles(file_graph(sources)) == [("a", "b.d", "c")]
  assert circles(file_graph({**sources, "c": "import numpy"})) == []


def test_names_are_imported_from_where_they_are_defined():
  found = files(packages_only=True)
  modules = {dotted(path): defined(path.read_text()) for _, path in found}
  lines = [line for _, p in found for line in through_a_third(p.read_text(), p.name, modules)]
  assert not lines, "\n".join(lines)


def test_a_name_imported_through_a_third_module_is_found():
  modules = {"a.b": defined("from c import d, e as e\nf: int = 1\ndef g(): pass"), "a.b.h": set()}
  [line] = through_a_third("from a.b import d, e, f, g, h\nfrom x import d", "r", modules)
  assert line == "r:1: d is not defined in a.b; import it from its own"
  [line] = through_a_third("from a import b\nb.f()\nb.d()", "r", modules | {"a": set()})
  assert line == "r:3: d is not defined in a.b; import it from its own"


def test_the_rest_is_imported_as_it_is_meant_to():
  for check in (private_names, early_tensorflow):
    lines = [
      line
      for _, path in files(packages_only=False)
      for line in check(path.read_text(), path.relative_to(ROOT))
    ]
    assert not lines, "\n".join(lines)


def test_what_jax_may_change_is_imported_in_one_place_each_with_its_reason():
  places, missing = {}, []
  for _, path in files(packages_only=True):
    where = path.relative_to(ROOT)
    for module, line in unstable(path.read_text(), where):
      places.setdefault(module, []).append(str(where))
      missing += [line] if line else []
  assert len(places) >= 4
  assert not missing, "\n".join(missing)
  assert not {module: found for module, found in places.items() if len(found) > 1}


def test_a_missing_reason_is_found():
  bare = "import jax\nfrom jax.extend import core"
  [(module, line)] = unstable(bare, "r")
  assert (module, line[:3]) == ("jax.extend.core", "r:2")
  assert [*unstable(bare.replace("\nfrom", "\n# Why.\nfrom"), "r")] == [("jax.extend.core", "")]


@pytest.mark.parametrize(
  ("package", "source", "said"),
  [
    ("partitioning", "import models.mlp", "partitioning imports models.mlp; it may import no"),
    ("training", "from planning.cost import x", "may import input_pipeline, interop, models, pa"),
    ("configs", "def f():\n  if True:\n    from partitioning import mesh", "r:3: configs imports"),
    (
      "models",
      "from tests.helpers.jobs import make_job",
      "models imports tests.helpers.jobs.make_job",
    ),
    ("input_pipeline", "import numpy, training", "input_pipeline imports training"),
    ("models", "from ..training import step", "relative import ..training.step; write the package"),
  ],
)
def test_an_arrow_that_points_elsewhere_is_found(package, source, said):
  [line] = wrong_arrows(source, package, "r")
  assert said in line


def test_an_arrow_that_may_be_is_left_alone():
  source = "import jax\nfrom partitioning import mesh\nimport training.step, training_extras"
  assert wrong_arrows(source, "training", "r") == []


def test_private_names_are_found():
  for source in ("from jax import _src", "jax._src.core.f()"):
    [line] = private_names(f"import jax\n{source}", "r")
    assert line.startswith("r:2: jax.")


def test_tensorflow_is_found_where_the_module_imports_it_and_not_where_a_function_does():
  early = "try:\n  import tensorflow as tf\nexcept ImportError:\n  pass\n"
  assert early_tensorflow(early, "r") == ["r:2: tensorflow is imported at module level"]
  assert len(early_tensorflow("class A:\n  from tensorflow.io import gfile", "r")) == 1
  assert early_tensorflow("def f():\n  import tensorflow", "r") == []
  assert early_tensorflow("import tensorflow_datasets", "r") == []
