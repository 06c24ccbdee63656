"""Moments in bfloat16 and 8-bit blocks: which arrays, what an update computes, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
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


def each(*fields, of=tuple(NAMES)):
  return {f"{field}/{kernel}" for field in fields for kernel in of}


PART = "inner_states/{}/inner_state"
REST, LION, MUON, ADAM = (PART.format(label) for label in ("rest", "0", "muon", "adamw"))


@pytest.mark.parametrize(
  ("name", "overrides", "wanted"),
  [
    ("adamw", {}, each("0/mu", "0/nu")),
    ("sgd", {**NO_DECAY, "optimizer.momentum": 0.9}, each("0/trace")),
    (
      "adamw",
      {"optimizer.groups": ({"parameters": "unembed/*", "name": "lion"},)},
      each(f"{REST}/0/mu", f"{REST}/0/nu", of=NAMES[:1]) | each(f"{LION}/0/mu", of=NAMES[1:]),
    ),
    (
      "muon",
      {},
      each(f"0/{MUON}/momentum", of=NAMES[:1]) | each(f"0/{ADAM}/mu", f"0/{ADAM}/nu", of=NAMES[1:]),
    ),
    # The first parameters are a part of its state: a copy, not a moment.
    ("contrib.prodigy", NO_DECAY, each("exp_avg", "exp_avg_sq", "grad_sum")),
  ],
  ids=["adamw", "sgd", "groups", "muon", "prodigy"],
)
def test_moments_of_kernels_are_stored_narrower(name, overrides, wanted):
  for dtype in ("bfloat16", "int8"):
    state = jax.eval_shape(optimizer_of(name, dtype, **overrides).init, drawn(0))
    in_bfloat16, in_blocks = narrow(state)
    if dtype == "bfloat16":
      assert (in_bfloat16, in_blocks) == (wanted, set())
    else:
      assert (in_bfloat16, in_blocks) == (set(), {x for x in wanted if x.endswith(NAMES[0])})


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


def test_random_bits_are_others_in_each_step_and_for_another_seed():
  params, grads = ({"layers": {"mlp": drawn(seed)["layers"]["mlp"]}} for seed in (0, 1))
  found = []
  for seed, counts in ((0, (0, 1)), (1, (0,))):
    config = config_of(**{"optimizer.state_dtype": "bfloat16", "seed": seed})
    ours = make_optimizer(resolve(config).optimizer, params)
    begun, update = jax.jit(ours.init)(params), compiled(ours)
    for count in counts:
      _, state = update(grads, begun._replace(count=jnp.int32(count)), params)
      found.append(np.asarray(state.inner[0].mu["layers"]["mlp"]["up"]["kernel"], np.float32))
  assert np.mean(found[0] != found[1]) > 0.2, "and not the nearest number, which would stall"
  assert np.mean(found[0] != found[2]) > 0.2


@pytest.mark.parametrize(
  ("name", "dtype", "overrides", "said"),
  [
    (
      "sgd",
      "int8",
      NO_DECAY,
      "state_dtype=int8: it would apply to nothing in the state of sgd: only",
    ),
    (
      "adafactor",
      "int8",
      {**NO_DECAY, "optimizer.arguments": "min_dim_size_to_factor=32"},
      "at least 4096 elements, and with a factor 128 in their dims; leave",
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


def test_soaps_squares_of_a_square_kernel_stay_float32():
  kernel = {"layers": {"mlp": {"up": {"kernel": np.zeros((2, 64, 64), np.float32)}}}}
  config = config_of("soap", **{"optimizer.state_dtype": "bfloat16"})
  made = make_optimizer(resolve(config).optimizer, kernel)
  state = named_leaves(jax.eval_shape(made.init, kernel))
  squares = {name: x.dtype for name, x in state.items() if x.shape == (2, 64, 64)}
  narrowed = {name for name, dtype in squares.items() if dtype == jnp.bfloat16}
  assert len(squares) == 6
  assert {name.split("/layers")[0].rsplit("/", 1)[-1] for name in narrowed} == {"mu", "nu"}
