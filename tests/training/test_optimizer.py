"""Optimizers by name: the table, optax's, their arguments, and what cannot be used."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import base
from configs.schema import finalize
from partitioning.rules import named_leaves
from tests.helpers.jobs import SMALL
from training import optimizer
from training.optimizers import build
from training.optimizers.build import make_optimizer
from training.specs import resolve

CONSTANT = {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
NO_DECAY = {"optimizer.weight_decay": 0.0}
SHAPES = {"kernel": (3, 4), "scale": (4,)}


def config_of(name, recipe="lm", /, **overrides):
  config = base.get_config(recipe)
  keys = {**SMALL[recipe], "optimizer.name": name, **overrides}
  config.update_from_flattened_dict(keys)
  return finalize.finalize(config, "cpu")


def drawn(seed, shapes=SHAPES):
  """Returns random arrays."""
  random = np.random.default_rng(seed)
  return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def updates_of(made, params, steps):
  """Returns the updates of a step each."""
  state, found, update = made.init(params), [], jax.jit(made.update)
  with jax.numpy_dtype_promotion("standard"):
    for grads in steps:
      updates, state = update(grads, state, params)
      found.append(updates)
  return found


def refusal(name, **overrides):
  with pytest.raises(ValueError, match="optimizer") as error:
    make_optimizer(resolve(config_of(name, **overrides)).optimizer, drawn(0))
  return str(error.value)


# ---- By name ----


def test_lion_of_optax_has_its_arguments_the_schedule_and_the_mask_of_weight_decay():
  keys = {"optimizer.arguments": "b1=0.8,b2=0.7", "optimizer.warmup_steps": 2}
  keys |= {"optimizer.schedule": "constant", "optimizer.weight_decay": 0.1}
  config = config_of("lion", **keys)
  params, steps = drawn(0), [drawn(1), drawn(2)]
  found = updates_of(make_optimizer(resolve(config).optimizer, params), params, steps)
  rate = config.optimizer.learning_rate
  for name, decay in (("kernel", 0.1), ("scale", 0.0)):
    momentum = np.zeros(SHAPES[name], np.float32)
    for updates, grads, its_rate in zip(found, steps, (rate / 2, rate), strict=True):
      sign = np.sign(0.8 * momentum + 0.2 * grads[name])
      wanted = -its_rate * (sign + decay * params[name])
      np.testing.assert_allclose(updates[name], wanted, rtol=1e-5)
      momentum = 0.7 * momentum + 0.3 * grads[name]


def test_arguments_that_have_no_key_reach_our_own_optimizers():
  config = config_of("sgd", **CONSTANT, **{"optimizer.momentum": 0.5})
  config.optimizer.arguments = "nesterov=True"
  params, grads = drawn(0), drawn(1)
  [updates] = updates_of(make_optimizer(resolve(config).optimizer, params), params, [grads])
  np.testing.assert_allclose(updates["kernel"], -8e-3 * 1.5 * grads["kernel"], rtol=1e-5)
  wrong = {"optimizer.arguments": "nesterov=True"}
  assert "nesterov=True needs optimizer.momentum above 0" in refusal("sgd", **wrong)


@pytest.mark.parametrize("name", ["adan", "contrib.prodigy"])
def test_others_of_optax_are_built(name):
  decay = NO_DECAY if name != "adan" else {}
  assert updates_of(
    make_optimizer(resolve(config_of(name, **decay)).optimizer, drawn(0)), drawn(0), [drawn(1)]
  )


def test_an_unknown_name_is_refused_with_the_nearest():
  assert refusal("adamm").endswith("did you mean 'adam'?")
  message = refusal("contrib.moun")
  assert "schedule_free_adamw, sgd, contrib.muon, or one of optax's by its name" in message
  assert message.endswith("did you mean 'contrib.muon'?")
  assert "scale_by_adam" not in build.names_in_optax()  # no optimizer by itself
  with pytest.raises(ValueError, match="one of optax's"):
    build.find("scale_by_adam")


@pytest.mark.parametrize(
  ("name", "overrides", "said"),
  [
    ("lbfgs", NO_DECAY, "the step cannot use it: TypeError: scale_by_zoom_linesearch"),
    ("contrib.momo", NO_DECAY, "missing 1 required keyword-only argument: 'value'"),
    ("noisy_sgd", NO_DECAY, "its state has a typed random key, which a checkpoint cannot hold"),
    ("contrib.schedule_free_adamw", {}, "its parameters are not those to evaluate"),
    ("sm3", NO_DECAY, "a number, not a schedule; set optimizer.schedule=constant and optimizer.wa"),
    ("rmsprop", {}, "optimizer.weight_decay=0.1: rmsprop takes none that leaves scales and biases"),
    (
      "contrib.prodigy",
      {},
      "set it to 0, and give its own as optimizer.arguments=weight_decay=...",
    ),
  ],
)
def test_what_the_step_cannot_use_is_refused_with_the_reason(name, overrides, said):
  assert said in refusal(name, **overrides)


def test_a_number_for_a_learning_rate_is_the_constant_one():
  config = config_of("sm3", **CONSTANT, **NO_DECAY)
  assert updates_of(make_optimizer(resolve(config).optimizer, drawn(0)), drawn(0), [drawn(1)])


# ---- Arguments ----


def test_all_wrong_arguments_come_in_one_message_with_the_signature():
  text = "b_1=0.8,learning_rate=1,weight_decay=0.2,mask=None"
  assert refusal("lion", **{"optimizer.arguments": text}) == (
    "optimizer.arguments:\n"
    "  learning_rate: set optimizer.learning_rate\n"
    "  weight_decay: set optimizer.weight_decay\n"
    "  mask: scales and biases never decay\n"
    "  b_1: lion has no such argument; did you mean 'b1'?\n"
    "it is lion(learning_rate, b1=0.9, b2=0.99, mu_dtype=None, weight_decay=0.001, mask=None)"
  )
  assert "  b1: set optimizer.beta_1" in refusal("adamw", **{"optimizer.arguments": "b1=0.8"})


@pytest.mark.parametrize("text", ["b1", "0.9", "b1=", "b1=0.9)+f(b2=1", "**{}", "b1=print(1)"])
def test_arguments_of_another_form_are_refused(text):
  assert refusal("lion", **{"optimizer.arguments": text}) == (
    f"optimizer.arguments={text!r}: give name=value,name=value, such as b1=0.9,nesterov=True"
  )


# ---- A row of one's own ----


def test_a_row_that_a_user_adds_is_found_and_gets_what_it_takes(monkeypatch):
  def halving(learning_rate, factor, weight_decay=0.0, mask=None):
    steps = optax.scale(factor), optax.add_decayed_weights(weight_decay, mask)
    return optax.chain(*steps, optax.scale_by_learning_rate(learning_rate))

  monkeypatch.setitem(optimizer.OPTIMIZERS, "halving", optimizer.Optimizer(halving))
  assert "factor: it has no default" in refusal("halving")
  config = config_of("halving", **CONSTANT, **{"optimizer.arguments": "factor=0.5"})
  params, grads = drawn(0), drawn(1)
  [updates] = updates_of(make_optimizer(resolve(config).optimizer, params), params, [grads])
  wanted = -8e-3 * (0.5 * grads["kernel"] + 0.1 * params["kernel"])
  np.testing.assert_allclose(updates["kernel"], wanted, rtol=1e-5)
  np.testing.assert_allclose(updates["scale"], -8e-3 * 0.5 * grads["scale"], rtol=1e-5)


def test_a_row_that_names_what_is_not_there_is_refused(monkeypatch):
  def halving(learning_rate, factor=0.5):
    return optax.scale(-factor)

  row = optimizer.Optimizer(halving, keys={"beta_3": "factor", "beta_2": "factors"})
  monkeypatch.setitem(optimizer.OPTIMIZERS, "halving", row)
  message = refusal("halving")
  assert "optimizer.beta_3 is no key of this config; did you mean 'beta_" in message
  assert "factors is no argument of learning_rate, factor=0.5; did you mean 'factor'?" in message


def test_a_row_with_keys_gets_them_and_is_tried_as_any_other(monkeypatch):
  def halving(learning_rate, factor, **more):
    assert more == {"other": 3}
    return optax.chain(optax.scale(factor), optax.scale_by_learning_rate(learning_rate))

  row = optimizer.Optimizer(halving, keys={"beta_2": "factor"})
  monkeypatch.setitem(optimizer.OPTIMIZERS, "halving", row)
  assert "optimizer.weight_decay=0.1: halving takes none" in refusal("halving")
  keys = {**CONSTANT, **NO_DECAY, "optimizer.beta_2": 0.25, "optimizer.arguments": "other=3"}
  params, grads = drawn(0), drawn(1)
  [updates] = updates_of(
    make_optimizer(resolve(config_of("halving", **keys)).optimizer, params), params, [grads]
  )
  np.testing.assert_allclose(updates["scale"], -8e-3 * 0.25 * grads["scale"], rtol=1e-5)
  broken = optimizer.Optimizer(lambda learning_rate, b=1: None, keys={"beta_2": "b"})
  monkeypatch.setitem(optimizer.OPTIMIZERS, "halving", broken)
  assert "optimizer.name=halving: the step cannot use it: " in refusal("halving", **NO_DECAY)


# ---- Muon ----

STACKED = {
  "embed": {"table": (6, 5)},
  "final_norm": {"scale": (5,)},
  "layers": {
    "attention": {"query": {"kernel": (2, 5, 4, 3)}, "out": {"kernel": (2, 4, 3, 5)}},
    "mlp": {"up": {"kernel": (2, 5, 7)}, "down": {"kernel": (2, 7, 5)}},
    "mlp_norm": {"scale": (2, 5)},
  },
}


def test_muon_refuses_a_model_of_which_it_would_update_nothing():
  params = {"embed": {"table": jax.ShapeDtypeStruct((6, 5), jnp.float32)}}
  with pytest.raises(ValueError, match="optimizer") as error:
    make_optimizer(resolve(config_of("contrib.muon")).optimizer, params)
  assert str(error.value) == (
    "optimizer.name=contrib.muon: Muon would update 0 of the 1 trained parameters of the model "
    "transformer, and its Adam all: Muon takes kernels whose dims, layers, dense_layers, "
    "mixer_layers, dense_mixer_layers, mlp_layers, mtp_layers, experts apart, are all among model, "
    "feedforward, expert_feedforward, shared_feedforward, heads, kv_heads, head, value_head, "
    "key_value_head, "
    "query_latent, query_latent_output, latent, latent_output, rotary_key, mixer_heads, "
    "mixer_key_heads, mixer_head, mixer_value_head, mixer_channels, decay_latent, gate_latent. "
    "Trained kernels are embed/table (vocabulary, model). Give the model's hidden dims these "
    "names, or choose another optimizer"
  )


def test_muon_takes_each_layer_s_hidden_kernels_and_no_table():
  """Each layer's matrix moves as optax's Muon moves a matrix alone; the rest as its Adam does."""
  random = np.random.default_rng(0)
  params = jax.tree.map(
    lambda shape: jnp.asarray(random.standard_normal(shape), jnp.float32),
    STACKED,
    is_leaf=lambda x: isinstance(x, tuple),
  )
  grads = jax.tree.map(lambda x: x[..., ::-1] + 1, params)
  config = config_of("contrib.muon", **CONSTANT, **NO_DECAY)
  [found] = updates_of(make_optimizer(resolve(config).optimizer, params), params, [grads])
  found, raw, moved = (named_leaves(tree) for tree in (found, params, grads))
  alone = optax.contrib.muon(8e-3)  # of a tree of matrices
  inputs = {"query": 1, "out": 2, "up": 1, "down": 1}  # dims of a layer's kernel that come in
  for name, count in inputs.items():
    [name] = [n for n in raw if f"/{name}/" in n]
    matrices = []
    for tree in (raw, moved):
      x = tree[name][1]
      matrices.append({"m": x.reshape(int(np.prod(x.shape[:count])), -1)})
    [wanted] = updates_of(alone, matrices[0], [matrices[1]])
    ours = found[name][1].reshape(wanted["m"].shape)
    np.testing.assert_allclose(ours, wanted["m"], rtol=1e-4, atol=1e-6)
  adam = optax.nadam(8e-3)  # Muon's Adam is Nesterov's as Muon is
  for name in ("embed/table", "final_norm/scale", "layers/mlp_norm/scale"):
    [wanted] = updates_of(adam, {"x": raw[name]}, [{"x": moved[name]}])
    np.testing.assert_allclose(found[name], wanted["x"], rtol=1e-4)
