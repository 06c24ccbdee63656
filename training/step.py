"""The train step: `(state, batch) -> (state, metrics)`, pure: loss, gradients, update."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from input_pipeline.ramp import Shape
from models import MODELS, check_network, model_spec
from models.layer_stack import STACKS
from models.losses import Batch, Sums
from partitioning.constraints import automatic_spec, on_one_device
from partitioning.dims import Legend
from partitioning.dtypes import wide_dtype
from partitioning.parallel import eight_bit
from partitioning.parallel.gathered_parameters import GatheredOnce
from partitioning.parallel.pipeline_schedule import Schedule
from partitioning.rules import letters_of, named_leaves
from training import gradients, router_bias
from training.gradient_reduction import keep_apart, reduce_once
from training.gradients import Gradients
from training.optimizers import host_state, stochastic_rounding
from training.optimizers.build import make_optimizer
from training.optimizers.schedule_free import gradient_point
from training.parameter_gathers import gather_once
from training.pipelined import Pipelined
from training.schedules import learning_rate_schedule
from training.state import State, merged, nested, split, trainable
from training.step_spec import StepSpec, step_spec
from training.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class Program:
  """The pure functions of a config, independent of the devices that they are compiled for.

  Attributes:
    spec: what the step needs to know of the config.
    build: draws the model, with parameters in float32 or wider.
    letters: pattern of parameter names -> the letters of their dims.
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

  spec: StepSpec
  build: Callable[[nnx.Rngs], nnx.Module]
  letters: Mapping[str, str]
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
    model = self.build(nnx.Rngs(params=key))
    params = _stored(nnx.to_pure_dict(nnx.state(model, nnx.Param)), self.trained, self.spec)
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
    history, others = split(variables or {}, eight_bit.is_history)
    given = dict(batch), merged(wide(trained), history), frozen, others, key
    (grads, means), others = self._of_batch(batch["weights"].size)(*given)
    if self.spec.gradient_accumulation_steps > 1:
      # Otherwise XLA would shard the sums for the norm, compute parameters and optimizer state with
      # that sharding, and all-gather each of them at the end.
      grads = self.laid_out(grads)
    seen, grads = split(grads, eight_bit.is_history)
    variables = merged(jax.tree.map(eight_bit.advanced, history, seen), others)
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
      return found if self.reduce_once_over is None else keep_apart(*found), variables

    found = gradients.accumulate(of_microbatch, self.spec.gradient_accumulation_steps)
    if self.gathered is not None:
      return gather_once(found, self.gathered)
    return found if self.reduce_once_over is None else reduce_once(found, self.reduce_once_over)

  def _pipelined(self, finish: Callable[[Sums], Sums] = lambda sums: sums) -> Pipelined:
    """Returns the model's loss and gradients by the schedule of its stages."""
    residual = MODELS[self.spec.model].build.residual
    specs = None if self.param_specs is None else named_leaves(self.param_specs)
    given = self.spec, self.pipeline, self.module, residual, self.stacked, specs, finish
    return Pipelined(*given)

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
    return self.step_and_gradients(state, batch)[:2]

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
    params, optimizer, rate = self.updated(state, _scaled(raw, scale))
    params = router_bias.moved(params, means, self.spec.router_bias_rate)
    means = router_bias.as_metrics(means)
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
    point = gradient_point(trained, state.optimizer)
    return state.params if point is trained else merged(self.laid_out(point), frozen)

  def updated(self, state: State, grads: Any) -> tuple[Any, Any, jax.Array | float]:
    """Returns parameters and optimizer state after gradients are applied, and the learning rate."""
    trained, frozen = self.split(state.params)
    trained = wide(trained)
    # optax raises decays to an integer count, which strict promotion (on in the tests) forbids.
    with jax.numpy_dtype_promotion("standard"):
      if self.spec.state_memory == "host":
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
    if not self.spec.stochastic_rounding:
      return jax.tree.map(lambda x: x.astype(self.spec.parameter_dtype), params)
    key = stochastic_rounding.key(self.spec.seed, step)
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
    first = letters_of(name, self.letters)[:1]
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

  def build(rngs: nnx.Rngs) -> nnx.Module:
    return MODELS[config.model.name].build(drawn, rngs=rngs)

  def abstract() -> nnx.Module:
    model = build(nnx.Rngs(params=0))
    check_network(config.model.name, model)
    return model

  spec, of_model = step_spec(config), model_spec(config)
  drawn = dataclasses.replace(of_model, parameter_dtype=wide_dtype(of_model.parameter_dtype))
  model = nnx.eval_shape(abstract)
  graphdef, params, _ = nnx.split(model, nnx.Param, ...)
  params = nnx.to_pure_dict(params)
  trained = trainable(config.training.trainable, list(named_leaves(params)))
  trained = router_bias.without(trained)
  params = jax.eval_shape(lambda params: _stored(params, trained, spec), params)
  optimizer = make_optimizer(config, jax.eval_shape(wide, split(params, trained.__contains__)[0]))
  schedule = learning_rate_schedule(config)
  letters, variables = of_model.parameters, variables_of(model)
  return Program(spec, build, letters, graphdef, params, optimizer, schedule, variables, trained)


def _stored(params: Any, trained: frozenset[str], spec: StepSpec) -> Any:
  """Returns parameters in the dtypes of the trained and of the other ones.

  The routers' biases are in float32 or wider: their steps are smaller than bfloat16 resolves.
  """
  dtypes = spec.parameter_dtype, spec.frozen_dtype
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
