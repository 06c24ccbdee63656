"""runtime/extensions.py: what a file registers, and which files are part of a run by that."""

import functools
import importlib.metadata
import linecache
import pathlib
import sys
import types

import pytest

from runtime import extensions, provenance
from runtime.extensions import ROOT, Table

USES = """
import sys
import tables_of_the_test
import {beside}
tables_of_the_test.TABLES["{table}"].register("{name}", sys.modules[__name__])
"""
TABLES = {}


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
  """Leaves nothing registered, loaded or imported behind."""
  monkeypatch.setattr(extensions, "_LOADED", {})
  monkeypatch.setattr(extensions, "_TABLES", [])
  monkeypatch.setattr(sys, "path", [*sys.path])
  monkeypatch.setattr(sys, "dont_write_bytecode", True)
  monkeypatch.setitem(sys.modules, "tables_of_the_test", types.ModuleType("tables_of_the_test"))
  sys.modules["tables_of_the_test"].TABLES = TABLES
  before = {*sys.modules}
  TABLES["model"] = Table("model", {"ours": 1})
  TABLES["sink"] = Table("sink", {}, numerics=False)
  yield
  for name in {*sys.modules} - before:
    del sys.modules[name]
  provenance._versions.cache_clear()
  provenance._everything.cache_clear()


def write(folder, name="mine", beside="helper", table="model"):
  """Writes a config file that registers itself, and the module beside it."""
  folder.mkdir(exist_ok=True)
  (folder / f"{beside}.py").write_text("VALUE = 1\n")
  path = folder / f"{name}.py"
  path.write_text(USES.format(beside=beside, name=name, table=table))
  return path


def test_a_file_that_is_executed_again_replaces_its_own_entry(tmp_path):
  path = write(tmp_path)
  first, second = extensions.load(path), extensions.load(path)
  assert first is not second
  assert TABLES["model"]["mine"] is second
  assert second.helper.VALUE == 1
  assert extensions.loaded() == [path]
  assert extensions.registered("model", "mine") is second
  assert extensions.registered("model", "ours") is None  # the project's own
  assert extensions.registered("sink", "mine") is None


def test_a_name_that_is_taken_is_refused_with_the_place_of_the_other(tmp_path):
  other = write(tmp_path / "a")
  extensions.load(other)
  path = write(tmp_path / "b", beside="helper_b")
  with pytest.raises(ValueError, match=r"'mine' is already registered by .*/a/mine\.py; rename"):
    extensions.load(path)
  with pytest.raises(ValueError, match="'ours' is already registered by the project"):
    extensions.load(write(tmp_path / "c", name="ours", beside="helper_c"))


def test_modules_of_one_name_in_two_folders_are_refused(tmp_path):
  extensions.load(write(tmp_path / "a"))
  path = write(tmp_path / "b", name="other")
  with pytest.raises(ValueError, match=r"b/helper\.py: .*/a has a module 'helper' too.*rename"):
    extensions.load(path)


def test_files_are_those_that_register_and_what_they_import_from_beside(tmp_path):
  model = write(tmp_path / "a")
  sink = write(tmp_path / "b", name="sinking", beside="pen", table="sink")
  (tmp_path / "c").mkdir()
  (tmp_path / "c" / "strategy.py").write_text("import numpy\n")
  for path in (model, sink, tmp_path / "c" / "strategy.py"):
    extensions.load(path)
  assert extensions.files(numerics=True) == [model.parent / "helper.py", model]
  assert extensions.files() == [model.parent / "helper.py", model, sink.parent / "pen.py", sink]


def test_a_config_file_in_the_project_brings_nothing_of_the_project_with_it(tmp_path, monkeypatch):
  monkeypatch.setattr(extensions, "ROOT", tmp_path)
  path = write(tmp_path / "configs")
  monkeypatch.setitem(sys.modules, "configs.base", types.ModuleType("configs.base"))
  sys.modules["configs.base"].__file__ = str(tmp_path / "configs" / "base.py")
  extensions.load(path)
  assert extensions.files() == [path.parent / "helper.py", path]


def test_the_code_of_a_checkpoint_has_what_registers_and_not_where_it_is(tmp_path, monkeypatch):
  monkeypatch.setattr(provenance, "NUMERICS", ("models/mlp.py",))
  monkeypatch.setattr(provenance, "RUN", ("models/mlp.py",))
  provenance._versions.cache_clear()
  provenance._everything.cache_clear()

  def code():
    return provenance.versions()["code"], {**provenance.everything()}

  before = code()
  extensions.load(write(tmp_path / "b", name="sinking", beside="pen", table="sink"))
  with_sink = code()
  assert with_sink[0] == before[0]
  assert {*with_sink[1]} - {*before[1]} == {"code of sinking.py", "code of pen.py"}
  path = write(tmp_path / "a")
  extensions.load(path)
  with_model = code()
  assert with_model[0] != before[0]
  content = [file.read_bytes() for file in extensions.files(numerics=True)]
  for file in extensions.files(numerics=True):
    file.write_text("changed = True\n")
    provenance._versions.cache_clear()
    assert code()[0] != with_model[0], file
    file.write_bytes(content.pop(0))
  moved = path.parent.rename(tmp_path / "elsewhere")
  files = [moved / file.name for file in (path.parent / "helper.py", path)]
  assert provenance.digest(provenance.NUMERICS, files) == with_model[0]


def test_an_error_below_a_users_file_is_placed_there_and_no_other(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text("import json\n\ndef f():\n  return json.loads(3)\n")
  mine = extensions.load(path)
  with pytest.raises(TypeError) as caught:
    mine.f()
  # As this test's file is in the project, its frames are not a user's.
  named = extensions.placed(caught.value)
  assert isinstance(named, extensions.UserCodeError)
  assert str(named).startswith(f"{path}:4: TypeError: the JSON object must be")
  assert named.__cause__ is caught.value
  with pytest.raises(KeyError) as caught:
    {}["x"]
  assert extensions.placed(caught.value) is caught.value


def test_the_place_of_an_error_is_the_users(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text("import json\n\njson.loads('x')\n")
  with pytest.raises(ValueError, match="Expecting") as caught:
    extensions.load(path)
  assert extensions.error_text(caught.value).startswith(f"{path}:3: JSONDecodeError: Expecting")
  path.write_text("x = 1\ndef f(:\n")
  with pytest.raises(SyntaxError) as caught:
    extensions.load(path)
  assert extensions.error_text(caught.value) == f"{path}:2: SyntaxError: invalid syntax"


HEAD = "import models.layers\nfrom models import layers as block, mlp as classifier\n"
HEAD += "import os, jax, helper\n"
CHANGES = [
  "block.MLP = helper.Mine",
  "models.layers.MLP = helper.Mine",
  "block.MLP.epsilon: float = 1e-3",
  "block.EPSILON += 1",
  "a, block.MLP = 1, helper.Mine",
  "del block.MLP",
  "classifier.MLP.__call__ = lambda self, x: x",
  "setattr(block, 'MLP', helper.Mine)",
  "other = block\nother.MLP = helper.Mine",
  "os.environ['XLA_FLAGS'] = ''",
  "jax.config.update('jax_default_matmul_precision', 'highest')",
  "if True:\n  helper.patch()",
  "helper.patch(1)",
  "helper.patch(target=block)",
  "from helper import patch\npatch()",
  "def get_config(recipe=None):\n  block.MLP = helper.Mine",
  "def get_config(recipe=None):\n  helper.patch()",
  "for name in ('MLP',):\n  setattr(block, name, helper.Mine)",
  "class Mine: pass\nblock.MLPS.update(feedforward=Mine)",
  "class Mine: pass\nblock.LIST.append(Mine)",
]
SETS_KEYS = [
  "def get_config(recipe=None):\n  config = helper.get_config(recipe)\n  config.seed = 3\n"
  "  config.model.update(layers=2)\n  config.data['name'] = helper.NAME\n  return config",
  "def get_config(recipe=None):\n  config = {}\n  config.update(helper.SIZES)\n  return config",
  "block_of = {}\nblock_of['a'] = block.MLP",
  "class Mine(block.MLP):\n  def __init__(self):\n    super().__init__()\n    self.size = 3",
  "from models import MODELS\nMODELS.register('mine', helper)",
  "def get_config(recipe=None):\n  config = {}\n  helper.set_keys(config)\n  return config",
  "print('text', block.MLP)\nimport sys\nsys.path.insert(0, 'folder')",
  "def callback(step):\n  helper.write(step)",
  "def _keys(config):\n  config.seed = 1\n\ndef get_config(recipe=None):\n  _keys(config)",
]


def test_a_file_that_changes_what_it_imports_is_found_and_one_that_sets_keys_changes_nothing():
  for text in CHANGES:
    assert extensions.changes_imported(f"{HEAD}{text}\n".encode()), text
  for text in SETS_KEYS:
    assert not extensions.changes_imported(f"{HEAD}{text}\n".encode()), text
  for path in (ROOT / "configs").rglob("*.py"):  # so runs may resume with another strategy
    assert not extensions.changes_imported(path.read_bytes()), path


def test_files_are_those_that_change_something_and_what_they_import_later(tmp_path):
  """With what is imported by a function only, and without a file that only sets keys."""
  (tmp_path / "strategy.py").write_text("import patches\n")
  (tmp_path / "patches.py").write_text(
    "import tables_of_the_test as t\nt.SIZE = 3\nimport parts.a\n"
  )
  (tmp_path / "parts").mkdir()
  (tmp_path / "parts" / "__init__.py").write_text("")
  (tmp_path / "parts" / "a.py").write_text("def f():\n  from . import b\n")
  (tmp_path / "parts" / "b.py").write_text("import numpy\nimport pytest\n")
  extensions.load(tmp_path / "strategy.py")
  names = ["parts/__init__.py", "parts/a.py", "parts/b.py", "patches.py"]
  found = extensions.files(numerics=True)
  assert found == [tmp_path / name for name in names]
  assert {"numpy", "pytest"} <= extensions.libraries(found)
  versions = provenance.versions()
  assert versions["pytest"] == importlib.metadata.version("pytest")
  assert {*versions} == {"code", "python", "pytest", *provenance.LIBRARIES}
  before = provenance.code_files()
  (tmp_path / "parts" / "b.py").write_text("import numpy\nX = 1\n")
  after = provenance.code_files()
  assert {name for name in after if before.get(name) != after[name]} == {"b.py"}


def test_a_function_that_a_users_file_puts_in_place_of_ours_is_found(tmp_path, monkeypatch):
  """However it got there: here by what another file calls."""
  (tmp_path / "mine.py").write_text("def f(x):\n  return x\n\n\nclass Mine:\n  pass\n")
  mine = extensions.load(tmp_path / "mine.py")
  assert extensions.files(numerics=True) == []
  with monkeypatch.context() as patched:
    patched.setitem(Table("part", {"ours": Table}), "ours", mine.Mine)
    assert extensions.files(numerics=True) == [tmp_path / "mine.py"]
  for target, name, value in (
    (provenance, "_hex", mine.f),
    (provenance, "_hex", functools.partial(mine.f, 1)),
    (Table, "register", mine.f),
    (Table, "size", property(mine.f)),
    (extensions, "Table", mine.Mine),
  ):
    with monkeypatch.context() as patched:
      patched.setattr(target, name, value, raising=False)
      found = extensions.files(numerics=True)
    assert found == [tmp_path / "mine.py"], (target, name)


def test_a_cell_of_a_notebook_counts_by_its_source(tmp_path, monkeypatch):
  name = str(tmp_path / "ipykernel_7" / "123.py")
  text = "def f(x):\n  return x\n"
  linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
  scope = {}
  exec(compile(text, name, "exec"), scope)
  monkeypatch.setattr(provenance, "_normal", scope["f"])
  assert [str(path) for path in extensions.files(numerics=True)] == [name]
  assert extensions.source(extensions.files(numerics=True)[0]) == text.encode()
  del linecache.cache[name]


def test_a_folder_of_pythonpath_with_installed_packages_is_of_libraries(tmp_path):
  (installed := tmp_path / "target").mkdir()
  (installed / "flax-0.12.dist-info").mkdir()
  (own := tmp_path / "own").mkdir()
  (own / "my_model.py").write_text("")
  found = extensions.library_folders([str(own), str(installed), str(tmp_path / "absent")])
  assert installed.resolve() in found
  assert own.resolve() not in found
  assert (
    pathlib.Path(pytest.__file__)
    .resolve()
    .is_relative_to(next(one for one in found if one.name == "site-packages"))
  )
