r"""Bits flipped at random where only one device holds them, and which checks of a run find it.

  python -m benchmarks.silent_faults [--trials=40] [--strategy=fsdp8] [--seed=0]

A small decoder on 8 simulated devices. A trial flips a random bit of a random element once, in one
step: of a parameter or a moment of AdamW while the step is computed, of a gradient before the
optimizer takes it, or of the activations that enter the first layer. Parameters and their gradients
are sharded, so one device has the fault, and the batch too. Each step is computed again on other
devices, which a run does every `training.recompute_every_steps`-th time; the replicas are compared
after the step, as a run does, and its loss is looked at. The share that a run finds of faults that
come once is that of the first column divided by the number of steps from one such step to the next;
of a device that goes on being wrong, every one, after half as many steps in the mean.

Bits that change between two steps, in parameters and moments, are looked for by
`training.check_memory` as well, which compares at every step.

The last lines have what a step costs that is computed twice, next to one that is not, and what one
costs whose state is compared with what the step before has left.
"""

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import timing
from commands import config_flag
from models import transformer
from partitioning.rules import named_leaves, nested
from runtime import devices
from tests.helpers import jobs
from training.kept_state import KeptState, StateChangedError
from training.recomputed_steps import RecomputedSteps, StepsDifferError
from training.replica_check import CopiesDifferError
from training.setup import Compiled, Job
from training.state import State

_TRIALS = flags.DEFINE_integer("trials", 40, "of each kind.", lower_bound=1)
_STRATEGY = flags.DEFINE_string("strategy", "fsdp8", "A file of configs/.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the faults.")
KINDS = ("parameter", "moment", "gradient", "activation")
STEPS = 3  # before the faulty one


def flipped(x: jax.Array, where: jax.Array) -> jax.Array:
  """Returns a float32 array with a bit flipped.

  Args:
    x: any shape.
    where: int32 [3]: 1 or 0 (nothing is flipped), element, bit.
  """
  place = jnp.zeros(x.shape, jnp.int32)
  stride = 1
  for dim in reversed(range(x.ndim)):
    place += stride * jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
    stride *= x.shape[dim]
  mask = jnp.where(place == where[1], where[0] << where[2], 0)
  bits = jax.lax.bitcast_convert_type(x, jnp.int32) ^ mask
  return jax.lax.bitcast_convert_type(bits, x.dtype)


class FaultyJob(Job):
  """A job whose step takes flips: of the activations int32 [3], of the gradients int32 [name, 3].

  Without any it is the step that is computed again: other operations would give other bits.
  """

  @property
  def names(self) -> list[str]:
    """Returns the parameters that are sharded."""
    leaves = named_leaves(self.placed_state.params)
    return [name for name, leaf in leaves.items() if not leaf.sharding.is_fully_replicated]

  def flips(self) -> list[np.ndarray]:
    """Returns the flips that flip nothing."""
    return [np.zeros(3, np.int32), np.zeros((len(self.names), 3), np.int32)]

  def compile_train_step(self, shape: Any = None) -> Compiled:
    """Compiles `(state, batch, *flips) -> (state, metrics)`; without flips, nothing is flipped."""
    update, names, embedded = self.program.update, self.names, transformer.Transformer._embedded

    def step(state: State, batch: Any, activations: jax.Array, gradients: jax.Array) -> Any:
      def with_flips(grads: Any, *rest: Any) -> Any:
        leaves = named_leaves(grads)
        spoiled = {name: flipped(leaves[name], gradients[i]) for i, name in enumerate(names)}
        return update(nested({**leaves, **spoiled}), *rest)

      flips = mock.patch.object(
        transformer.Transformer, "_embedded", lambda *given: flipped(embedded(*given), activations)
      )
      with flips:  # of what enters the first layer, in what is traced within
        return dataclasses.replace(self.program, update=with_flips).train_step(state, batch)

    everywhere = NamedSharding(self.mesh, PartitionSpec())
    compiled = self.compile(
      step,
      *(self.state, self.batch, *self.flips()),
      in_shardings=(self.state_shardings, self.batch_shardings, everywhere, everywhere),
      out_shardings=(self.state_shardings, everywhere),
    )

    def function(state: State, batch: Any, *flips: np.ndarray) -> Any:
      return compiled.function(state, batch, *(flips or self.flips()))

    return Compiled(function, compiled.seconds)


def flip_leaf(array: jax.Array, element: int, bit: int) -> jax.Array:
  """Returns an array with a bit of an element flipped, on every device that holds it."""
  where = jnp.array([1, element, bit], jnp.int32)
  return jax.jit(flipped, out_shardings=array.sharding)(array, where)


def one_trial(job: FaultyJob, kind: str, chance: np.random.Generator, tools: tuple) -> set[str]:
  """Makes the steps, the last with a fault; returns what found it: `again`, `replicas`, `loss`."""
  (step_of, again, replicas), names = tools, job.names
  state, found = jobs.first_state(job), set()
  name, bit = str(chance.choice(names)), int(chance.integers(32))
  activation, gradients = job.flips()
  for number in range(1, STEPS + 2):
    batch = jobs.place(job, jobs.host_batch(job, number - 1))
    again.before_step(number, state, batch)
    if number == STEPS + 1:
      element = int(chance.integers(np.prod(named_leaves(state.params)[name].shape)))
      if kind == "gradient":
        gradients[names.index(name)] = 1, element, bit
      elif kind == "activation":
        size = batch["tokens"].size * job.config.model.model_size
        activation[:] = 1, int(chance.integers(size)), bit
      else:
        state = with_flip(state, kind, name, element, bit, chance)
    state, metrics = step_of(state, batch, activation, gradients)
    jax.block_until_ready(state)
    with contextlib.suppress(StepsDifferError):
      again.after_step(number, state)
      continue
    assert number == STEPS + 1, "a false alarm"
    found.add("again")
  if not np.isfinite(float(metrics["loss"])) or not np.isfinite(float(metrics["grad_norm"])):
    found.add("loss")
  try:
    replicas.before_save(number, state)
  except CopiesDifferError:
    found.add("replicas")
  return found


def with_flip(state: State, kind: str, name: str, element: int, bit: int, chance: Any) -> State:
  """Returns the state with a bit flipped in a parameter, or in one of its moments."""
  if kind == "parameter":
    leaves = named_leaves(state.params)
    changed = {**leaves, name: flip_leaf(leaves[name], element, bit)}
    return dataclasses.replace(state, params=nested(changed))
  which = str(chance.choice(["mu", "nu"]))

  def one(path: Any, leaf: jax.Array) -> jax.Array:
    text = jax.tree_util.keystr(path, simple=True, separator="/")
    hit = f"/{which}/" in f"/{text}" and text.endswith(name)
    return flip_leaf(leaf, element, bit) if hit else leaf

  return dataclasses.replace(
    state, optimizer=jax.tree_util.tree_map_with_path(one, state.optimizer)
  )


def memory_trial(job: Job, kind: str, kept: KeptState, step_of: Any, chance: Any) -> bool:
  """Flips a bit between two steps; returns whether the second one finds it."""
  names = list(named_leaves(job.placed_state.params))
  state = jobs.first_state(job)
  kept.forget()
  for number in range(1, STEPS + 2):
    if number == STEPS + 1:
      name = str(chance.choice(names))
      element = int(chance.integers(np.prod(named_leaves(state.params)[name].shape)))
      state = with_flip(state, kind, name, element, int(chance.integers(32)), chance)
    state, found = step_of(state, jobs.place(job, jobs.host_batch(job, number - 1)))
    try:
      kept.after_step(number, found)
    except StateChangedError:
      assert number == STEPS + 1, "a false alarm"
      return True
  return False


def costs(job: Job) -> tuple[float, float]:
  """Returns the time of a step computed twice, and of one with digests, over that of another."""

  def way(step_of: Any, before: Any = None, after: Any = None) -> Callable[[], None]:
    state, number = jobs.first_state(job), 0

    def take() -> None:
      nonlocal state, number
      batch, number = jobs.place(job, jobs.host_batch(job, number)), number + 1
      if before:
        before(number, state, batch)
      state, found = step_of(state, batch)
      if after:
        after(number, state, found)
      jax.block_until_ready(state)

    return take

  plain, again, kept = (
    job.compile_train_step().function,
    RecomputedSteps(job, 1, 0),
    KeptState(job, late=False),
  )
  ways = {
    "plain": way(plain),
    "again": way(
      plain, again.before_step, lambda number, state, _: again.after_step(number, state)
    ),
    "kept": way(
      kept.compile_train_step().function,
      after=lambda number, _, found: kept.after_step(number, found),
    ),
  }
  seconds = timing.in_turns(ways, 20, time.perf_counter)
  return tuple(timing.ratio(seconds[name], seconds["plain"]) for name in ("again", "kept"))


def main(_: list[str]) -> None:
  """Prints a line for each kind of fault, and the cost."""
  devices.start({"data": 8}, simulate=True)
  plain = jobs.make_job(_STRATEGY.value, "lm")
  job = FaultyJob(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)})
  tools = job.compile_train_step().function, RecomputedSteps(job, 1, 0), jobs.replica_check(job)
  rows = []
  for number, kind in enumerate(KINDS):
    chance = np.random.default_rng([_SEED.value, number])
    found = [one_trial(job, kind, chance, tools) for _ in range(_TRIALS.value)]
    counts = [sum(name in one for one in found) for name in ("again", "loss", "replicas")]
    rows.append([kind, str(len(found)), *map(str, counts)])
  head = ("bit flipped in", "faults", "computed again, differs", "not finite", "replicas differ")
  print(timing.table(head, rows), flush=True)
  kept = KeptState(plain, late=False)
  step_of = kept.compile_train_step().function
  for number, kind in enumerate(KINDS[:2]):
    chance = np.random.default_rng([_SEED.value, number])
    count = _TRIALS.value
    found = sum(memory_trial(plain, kind, kept, step_of, chance) for _ in range(count))
    print(f"changed in memory, a {kind}: {found} of {count} found by the next step", flush=True)
  sizes = importlib.import_module(f"configs.{_STRATEGY.value}").get_config("lm")
  sizes = {key: value for key, value in config_flag.leaves(sizes) if key in jobs.SMALL["lm"]}
  again, kept = costs(jobs.make_job(_STRATEGY.value, "lm", **sizes))
  print(f"a step computed twice takes {again:.2f} of another: {again - 1:.2f} % every 100 steps")
  print(f"a step whose state is compared with what was left takes {kept:.3f} of another")


if __name__ == "__main__":
  app.run(main)
