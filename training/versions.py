"""What computed a checkpoint, besides its config: the code and the libraries."""

import functools
import hashlib
import importlib.metadata
import pathlib
import platform

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The rooms whose code decides what a step computes.
ROOMS = ("input_pipeline", "models", "partitioning", "training")
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")


@functools.cache
def versions() -> dict[str, str]:
  """Returns name -> version; the code's is a digest of the rooms' source files."""
  digest = hashlib.sha256()
  for path in sorted(path for room in ROOMS for path in (ROOT / room).glob("*.py")):
    digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
  found = {name: importlib.metadata.version(name) for name in LIBRARIES}
  return {"code": digest.hexdigest()[:16], "python": platform.python_version(), **found}


@functools.cache
def everything() -> dict[str, str]:
  """Returns the digest of all code that a run may reach, and the version of every library.

  More than `versions`, and not kept: what the processes of one run must have in common.
  """
  rooms = (*ROOMS, "checkpointing", "commands", "configs", "processes", "runtime")
  digest = hashlib.sha256()
  for path in [
    ROOT / "main.py",
    *(p for room in rooms for p in sorted((ROOT / room).glob("*.py"))),
  ]:
    digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
  lines = (ROOT / "requirements.txt").read_text().splitlines()
  names = {line.partition("==")[0] for line in lines if "==" in line}
  found = {name: importlib.metadata.version(name) for name in sorted(names)}
  found["python"] = platform.python_version()
  return {"code": digest.hexdigest()[:16], **{f"versions.{n}": v for n, v in found.items()}}
