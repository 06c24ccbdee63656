"""The step: `(state, batch) -> (state, metrics)`, pure, whole on one screen."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from models import MODELS
from models.losses import Batch, Sums
from partitioning.dims import Legend
from training.optimizer import learning_rate_schedule, make_optimizer
from training.state import State
from training.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class Program:
  """The pure functions of a config; what they are compiled for is not their business."""

  config: ConfigDict
  graphdef: nnx.GraphDef
  params: Any  # shapes and dtypes
  optimizer: optax.GradientTransformation
  schedule: optax.Schedule
  param_specs: Any = None  # a tree like the parameters; their gradients are laid out by it
  norm_specs: Any = None  # likewise, while their squares are summed

  def init(self, key: jax.Array) -> State:
    """Returns the first state. Jit it: drawn eagerly, parameters differ in their last bits."""
    model = MODELS[self.config.model.name].build(self.config, rngs=nnx.Rngs(params=key))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return self._first(params)

  def abstract_state(self) -> State:
    """Returns the first state's shapes and dtypes."""
    return jax.eval_shape(self._first, self.params)

  def _first(self, params: Any) -> State:
    return State(jnp.zeros((), jnp.int32), params, self.optimizer.init(params))

  def sums(self, params: Any, batch: Batch, key: jax.Array | None = None) -> Sums:
    """Returns the model's loss sums and the sum of weights; without a key nothing is dropped."""
    model = nnx.merge(self.graphdef, params)
    sums = model.loss_sums(batch, key)
    return {**sums, "weight": jnp.sum(batch["weights"], dtype=sums["loss"].dtype)}

  def gradients(
    self, params: Any, batch: Batch, key: jax.Array | None
  ) -> tuple[Any, Sums, jax.Array]:
    """Returns the gradients of the global batch's mean loss but for a factor, the means, and it.

    The mean is the sum of weighted losses over the sum of weights across the global batch,
    also where it is cut into microbatches: those with fewer weights count for less. Divided by the
    weights' number, which is known, and not by their sum: so the sum is reduced together with the
    gradients, not by a collective of its own before them; and the step scales and clips in one
    pass over the gradients.
    """
    count = self.config.training.gradient_accumulation_steps
    entries = batch["weights"].size

    def mean(params, microbatch, key):
      sums = self.sums(params, microbatch, key)
      means = {name: value / entries for name, value in sums.items()}
      return means["loss"], means

    def grad(params, microbatch, key):
      grads, means = jax.grad(mean, has_aux=True)(params, microbatch, key)
      return self.laid_out(grads), means

    if count == 1:
      grads, means = grad(params, batch, key)
    else:
      grads, means = _accumulate(functools.partial(grad, params), count, batch, key)
      # Left to XLA, the sums would lie as the norm wants them, and parameters and optimizer state
      # be computed so and gathered at the end, each of them.
      grads = self.laid_out(grads)
    scale = 1 / means.pop("weight")
    return grads, {name: value * scale for name, value in means.items()}, scale

  def laid_out(self, grads: Any) -> Any:
    """Returns gradients that lie as their parameters do."""
    if self.param_specs is None:
      return grads
    return jax.tree.map(jax.lax.with_sharding_constraint, grads, self.param_specs)

  def norm(self, grads: Any) -> jax.Array:
    """Returns the global norm; devices that hold copies of a gradient sum a part of it each."""
    if self.norm_specs is not None:
      grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, self.norm_specs)
    return optax.tree.norm(grads)

  def train_step(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
    """Returns the state after one optimizer step, and scalars about it.

    Randomness is folded from (seed, step), so it does not depend on where a run began.
    """
    return self.step_and_gradients(state, batch)[:2]

  def step_and_gradients(
    self, state: State, batch: Batch
  ) -> tuple[State, dict[str, jax.Array], Any]:
    """Returns what `train_step` does, and the gradients before they are clipped."""
    key = jax.random.fold_in(jax.random.key(self.config.seed), state.step)
    raw, means, mean = self.gradients(state.params, batch, key)
    norm = mean * self.norm(raw)
    clip = self.config.optimizer.clip_norm
    scale = mean * clip / jnp.maximum(norm, clip) if clip else mean
    grads = _scaled(raw, scale)
    # optax raises decays to an integer count, which strict promotion (on in the tests) forbids.
    with jax.numpy_dtype_promotion("standard"):
      updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
      rate = jnp.asarray(self.schedule(state.step), norm.dtype)
    params = optax.apply_updates(state.params, updates)
    own = {n: x for n, x in means.items() if n not in TASKS[self.config.task].sums}
    metrics = {"loss": means["loss"], "grad_norm": norm, "learning_rate": rate, **own}
    return State(state.step + 1, params, optimizer), metrics, _scaled(raw, mean)


def abstract_batch(config: ConfigDict, legend: Legend) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes and dtypes of a global batch, without opening the data set."""
  differing = {"B": config.data.global_batch_size, "T": config.data.sequence_length}
  return {
    name: jax.ShapeDtypeStruct(
      tuple(differing.get(letter) or legend[letter].size for letter in letters), jnp.dtype(dtype)
    )
    for name, (letters, dtype) in TASKS[config.task].batch.items()
  }


def make_program(config: ConfigDict) -> Program:
  """Returns the functions of a finalized config."""

  def abstract() -> nnx.Module:
    return MODELS[config.model.name].build(config, rngs=nnx.Rngs(params=0))

  graphdef, params = nnx.split(nnx.eval_shape(abstract), nnx.Param)
  params = nnx.to_pure_dict(params)
  made = make_optimizer(config, params), learning_rate_schedule(config)
  return Program(config, graphdef, params, *made)


def _scaled(grads: Any, scale: jax.Array) -> Any:
  return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


def _accumulate(grad: Callable, count: int, batch: Batch, key: jax.Array | None) -> Any:
  """Returns the sum of `grad(microbatch, key)` over the microbatches of a batch.

  Row r of the batch goes to microbatch r % count, so that no row changes its device.
  """
  microbatches = jax.tree.map(
    lambda x: x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1), dict(batch)
  )
  keys = None if key is None else jax.random.split(key, count)

  def add(total, inputs):
    return jax.tree.map(jnp.add, total, grad(*inputs)), None

  first = jax.tree.map(lambda x: x[0], (microbatches, keys))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(grad, *first))
  return jax.lax.scan(add, zeros, (microbatches, keys))[0]
