"""Stored programs: a key holds all that a program is made of, and a wrong file is never run."""

import dataclasses
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runtime import executables, provenance
from runtime.executables import Executables, described

CONFIG = {"model": {"layers": 2}, "training": {"matmul_precision": "default"}}
VERSIONS = {"code": "a", "jax": "0.10.2"}


def mesh_of(devices, shape=(2, 3)):
  return Mesh(np.array(devices).reshape(shape), ("data", "tensor"))


def key(
  *,
  config=CONFIG,
  devices=None,
  shape=(2, 3),
  options=(),
  name="train step",
  arguments=None,
  **more,
):
  """Returns the key of a program with one thing changed."""
  mesh = mesh_of(devices or jax.devices()[:6], shape)
  facts = {**executables.facts_of(config, mesh, list(options)), "versions": VERSIONS, **more}
  arguments = arguments or described(argument(mesh))
  return Executables(pathlib.Path(), facts, lambda *_: True, writes=True).key(name, arguments)


def argument(mesh, shape=(6, 7), dtype=jnp.float32, spec=("data",)):
  sharding = NamedSharding(mesh, PartitionSpec(*spec))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


MESH = mesh_of(jax.devices()[:6])
CHANGES = {
  "a config key": {"config": {**CONFIG, "training": {"matmul_precision": "highest"}}},
  "the order of devices": {"devices": jax.devices()[5::-1]},
  "other devices": {"devices": jax.devices()[1:7]},
  "the mesh": {"shape": (3, 2)},
  "a compiler option": {"options": [{"xla_x": "true"}]},
  "the program": {"name": "evaluation step"},
  "the code": {"versions": {**VERSIONS, "code": "b"}},
  "a library": {"versions": {**VERSIONS, "jax": "0.10.3"}},
  "a shape": {"arguments": described(argument(MESH, (7, 6)))},
  "a dtype": {"arguments": described(argument(MESH, dtype=jnp.bfloat16))},
  "a sharding": {"arguments": described(argument(MESH, spec=(None, "tensor")))},
  "the tree": {"arguments": described([argument(MESH)])},
}


def test_any_change_of_what_a_program_is_made_of_changes_its_key(monkeypatch):
  keys = {"nothing": key(), **{what: key(**change) for what, change in CHANGES.items()}}
  for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
    with monkeypatch.context() as changed:
      changed.setenv(name, "--xla_some_flag=1")
      keys[name] = key()
  with jax.default_matmul_precision("highest"):
    keys["an option of JAX"] = key()
  for one, other in itertools.combinations(keys, 2):
    assert keys[one] != keys[other], (one, other)
  assert key() == keys["nothing"]


def test_the_versions_of_a_run_have_all_its_code(monkeypatch):
  """A store has the digest of every file that a run may import."""
  files = {str(path) for path in provenance.source_files(provenance.RUN)}
  assert {"training/step.py", "models/transformer.py", "runtime/executables.py"} <= files
  executables._versions.cache_clear()
  monkeypatch.setattr(executables.extensions, "files", lambda **_: [])  # of other tests
  with monkeypatch.context() as changed:
    changed.setattr(executables, "_STARTED", float("inf"))
    assert executables._versions()["code"] == provenance.versions()["code"]
    assert set(provenance.LIBRARIES) <= {*executables._versions()}
  executables._versions.cache_clear()
  with monkeypatch.context() as changed:
    changed.setattr(executables, "_STARTED", 0.0)  # sources have changed since this process began
    assert executables._versions() is None
  executables._versions.cache_clear()
  assert executables.of_run(CONFIG, MESH, [], lambda *_: True) is None  # pytest is not main.py


# ------------------------------ files ------------------------------


class Compiling:
  """Compiles a function for the store, and counts how often."""

  def __init__(self, folder, **facts):
    given = {**executables.facts_of(CONFIG, MESH, []), "versions": VERSIONS, **facts}
    self.store = Executables(folder, given, lambda _, own: own, writes=True)
    self.compiled = 0

  def __call__(self, function, *arguments):
    devices = [*MESH.devices.flat]
    key = self.store.key("f", described(arguments))
    if found := self.store.load("f", key, devices):
      return found
    return self.store.compiled(
      "f", key, jax.jit(function, donate_argnums=0).lower(*arguments), self.finish, devices
    )

  def finish(self, lowered):
    self.compiled += 1
    return lowered.compile()


def ones(value=1.0):
  return jax.device_put(jnp.full((6, 7), value), NamedSharding(MESH, PartitionSpec("data")))


def one(x, y, unused):
  return x * 2 + y


def other(x, unused, y):
  return x * 2 + y


def test_a_stored_program_computes_and_donates_as_the_compiled_one(tmp_path):
  compiling = Compiling(tmp_path)
  arguments = [ones(), ones(2.0), ones(3.0)]
  expected = compiling(one, *arguments)(*(ones(x) for x in (1.0, 2.0, 3.0)))
  stored = compiling(one, *arguments)
  assert compiling.compiled == 1
  result = stored(*arguments)
  np.testing.assert_array_equal(result, np.full((6, 7), 4.0))
  assert result.sharding == expected.sharding
  assert [x.is_deleted() for x in arguments] == [True, False, False]
  assert stored.as_text().startswith("HloModule")


def test_a_change_of_code_finds_an_equal_program_and_no_other(tmp_path):
  """`one` and `other` lower to the same text, and drop another argument."""
  two = lambda x, y: x * 2 + y  # noqa: E731
  Compiling(tmp_path)(two, ones(), ones())
  later = {"config": {**CONFIG, "comment": 1}}
  again = Compiling(tmp_path, **later)
  again(two, ones(), ones())
  assert again.compiled == 0
  Compiling(tmp_path)(one, ones(), ones(), ones())
  dropping = Compiling(tmp_path, **later)
  found = dropping(other, ones(), ones(), ones())
  assert dropping.compiled == 1
  assert float(found(ones(), ones(7.0), ones(3.0))[0, 0]) == 5.0


def test_a_damaged_file_is_compiled_again_and_replaced(tmp_path):
  Compiling(tmp_path)(one, ones(), ones(), ones())
  [path] = tmp_path.glob("*.executable")
  whole = path.read_bytes()
  flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
  for damaged in (whole[: len(whole) // 2], b"", flipped, b"{}"):
    path.write_bytes(damaged)
    for count in (1, 0):
      again = Compiling(tmp_path)
      found = again(one, ones(), ones(), ones())
      assert again.compiled == count
      assert float(found(ones(), ones(), ones())[0, 0]) == 3.0


def test_all_processes_load_or_all_compile(tmp_path):
  """A process that has a program compiles with one that has not."""
  Compiling(tmp_path)(one, ones(), ones(), ones())
  alone = Compiling(tmp_path)
  alone.store = dataclasses.replace(alone.store, agree=lambda *_: False)
  alone(one, ones(), ones(), ones())
  assert alone.compiled == 1


def test_the_folder_has_a_limit(tmp_path, monkeypatch):
  monkeypatch.setattr(executables, "_MOST_FILES", 8)
  for number in range(5):
    Compiling(tmp_path, options=number)(one, ones(), ones(), ones())
  assert len([*tmp_path.iterdir()]) <= 8
