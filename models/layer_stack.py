"""The layers of a decoder: one layer, and stacks of them, run in their order in scans.

Of complete rows, or of tokens that follow those in a cache. Where pipeline stages split the layers,
and no schedule runs, one stage after another.
Names carry their dims: `x_BRD` is batch, residual sequence, width.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epy
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
from models.spec import LATENT_ATTENTION, RESIDUAL, LayersSpec, under
from partitioning.constraints import automatic_layout
from partitioning.dtypes import scaled
from partitioning.mesh_sizes import STAGE
from runtime.extensions import Table
from runtime.layer_kinds import (
  LAYERS,
  MIXER,
  MIXER_LAYERS,
  MLP,
  MLP_LAYERS,
  OF_DENSE,
  OF_MIXERS,
  layer_type,
  stack_of,
)

with epy.lazy_imports():  # of experts, latent attention, mixers, and layers that stages split
  from models import experts, kimi_delta, latent_attention, mixers, state_space
  from partitioning.parallel import pipeline

# ------------------------------ one layer ------------------------------

# By `model.attention`: the class, or what imports and returns it.
ATTENTION: Table = Table(
  "attention",
  {
    "grouped_query": GroupedQueryAttention,
    "bidirectional": BidirectionalAttention,
    LATENT_ATTENTION: lambda: latent_attention.LatentAttention,
  },
)
# By `model.mixer`: likewise, of layers of the type `mixer`.
MIXERS: Table = Table(
  "mixer",
  {
    "gated_delta": lambda: mixers.GatedDeltaNet,
    "short_convolution": lambda: mixers.ShortConvolution,
    "kimi_delta": lambda: kimi_delta.KimiDelta,
    "mamba2": lambda: state_space.Mamba2,
    "lightning": lambda: state_space.Lightning,
  },
)


def attention_class(spec: LayersSpec, stack: str = LAYERS) -> type[nnx.Module]:
  """Returns the class of the attention of a stack's layers, or of what they have in its place."""
  if stack in OF_MIXERS:
    return mixer_class(spec.mixer)
  found = ATTENTION[spec.attention]
  return found if isinstance(found, type) else found()


def mixer_class(name: str) -> type[nnx.Module]:
  """Returns the class of a `model.mixer`."""
  found = MIXERS[name]
  return found if isinstance(found, type) else found()


class Block(nnx.Module):
  """One layer: attention and MLP, or one of them, each with a norm before it, after it, or both.

  In place of the MLP it may have a mixture of experts.
  """

  def __init__(self, spec: LayersSpec, *, rngs: nnx.Rngs, stack: str = LAYERS):
    """Draws the layer's parameters from `rngs.params`.

    Args:
      spec: of the model.
      rngs: draws them.
      stack: how their names begin. Of a model with experts the layers of OF_DENSE have none; those
        of OF_MIXERS have a mixer in place of attention, under the same name.
    """
    self.spec, norm = spec, NORMS[spec.norm]
    attends, self.feeds = _parts_of(spec, stack)
    self.pre_norms, self.post_norms = spec.norms_of(stack)
    if attends:
      if self.pre_norms:
        self.attention_norm = norm(f"{stack}attention_norm", spec)
      self.attention = attention_class(spec, stack)(spec, rngs=rngs, name=f"{stack}attention")
      if spec.with_mixers:
        self.mixer = attention_class(spec, MIXER_LAYERS)(spec, rngs=rngs, name=f"{stack}mixer")
    self.attends, self.sparse = attends, self.feeds and _has_experts(spec, stack)
    if self.feeds and self.pre_norms:
      self.mlp_norm = norm(f"{stack}mlp_norm", spec)
    if self.sparse:
      self.experts = experts.Experts(spec, rngs=rngs, name=f"{stack}experts")
    elif self.feeds:
      self.mlp = MLPS[spec.mlp](spec, rngs=rngs, name=f"{stack}mlp")
    if self.post_norms:
      for part in ["attention"] * attends + ["mlp"] * self.feeds:
        setattr(self, f"{part}_post_norm", norm(f"{stack}{part}_post_norm", spec))

  @staticmethod
  def dims(spec: LayersSpec, stack: str = LAYERS) -> dict[str, str]:
    """Returns parameter -> letters, of a layer of a stack, in the order of computation."""
    parts, (attends, feeds) = {}, _parts_of(spec, stack)
    if attends:
      parts["attention"] = under("attention", attention_class(spec, stack).dims(spec))
      if spec.with_mixers:
        parts["attention"] |= under("mixer", attention_class(spec, MIXER_LAYERS).dims(spec))
    if feeds and _has_experts(spec, stack):
      parts["mlp"] = under("experts", experts.Experts.dims(spec))
    elif feeds:
      parts["mlp"] = under("mlp", MLPS[spec.mlp].dims(spec))
    (before, after), norm = spec.norms_of(stack), NORMS[spec.norm].dims(spec)
    found = {}
    for part, rows in parts.items():
      found |= under(f"{part}_norm", norm) if before else {}
      found |= rows | (under(f"{part}_post_norm", norm) if after else {})
    return found

  @property
  def cached(self) -> tuple[str, ...]:
    """Returns the names of the arrays of the layer's cache."""
    if not self.attends:
      return ()
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
    x_BRD, numbers = named(x_BRD, "layer_input"), {}
    if self.attends:
      normed_BRD = self._normed(x_BRD, "attention")
      update_BRD, cache = self.attention(normed_BRD, layer, rows, cache, keys[2])
      if spec.with_mixers:
        key = None if keys[2] is None else jax.random.fold_in(keys[2], 1)
        more_BRD, cache = self.mixer(normed_BRD, layer, rows, cache, key)
        update_BRD = update_BRD + more_BRD
      x_BRD = self._added(x_BRD, normed_BRD, update_BRD, "attention", keys[0], rows)
    if self.feeds:
      normed_BRD = self._normed(x_BRD, "mlp")
      if self.sparse:
        update_BRD, numbers = self.experts(normed_BRD, rows)
      else:
        update_BRD = self.mlp(normed_BRD, keys[3], rows.slots_BT[0])
      x_BRD = self._added(x_BRD, normed_BRD, update_BRD, "mlp", keys[1], rows)
    activations.record("residual", x_BRD)
    return x_BRD, cache, numbers

  def _normed(self, x_BRD: Float[Array, "B R D"], part: str) -> Float[Array, "B R D"]:
    """Returns what a part of the layer reads."""
    if not self.pre_norms:
      return x_BRD
    return named(getattr(self, f"{part}_norm")(x_BRD), f"{part}_input")

  def _added(
    self,
    x_BRD: Float[Array, "B R D"],
    normed_BRD: Float[Array, "B R D"],
    update_BRD: Float[Array, "B R D"],
    part: str,
    key: Key[Array, ""] | None,
    rows: Rows,
  ) -> Float[Array, "B R D"]:
    """Returns the residual with what a part of the layer has computed of it.

    With `model.normed_residual` that is added to so much of the part's normalized input in place of
    the residual (MiniMax-01).
    """
    update_BRD, spec = named(update_BRD, f"{part}_update"), self.spec
    if self.post_norms:
      update_BRD = getattr(self, f"{part}_post_norm")(update_BRD)
    update_BRD = self._scaled(update_BRD)
    if spec.normed_residual:
      x_BRD = scaled(normed_BRD, spec.normed_residual)
    activations.record(part, update_BRD)
    return x_BRD + dropout(update_BRD, spec.dropout_rate, key, rows.slots_BT[0])

  def _scaled(self, update_BRD: Float[Array, "B R D"]) -> Float[Array, "B R D"]:
    """Returns what is added to the residual, times `model.residual_multiplier` (Granite)."""
    factor = self.spec.residual_multiplier
    return update_BRD if factor == 1.0 else scaled(update_BRD, factor)


def _parts_of(spec: LayersSpec, stack: str) -> tuple[bool, bool]:
  """Returns whether the layers of a stack have attention, or a mixer, and whether an MLP."""
  return stack != MLP_LAYERS, spec.parts == 2 or stack == MLP_LAYERS


def _has_experts(spec: LayersSpec, stack: str) -> bool:
  return spec.experts > 0 and stack not in OF_DENSE


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
# Runs of layers of a stack, (its name, how many), one after another, and how often all of them.
Group = tuple[tuple[tuple[str, int], ...], int]


def order_of(model: Any, count: int | None = None) -> tuple[Group, ...]:
  """Returns the order of the layers of all stacks.

  Equal groups that follow each other are one scan, whose code is that of one of them.

  Args:
    model: a spec, or the section `model` of a finalized config.
    count: of the layers, the first ones; None: all.
  """
  if not hasattr(model, "layer_types"):  # of a model whose layers are alike
    return ((((LAYERS, model.layers),), 1),)
  kinds = itertools.groupby(stack_of(model, layer) for layer in range(count or model.layers))
  runs = [(name, len([*same])) for name, same in kinds]
  found = []
  while runs:
    # The period that covers most runs; without one the first run alone.
    sizes = {1: 1} | {size: _repeats(runs, size) for size in range(2, len(runs) // 2 + 1)}
    size = max(sizes, key=lambda size: size * sizes[size] * (sizes[size] > 1))
    found.append((tuple(runs[:size]), sizes[size]))
    runs = runs[size * sizes[size] :]
  return tuple(found)


def _repeats(runs: list, size: int) -> int:
  """Returns how often the first runs, so many, follow one another."""
  periods = (runs[at : at + size] for at in range(0, len(runs), size))
  return len([*itertools.takewhile(lambda one: one == runs[:size], periods)])


def trip_counts(order: tuple[Group, ...]) -> list[int]:
  """Returns the trip counts of the scans of `over_layers`; that of the most layers comes first."""
  counts = [(sum(count for _, count in runs), times) for runs, times in order]
  trips = [(size * times, size if times == 1 else times) for size, times in counts]
  return [each for _, each in sorted(trips, key=lambda one: -one[0])]


def over_layers(
  body: Callable[[nnx.Module, Any, Any], tuple[Any, Any]],
  stacks: Mapping[str, nnx.Module],
  order: tuple[Group, ...],
  carry: Any,
  every: Any,
  *,
  wrapped: Callable[[Step], Step] = lambda step: step,
  unroll: int = 1,
) -> tuple[Any, dict[str, Any]]:
  """Runs all layers, one after another.

  Args:
    body: takes a layer, the carry, and what is this layer's of `every`.
    stacks: name -> the layers of a stack, stacked.
    order: of `order_of`; not read where there is one stack.
    carry: what the first layer is given.
    every: a tree of arrays with one entry for each layer, in the order in which they run.
    wrapped: makes of a layer's function another, such as a rematerialized one.
    unroll: layers of an iteration of the scan over the stack LAYERS.

  Returns:
    The carry after the last layer; name -> what the layers of a stack returned, stacked.
  """
  steps = {name: _step(body, layers, wrapped) for name, layers in stacks.items()}
  scans = {
    name: functools.partial(jax.lax.scan, step, unroll=unroll if name == LAYERS else 1)
    for name, (step, _) in steps.items()
  }
  if len(steps) == 1:
    [name] = steps
    carry, found = scans[name](carry, (steps[name][1], every))
    return carry, {name: found}

  def run(group: Group, carry: Any, inputs: tuple) -> tuple[Any, list]:
    """Runs a group once."""
    (runs, times), (params, every), results, at = group, inputs, [], 0
    for (name, count), of_run in zip(runs, params, strict=True):
      if count == 1 and times > 1:  # the scan's own inputs: a slice of them would be saved for it
        carry, found = steps[name][0](carry, (of_run, jax.tree.map(operator.itemgetter(at), every)))
      else:
        carry, found = scans[name](carry, (of_run, _part(every, at, at + count)))
      results.append(found)
      at += count
    return carry, results

  found: dict[str, list] = {name: [] for name in steps}
  ends, at = dict.fromkeys(steps, 0), 0
  for group in order:
    runs, times = group
    sizes = {name: sum(n for one, n in runs if one == name) for name, _ in runs}
    parts = {
      name: _part(steps[name][1], n := ends[name], n + sizes[name] * times) for name in sizes
    }
    stop = at + times * sum(sizes.values())
    given = _of_runs(parts, runs, times), _part(every, at, stop)
    if times == 1:
      carry, results = run(group, carry, given)
    else:
      given = given[0], _periods(given[1], times)
      carry, results = jax.lax.scan(functools.partial(run, group), carry, given)
    for name, size in sizes.items():
      own = [(n, one) for (other, n), one in zip(runs, results, strict=True) if other == name]
      counts, trees = zip(*own, strict=True)
      join = functools.partial(_in_turn, counts=counts, times=times)
      found[name].append(jax.tree.map(join, *trees))
      ends[name] += size * times
    at = stop
  return carry, {
    name: jax.tree.map(lambda *x: jnp.concatenate(x), *each) for name, each in found.items()
  }


def _of_runs(stacks: dict[str, Any], runs: tuple[tuple[str, int], ...], times: int) -> list[Any]:
  """Returns the layers of each run of a group, [times, count, ...], without a dim that is 1.

  Where it is one of several runs of a stack, they are a copy.
  """
  found, ends = [], dict.fromkeys(stacks, 0)
  for name, count in runs:
    stack, first = stacks[name], ends[name]
    ends[name] += count
    alone = [one for one, _ in runs].count(name) == 1
    if times > 1 and (count > 1 or not alone):
      stack = _periods(stack, times)
    part = first if times > 1 and count == 1 else slice(first, first + count)
    if not alone:
      stack = jax.tree.map(operator.itemgetter((slice(None), part) if times > 1 else part), stack)
    found.append(stack)
  return found


def _periods(tree: Any, times: int) -> Any:
  return jax.tree.map(lambda x: x.reshape(times, -1, *x.shape[1:]), tree)


def _in_turn(*results: Array, counts: tuple[int, ...], times: int) -> Array:
  """Returns results of a stack's runs of so many layers in a period, in the order of its layers."""
  if times > 1:
    pairs = zip(results, counts, strict=True)
    results = [x.reshape(times, n, *x.shape[1 + (n > 1) :]) for x, n in pairs]
  x = jnp.concatenate(results, axis=int(times > 1)) if len(results) > 1 else results[0]
  return x.reshape(-1, *x.shape[2:]) if times > 1 else x


def _step(body: Callable, layers: nnx.Module, wrapped: Callable[[Step], Step]) -> tuple[Step, Any]:
  """Returns the body as that of a scan over stacked parameters, and these."""
  graphdef, stack = nnx.split(layers)

  def step(carry, inputs):
    params, one = inputs
    return body(nnx.merge(graphdef, params), carry, one)

  return wrapped(step), stack


def _part(tree: Any, start: int, stop: int | None = None) -> Any:
  return jax.tree.map(lambda x: x[start:stop], tree)


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
  first: Int[Array, ""] | int = 0,
) -> tuple[Float[Array, "B R D"], dict[str, jax.Array]]:
  """Returns the residual after all layers of a `Transformer`, and what they say of rows, stacked.

  Args:
    model: the decoder.
    x_BRD: the residual before them.
    rows: of the tokens.
    key: of the whole model's dropout; None turns it off.
    first: global number of the module's first layer: a pipeline stage's module has only the stage's
      part of the stacked parameters.
  """
  if (stages := _stages()) == 1:
    return _run(model, model.stacks, x_BRD, rows, key, first)
  graphdefs, states = _split(model.stacks)
  count = model.spec.layers // stages

  def of_stage(states: Any, x_BRD: Array, given: Any, stage: Int[Array, ""]) -> tuple:
    with activations.recording():  # of one stage: not those of all layers
      return _run(model, _merged(graphdefs, states), x_BRD, *given, stage * count)

  given = of_stage, states, x_BRD, (rows, key)
  x_BRD, numbers = pipeline.relayed(*given, RESIDUAL.between)
  return x_BRD, by_stack(numbers, model.sparse_stacks, stages)


def _split(stacks: Mapping[str, nnx.Module]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns name -> the structure of a stack, and name -> its parameters."""
  graphdefs, states = zip(*map(nnx.split, stacks.values()), strict=True)
  return dict(zip(stacks, graphdefs, strict=True)), dict(zip(stacks, states, strict=True))


def _merged(graphdefs: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, nnx.Module]:
  return {name: nnx.merge(graphdefs[name], state) for name, state in states.items()}


def by_stack(numbers: Any, stacks: Sequence[int], parts: int) -> Any:
  """Returns numbers of layers in the order of their stacks, as `blocks` returns them.

  Args:
    numbers: a tree of arrays with the layers as their first dim: those of each part of a model in
      turn, and of a part those of each stack in turn.
    stacks: how many layers each stack has.
    parts: of the model, that are alike.
  """
  ends = itertools.accumulate(count // parts for count in stacks)

  def in_order(x: Array) -> Array:
    of_stacks = jnp.split(x.reshape(parts, -1, *x.shape[1:]), [*ends][:-1], axis=1)
    return jnp.concatenate([one.reshape(-1, *x.shape[1:]) for one in of_stacks])

  return numbers if len(stacks) < 2 else jax.tree.map(in_order, numbers)


def _of_layers(
  model: Any, stacks: Mapping[str, nnx.Module], every: Any, first: Int[Array, ""] | int
) -> tuple[int, Any]:
  """Returns the number of these layers of a model, and what is theirs of a tree for all layers."""
  count = sum(jax.tree.leaves(nnx.state(one))[0].shape[0] for one in stacks.values())
  if count == model.spec.layers:
    return count, every
  part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count)
  return count, jax.tree.map(part, every)


def _run(
  model: Any,
  stacks: Mapping[str, nnx.Module],
  x_BRD: Float[Array, "B R D"],
  rows: Rows,
  key: Key[Array, ""] | None,
  first: Int[Array, ""] | int,
) -> tuple[Float[Array, "B R D"], dict[str, jax.Array]]:
  """Runs stacked layers, of which number 0 is number `first` of the model."""
  keys = None if key is None else jax.random.split(key, model.spec.layers)
  count, every = _of_layers(model, stacks, (model.layer_pattern.stacked(), keys), first)

  def layer(block, x_BRD, one):
    with activations.layer() as recorded:
      x_BRD, _, numbers = block(x_BRD, *one, rows)
    return x_BRD, (numbers, recorded)

  x_BRD, found = over_layers(
    layer,
    stacks,
    order_of(model.spec, count),
    x_BRD,
    every,
    wrapped=lambda step: rematerialized(
      step, model.spec.rematerialization, reshard=model.spec.reshard_after_forward
    ),
    unroll=model.spec.scan_unroll,
  )
  for name, (_, recorded) in sorted(found.items(), key=lambda one: one[0] == LAYERS):
    activations.record_layers(recorded, name)
  numbers = [one for one, _ in found.values() if one]  # of layers with experts
  return x_BRD, jax.tree.map(lambda *x: jnp.concatenate(x), *numbers) if numbers else {}


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
  graphdefs, states = _split(model.stacks)
  stages = _stages()
  count = model.spec.layers // stages

  def of_stage(stacked: Any, x_BRD: Array, given: Any, stage: Int[Array, ""] | int) -> tuple:
    (states, arrays), (rows, lengths_B) = stacked, given
    cache = {**arrays, LENGTHS: lengths_B}
    return _extended(model, _merged(graphdefs, states), x_BRD, rows, cache, stage * count)

  given = (states, per_layer(cache)), x_BRD, (rows, cache[LENGTHS])
  if stages == 1:
    x_BRD, arrays = of_stage(*given, 0)
  else:
    x_BRD, arrays = pipeline.relayed(of_stage, *given, RESIDUAL.between)
  return x_BRD, cache | arrays


def _extended(
  model: Any,
  stacks: Mapping[str, nnx.Module],
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

  count, every = _of_layers(model, stacks, model.layer_pattern.stacked(), first)
  # Layers with attention have arrays in common, whatever their MLP is, and so have mixers.
  mixes = [layer_type(model.spec, layer) for layer in range(count)]
  mixes = [one if one in (MIXER, MLP) else "" for one in mixes]
  numbers = jnp.asarray([mixes[:n].count(one) for n, one in enumerate(mixes)], jnp.int32)
  # In the carry, not a scanned input: a layer is updated in place, and there is only one cache.
  (x_BRD, cache), _ = over_layers(
    layer,
    stacks,
    order_of(model.spec, count),
    (x_BRD, cache),
    (every, numbers),
  )
  return x_BRD, per_layer(cache)
