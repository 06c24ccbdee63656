"""Optimizer state in fewer bytes: moments in bfloat16 or in 8-bit blocks, computed in float32.

An array of the state counts as a moment if it belongs to a parameter and has its shape, is float32,
and does not begin as a copy of the parameter (which averages do). Those of scales and biases, and
small ones, stay float32.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from models import model_spec
from models.mup import STACKS, VECTORS
from partitioning.optimizer_state import Path, kept_by_trial, leaves_by_path, owners
from partitioning.rules import letters_of
from training.optimizers import blocks, stochastic_rounding
from training.optimizers.blocks import Blocks

LEAST = 4096  # elements; smaller arrays stay float32
# Dims, by name, that no mesh splits; and those that are numbers of separate arrays.
_WHOLE, _APART = ("head",), STACKS

# Path of a moment -> the shape of its blocks; None: it is stored in bfloat16.
Stored = dict[Path, tuple[int, ...] | None]


class NarrowState(NamedTuple):
  """The state of an optimizer whose moments are stored in another dtype.

  Attributes:
    count: int32 scalar, the number of updates, from which random bits follow.
    inner: the optimizer's own state, with bfloat16 arrays or `Blocks` in place of moments.
  """

  count: jax.Array
  inner: Any


def stored_narrow(
  config: ConfigDict, optimizer: optax.GradientTransformation, params: Any
) -> optax.GradientTransformation:
  """Returns the optimizer with its moments stored as `optimizer.state_dtype` says.

  In an update they are decoded to float32, and rounded stochastically at its end.

  Args:
    config: finalized.
    optimizer: computes in the dtype of the parameters that it is given.
    params: nested dict of float32 arrays or ShapeDtypeStructs.

  Raises:
    ValueError: it has no state to which this applies.
  """
  dtype = config.optimizer.state_dtype
  if dtype in ("float32", "float64"):
    return optimizer
  dims = _dims(config, params)
  which = functools.partial(_moments, optimizer.init, dims=dims, in_blocks=dtype == "int8")
  if not which(params) and dtype != config.training.parameter_dtype:
    raise ValueError(_none_text(config.optimizer, optimizer, params))

  def encoded(tree: Any, stored: Stored, count: jax.Array) -> Any:
    key = stochastic_rounding.key(config.seed, count)

    def one(path: Any, leaf: jax.Array) -> Any:
      name = tuple(jax.tree_util.keystr((part,), simple=True) for part in path)
      if name not in stored:
        return leaf
      words = stochastic_rounding.words(key, "/".join(name), leaf.shape)
      if (block := stored[name]) is None:
        return stochastic_rounding.to_bfloat16(leaf, words)
      return blocks.encode(leaf, block, words)

    return jax.tree_util.tree_map_with_path(one, tree)

  def init(params: Any) -> NarrowState:
    count = jnp.zeros((), jnp.int32)
    # Moments begin as constants, and XLA would take seconds to encode them while it compiles.
    first = jax.lax.optimization_barrier(optimizer.init(params))
    return NarrowState(count, encoded(first, which(params), count))

  def update(updates: Any, state: NarrowState, params: Any = None) -> tuple[Any, NarrowState]:
    stored = which(params)
    wide = jax.tree_util.tree_map_with_path(
      functools.partial(_decoded, stored), state.inner, is_leaf=_is_blocks
    )
    updates, inner = optimizer.update(updates, wide, params)
    count = state.count + 1
    return updates, NarrowState(count, encoded(inner, stored, count))

  return optax.GradientTransformation(init, update)


def _decoded(stored: Stored, path: Any, leaf: Any) -> jax.Array:
  if _is_blocks(leaf):
    return blocks.decode(leaf)
  name = tuple(jax.tree_util.keystr((part,), simple=True) for part in path)
  return leaf.astype(jnp.float32) if name in stored else leaf


def _is_blocks(node: Any) -> bool:
  return isinstance(node, Blocks)


# ---- Which arrays ----


def _moments(
  init: Callable[[Any], Any],
  params: Any,
  *,
  dims: Mapping[Path, Sequence[str]],
  in_blocks: bool,
) -> Stored:
  """Returns the moments that are stored narrower; the others are too small or fit no blocks."""
  parameters = leaves_by_path(params)
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  state = leaves_by_path(jax.eval_shape(init, params))
  copies = _from_parameters(init, params)
  found: Stored = {}
  whose = owners(state, parameters)
  # A square of a side (SOAP's) has the shape of a parameter whose dims are equal.
  equal = any(len(set(leaf.shape)) < len(leaf.shape) for leaf in parameters.values())
  kept = kept_by_trial(init, parameters) if equal else {}
  for (path, leaf), is_copy in zip(state.items(), copies, strict=True):
    owner = whose[path]
    if owner is None or is_copy or leaf.shape != parameters[owner].shape:
      continue
    if equal and tuple(range(leaf.ndim)) not in kept[path]:
      continue
    if leaf.dtype != jnp.float32 or leaf.size < LEAST or owner[-1].endswith(VECTORS):
      continue
    block = _block(leaf.shape, dims[owner]) if in_blocks else None
    if block is not None or not in_blocks:
      found[path] = block
  return found


def _block(shape: Sequence[int], dims: Sequence[str]) -> tuple[int, ...] | None:
  names = [*dims, *[""] * (len(shape) - len(dims))]  # of a model without letters, unnamed
  whole, apart = ([name in chosen for name in names] for chosen in (_WHOLE, _APART))
  return blocks.block_shape(shape, whole, apart)


def _dims(config: ConfigDict, params: Any) -> dict[Path, list[str]]:
  """Returns parameter -> the names of its dims."""
  model = model_spec(config)
  legend, rules = model.legend, model.parameters
  found = {}
  for path in leaves_by_path(params):
    letters = letters_of("/".join(path), rules)
    found[path] = [legend[letter].name for letter in letters if letter in legend]
  return found


def _from_parameters(init: Callable[[Any], Any], params: Any) -> list[bool]:
  """Returns for each array of the first state whether it depends on the values of parameters."""
  with jax.numpy_dtype_promotion("standard"):
    jaxpr = jax.make_jaxpr(init)(params).jaxpr
  known = {id(x) for x in jaxpr.invars}
  for equation in jaxpr.eqns:
    if any(id(x) in known for x in equation.invars):
      known.update(id(x) for x in equation.outvars)
  return [id(x) in known for x in jaxpr.outvars]


def _none_text(keys: ConfigDict, optimizer: optax.GradientTransformation, params: Any) -> str:
  state, parameters = leaves_by_path(jax.eval_shape(optimizer.init, params)), leaves_by_path(params)
  whose = owners(state, parameters)
  shapes = [
    leaf.shape
    for path, leaf in state.items()
    if whose[path] is not None and leaf.shape == parameters[whose[path]].shape
  ]
  what = f"optimizer.state_dtype={keys.state_dtype}: "
  if not shapes:
    return (
      f"{what}{keys.name} has no state of the parameters' shapes that this could apply to; leave "
      f"it out, or choose an optimizer with moments, such as adamw"
    )
  in_blocks = f", or whose dims have no factor {blocks.SIZE}" if keys.state_dtype == "int8" else ""
  return (
    f"{what}it would apply to nothing in the state of {keys.name}, the largest array being of "
    f"shape {max(shapes, key=math.prod)}: those of scales and biases, those with fewer than "
    f"{LEAST} elements{in_blocks}, and copies of parameters stay float32; leave it out"
  )
