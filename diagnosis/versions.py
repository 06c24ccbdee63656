"""Installed packages beside those of the lock files, and beside one another."""

import importlib.metadata
import pathlib
import platform
import re
import sys
from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from diagnosis.finding import Finding, ok, warning, wrong

ROOT = pathlib.Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 11)
_PLUGIN = re.compile(r"jax-(cuda\d+|rocm\d+)-(?:plugin|pjrt)")
_MOST = 6  # packages that a finding names


def installed() -> dict[str, str]:
  """Returns name -> version of the packages of this Python; of two, the one that is imported."""
  found: dict[str, str] = {}
  for each in importlib.metadata.distributions():  # in the order of sys.path
    if each.name:
      found.setdefault(canonicalize_name(each.name), each.version)
  return found


def pins(file: pathlib.Path) -> dict[str, str]:
  """Returns name -> version that a lock file or a requirements file pins for this Python."""
  lines = re.sub(r"\\\n", " ", file.read_text()).splitlines()
  entries = (line.split(" --hash=")[0].strip() for line in lines)
  found = (Requirement(entry) for entry in entries if entry and entry[0] not in "#-")
  return {
    canonicalize_name(each.name): str(each.specifier).removeprefix("==")
    for each in found
    if each.marker is None or each.marker.evaluate()
  }


def check(
  hardware: str | None, there: Mapping[str, str] | None = None, root: pathlib.Path = ROOT
) -> Iterator[Finding]:
  """Yields what is found about Python and the packages.

  Args:
    hardware: `gpu` or `tpu` if this machine has such; the packages for it must be there.
    there: name -> version of what is installed; by default of this Python.
    root: of the project, with its lock files.
  """
  there = installed() if there is None else there
  yield _python()
  locked = pins(root / "requirements" / "locks" / "base.txt")
  yield from _packages(there, locked, pins(root / "requirements.txt"))
  yield from _jax(there, locked)
  yield from _gpu(there, hardware)
  yield from _tpu(there, hardware, locked, pins(root / "requirements" / "locks" / "tpu.txt"))


def _python() -> Finding:
  name = f"Python {platform.python_version()}"
  if sys.version_info < OLDEST_PYTHON:
    return wrong(f"{name}: too old", f"use {'.'.join(map(str, OLDEST_PYTHON))} or newer")
  return ok(f"{name}, {platform.system()} {platform.machine()}")


def _packages(
  there: Mapping[str, str], locked: Mapping[str, str], direct: Mapping[str, str]
) -> Iterator[Finding]:
  lock = "requirements/locks/base.txt"
  install = f"run `make setup`, or pip install --require-hashes -r {lock}"
  if missing := [name for name in direct if name not in there]:
    yield wrong(f"missing packages: {_few(missing)}", install)
  others = [
    f"{name} {there[name]} ({version})"
    for name, version in locked.items()
    if there.get(name, version) != version
  ]
  if others:
    yield warning(
      f"{len(others)} packages differ from {lock} (in brackets): {_few(others)}", install
    )
  elif not missing:
    yield ok(f"{len(locked)} packages as in {lock}")


def _jax(there: Mapping[str, str], locked: Mapping[str, str]) -> Iterator[Finding]:
  jax, jaxlib = there.get("jax"), there.get("jaxlib")
  if not jax or not jaxlib:
    return
  if jax != jaxlib:
    yield wrong(
      f"jax {jax} and jaxlib {jaxlib} do not match",
      f"install the same version of both: pip install jax=={locked['jax']} "
      f"jaxlib=={locked['jaxlib']}",
    )
  else:
    yield ok(f"jax and jaxlib {jax}, flax {there.get('flax', 'missing')}")


def _gpu(there: Mapping[str, str], hardware: str | None) -> Iterator[Finding]:
  plugins = {name: version for name, version in there.items() if _PLUGIN.fullmatch(name)}
  kinds = sorted({_PLUGIN.fullmatch(name)[1] for name in plugins})
  if len(kinds) > 1:
    yield wrong(
      f"plugins of several kinds of GPU software are installed: {', '.join(sorted(plugins))}",
      f"uninstall all but those of one, such as {kinds[0]}",
    )
  if uneven := [
    f"{name} {version}" for name, version in plugins.items() if version != there.get("jaxlib")
  ]:
    yield wrong(
      f"{', '.join(uneven)} do not match jaxlib {there.get('jaxlib')}",
      "run `make setup ACCELERATOR=gpu`, or install them in jaxlib's version",
    )
  elif plugins and len(kinds) == 1:
    yield ok(f"plugins for GPUs: {kinds[0]} {next(iter(plugins.values()))}")
  if hardware == "gpu" and not plugins:
    yield wrong(
      "this machine has a GPU, and JAX has no plugin for it", "run `make setup ACCELERATOR=gpu`"
    )


def _tpu(
  there: Mapping[str, str],
  hardware: str | None,
  locked: Mapping[str, str],
  of_tpus: Mapping[str, str],
) -> Iterator[Finding]:
  found, pinned = there.get("libtpu"), of_tpus["libtpu"]
  if found is None:
    if hardware == "tpu":
      yield wrong(
        "this machine has a TPU, and libtpu is not installed", "run `make setup ACCELERATOR=tpu`"
      )
    return
  if there.get("jax") != locked["jax"]:
    yield warning(
      f"libtpu {found}: known to match is {pinned} with jax {locked['jax']} alone",
      f"install jax[tpu]=={there.get('jax')}, which brings the libtpu that it is made for",
    )
  elif found.split(".")[:3] != pinned.split(".")[:3]:
    yield wrong(
      f"libtpu {found} does not match jax {locked['jax']}: programs that it compiles cannot be "
      f"read",
      f"pip install libtpu=={pinned}",
    )
  else:
    yield ok(f"libtpu {found}")


def _few(names: list[str]) -> str:
  more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
  return ", ".join(names[:_MOST]) + more
