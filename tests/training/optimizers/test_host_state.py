"""Optimizer state in host memory: where it is, and that no number changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partitioning.rules import HOST, named_leaves
from planning.traced_step import equations
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.parity.expert_cases import WITH_DENSE
from training.optimizer import optimizers_with
from training.optimizers import host_state

KEY = "optimizer.state_memory"
GROUPS = ({"parameters": ("embed/*", "layers/mlp/*"), "name": "lion", "weight_decay": 0.5},)


def trained(strategy, **overrides):
  """Returns the job, and its state after two steps."""
  job = make_job(strategy, "lm", **{"optimizer.warmup_steps": 0, **overrides})
  step, state = job.compile_train_step().function, first_state(job)
  for number in range(2):
    state, _ = step(state, place(job, host_batch(job, seed=number)))
  return job, state


@pytest.mark.long
@pytest.mark.parametrize(
  ("strategy", "overrides"),
  [
    ("dp4_tp2", {"optimizer.groups": GROUPS, "optimizer.ema_decays": (0.9,)}),
    pytest.param("fsdp8", {}, marks=pytest.mark.long),
    ("dp4_tp2", WITH_DENSE),
  ],
)
def test_a_step_gives_the_same_bits(strategy, overrides):
  job, state = trained(strategy, **{KEY: "host"}, **overrides)
  _, wanted = trained(strategy, **overrides)
  job.check_placed(state)
  for name, leaf in named_leaves(state.optimizer).items():
    assert leaf.sharding.memory_kind == (HOST if "layers/" in name else "device"), name
  ours, theirs = (named_leaves(jax.device_get(vars(one))) for one in (state, wanted))
  assert [*ours] == [*theirs]
  different = [name for name in ours if not np.array_equal(ours[name], theirs[name])]
  assert different == []


def test_one_layers_state_is_fetched_at_a_time():
  fetched, written = moved_by_update({})
  assert (2, 40, 56) not in fetched
  assert fetched.count((1, 40, 56)) == 4  # both moments of gate and up
  assert written.count((1, 40, 56)) == 4


def test_both_stacks_of_a_mixture_are_moved_layer_by_layer():
  placed = make_job("single", "lm", **{KEY: "host", **WITH_DENSE}).placements["optimizer"]
  where = {name.partition("/mu/")[2]: one.memory for name, one in placed.items() if "/mu/" in name}
  assert where["layers/experts/up/kernel"] == where["dense_layers/mlp/up/kernel"] == HOST
  assert where["embed/table"] != HOST
  fetched, _ = moved_by_update(WITH_DENSE)
  assert fetched.count((1, 40, 56)) == 4  # of the one dense layer's gate and up
  assert fetched.count((1, 8, 40, 24)) == 4  # of the experts'
  assert (2, 8, 40, 24) not in fetched


def moved_by_update(keys):
  """Returns the shapes of what an update brings to the device, and of what it writes back."""
  job = make_job("single", "lm", **{KEY: "host", **keys})
  trained, _ = job.program.split(job.state.params)
  with jax.set_mesh(job.mesh):
    traced = jax.make_jaxpr(job.program.updated)(job.state, trained).jaxpr
  host = jax.memory.Space.Host
  moved = [
    (one.invars[0].aval, one.outvars[0].aval)
    for one in equations(traced)
    if one.primitive.name == "device_put"
  ]
  fetched = [after.shape for before, after in moved if before.memory_space == host != after]
  return fetched, [after.shape for before, after in moved if after.memory_space == host]


def stack_of(name):
  """Returns the first part of a parameter's name, where it is a stack."""
  return name.partition("/")[0] if "/" in name else ""


@pytest.mark.parametrize("name", optimizers_with(lambda row: row.elementwise))
def test_an_optimizer_that_the_config_allows_updates_each_element_by_itself(name):
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    optimizer = getattr(optax, name)(0.1, **({"momentum": 0.9} if name == "sgd" else {}))
    params, *grads = np.random.default_rng(0).standard_normal((3, 2, 3))

    def updated(params, grads):
      state, found = optimizer.init(params), []
      for given in grads:
        updates, state = optimizer.update(given, state, params)
        found.append(updates)
      return found

    whole = updated(jnp.asarray(params), grads)
    half = updated(jnp.asarray(params[:1]), [given[:1] for given in grads])
  for ours, wanted in zip(half, whole, strict=True):
    np.testing.assert_allclose(ours, wanted[:1], rtol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_layers_one_by_one_are_as_all_at_once(name):
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    optimizer = getattr(optax, name)(0.1, **({"momentum": 0.9} if name == "sgd" else {}))
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape))  # noqa: E731
    params = {
      "embed": draw(5, 3),
      "layers": {"a": draw(3, 4, 2), "b": draw(3, 6)},
      "dense_layers": {"a": draw(2, 4, 2)},
    }
    grads = jax.tree.map(lambda x: draw(*x.shape), params)
    together, apart = [(params, optimizer.init(params))] * 2
    for _ in range(2):
      updates, state = optimizer.update(grads, together[1], together[0])
      together = optax.apply_updates(together[0], updates), state
      apart = jax.jit(
        lambda state, params: host_state.update(
          *(optimizer, stack_of, optax.apply_updates, grads, state, params)
        )
      )(apart[1], apart[0])
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), *jax.device_get((together, apart))
    )


def test_it_is_refused_where_there_is_nothing_to_move():
  with pytest.raises(ValueError, match="has no state of stacked layers to move there; set it to"):
    make_job(
      "single", "lm", **{KEY: "host", "optimizer.name": "sgd", "optimizer.weight_decay": 0.0}
    )
