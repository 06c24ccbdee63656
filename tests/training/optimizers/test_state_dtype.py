"""Moments in bfloat16 and 8-bit blocks: which arrays, what an update computes, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import base
from configs.schema import finalize
from partitioning.rules import named_leaves
from training.optimizers.build import make_optimizer
from training.optimizers.low_precision import Blocks, decode_blocks
from training.specs import resolve
from training.step import make_program

SHAPES = {
  "layers": {"mlp": {"up": {"kernel": (2, 64, 128)}}, "mlp_norm": {"scale": (64, 64)}},
  "final_norm": {"scale": (64,)},
  "unembed": {"kernel": (60, 100)},  # without a factor 128
}
NAMES = ["layers/mlp/up/kernel", "unembed/kernel"]  # of those that are not scales


def config_of(name="adamw", **overrides):
  config = base.get_config("lm")
  keys = {"optimizer.name": name, "optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
  for key, value in {**keys, **overrides}.items():
    config.update_from_flattened_dict({key: value})
  return finalize.finalize(config, "cpu")


def drawn(seed, scale=1.0):
  random = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: (scale * random.standard_normal(shape)).astype(np.float32),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def optimizer_of(name, dtype, **overrides):
  config = config_of(name, **{"optimizer.state_dtype": dtype, **overrides})
  return make_optimizer(resolve(config).optimizer, drawn(0))


def compiled(optimizer):
  """Returns its update as a step runs it."""
  update = jax.jit(optimizer.update)

  def run(*arguments):
    with jax.numpy_dtype_promotion("standard"):
      return update(*arguments)

  return run


def decoded(tree):
  """Returns a state with float32 in place of what is stored narrower."""
  of = lambda x: decode_blocks(x) if isinstance(x, Blocks) else x  # noqa: E731
  tree = jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, Blocks))
  return jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, tree)


def narrow(state):
  """Returns the names of arrays stored in bfloat16, and of those stored in blocks."""
  leaves = named_leaves(state.inner)
  codes = [name for name, x in leaves.items() if x.dtype == np.uint8]
  return (
    {name for name, x in leaves.items() if x.dtype == jnp.bfloat16},
    {name.removesuffix("/codes") for name in codes},
  )


NO_DECAY = {"optimizer.weight_decay": 0.0}


@pytest.mark.parametrize(
  ("name", "overrides", "fields"),
  [
    ("adamw", {}, ["0/mu", "0/nu"]),
    ("lion", {}, ["0/mu"]),
    ("sgd", {**NO_DECAY, "optimizer.momentum": 0.9}, ["0/trace"]),
    ("adamw", {"optimizer.groups": ({"parameters": "unembed/*", "name": "lion"},)}, None),
    # The first parameters are a part of its state: a copy, not a moment.
    ("contrib.prodigy", NO_DECAY, ["exp_avg", "exp_avg_sq", "grad_sum"]),
  ],
  ids=["adamw", "lion", "sgd", "groups", "prodigy"],
)
def test_moments_of_kernels_are_stored_narrower(name, overrides, fields):
  for dtype in ("bfloat16", "int8"):
    state = jax.eval_shape(optimizer_of(name, dtype, **overrides).init, drawn(0))
    in_bfloat16, in_blocks = narrow(state)
    kernels = NAMES if dtype == "bfloat16" else NAMES[:1]
    if fields is None:
      rest = [f"inner_states/rest/inner_state/0/{field}/{NAMES[0]}" for field in ("mu", "nu")]
      lion = "inner_states/0/inner_state/0/mu/unembed/kernel"
      wanted = {*rest, lion} if dtype == "bfloat16" else {*rest}
    else:
      wanted = {f"{field}/{kernel}" for field in fields for kernel in kernels}
    assert (in_bfloat16 or in_blocks) == wanted
    assert not (in_bfloat16 and in_blocks)


def test_muons_momentum_and_its_adamw_are_stored_narrower():
  params = drawn(0)
  config = config_of("muon", **{"optimizer.state_dtype": "int8"})
  _, in_blocks = narrow(
    jax.eval_shape(make_optimizer(resolve(config).optimizer, params).init, params)
  )
  assert in_blocks == {f"0/inner_states/muon/inner_state/momentum/{NAMES[0]}"}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_an_update_is_that_of_the_optimizer_on_the_decoded_state(dtype):
  ours, plain = optimizer_of("adamw", dtype), optimizer_of("adamw", "float32")
  params = drawn(0)
  state, update = jax.jit(ours.init)(params), compiled(ours)
  for step in range(3):
    grads, before = drawn(step + 1, 0.1), state
    wanted, wanted_state = compiled(plain)(grads, decoded(before.inner), params)
    updates, state = update(grads, before, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-6, 1e-9), updates, wanted)
    assert int(state.count) == step + 1
    # Stored is what came out, rounded to a neighbour: of bfloat16, or of 5 bits and a scale.
    relative = {"bfloat16": 2**-7, "int8": 1 / 16}[dtype]
    stored, exact = named_leaves(decoded(state.inner)), named_leaves(wanted_state)
    for name, x in exact.items():
      kernel = name.endswith(tuple(NAMES if dtype == "bfloat16" else NAMES[:1]))
      floor = 0 if dtype == "bfloat16" else np.abs(x).max() / 1984
      allowed = np.maximum(relative * np.abs(x), floor) if kernel else 3e-6 * np.abs(x) + 1e-12
      assert np.all(np.abs(stored[name] - x) <= allowed), name
      assert not kernel or np.any(stored[name] != x)


def test_the_second_moment_does_not_stall_in_bfloat16():
  """With beta_2 of 0.999, to the nearest it would stay where it is, whatever the gradients are."""
  keys = {"optimizer.beta_2": 0.999, **NO_DECAY}
  ours, params = optimizer_of("adamw", "bfloat16", **keys), drawn(0)
  grads = jax.tree.map(np.ones_like, params)
  state = jax.jit(ours.init)(params)
  state = jax.tree.map(lambda x: jnp.full_like(x, 4) if x.ndim else x, state)
  update = compiled(ours)
  for _ in range(40):
    _, state = update(grads, state, params)
  second = np.asarray(state.inner[0].nu["layers"]["mlp"]["up"]["kernel"], np.float64)
  wanted = 1 + 3 * 0.999**40
  assert abs(second.mean() - wanted) < 5 * 40**0.5 * 2**-6 / second.size**0.5
  nearest = jnp.bfloat16(4)
  for _ in range(40):
    nearest = jnp.bfloat16(0.999 * np.float32(nearest) + 0.001)
  assert nearest == 4


def test_random_bits_are_others_in_each_step_and_for_another_seed():
  params, grads = ({"layers": {"mlp": drawn(seed)["layers"]["mlp"]}} for seed in (0, 1))
  found = []
  for seed, count in ((0, 0), (0, 1), (1, 0)):
    config = config_of(**{"optimizer.state_dtype": "bfloat16", "seed": seed})
    ours = make_optimizer(resolve(config).optimizer, params)
    _, state = compiled(ours)(grads, ours.init(params)._replace(count=jnp.int32(count)), params)
    found.append(np.asarray(state.inner[0].mu["layers"]["mlp"]["up"]["kernel"], np.float32))
  assert np.mean(found[0] != found[1]) > 0.2
  assert np.mean(found[0] != found[2]) > 0.2


@pytest.mark.parametrize(
  ("name", "dtype", "overrides", "said"),
  [
    ("sgd", "int8", NO_DECAY, "state_dtype=int8: sgd has no state of the parameters' shapes"),
    (
      "adafactor",
      "int8",
      {**NO_DECAY, "optimizer.arguments": "min_dim_size_to_factor=32"},
      "state of adafactor, the largest array being of shape (64,)",
    ),
  ],
)
def test_an_optimizer_without_moments_is_refused(name, dtype, overrides, said):
  with pytest.raises(ValueError, match=r"optimizer\.state_dtype=") as refusal:
    optimizer_of(name, dtype, **overrides)
  assert said in str(refusal.value)


def test_bfloat16_parameters_do_not_need_an_optimizer_with_moments():
  keys = {"optimizer.name": "sgd", "training.parameter_dtype": "bfloat16", **NO_DECAY}
  program = make_program(resolve(config_of(**keys)))
  assert not any(x.ndim for x in jax.tree.leaves(program.abstract_state().optimizer))


def test_float32_state_is_the_optimizers_own():
  params = drawn(0)
  state = jax.eval_shape(optimizer_of("adamw", "float32").init, params)
  wanted = jax.eval_shape(optax.adamw(1e-3).init, params)
  assert jax.tree.structure(state[0]) == jax.tree.structure(wanted[0])


def test_soaps_squares_of_a_square_kernel_stay_float32():
  kernel = {"layers": {"mlp": {"up": {"kernel": np.zeros((2, 64, 64), np.float32)}}}}
  config = config_of("soap", **{"optimizer.state_dtype": "bfloat16"})
  state = named_leaves(make_optimizer(resolve(config).optimizer, kernel).init(kernel))
  squares = {name: x.dtype for name, x in state.items() if x.shape == (2, 64, 64)}
  narrowed = {name for name, dtype in squares.items() if dtype == jnp.bfloat16}
  assert len(squares) == 6
  assert {name.split("/layers")[0].rsplit("/", 1)[-1] for name in narrowed} == {"mu", "nu"}
