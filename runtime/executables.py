"""Compiled programs on disk, which a start finds without tracing them.

JAX's persistent compilation cache is keyed by the lowered program, so a start that finds its entry
has traced and lowered it first, which takes longer than reading it. Here a program is found by
everything that it is made of: code, config, arguments, devices, options, versions. A key that is
not there costs a trace and a lowering; then the lowered program is looked up (code may change
without changing a program), and compiled if it is not there either.

Such programs are compiled without JAX's cache: what it has read cannot be serialized again on CPUs
(of jax 0.10.2 and 0.12.0: "Function ... not found" when it runs). Reading an entry runs code, as
JAX's cache does: whoever can write to the folder can run code in the processes that read it.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import pickle
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import psutil

# JAX has no other way to write a compiled program; `jax.export` writes one that is not compiled.
from jax.experimental import serialize_executable

from runtime import extensions, files, provenance
from runtime.uncached import without_cache

_FOLDER = "executables"
_KEY, _PROGRAM = ".key", ".executable"
_MOST_BYTES = 2**33  # of a program
_MOST_FILES = 400  # of the folder; the oldest are removed
# When this process had the sources that it runs. A file that changed later is not what runs.
_STARTED = min(psutil.Process().create_time(), time.time())
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# JAX's options that say where a process finds its devices and its cache.
_PLACES = re.compile(r"_visible_devices$|compilation_cache|persistent_cache")
_ARGUMENT = re.compile(r"%arg\d+: ")
_MAIN = re.compile(r"func\.func public @main\((.*)$", re.MULTILINE)

# (name of a program, whether this process has it) -> whether all processes do.
Agree = Callable[[str, bool], bool]


@dataclasses.dataclass(frozen=True)
class Executables:
  """The store of a run.

  Attributes:
    folder: of its files, on this machine or shared.
    facts: whatever determines the run's programs besides their arguments.
    agree: all processes load a program, or all compile it.
    writes: whether this process writes first.
  """

  folder: pathlib.Path
  facts: Mapping[str, Any]
  agree: Agree
  writes: bool

  def key(self, name: str, facts: Any) -> str:
    """Returns the key of a program: a digest of all that it is made of.

    Args:
      name: of the program.
      facts: of it besides the run's, as JSON; see `described`.
    """
    return _digest([name, self.facts, facts])

  def load(self, name: str, key: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
    """Returns a stored program; None where a process does not have it. All processes call it."""
    found = None
    if (text := self._read(key + _KEY)) is not None:
      found = self._load(text.decode(), devices)
    return found if self.agree(f"{name}: key", found is not None) else None

  def compiled(
    self,
    name: str,
    key: str,
    lowered: jax.stages.Lowered,
    compile_it: Callable[[jax.stages.Lowered], jax.stages.Compiled],
    devices: Sequence[jax.Device],
  ) -> jax.stages.Compiled:
    """Returns the program of a key that was not there, and stores it. All processes call it."""
    digest = self._program(key, lowered)
    found = self._load(digest, devices)
    if not self.agree(f"{name}: program", found is not None):
      with without_cache():
        found = compile_it(lowered)
      try:
        parts = serialize_executable.serialize(found)
      except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        parts = None  # a program with callbacks or constants of its own
      content = pickle.dumps(parts) if parts else b""
    else:
      content = None  # it is there
    self._write(key, digest, content, self.writes)
    self.agree(f"{name}: written", True)
    self._write(key, digest, content, not self.writes)  # where each host has its own folder
    return found

  def _program(self, key: str, lowered: jax.stages.Lowered) -> str:
    """Returns a digest of a lowered program, or its key where the program does not say it all.

    Which arguments were dropped, since nothing reads them, is not in its text.
    """
    text = lowered.as_text()
    taken = len(_ARGUMENT.findall(_MAIN.search(text)[1]))
    if taken != len(jax.tree.leaves(lowered.args_info)):
      return key
    given = [self.facts[name] for name in ("devices", "options", "environment", "versions")]
    trees = [described(lowered.args_info), described(lowered.out_info)]
    return _digest([text, *given, trees])

  def _load(self, digest: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
    if (content := self._stored(digest)) is None:
      return None
    try:
      parts = pickle.loads(content)
      return serialize_executable.deserialize_and_load(*parts, execution_devices=devices)
    except Exception:  # whatever is wrong with it, it is compiled
      return None

  def _stored(self, digest: str) -> bytes | None:
    """Returns a program; None where there is none, or a damaged one."""
    content = self._read(digest + _PROGRAM)
    whole = content and hashlib.sha256(content[64:]).hexdigest().encode() == content[:64]
    return content[64:] if whole else None

  def _read(self, name: str) -> bytes | None:
    path = self.folder / name
    try:
      content = files.read_bytes(path, most_bytes=_MOST_BYTES)
      os.utime(path)  # what is in use is not removed
    except OSError:
      return None
    return content

  def _write(self, key: str, digest: str, content: bytes | None, mine: bool) -> None:
    """Writes a program that was compiled, and its key, unless they are there."""
    if not mine or content == b"":
      return
    program = self.folder / (digest + _PROGRAM)
    try:
      self.folder.mkdir(parents=True, exist_ok=True)
      if content is not None and self._stored(digest) is None:
        signed = hashlib.sha256(content).hexdigest().encode() + content
        files.replace(program, signed, shared=True)
      if program.exists() and self._read(key + _KEY) != digest.encode():
        files.replace(self.folder / (key + _KEY), digest, shared=True)
      files.keep_newest(self.folder, (_KEY, _PROGRAM), _MOST_FILES)
    except OSError:
      return  # the disk is full, or not ours: the next start compiles again


def of_run(
  config: Mapping[str, Any], mesh: jax.sharding.Mesh, options: Any, agree: Agree
) -> Executables | None:
  """Returns the store of a run; None where a program may depend on what no key can hold.

  That is: code that is not in the project's files, as in a notebook, or in a file of a user, which
  may read anything; a source that has changed since this process began; a cache in a bucket.

  Args:
    config: all of it, as JSON.
    mesh: of the programs.
    options: of the compiler, by default and of the config, as JSON.
    agree: see `Executables`.
  """
  main = getattr(sys.modules["__main__"], "__file__", None)
  is_command = main is not None and pathlib.Path(main).resolve() == provenance.ROOT / "main.py"
  folder = jax.config.jax_compilation_cache_dir or ""
  if (
    not folder or not files.is_local(folder) or not is_command or (versions := _versions()) is None
  ):
    return None
  facts = {**facts_of(config, mesh, options), "versions": versions}
  return Executables(pathlib.Path(folder) / _FOLDER, facts, agree, jax.process_index() == 0)


def facts_of(config: Mapping[str, Any], mesh: jax.sharding.Mesh, options: Any) -> dict[str, Any]:
  """Returns what determines a run's programs besides code and arguments; see `of_run`."""
  devices = [*mesh.devices.flat]
  client = devices[0].client
  return {
    "config": config,
    "mesh": [[*mesh.axis_names], [*mesh.devices.shape], [str(t) for t in mesh.axis_types]],
    "devices": [
      [[one.id, one.process_index, one.platform, one.device_kind] for one in devices],
      [jax.process_count(), jax.device_count(), len(jax.local_devices())],
      [client.platform, client.platform_version, _processor() if client.platform == "cpu" else ""],
    ],
    "options": options,
    "environment": environment(),
  }


def environment() -> dict[str, str]:
  """Returns the flags of XLA, and JAX's options that may change a program."""
  jaxs = {name: repr(one) for name, one in jax.config.values.items() if not _PLACES.search(name)}
  return {**jaxs, **{name: os.environ.get(name, "") for name in _VARIABLES}}


@functools.cache
def _versions() -> dict[str, Any] | None:
  """Returns the digests of all code, and the versions; None where files do not say what runs."""
  if extensions.files(numerics=True):
    return None
  sources = (provenance.ROOT / path for path in provenance.source_files(provenance.RUN))
  if any(path.stat().st_mtime >= _STARTED for path in sources):
    return None
  return {**provenance.everything(), **provenance.versions(), "machine": platform.machine()}


@functools.cache
def _processor() -> str:
  """Returns what a program that is compiled for this machine's processor may use."""
  try:
    text = pathlib.Path("/proc/cpuinfo").read_text()
  except OSError:
    return platform.processor()
  kept = ("model name", "flags", "Features", "CPU part")
  return _digest(sorted({line for line in text.splitlines() if line.startswith(kept)}))


def described(tree: Any) -> list[Any]:
  """Returns the structure of a tree of arrays, abstract arrays, shardings or plain values."""
  leaves, structure = jax.tree.flatten(tree)
  return [str(structure), [_leaf(leaf) for leaf in leaves]]


def _leaf(leaf: Any) -> list[str]:
  if isinstance(leaf, jax.sharding.Sharding):
    return [str(leaf), str(leaf.memory_kind)]
  if hasattr(leaf, "dtype"):
    parts = (leaf.dtype, getattr(leaf, "weak_type", ""), getattr(leaf, "donated", ""))
    placed = getattr(leaf, "sharding", None)
    if isinstance(placed, jax.sharding.SingleDeviceSharding):
      placed = None  # on a device of this process, such as the key that draws the parameters
    memory = getattr(placed, "memory_kind", "")
    return [str(list(leaf.shape)), *map(str, parts), str(placed), str(memory)]
  return [repr(leaf)]


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
