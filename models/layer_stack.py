"""The layers of a decoder: one layer, and stacks of them, run in their order in scans.

Of complete rows, or of tokens that follow those in a cache. Where pipeline stages split the layers,
and no schedule runs, one stage after another.
Names carry their dims: `x_BRD` is batch, residual sequence, width.
"""

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from models import activations
from models.attention import (
  LENGTHS,
  BidirectionalAttention,
  Cache,
  GroupedQueryAttention,
  cache_layer,
  per_layer,
  set_cache_layer,
)
from models.layers import MLPS, NORMS, dropout, named, rematerialized
from models.losses import Sums
from models.positions import Layer, Rows
from models.spec import (
  DENSE_LAYERS,
  LATENT_ATTENTION,
  LAYERS,
  MIXER_LAYERS,
  NO_MIXER,
  RESIDUAL,
  LayersSpec,
  under,
)
from partitioning.constraints import automatic_layout
from partitioning.dtypes import scaled
from partitioning.mesh_sizes import STAGE
from runtime.extensions import Table
from runtime.layer_kinds import MIXER, is_sparse, layer_type

# ------------------------------ one layer ------------------------------


def _latent_attention() -> type[nnx.Module]:
  from models.latent_attention import LatentAttention  # of such models alone

  return LatentAttention


# By `model.attention`: the class, or what imports and returns it.
ATTENTION: Table = Table(
  "attention",
  {
    "grouped_query": GroupedQueryAttention,
    "bidirectional": BidirectionalAttention,
    LATENT_ATTENTION: _latent_attention,
  },
)


def _mixer(name: str, module: str = "mixers") -> Callable[[], type[nnx.Module]]:
  def imported() -> type[nnx.Module]:
    return getattr(importlib.import_module(f"models.{module}"), name)  # of such models alone

  return imported


# By `model.mixer`: likewise, of layers of the type `mixer`.
MIXERS: Table = Table(
  "mixer",
  {
    "gated_delta": _mixer("GatedDeltaNet"),
    "short_convolution": _mixer("ShortConvolution"),
    "kimi_delta": _mixer("KimiDelta", "kimi_delta"),
    "mamba2": _mixer("Mamba2", "state_space"),
    "lightning": _mixer("Lightning", "state_space"),
  },
)


def attention_class(spec: LayersSpec, stack: str = LAYERS) -> type[nnx.Module]:
  """Returns the class of the attention of a stack's layers, or of what they have in its place."""
  if stack == MIXER_LAYERS:
    return mixer_class(spec.mixer)
  found = ATTENTION[spec.attention]
  return found if isinstance(found, type) else found()


def mixer_class(name: str) -> type[nnx.Module]:
  """Returns the class of a `model.mixer`."""
  found = MIXERS[name]
  return found if isinstance(found, type) else found()


class Block(nnx.Module):
  """One layer: attention and MLP, each with a norm before it, after it, or both.

  In place of the MLP it may have a mixture of experts.
  """

  def __init__(self, spec: LayersSpec, *, rngs: nnx.Rngs, stack: str = LAYERS):
    """Draws the layer's parameters from `rngs.params`.

    Args:
      spec: of the model.
      rngs: draws them.
      stack: how their names begin. Of a model with experts the layers in `dense_layers/` have none;
        those in `mixer_layers/` have a mixer in place of attention, under the same name.
    """
    self.spec, norm = spec, NORMS[spec.norm]
    if spec.pre_norms:
      self.attention_norm = norm(f"{stack}attention_norm", spec)
    self.attention = attention_class(spec, stack)(spec, rngs=rngs, name=f"{stack}attention")
    if spec.with_mixers:
      self.mixer = attention_class(spec, MIXER_LAYERS)(spec, rngs=rngs, name=f"{stack}mixer")
    if spec.pre_norms:
      self.mlp_norm = norm(f"{stack}mlp_norm", spec)
    self.sparse = spec.experts > 0 and stack != DENSE_LAYERS
    if self.sparse:
      from models.experts import Experts  # of such models alone

      self.experts = Experts(spec, rngs=rngs, name=f"{stack}experts")
    else:
      self.mlp = MLPS[spec.mlp](spec, rngs=rngs, name=f"{stack}mlp")
    if spec.post_norms:
      self.attention_post_norm = norm(f"{stack}attention_post_norm", spec)
      self.mlp_post_norm = norm(f"{stack}mlp_post_norm", spec)

  @staticmethod
  def dims(spec: LayersSpec, stack: str = LAYERS) -> dict[str, str]:
    """Returns parameter -> letters, of a layer of a stack, in the order of computation."""
    if spec.experts > 0 and stack != DENSE_LAYERS:
      from models.experts import Experts

      feedforward = under("experts", Experts.dims(spec))
    else:
      feedforward = under("mlp", MLPS[spec.mlp].dims(spec))
    attention = under("attention", attention_class(spec, stack).dims(spec))
    if spec.with_mixers:
      attention |= under("mixer", attention_class(spec, MIXER_LAYERS).dims(spec))
    norm = NORMS[spec.norm].dims(spec)
    found = {}
    for part, rows in (("attention", attention), ("mlp", feedforward)):
      found |= under(f"{part}_norm", norm) if spec.pre_norms else {}
      found |= rows | (under(f"{part}_post_norm", norm) if spec.post_norms else {})
    return found

  @property
  def cached(self) -> tuple[str, ...]:
    """Returns the names of the arrays of the layer's cache."""
    return self.attention.cached + (self.mixer.cached if self.spec.with_mixers else ())

  def __call__(
    self,
    x_BRD: Float[Array, "B R D"],
    layer: Layer,
    key: Key[Array, ""] | None,
    rows: Rows,
    cache: Cache | None = None,
  ) -> tuple[Float[Array, "B R D"], Cache | None, Sums]:
    """Returns the residual after this layer, the layer's cache, and numbers of each row.

    Args:
      x_BRD: the residual.
      layer: the numbers that differ between layers.
      key: draws the dropout; None turns it off.
      rows: slots, positions and documents of the tokens.
      cache: keys and values of earlier tokens; None if x has all tokens.

    Returns:
      The residual; the cache; numbers of each row [B, ...], by name: of a sparse layer, those of
      `models.experts`.
    """
    spec, keys = self.spec, (None,) * 4
    if key is not None:
      count = 4 if spec.lora.dropout else 2
      keys = (*jax.random.split(key, count), None, None)[:4]
    x_BRD = named(x_BRD, "layer_input")
    normed_BRD = x_BRD
    if spec.pre_norms:
      normed_BRD = named(self.attention_norm(x_BRD), "attention_input")
    update_BRD, cache = self.attention(normed_BRD, layer, rows, cache, keys[2])
    if spec.with_mixers:
      key = None if keys[2] is None else jax.random.fold_in(keys[2], 1)
      more_BRD, cache = self.mixer(normed_BRD, layer, rows, cache, key)
      update_BRD = update_BRD + more_BRD
    update_BRD = named(update_BRD, "attention_update")
    if spec.post_norms:
      update_BRD = self.attention_post_norm(update_BRD)
    update_BRD = self._scaled(update_BRD)
    activations.record("attention", update_BRD)
    x_BRD = x_BRD + dropout(update_BRD, spec.dropout_rate, keys[0], rows.slots_BT[0])
    normed_BRD = named(self.mlp_norm(x_BRD), "mlp_input") if spec.pre_norms else x_BRD
    numbers = {}
    if self.sparse:
      update_BRD, numbers = self.experts(normed_BRD, rows)
    else:
      update_BRD = self.mlp(normed_BRD, keys[3], rows.slots_BT[0])
    update_BRD = named(update_BRD, "mlp_update")
    if spec.post_norms:
      update_BRD = self.mlp_post_norm(update_BRD)
    update_BRD = self._scaled(update_BRD)
    activations.record("mlp", update_BRD)
    x_BRD = x_BRD + dropout(update_BRD, spec.dropout_rate, keys[1], rows.slots_BT[0])
    activations.record("residual", x_BRD)
    return x_BRD, cache, numbers

  def _scaled(self, update_BRD: Float[Array, "B R D"]) -> Float[Array, "B R D"]:
    """Returns what is added to the residual, times `model.residual_multiplier` (Granite)."""
    factor = self.spec.residual_multiplier
    return update_BRD if factor == 1.0 else scaled(update_BRD, factor)


def stacked(
  spec: LayersSpec, rngs: nnx.Rngs, count: int, name: str, kind: type[Block] = Block
) -> Block:
  """Returns `count` layers with their parameters stacked along the first dim."""

  @nnx.split_rngs(splits=count)
  @nnx.vmap(in_axes=0, out_axes=0)
  def stack(rngs: nnx.Rngs) -> Block:
    return kind(spec, rngs=rngs, stack=name)

  return stack(rngs)


# ------------------------------ scans over layers ------------------------------

# The carry and what one layer is given -> the carry and what the layer returns.
Step = Callable[[Any, Any], tuple[Any, Any]]
# Letters of stacked layers: of all, or those with experts or attention; of dense ones beside
# experts; of mixer layers; of those that predict further tokens.
STACKS = ("L", "Z", "y", "Y")
# (beside, main, times): so many times, first so many layers of the stack beside the main one, dense
# or mixer layers, and then so many of that.
Group = tuple[int, int, int]


def order_of(model: Any) -> tuple[Group, ...]:
  """Returns the order of layers of the main stack and of the one beside it, if there is one.

  Equal groups that follow each other are one scan, whose code is that of one of them.

  Args:
    model: a spec, or the section `model` of a finalized config.
  """
  if getattr(model, "mixer", NO_MIXER) != NO_MIXER:
    kinds = [layer_type(model, layer) != MIXER for layer in range(model.layers)]
  elif getattr(model, "experts", 0):
    kinds = [is_sparse(model, layer) for layer in range(model.layers)]
  else:
    kinds = [True] * model.layers
  pairs: list[tuple[int, int]] = []
  for main, run in itertools.groupby(kinds):
    count = len([*run])
    if not main:
      pairs.append((count, 0))
    elif pairs:  # behind others
      pairs[-1] = pairs[-1][0], count
    else:
      pairs.append((0, count))
  return tuple((*pair, len([*same])) for pair, same in itertools.groupby(pairs))


def trip_counts(order: tuple[Group, ...]) -> list[int]:
  """Returns the trip counts of the scans of `over_layers`; that of the most layers comes first."""
  found = []
  for dense, sparse, times in order:
    once = [(count, count) for count in (sparse, dense) if count]
    found += once if times == 1 else [((dense + sparse) * times, times)]
  return [trips for _, trips in sorted(found, key=lambda one: -one[0])]


def over_layers(
  body: Callable[[nnx.Module, Any, Any], tuple[Any, Any]],
  layers: nnx.Module,
  dense_layers: nnx.Module | None,
  order: tuple[Group, ...],
  carry: Any,
  every: Any,
  *,
  wrapped: Callable[[Step], Step] = lambda step: step,
  unroll: int = 1,
) -> tuple[Any, Any, Any]:
  """Runs all layers, one after another.

  Args:
    body: takes a layer, the carry, and what is this layer's of `every`.
    layers: stacked.
    dense_layers: those of a model with experts that have none, stacked; None: there are none.
    order: of `order_of`.
    carry: what the first layer is given.
    every: a tree of arrays with one entry for each layer, in the order in which they run.
    wrapped: makes of a layer's function another, such as a rematerialized one.
    unroll: layers of an iteration of the scan over `layers`.

  Returns:
    The carry after the last layer; what the layers returned, stacked; what the dense ones did.
  """
  step, stack = _step(body, layers, wrapped)
  if dense_layers is None:
    return *jax.lax.scan(step, carry, (stack, every), unroll=unroll), {}
  dense_step, dense_stack = _step(body, dense_layers, wrapped)

  def run(group: Group, carry: Any, inputs: tuple) -> tuple[Any, tuple]:
    """Runs a group once."""
    (dense, sparse, times), (of_dense, of_sparse, every) = group, inputs
    first = rest = None
    if dense:
      carry, first = jax.lax.scan(dense_step, carry, (of_dense, _part(every, 0, dense)))
    if sparse == 1 and times > 1:  # the scan's own inputs: a slice of them would be saved for it
      carry, rest = step(carry, (of_sparse, jax.tree.map(lambda x: x[-1], every)))
    elif sparse:
      carry, rest = jax.lax.scan(step, carry, (of_sparse, _part(every, dense)), unroll=unroll)
    return carry, (first, rest)

  found: tuple[list, list] = [], []
  at = [0, 0]
  for group in order:
    dense, sparse, times = group
    ends = at[0] + dense * times, at[1] + sparse * times
    given = (
      _part(dense_stack, at[0], ends[0]),
      _part(stack, at[1], ends[1]),
      _part(every, sum(at), sum(ends)),
    )
    if times == 1:
      carry, results = run(group, carry, given)
    else:
      sizes = dense, sparse if sparse > 1 else 0, dense + sparse
      given = tuple(_in_periods(tree, size, times) for tree, size in zip(given, sizes, strict=True))
      carry, results = jax.lax.scan(functools.partial(run, group), carry, given)
      results = tuple(map(_of_periods, results, sizes[:2]))
    for kept, one, count in zip(found, results, (dense, sparse), strict=True):
      kept.extend([one] if count else [])
    at = [*ends]
  of_dense, of_sparse = (jax.tree.map(lambda *x: jnp.concatenate(x), *one) for one in found)
  return carry, of_sparse, of_dense


def _step(body: Callable, layers: nnx.Module, wrapped: Callable[[Step], Step]) -> tuple[Step, Any]:
  """Returns the body as that of a scan over stacked parameters, and these."""
  graphdef, stack = nnx.split(layers)

  def step(carry, inputs):
    params, one = inputs
    return body(nnx.merge(graphdef, params), carry, one)

  return wrapped(step), stack


def _part(tree: Any, start: int, stop: int | None = None) -> Any:
  return jax.tree.map(lambda x: x[start:stop], tree)


def _in_periods(tree: Any, size: int, times: int) -> Any:
  """Returns stacked arrays with a dim for each period; without one for the 0 or 1 in it."""
  return jax.tree.map(lambda x: x.reshape(times, size, *x.shape[1:]), tree) if size else tree


def _of_periods(tree: Any, size: int) -> Any:
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree) if size else tree


# ------------------------------ the stacks of a decoder ------------------------------


def _stages() -> int:
  """Returns how many stages the layers are split over here; 1 inside of a stage."""
  layout, sizes = automatic_layout()
  axes = layout.parameters.get(layout.legend["L"].name, ())
  return sizes[STAGE] if STAGE in axes else 1


def blocks(
  model: Any,
  x_BRD: Float[Array, "B R D"],
  rows: Rows,
  key: Key[Array, ""] | None,
  first: Int[Array, ""] | int,
) -> tuple[Float[Array, "B R D"], dict[str, jax.Array]]:
  """Returns what `Transformer.blocks` does, of a `Transformer`; arguments as there."""
  if (stages := _stages()) == 1:
    return _run(model, model.layers, x_BRD, rows, key, first)
  graphdef, stack = nnx.split(model.layers)
  count = model.spec.layers // stages

  def of_stage(stack: Any, x_BRD: Array, given: Any, stage: Int[Array, ""]) -> tuple:
    with activations.recording():  # of one stage: not those of all layers
      return _run(model, nnx.merge(graphdef, stack), x_BRD, *given, stage * count)

  return _relayed(of_stage, stack, x_BRD, (rows, key))


def _relayed(*given: Any) -> tuple[Array, Any]:
  from partitioning.parallel import pipeline  # where the layers are split

  return pipeline.relayed(*given, RESIDUAL.between)


def _of_layers(
  model: Any, layers: nnx.Module, every: Any, first: Int[Array, ""] | int
) -> tuple[int, Any]:
  """Returns the number of these layers of a model, and what is theirs of a tree for all layers."""
  stacks = [layers] if model.layers_beside is None else [layers, model.layers_beside]
  count = sum(jax.tree.leaves(nnx.state(one))[0].shape[0] for one in stacks)
  if count == model.spec.layers:
    return count, every
  part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count)
  return count, jax.tree.map(part, every)


def _run(
  model: Any,
  layers: nnx.Module,
  x_BRD: Float[Array, "B R D"],
  rows: Rows,
  key: Key[Array, ""] | None,
  first: Int[Array, ""] | int,
) -> tuple[Float[Array, "B R D"], dict[str, jax.Array]]:
  """Runs stacked layers, of which number 0 is number `first` of the model."""
  keys = None if key is None else jax.random.split(key, model.spec.layers)
  _, every = _of_layers(model, layers, (model.layer_pattern.stacked(), keys), first)

  def layer(block, x_BRD, one):
    with activations.layer() as recorded:
      x_BRD, _, numbers = block(x_BRD, *one, rows)
    return x_BRD, (numbers, recorded)

  x_BRD, found, of_beside = over_layers(
    layer,
    layers,
    model.layers_beside,
    model.layer_order,
    x_BRD,
    every,
    wrapped=lambda step: rematerialized(
      step, model.spec.rematerialization, reshard=model.spec.reshard_after_forward
    ),
    unroll=model.spec.scan_unroll,
  )
  numbers = found[0]
  if of_beside:
    activations.record_layers(of_beside[1], model.name_beside)
    if of_beside[0]:  # mixers with experts
      numbers = jax.tree.map(lambda *x: jnp.concatenate(x), numbers, of_beside[0])
  activations.record_layers(found[1])
  return x_BRD, numbers


def extended(
  model: Any, x_BRD: Float[Array, "B R D"], rows: Rows, cache: Cache
) -> tuple[Float[Array, "B R D"], Cache]:
  """Returns the residual after all layers of a `Transformer`, and the cache with the tokens.

  Args:
    model: the decoder.
    x_BRD: of the tokens that follow those in the cache.
    rows: their slots and positions.
    cache: of all layers.
  """
  graphdef, stack = nnx.split(model.layers)
  stages = _stages()
  count = model.spec.layers // stages

  def of_stage(stacked: Any, x_BRD: Array, given: Any, stage: Int[Array, ""] | int) -> tuple:
    (stack, arrays), (rows, lengths_B) = stacked, given
    cache = {**arrays, LENGTHS: lengths_B}
    return _extended(model, nnx.merge(graphdef, stack), x_BRD, rows, cache, stage * count)

  given = (stack, per_layer(cache)), x_BRD, (rows, cache[LENGTHS])
  if stages == 1:
    x_BRD, arrays = of_stage(*given, 0)
  else:
    x_BRD, arrays = _relayed(of_stage, *given)
  return x_BRD, cache | arrays


def _extended(
  model: Any,
  layers: nnx.Module,
  x_BRD: Float[Array, "B R D"],
  rows: Rows,
  cache: Cache,
  first: Int[Array, ""] | int,
) -> tuple[Float[Array, "B R D"], dict[str, jax.Array]]:
  """Returns the residual after stacked layers, of which `first` is the first, and their cache."""

  def layer(block, carry, inputs):
    x_BRD, cache = carry
    one, number = inputs
    of_layer = cache_layer(cache, number, block.cached)
    x_BRD, new, _ = block(x_BRD, one, None, rows, of_layer)
    return (x_BRD, set_cache_layer(cache, number, new)), None

  count, every = _of_layers(model, layers, model.layer_pattern.stacked(), first)
  numbers = jnp.arange(count, dtype=jnp.int32)
  if model.name_beside == MIXER_LAYERS:  # with arrays of their own
    numbers = jnp.asarray([model.spec.place_of(n)[1] for n in range(count)], jnp.int32)
  # In the carry, not a scanned input: a layer is updated in place, and there is only one cache.
  (x_BRD, cache), *_ = over_layers(
    layer,
    layers,
    model.layers_beside,
    model.layer_order,
    (x_BRD, cache),
    (every, numbers),
  )
  return x_BRD, per_layer(cache)
