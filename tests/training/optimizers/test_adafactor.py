"""Adafactor: optax's, and its weight decay; arguments of optimizers as a text has them."""

import functools

import jax
import numpy as np
import optax

from tests.training.test_optimizer import config_of, drawn
from training.optimizers.build import make_optimizer
from training.optimizers.spec import parse_arguments
from training.specs import resolve

DECAY = 0.25


@functools.cache
def two_updates(decay):
  """Returns the updates of two steps of a warm-up, their rates, and the state."""
  keys = {"optimizer.name": "adafactor", "optimizer.weight_decay": decay}
  config = config_of("adafactor", **keys, **{"optimizer.warmup_steps": 4})
  params, found = drawn(0), []
  made = make_optimizer(resolve(config).optimizer, params)
  state, update = made.init(params), jax.jit(made.update)
  with jax.numpy_dtype_promotion("standard"):
    for seed in (1, 2):
      updates, state = update(drawn(seed), state, params)
      found.append(jax.device_get(updates))
  return found, [config.optimizer.learning_rate * n / 4 for n in (1, 2)], state


def test_decay_is_the_learning_rate_times_it_times_the_parameter_and_scales_have_none():
  with_decay, rates, _ = two_updates(DECAY)
  without, _, _ = two_updates(0.0)
  for ours, plain, rate in zip(with_decay, without, rates, strict=True):
    taken_off = rate * DECAY * drawn(0)["kernel"]
    np.testing.assert_allclose(plain["kernel"] - ours["kernel"], taken_off, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(ours["scale"], plain["scale"])


def test_without_decay_it_is_optax_s():
  updates, rates, state = two_updates(0.0)
  theirs = optax.adafactor(lambda step: jax.numpy.asarray(rates)[step])
  begun = theirs.init(drawn(0))
  assert jax.tree.structure(begun) == jax.tree.structure(state)
  with jax.numpy_dtype_promotion("standard"):
    wanted, _ = jax.jit(theirs.update)(drawn(1), begun, drawn(0))
  for name, x in wanted.items():
    np.testing.assert_allclose(updates[0][name], x, rtol=1e-5)


def test_arguments_are_read_as_in_a_call():
  text = "a=1e-3,b=(0.9, 0.99),c=True,d=bfloat16,e='x,y',f=None"
  wanted = {"a": 1e-3, "b": (0.9, 0.99), "c": True, "d": "bfloat16", "e": "x,y", "f": None}
  assert parse_arguments(text) == wanted
  assert parse_arguments("") == {}
