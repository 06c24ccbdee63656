"""runtime/extensions.py: what a file registers, and which files are part of a run by that."""

import sys
import types

import pytest

from runtime import extensions, provenance
from runtime.extensions import Table

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


def test_a_name_that_is_taken_is_refused_with_the_place_of_the_other(tmp_path):
  other = write(tmp_path / "a")
  extensions.load(other)
  path = write(tmp_path / "b", beside="helper_b")
  with pytest.raises(ValueError, match=r"'mine' is already registered by .*/a/mine\.py; rename"):
    extensions.load(path)
  with pytest.raises(ValueError, match="'ours' is already registered by the project"):
    extensions.load(write(tmp_path / "c", name="ours", beside="helper_c"))


def test_what_is_registered_is_found_without_its_table(tmp_path):
  module = extensions.load(write(tmp_path))
  assert extensions.registered("model", "mine") is module
  assert extensions.registered("model", "ours") is None  # the project's own
  assert extensions.registered("sink", "mine") is None


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


def test_the_code_of_a_checkpoint_has_what_registers_and_not_where_it_is(tmp_path):
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
