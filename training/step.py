"""The train step: `(state, batch) -> (state, metrics)`, pure: loss, gradients, update."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from etils import epy
from flax import nnx

from models import MODELS, check_network
from models.losses import COUNTS, Batch, Sums
from models.spec import IN_STAGES, stacks_of
from partitioning.constraints import automatic_spec, on_one_device
from partitioning.dtypes import advanced_history, is_history
from partitioning.rules import letters_of, named_leaves, nested
from training import gradients
from training.gradients import Gradients
from training.optimizers.build import gradient_point, make_optimizer
from training.schedules import learning_rate_schedule
from training.specs import Resolved, StepSpec
from training.state import (
  ROUTER_BIASES,
  State,
  merged,
  split,
  stored,
  trainable,
  wide,
  without_teacher,
)
from training.tasks import TASKS

with epy.lazy_imports():  # of experts, microbatches, groups, state on the host or in bfloat16
  from models import load_balance
  from partitioning.parallel import batch_region
  from training import microbatches, outer
  from training.optimizers import host_state, low_precision

if TYPE_CHECKING:
  from partitioning.parallel.batch_region import GatheredOnce
  from partitioning.parallel.pipeline_schedule import Schedule

# From (gradients, the optimizer's state, trained parameters) to (these, its state) after the step.
Update = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Program:
  """The pure functions of a config; `training.setup.prepare` adds how a mesh shards them.

  Attributes:
    spec: what the step needs to know of the config.
    build: draws the model, with parameters in float32 or wider.
    letters: pattern of parameter names -> the letters of their dims.
    stacks: the letters of stacked layers.
    graphdef: of the model.
    params: shapes and dtypes of the parameters.
    variables: shapes and dtypes of the model's variables that are not parameters.
    trained: names of the parameters that `training.trainable` selects.
    optimizer: of those that are trained.
    point: (trained parameters, the optimizer's state) -> where a step takes its gradients.
    update: applies it.
    stored: (trained parameters, step) -> these in the dtype in which they are stored.
    schedule: step -> learning rate.
    param_specs: a tree like the parameters: the sharding of their gradients.
    norm_specs: likewise, while their squares are summed for the norm.
    pipeline: the schedule of pipeline stages; None: there is one.
    gathered: parameters that a pipeline gathers once per step; None: each tick gathers its own.
    reduce_once_over: the mesh axis over which gradients are reduced after the last microbatch;
      None: they are reduced over all axes after each (`training.gradient_reduction`).
    before_update: called with the state, the gradients' norm and the factor that they are scaled
      by, which it returns; None: nothing is called.
  """

  spec: StepSpec
  build: Callable[[nnx.Rngs], nnx.Module]
  letters: Mapping[str, str]
  stacks: tuple[str, ...]
  graphdef: nnx.GraphDef
  params: Any
  variables: Any
  trained: frozenset[str]
  optimizer: optax.GradientTransformation
  point: Callable[[Any, Any], Any]
  update: Update
  stored: Callable[[Any, jax.Array], Any]
  schedule: optax.Schedule
  param_specs: Any = None
  norm_specs: Any = None
  pipeline: "Schedule | None" = None
  gathered: "GatheredOnce | None" = None
  reduce_once_over: str | None = None
  before_update: Callable[[State, jax.Array, jax.Array], jax.Array] | None = None

  def init(self, key: jax.Array, given: Any = None) -> State:
    """Returns the initial state. Jit it: drawn eagerly, parameters differ in their last bits.

    Args:
      key: draws the parameters.
      given: nested dict of parameters that come from elsewhere, which some optimizers remember; the
        state is returned without them. None: all are drawn.
    """
    model = self.build(nnx.Rngs(params=key))
    params = stored(nnx.to_pure_dict(nnx.state(model, nnx.Param)), self.trained, self.spec)
    if given is None:
      return self._first(params, variables_of(model))
    _, drawn = split(params, frozenset(named_leaves(given)).__contains__)
    state = self._first(merged(given, drawn), variables_of(model))
    return dataclasses.replace(state, params=drawn)

  def abstract_state(self) -> State:
    """Returns the shapes and dtypes of the initial state."""
    return jax.eval_shape(self._first, self.params, self.variables)

  def _first(self, params: Any, variables: Any) -> State:
    optimizer = self.optimizer.init(wide(self.split(params)[0]))
    return State(jnp.zeros((), jnp.int32), params, optimizer, variables)

  def split(self, params: Any) -> tuple[Any, Any]:
    """Returns the parts of a tree like the parameters that are trained, and those that are not."""
    return split(params, self.trained.__contains__)

  def changing(self, params: Any) -> tuple[Any, Any]:
    """Returns the parts of a tree like the parameters that steps change, and those that stay.

    The first are the trained ones and the routers' biases.
    """
    return split(params, lambda name: name in self.trained or name in ROUTER_BIASES)

  def module(self, params: Any, variables: Any = None) -> nnx.Module:
    """Returns the model of these; one without variables is merged from its parameters alone."""
    return nnx.merge(self.graphdef, params, *([variables] if variables else []))

  # ------------------------------ the loss and its gradients ------------------------------

  def forward(
    self, params: Any, variables: Any, batch: Batch, key: jax.Array | None
  ) -> tuple[Sums, Any]:
    """Returns the model's loss sums with the sum of weights, and its variables afterwards.

    Trained parameters are in float32 or wider.
    """
    model = self.module(params, variables)
    sums = model.loss_sums(batch, key)
    sums = {**sums, "weight": jnp.sum(batch["weights"], dtype=sums["loss"].dtype)}
    return sums, variables_of(model)

  def sums(
    self, params: Any, batch: Batch, key: jax.Array | None = None, variables: Any = None
  ) -> Sums:
    """Returns the model's loss sums and the sum of weights; without a key, without dropout."""
    trained, frozen = self.split(params)
    params, rows = merged(wide(trained), frozen), batch["weights"].shape[0]
    if key is None and self.pipeline is not None and rows % self.pipeline.microbatches == 0:
      return self._pipelined().sums(params, batch)
    return self.forward(params, variables, batch, key)[0]

  def gradients(
    self, params: Any, batch: Batch, key: jax.Array | None, variables: Any = None
  ) -> tuple[Any, Sums, jax.Array, Any]:
    """Returns (unscaled gradients of the trained parameters, means, their scale, variables).

    The scaled gradients are those of the mean loss of the global batch, the sum of weighted losses
    over the sum of weights; so microbatches with a smaller sum of weights count for less. Unscaled
    gradients are divided by the number of weights, which is known, not by their sum: the sum is
    then reduced together with the gradients, not by a separate collective before them, and the step
    scales and clips in one pass over the gradients. All are float32 or wider, also where parameters
    are stored in bfloat16.
    """
    trained, frozen = self.split(params)
    history, others = split(variables or {}, is_history)
    given = dict(batch), merged(wide(trained), history), frozen, others, key
    (grads, means), others = self._of_batch(batch["weights"].size)(*given)
    if self.spec.gradient_accumulation_steps > 1:
      # Otherwise XLA would shard the sums for the norm, compute parameters and optimizer state with
      # that sharding, and all-gather each of them at the end.
      grads = self.laid_out(grads)
    seen, grads = split(grads, is_history)
    variables = merged(jax.tree.map(advanced_history, history, seen), others)
    scale = 1 / means.pop("weight")
    return grads, gradients.each(lambda x: x * scale, means), scale, variables

  def _of_batch(self, entries: int) -> Gradients:
    """Returns the gradients of a global batch with so many weights, where this program has them."""
    mean = functools.partial(gradients.each, lambda x: x / entries)
    if self.pipeline is None:
      one = gradients.of_loss(self.forward, mean)
    else:
      one = self._pipelined(mean).gradients

    def of_microbatch(*given: Any) -> tuple[tuple[Any, Sums], Any]:
      (grads, means), variables = one(*given)
      found = self.laid_out(grads), means
      return found if self.reduce_once_over is None else microbatches.keep_apart(*found), variables

    found = gradients.accumulate(of_microbatch, self.spec.gradient_accumulation_steps)
    if self.gathered is not None:
      return microbatches.gather_once(found, self.gathered)
    if self.reduce_once_over is not None:  # each device has its own rows
      return functools.partial(batch_region.summed_over_batch_parts, found, self.reduce_once_over)
    return found

  def _pipelined(
    self, finish: Callable[[Sums], Sums] = lambda sums: sums
  ) -> "microbatches.Pipelined":
    """Returns the model's loss and gradients by the schedule of its stages."""
    residual = MODELS[self.spec.model].build.residual
    specs = None if self.param_specs is None else named_leaves(self.param_specs)
    given = self.spec, self.pipeline, self.module, residual
    return microbatches.Pipelined(*given, lambda name: self.stack(name) in IN_STAGES, specs, finish)

  def laid_out(self, grads: Any) -> Any:
    """Returns gradients that are sharded as their parameters are; others of them as they were."""
    if self.param_specs is None or on_one_device():
      return grads
    specs, constrained = named_leaves(self.param_specs), jax.lax.with_sharding_constraint
    return nested(
      {
        name: constrained(x, automatic_spec(specs[name])) if name in specs else x
        for name, x in named_leaves(grads).items()
      }
    )

  def norm(self, grads: Any) -> jax.Array:
    """Returns the global norm; devices with replicas of a gradient each sum a part of it."""
    if self.norm_specs is not None:
      specs, _ = self.split(self.norm_specs)
      grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, specs)
    return optax.tree.norm(grads)

  # ------------------------------ the step ------------------------------

  def train_step(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
    """Returns the state after one optimizer step, and scalars about it.

    Random keys are folded from (seed, step), so they do not depend on where a run started.
    """
    step = lambda state, batch: self.step_and_gradients(state, batch)[:2]  # noqa: E731
    if self.spec.outer is not None:
      return outer.train_step(self.spec.outer, step, self.split, state, batch)
    return step(state, batch)

  def step_and_gradients(
    self, state: State, batch: Batch
  ) -> tuple[State, dict[str, jax.Array], Any]:
    """Returns what `train_step` does, and the gradients before they are clipped."""
    key = jax.random.fold_in(jax.random.key(self.spec.seed), state.step)
    raw, means, inverse_weight, variables = self.gradients(
      self.gradient_point(state), batch, key, state.variables
    )
    norm = inverse_weight * self.norm(raw)
    clip = self.spec.clip_norm
    scale = inverse_weight * clip / jnp.maximum(norm, clip) if clip else inverse_weight
    if self.before_update is not None:
      scale = self.before_update(state, norm, scale)
    params, optimizer, rate = self.updated(state, _scaled(raw, scale))
    params = moved_router_bias(params, means, self.spec.router_bias_rate)
    means = as_metrics(means)
    own = {n: x for n, x in means.items() if n not in TASKS[self.spec.task].sums}
    own |= _measured(optimizer)
    rate = jnp.asarray(rate, norm.dtype)
    metrics = {"loss": means["loss"], "grad_norm": norm, "learning_rate": rate, **own}
    state = State(state.step + 1, params, optimizer, variables)
    return state, metrics, _scaled(raw, inverse_weight)

  def gradient_point(self, state: State) -> Any:
    """Returns the parameters at which a step takes its gradients: some optimizers say where."""
    trained, frozen = self.split(state.params)
    trained = wide(trained)
    point = self.point(trained, state.optimizer)
    return state.params if point is trained else merged(self.laid_out(point), frozen)

  def updated(self, state: State, grads: Any) -> tuple[Any, Any, jax.Array | float]:
    """Returns parameters and optimizer state after gradients are applied, and the learning rate."""
    trained, frozen = self.split(state.params)
    # optax raises decays to an integer count, which strict promotion (on in the tests) forbids.
    with jax.numpy_dtype_promotion("standard"):
      trained, optimizer = self.update(grads, state.optimizer, wide(trained))
      rate = self.schedule(state.step)
    return merged(self.stored(trained, state.step), frozen), optimizer, rate

  def stack(self, name: str) -> str:
    """Returns the letter of the layers that a parameter has as its first dim; "" if it has none."""
    return _stack(name, self.letters, self.stacks)


def _stack(name: str, letters: Mapping[str, str], stacks: tuple[str, ...]) -> str:
  first = letters_of(name, letters)[:1]
  return first if first in stacks else ""


def make_program(resolved: Resolved) -> Program:
  """Returns the functions of a config, without a mesh.

  Raises:
    ValueError: `training.trainable` selects nothing, or an optimizer that the step cannot use.
  """

  def build(rngs: nnx.Rngs) -> nnx.Module:
    return MODELS[spec.model].build(resolved.model, rngs=rngs)

  def abstract() -> nnx.Module:
    model = build(nnx.Rngs(params=0))
    check_network(spec.model, model)
    return model

  spec, letters = resolved.step, resolved.model.parameters
  stacks = stacks_of(resolved.model.legend)
  model = nnx.eval_shape(abstract)
  graphdef, params, _ = nnx.split(model, nnx.Param, ...)
  params = nnx.to_pure_dict(params)
  trained = trainable(spec.trainable, list(named_leaves(without_teacher(params))))
  params = jax.eval_shape(lambda params: stored(params, trained, spec), params)
  keys, (updated, _) = resolved.optimizer, split(params, trained.__contains__)
  optimizer = make_optimizer(keys, jax.eval_shape(wide, updated))
  if spec.state_memory == "host":
    stack = functools.partial(_stack, letters=letters, stacks=stacks)
    update = functools.partial(host_state.update, optimizer, stack, optax.apply_updates)
  else:
    update = functools.partial(_update, optimizer)
  if spec.stochastic_rounding:
    store = functools.partial(low_precision.rounded_parameters, spec.seed)
  else:
    store = functools.partial(_cast, spec.parameter_dtype)
  given = spec, build, letters, stacks, graphdef, params, variables_of(model), trained
  schedule = learning_rate_schedule(keys, keys.steps)
  if spec.outer is not None:
    optimizer = outer.around(spec.outer, optimizer)
  return Program(*given, optimizer, gradient_point(keys), update, store, schedule)


def _update(
  optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any
) -> tuple[Any, Any]:
  updates, state = optimizer.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def _cast(dtype: str, params: Any, step: jax.Array) -> Any:
  del step
  return jax.tree.map(lambda x: x.astype(dtype), params)


def variables_of(model: nnx.Module) -> Any:
  """Returns a model's variables that are not parameters, as nested dicts; {} if it has none."""
  return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


def _measured(optimizer: Any) -> dict[str, jax.Array]:
  """Returns name -> what an optimizer has measured with `optax.snapshot`, by its state."""
  found = {}
  is_snapshot = lambda node: isinstance(node, optax.SnapshotState)  # noqa: E731
  for node in filter(is_snapshot, jax.tree.leaves(optimizer, is_leaf=is_snapshot)):
    if twice := found.keys() & node.measurement.keys():
      raise ValueError(
        f"optimizer.name: it measures {', '.join(sorted(twice))} in 2 of its parts; give each a "
        f"name of its own"
      )
    found |= node.measurement
  return found


def _scaled(grads: Any, scale: jax.Array) -> Any:
  return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


def moved_router_bias(params: Any, means: Mapping[str, jax.Array], rate: float) -> Any:
  """Returns the parameters with the biases of the next step.

  Args:
    params: nested dict.
    means: of a step, with the experts' counts over the global batch.
    rate: by which they move; 0: they stay.
  """
  leaves = named_leaves(params)
  if COUNTS not in means or not rate:
    return params
  first = 0
  for name in ROUTER_BIASES:
    if name in leaves:
      stop = first + leaves[name].shape[0]
      leaves[name] = load_balance.updated_bias(leaves[name], means[COUNTS][first:stop], rate)
      first = stop
  return nested(leaves)


def as_metrics(means: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the means of a step, with the experts' shares in place of their counts."""
  found = dict(means)
  counts = found.pop(COUNTS, None)
  return found if counts is None else {**found, **load_balance.shares(counts)}
