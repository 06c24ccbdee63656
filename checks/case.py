"""A program on one mesh: its arrays, its compiled step and what the compiler said of it."""

import contextlib
import functools
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# No other API forgets whether the cache is used, which JAX asks once.
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from checks.program import Description, DescriptionError, Program, text_of
from runtime import hlo

# jax.experimental.enable_x64 until jax 0.8.
x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
SEED = 0


class Case:
  """What the checks share of a program on one mesh; each part is made when first asked for."""

  def __init__(self, program: Program):
    """Takes a program; it places nothing yet."""
    self.program = program
    self.name = text_of(dict(program.mesh.shape))

  @property
  def describe(self) -> Description:
    return self.program.describe

  @functools.cached_property
  def start(self) -> Any:
    """The initial state on the host, as this mesh makes it."""
    return to_host(self.program.state(SEED))

  def batch(self, number: int) -> Any:
    """Returns a batch on the host."""
    return to_host(self.program.batch(SEED + number))

  @functools.cached_property
  def rows(self) -> Any:
    """The first batch, on the host."""
    return self.batch(0)

  @functools.cached_property
  def shardings(self) -> tuple[Any, Any]:
    """The shardings of state and batch, one for each leaf."""
    state, batch = self.program.in_shardings
    return self._filled(state, self.start), self._filled(batch, self.rows)

  def _filled(self, prefix: Any, tree: Any) -> Any:
    mesh = self.program.mesh

    def named(sharding: Any, below: Any) -> Any:
      if not isinstance(sharding, Sharding):
        sharding = NamedSharding(mesh, sharding or PartitionSpec())
      return jax.tree.map(lambda _: sharding, below)

    leaf = lambda x: x is None or isinstance(x, Sharding | PartitionSpec)  # noqa: E731
    return jax.tree.map(named, prefix, tree, is_leaf=leaf)

  def place(self, state: Any = None, batch: Any = None) -> tuple[Any, Any]:
    """Returns state and batch on the devices: the given ones, or the first.

    Raises:
      ValueError: a sharding that does not fit its array; the message names the leaf.
    """
    if state is not None:  # of another mesh, whose tree may hold other objects beside its arrays
      state = jax.tree.unflatten(jax.tree.structure(self.start), jax.tree.leaves(state))
    trees = (self.start if state is None else state, self.rows if batch is None else batch)
    return tuple(
      jax.tree.map(to_devices, tree, placed)
      for tree, placed in zip(trees, self.shardings, strict=True)
    )

  def jitted(self, step: Callable | None = None, *, out: bool = True) -> Any:
    """Returns a step compiled for this mesh, that leaves its arguments alone.

    Args:
      step: instead of the program's own.
      out: whether it returns (state, metrics), and the state is to stay as it is sharded.
    """
    chosen = self.program.step if step is None else step
    placed = {"out_shardings": (self.shardings[0], None)} if out else {}
    # In a function of its own, so that the donation of a step that is jitted already is off.
    return jax.jit(lambda s, b: chosen(s, b), in_shardings=self.shardings, **placed)

  @functools.cached_property
  def compiled(self) -> "Compiled":
    """The step as a trainer would run it: with the state donated."""
    step = self.program.step
    if not hasattr(step, "lower"):
      donated = {"donate_argnums": 0} if self.describe.donated else {}
      outputs = (self.shardings[0], None)
      step = jax.jit(step, in_shardings=self.shardings, out_shardings=outputs, **donated)
    arguments = self.place()
    kept = warnings.catch_warnings(record=True)
    with kept as warned, standard_error() as said, without_cache():
      warnings.simplefilter("always")
      compiled = step.lower(*arguments).compile()
      text = said()
    return Compiled(compiled, [str(one.message) for one in warned], text)


class Compiled:
  """A compiled step, the warnings of JAX and the words of XLA while it was compiled."""

  def __init__(self, compiled: Any, warned: list[str], said: str):
    self.compiled, self.warned, self.said = compiled, warned, said

  @functools.cached_property
  def text(self) -> str:
    return self.compiled.as_text()

  @functools.cached_property
  def program(self) -> hlo.Program:
    return hlo.parse(self.text)


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
  """Turns the persistent cache off: a program that is read from it comes without warnings."""
  before = jax.config.jax_enable_compilation_cache

  def use(value: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", value)
    compilation_cache.reset_cache()  # it remembers whether it is used

  use(False)
  try:
    yield
  finally:
    use(before)


@contextlib.contextmanager
def standard_error() -> Iterator[Callable[[], str]]:
  """Keeps what is written to the process' standard error, also by C++, and writes it at the end."""
  sys.stderr.flush()
  before = os.dup(2)
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)

    def written() -> str:
      sys.stderr.flush()
      file.seek(0)
      return file.read().decode(errors="replace")

    try:
      yield written
    finally:
      text = written()
      os.dup2(before, 2)
      os.close(before)
      sys.stderr.write(text)


# ---- Trees ----


def is_key(leaf: Any) -> bool:
  return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host(tree: Any) -> Any:
  """Returns the arrays of a tree on the host; typed random keys stay as they are."""
  return jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), tree)


def to_devices(leaf: Any, sharding: Sharding) -> jax.Array:
  # A copy, so that nothing that reuses its buffer changes the one on the host.
  return jax.device_put(leaf if is_key(leaf) else np.array(leaf), sharding)


def named_leaves(tree: Any) -> dict[str, Any]:
  """Returns path -> leaf: `params/layers/up`."""
  found = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {path_text(path): leaf for path, leaf in found}


def path_text(path: Any) -> str:
  keys = (re.sub(r"^[\['.]+|['\]]+$", "", str(key)) for key in path)
  return "/".join(keys) or "value"


def leaf_of(tree: Any, name: str) -> Any:
  """Returns the leaf of a path. Raises DescriptionError if there is none."""
  leaves = named_leaves(tree)
  if name not in leaves:
    raise DescriptionError(f"describe names the leaf {name!r}; there are {', '.join(leaves)}")
  return leaves[name]


def replaced(tree: Any, name: str, value: Any) -> Any:
  """Returns a tree with another leaf at a path that it has."""
  leaves = named_leaves(tree) | {name: value}
  return jax.tree.unflatten(jax.tree.structure(tree), list(leaves.values()))


def is_float(leaf: Any) -> bool:
  return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def axes_of(
  sharding: Sharding, shape: tuple[int, ...], mesh: jax.sharding.Mesh, *, dim: int | None = None
) -> set[str]:
  """Returns the mesh axes along which an array is cut; along the others it is replicated.

  Args:
    sharding: of the array.
    shape: its global one.
    mesh: whose axes are named.
    dim: look at this dim alone.
  """
  places = sharding.devices_indices_map(shape)
  grid = np.empty(mesh.devices.shape, object)
  for position, device in np.ndenumerate(mesh.devices):
    place = places.get(device, ())
    grid[position] = str(place if dim is None else place[dim : dim + 1])
  return {
    axis
    for i, axis in enumerate(mesh.axis_names)
    if mesh.shape[axis] > 1 and (grid != np.take(grid, [0], axis=i)).any()
  }
