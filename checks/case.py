"""A program on one mesh: its arrays, its compiled step and what the compiler said of it."""

import contextlib
import functools
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from checks.program import Description, DescriptionError, Program, text_of
from runtime import hlo
from runtime.uncached import without_cache

# jax.experimental.enable_x64 until jax 0.8.
x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
SEED = 0


class Case:
  """What the checks share of a program on one mesh; each part is made when first asked for."""

  def __init__(self, program: Program):
    """Takes a program; it places nothing yet."""
    self.program = program
    self.name = text_of(dict(program.mesh.shape))
    self._wide = jax.config.jax_enable_x64

  @property
  def describe(self) -> Description:
    return self.program.describe

  @functools.cached_property
  def start(self) -> Any:
    """The initial state on the host, as this mesh makes it."""
    with x64(self._wide):  # whoever asks first
      return to_host(self.program.state(SEED))

  def batch(self, number: int) -> Any:
    """Returns a batch on the host."""
    with x64(self._wide):
      return to_host(self.program.batch(SEED + number))

  @functools.cached_property
  def rows(self) -> Any:
    """The first batch, on the host."""
    return self.batch(0)

  @functools.cached_property
  def leaves(self) -> dict[str, Any]:
    """The leaves of the initial state, by their paths."""
    return named_leaves(self.start)

  @functools.cached_property
  def shardings(self) -> tuple[Any, Any]:
    """The shardings of state and batch, one for each leaf."""

    def named(sharding: Any, below: Any) -> Any:
      if not isinstance(sharding, Sharding):
        sharding = NamedSharding(self.program.mesh, sharding or PartitionSpec())
      return jax.tree.map(lambda _: sharding, below)

    leaf = lambda x: x is None or isinstance(x, Sharding | PartitionSpec)  # noqa: E731
    given = zip(self.program.in_shardings, (self.start, self.rows), strict=True)
    return tuple(jax.tree.map(named, prefix, tree, is_leaf=leaf) for prefix, tree in given)

  @functools.cached_property
  def cut(self) -> dict[str, list[set[str]]]:
    """State leaf -> the mesh axes that cut each of its dims in the compiled step."""
    placed = jax.tree.leaves(self.compiled[0].input_shardings[0][0])
    leaves = zip(self.leaves.items(), placed, strict=True)
    mesh = self.program.mesh
    return {name: axes_of(sharding, leaf.shape, mesh) for (name, leaf), sharding in leaves}

  @functools.cached_property
  def batch_cut(self) -> list[list[set[str]]]:
    """The mesh axes that cut each dim of each leaf of the batch."""
    leaves = zip(jax.tree.leaves(self.rows), jax.tree.leaves(self.shardings[1]), strict=True)
    return [axes_of(sharding, leaf.shape, self.program.mesh) for leaf, sharding in leaves]

  @property
  def row_axes(self) -> set[str]:
    """The mesh axes that cut the rows of the batch."""
    return set().union(*(axes for dims in self.batch_cut for axes in dims[:1]))

  def parts(self, axes: Iterable[str]) -> int:
    """Returns into how many parts some mesh axes cut an array."""
    return math.prod(self.program.mesh.shape[axis] for axis in axes)

  def place(self, state: Any = None, batch: Any = None) -> tuple[Any, Any]:
    """Returns state and batch on the devices: the given ones, or the first.

    Raises:
      ValueError: a sharding that does not fit its array; the message names the leaf.
    """
    if state is not None:  # of another mesh, whose tree may hold other objects beside its arrays
      state = jax.tree.unflatten(jax.tree.structure(self.start), jax.tree.leaves(state))
    trees = (self.start if state is None else state, self.rows if batch is None else batch)

    def placed(leaf: Any, sharding: Sharding) -> jax.Array:
      # A copy, so that nothing that reuses its buffer changes the one on the host.
      return jax.device_put(leaf if is_key(leaf) else np.array(leaf), sharding)

    return tuple(jax.tree.map(placed, *pair) for pair in zip(trees, self.shardings, strict=True))

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

  # ---- The step as a trainer would run it: with the state donated ----

  @functools.cached_property
  def compiled(self) -> tuple[Any, list[str], list[str]]:
    """The compiled step, JAX's warnings, and the lines that XLA wrote to standard error."""
    step = self.program.step
    if not hasattr(step, "lower"):
      donated = {"donate_argnums": 0} if self.describe.donated else {}
      outputs = (self.shardings[0], None)
      step = jax.jit(step, in_shardings=self.shardings, out_shardings=outputs, **donated)
    arguments = self.place()
    with warnings.catch_warnings(record=True) as warned, standard_error() as said, without_cache():
      warnings.simplefilter("always")
      compiled = step.lower(*arguments).compile()
    return compiled, [str(one.message) for one in warned], said

  @functools.cached_property
  def text(self) -> str:
    return self.compiled[0].as_text()

  @functools.cached_property
  def hlo(self) -> hlo.Program:
    return hlo.parse(self.text)


@contextlib.contextmanager
def standard_error() -> Iterator[list[str]]:
  """Lists the lines that the process, also its C++, writes to standard error, and writes them."""
  sys.stderr.flush()
  before, lines = os.dup(2), []
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    try:
      yield lines
    finally:
      sys.stderr.flush()
      os.dup2(before, 2)
      os.close(before)
      file.seek(0)
      lines += file.read().decode(errors="replace").splitlines(keepends=True)
      sys.stderr.write("".join(lines))


# ---- Trees ----


def is_key(leaf: Any) -> bool:
  return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host(tree: Any) -> Any:
  """Returns the arrays of a tree on the host; typed random keys stay as they are."""
  return jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), tree)


def named_leaves(tree: Any) -> dict[str, Any]:
  """Returns path -> leaf: `params/layers/up`."""
  found = jax.tree_util.tree_flatten_with_path(tree)[0]
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")  # noqa: E731
  return {name(path) or "value": leaf for path, leaf in found}


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


def axes_of(sharding: Sharding, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> list[set[str]]:
  """Returns the mesh axes along which each dim of an array is cut.

  Args:
    sharding: of the array.
    shape: its global one.
    mesh: whose axes are named.
  """
  places = sharding.devices_indices_map(shape)
  found = []
  for dim in range(len(shape)):
    grid = np.empty(mesh.devices.shape, object)
    for position, device in np.ndenumerate(mesh.devices):
      grid[position] = str(places[device][dim]) if device in places else ""
    varies = {a for i, a in enumerate(mesh.axis_names) if (grid != np.take(grid, [0], i)).any()}
    found.append(varies)
  return found
