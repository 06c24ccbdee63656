"""The train step: `(state, batch) -> (state, metrics)`, pure: loss, gradients, update."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from input_pipeline.ramp import Shape
from models import MODELS, check_network
from models.layer_stack import STACKS
from models.losses import Batch, Sums
from partitioning.constraints import automatic_spec, on_one_device
from partitioning.dims import Legend
from partitioning.dtypes import wide_dtype
from partitioning.parallel import eight_bit
from partitioning.parallel.batch_region import summed_over_batch_parts
from partitioning.parallel.gathered_parameters import GatheredOnce
from partitioning.parallel.pipeline_schedule import Schedule
from partitioning.rules import letters_of, named_leaves
from training import clipping, router_bias
from training.optimizers import host_state, stochastic_rounding
from training.optimizers.build import make_optimizer
from training.optimizers.schedule_free import gradient_point
from training.pipelined import Pipelined, gathered_sums, split_rows
from training.schedules import learning_rate_schedule
from training.state import State, merged, split, trainable
from training.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class Program:
  """The pure functions of a config, independent of the devices that they are compiled for.

  Attributes:
    config: finalized.
    graphdef: of the model.
    params: shapes and dtypes of the parameters.
    optimizer: of those that are trained.
    schedule: step -> learning rate.
    variables: shapes and dtypes of the model's variables that are not parameters.
    trained: names of the parameters that `training.trainable` selects.
    param_specs: a tree like the parameters: the sharding of their gradients.
    norm_specs: likewise, while their squares are summed for the norm.
    pipeline: the schedule of pipeline stages; None: there is one.
    gathered: parameters that a pipeline gathers once per step; None: each tick gathers its own.
    reduce_once_over: the mesh axis over which gradients are reduced after the last microbatch;
      None: they are reduced over all axes after each (`training.gradient_reduction`).
  """

  config: ConfigDict
  graphdef: nnx.GraphDef
  params: Any
  optimizer: optax.GradientTransformation
  schedule: optax.Schedule
  variables: Any
  trained: frozenset[str]
  param_specs: Any = None
  norm_specs: Any = None
  pipeline: Schedule | None = None
  gathered: GatheredOnce | None = None
  reduce_once_over: str | None = None

  def init(self, key: jax.Array, given: Any = None) -> State:
    """Returns the initial state. Jit it: drawn eagerly, parameters differ in their last bits.

    Args:
      key: draws the parameters.
      given: nested dict of parameters that come from elsewhere, which some optimizers remember; the
        state is returned without them. None: all are drawn.
    """
    model = _build(self.config, nnx.Rngs(params=key))
    params = _stored(nnx.to_pure_dict(nnx.state(model, nnx.Param)), self.trained, self.config)
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

    The first are the trained ones and the biases that `router_bias` moves.
    """
    return split(params, lambda name: name in self.trained or name == router_bias.PARAMETER)

  def module(self, params: Any, variables: Any = None) -> nnx.Module:
    """Returns the model of these; one without variables is merged from its parameters alone."""
    return nnx.merge(self.graphdef, params, *([variables] if variables else []))

  # ------------------------------ the loss and its gradients ------------------------------

  def forward(
    self, params: Any, variables: Any, batch: Batch, key: jax.Array | None
  ) -> tuple[Sums, Any]:
    """Returns the model's loss sums with the sum of weights, and its variables afterwards."""
    trained, frozen = self.split(params)
    model = self.module(merged(wide(trained), frozen), variables)
    sums = model.loss_sums(batch, key)
    sums = {**sums, "weight": jnp.sum(batch["weights"], dtype=sums["loss"].dtype)}
    return sums, variables_of(model)

  def sums(
    self, params: Any, batch: Batch, key: jax.Array | None = None, variables: Any = None
  ) -> Sums:
    """Returns the model's loss sums and the sum of weights; without a key, without dropout."""
    rows = batch["weights"].shape[0]
    if key is None and self.pipeline is not None and rows % self.pipeline.microbatches == 0:
      trained, frozen = self.split(params)
      return self._pipelined().sums(merged(wide(trained), frozen), batch)
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
    count = self.config.training.gradient_accumulation_steps
    entries = batch["weights"].size

    def mean(trained, history, frozen, others, microbatch, key):
      variables = merged(history, others)
      sums, variables = self.forward(merged(trained, frozen), variables, microbatch, key)
      means = _each(lambda x: x / entries, sums)
      return means["loss"], (means, variables)

    def total(batch, trained, frozen, variables, key):
      def grad(variables, microbatch, key):
        seen, variables = variables
        history, others = split(variables, _is_history)
        if self.pipeline is not None:
          one = trained, frozen, microbatch, key
          grads, means = self._pipelined().gradients(
            *one, lambda x: _each(lambda y: y / entries, x)
          )
        else:
          given = trained, history, frozen, others, microbatch, key
          (grads, now), (means, variables) = jax.grad(mean, (0, 1), has_aux=True)(*given)
          seen = jax.tree.map(jnp.maximum, seen, now)
        grads = self.laid_out(grads)
        if self.reduce_once_over is not None:
          # The compiler for TPUs (libtpu 0.0.42) moves reductions of what a loop adds up out of the
          # loop: those over fsdp too, where the sums would need the memory of all parameters, and
          # it fails (RET_CHECK in while_loop_all_reduce_code_motion.cc) where rows are split so.
          grads, means = jax.lax.optimization_barrier((grads, means))
        return (grads, means), (seen, variables)

      if count == 1:
        return grad(variables, batch, key)
      return _accumulate(grad, count, variables, batch, key)

    history, _ = split(variables or {}, _is_history)
    carried = jax.tree.map(jnp.zeros_like, history), variables or {}
    trained, frozen = self.split(params)
    given = (dict(batch), wide(trained), frozen, carried, key)
    if self.gathered is not None:
      (grads, means), carried = gathered_sums(self.gathered, total, *given)
    elif self.reduce_once_over is None:
      (grads, means), carried = total(*given)
    else:
      (grads, means), carried = summed_over_batch_parts(total, self.reduce_once_over, *given)
    if count > 1:
      # Otherwise XLA would shard the sums for the norm, compute parameters and optimizer state with
      # that sharding, and all-gather each of them at the end.
      grads = self.laid_out(grads)
    seen, variables = carried
    history, others = split(variables, _is_history)
    variables = merged(jax.tree.map(eight_bit.advanced, history, seen), others)
    scale = 1 / means.pop("weight")
    return grads, _each(lambda x: x * scale, means), scale, variables

  def _pipelined(self) -> Pipelined:
    """Returns the model's loss and gradients by the schedule of its stages."""
    residual = MODELS[self.config.model.name].build.residual
    return Pipelined(
      *(self.config, self.pipeline, self.module, residual, self.stacked),
      self.param_specs,
    )

  def laid_out(self, grads: Any) -> Any:
    """Returns gradients that are sharded as their parameters are."""
    if self.param_specs is None:
      return grads
    specs, _ = self.split(self.param_specs)
    if on_one_device():
      return grads
    constrained = jax.lax.with_sharding_constraint
    return jax.tree.map(lambda x, spec: constrained(x, automatic_spec(spec)), grads, specs)

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
    return self.step_and_gradients(state, batch)[:2]

  def step_and_gradients(
    self, state: State, batch: Batch
  ) -> tuple[State, dict[str, jax.Array], Any]:
    """Returns what `train_step` does, and the gradients before they are clipped."""
    key = jax.random.fold_in(jax.random.key(self.config.seed), state.step)
    raw, means, inverse_weight, variables = self.gradients(
      self.gradient_point(state), batch, key, state.variables
    )
    norm = inverse_weight * self.norm(raw)
    clip = clipping.of_step(self.config)
    scale = inverse_weight * clip / jnp.maximum(norm, clip) if clip else inverse_weight
    params, optimizer, rate = self.updated(state, _scaled(raw, scale))
    params = router_bias.moved(params, means, self.config)
    means = router_bias.as_metrics(means)
    own = {n: x for n, x in means.items() if n not in TASKS[self.config.task].sums}
    rate = jnp.asarray(rate, norm.dtype)
    metrics = {"loss": means["loss"], "grad_norm": norm, "learning_rate": rate, **own}
    state = State(state.step + 1, params, optimizer, variables)
    return state, metrics, _scaled(raw, inverse_weight)

  def gradient_point(self, state: State) -> Any:
    """Returns the parameters at which a step takes its gradients: some optimizers say where."""
    trained, frozen = self.split(state.params)
    trained = wide(trained)
    point = gradient_point(trained, state.optimizer)
    return state.params if point is trained else merged(self.laid_out(point), frozen)

  def updated(self, state: State, grads: Any) -> tuple[Any, Any, jax.Array | float]:
    """Returns parameters and optimizer state after gradients are applied, and the learning rate."""
    trained, frozen = self.split(state.params)
    trained = wide(trained)
    # optax raises decays to an integer count, which strict promotion (on in the tests) forbids.
    with jax.numpy_dtype_promotion("standard"):
      if self.config.optimizer.state_memory == "host":
        trained, optimizer = host_state.update(
          *(self.optimizer, self.stack, optax.apply_updates, grads, state.optimizer, trained)
        )
      else:
        updates, optimizer = self.optimizer.update(grads, state.optimizer, trained)
        trained = optax.apply_updates(trained, updates)
      rate = self.schedule(state.step)
    return merged(self.rounded(trained, state.step), frozen), optimizer, rate

  def rounded(self, params: Any, step: jax.Array) -> Any:
    """Returns updated parameters as they are stored, rounded if that is in bfloat16."""
    training = self.config.training
    if not training.stochastic_rounding:
      return jax.tree.map(lambda x: x.astype(training.parameter_dtype), params)
    key = stochastic_rounding.key(self.config.seed, step)
    rounded = [
      stochastic_rounding.to_bfloat16(x, stochastic_rounding.words(key, name, x.shape))
      for name, x in named_leaves(params, "params/").items()
    ]
    return jax.tree.unflatten(jax.tree.structure(params), rounded)

  def stacked(self, name: str) -> bool:
    """Returns whether a parameter's first dim is that of the stacked layers."""
    return self.stack(name) == "L"

  def stack(self, name: str) -> str:
    """Returns the letter of the layers that a parameter has as its first dim; "" if it has none."""
    rules = MODELS[self.config.model.name].parameters(self.config)
    first = letters_of(name, rules)[:1]
    return first if first in STACKS else ""


def abstract_batch(
  config: ConfigDict, legend: Legend, shape: Shape | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes and dtypes of a global batch, without opening the data set.

  Args:
    config: finalized.
    legend: of the model.
    shape: of a stage of a ramp; None: of the last.
  """
  rows, pieces = config.data.global_batch_size, 1
  if shape is not None:
    rows, pieces = shape.rows * shape.pieces, shape.pieces
  differing = {"B": rows, "T": config.data.sequence_length // pieces}
  return {
    name: jax.ShapeDtypeStruct(
      tuple(differing.get(letter) or legend[letter].size for letter in letters), jnp.dtype(dtype)
    )
    for name, (letters, dtype) in TASKS[config.task].batch.items()
  }


def make_program(config: ConfigDict) -> Program:
  """Returns the functions of a finalized config.

  Raises:
    ValueError: `training.trainable` selects nothing, or an optimizer that the step cannot use.
  """

  def abstract() -> nnx.Module:
    model = _build(config, nnx.Rngs(params=0))
    check_network(config.model.name, model)
    return model

  model = nnx.eval_shape(abstract)
  graphdef, params, _ = nnx.split(model, nnx.Param, ...)
  params = nnx.to_pure_dict(params)
  trained = trainable(config.training.trainable, list(named_leaves(params)))
  trained = router_bias.without(trained)
  params = jax.eval_shape(lambda params: _stored(params, trained, config), params)
  optimizer = make_optimizer(config, jax.eval_shape(wide, split(params, trained.__contains__)[0]))
  schedule = learning_rate_schedule(config)
  return Program(config, graphdef, params, optimizer, schedule, variables_of(model), trained)


def _build(config: ConfigDict, rngs: nnx.Rngs) -> nnx.Module:
  """Returns the model, with parameters drawn in float32 or wider."""
  if config.training.parameter_dtype == "bfloat16":
    config = config.copy_and_resolve_references()
    with config.unlocked():
      config.training.parameter_dtype = "float32"
  return MODELS[config.model.name].build(config, rngs=rngs)


def _stored(params: Any, trained: frozenset[str], config: ConfigDict) -> Any:
  """Returns parameters in the dtypes of the trained and of the other ones.

  The routers' biases are in float32 or wider: their steps are smaller than bfloat16 resolves.
  """
  dtypes = config.training.parameter_dtype, config.training.frozen_dtype
  bias, params = split(params, router_bias.PARAMETER.__eq__)
  parts = split(params, trained.__contains__)
  parts = [
    jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), part)
    for part, dtype in zip(parts, dtypes, strict=True)
  ]
  wide_bias = jax.tree.map(lambda x: x.astype(wide_dtype(jnp.dtype(dtypes[0]))), bias)
  return merged(merged(*parts), wide_bias)


def wide(tree: Any) -> Any:
  """Returns a tree of arrays in float32 or wider."""
  return jax.tree.map(lambda x: x.astype(wide_dtype(x.dtype)), tree)


def _is_history(name: str) -> bool:
  """Returns whether a variable is a history of delayed scaling: its gradient is what it gets."""
  return name.endswith("/amax_history")


def variables_of(model: nnx.Module) -> Any:
  """Returns a model's variables that are not parameters, as nested dicts; {} if it has none."""
  return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


def _each(function: Callable[[jax.Array], jax.Array], sums: Sums) -> Sums:
  """Returns a function of each of the sums; counts, which are integers, stay as they are."""
  counts = {name for name, x in sums.items() if jnp.issubdtype(x.dtype, jnp.integer)}
  return {name: x if name in counts else function(x) for name, x in sums.items()}


def _scaled(grads: Any, scale: jax.Array) -> Any:
  return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


def _accumulate(
  grad: Callable, count: int, variables: Any, batch: Batch, key: jax.Array | None
) -> tuple[Any, Any]:
  """Returns the sum of `grad(variables, microbatch, key)[0]` over a batch, and the variables.

  The variables are carried through the microbatches in order.
  """
  microbatches = split_rows(batch, count)
  keys = None if key is None else jax.random.split(key, count)

  def add(carry, inputs):
    total, variables = carry
    found, variables = grad(variables, *inputs)
    return (jax.tree.map(jnp.add, total, found), variables), None

  first = jax.tree.map(lambda x: x[0], (microbatches, keys))
  shapes, _ = jax.eval_shape(grad, variables, *first)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(add, (zeros, variables), (microbatches, keys))[0]
