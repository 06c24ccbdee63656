"""Damages entries of the compilation cache in every way and compiles again; prints what happens.

With --once it only compiles. A process of its own: a process decides once which cache it uses.
"""

import contextlib
import io
import json
import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp

from runtime import compilation_cache

FOLDER = pathlib.Path(sys.argv[1])
# name -> what becomes of an entry's content
DAMAGES = {
  "cut in half": lambda content: content[: len(content) // 2],
  "none": lambda content: content,
}


@jax.jit
def function(x):
  """Does something whose result is known."""
  return jnp.sin(x) @ jnp.cos(x).T


@jax.jit
def other(x):
  """Likewise."""
  return jnp.tanh(x) + 1


def run() -> str:
  """Compiles both functions or reads them, as a start does; returns what went to standard error."""
  jax.clear_caches()
  x = jnp.arange(6.0).reshape(2, 3)
  with contextlib.redirect_stderr(io.StringIO()) as err:
    compilation_cache.use(str(FOLDER))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    found = [float(function(x)[0, 1]), float(other(x)[0, 1])]
  assert found == WANTED, found
  return err.getvalue()


def entries() -> dict[str, bytes]:
  """Returns the functions' entries, by file name."""
  found = sorted(FOLDER.glob("jit_*-cache"))
  return {p.name: p.read_bytes() for p in found if p.name.startswith(("jit_function", "jit_other"))}


warnings.simplefilter("default")
compilation_cache._SETTLED_SECONDS = 0.2
jax.config.update("jax_platforms", "cpu")
compilation_cache.use(str(FOLDER))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
START = jnp.arange(6.0).reshape(2, 3)
WANTED = [float(function(START)[0, 1]), float(other(START)[0, 1])]
report = {}
for name, damage in DAMAGES.items() if "--once" not in sys.argv else ():
  whole = entries()
  assert len(whole) == 2, whole
  for entry, content in whole.items():
    (FOLDER / entry).write_bytes(damage(content))
  damaged = entries()
  said = run()
  healed = entries()
  assert set(healed) == set(whole)
  replaced = [damaged[entry] != healed[entry] for entry in whole]
  report[name] = {"said": said, "replaced": replaced, "again": run()}
print(json.dumps(report))
