"""muP: what follows from the letters of each parameter, next to table 8 of arXiv:2203.03466."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import base
from configs.schema import finalize
from models import MODELS, activations, layers, model_spec, mup
from models.mup import Kind
from partitioning.rules import letters_of, named_leaves
from tests.helpers.jobs import SMALL, host_batch, make_job

# At 4 times the base width: the kind of each parameter, and how many more inputs it has.
KINDS = {
  "embed/table": (Kind.INPUT, 1),
  "positions/table": (Kind.INPUT, 1),
  "layers/attention_norm/scale": (Kind.INPUT, 1),
  "layers/attention/query/kernel": (Kind.HIDDEN, 4),
  "layers/attention/query/bias": (Kind.INPUT, 1),
  "layers/attention/key/kernel": (Kind.HIDDEN, 4),
  "layers/attention/query_norm/scale": (Kind.INPUT, 1),
  "layers/attention/sinks": (Kind.INPUT, 1),
  "layers/attention/out/kernel": (Kind.HIDDEN, 4),
  "layers/mlp/up/kernel": (Kind.HIDDEN, 4),
  "layers/mlp/down/kernel": (Kind.HIDDEN, 4),
  "layers/mlp/down/bias": (Kind.INPUT, 1),
  "final_norm/scale": (Kind.INPUT, 1),
  "unembed/kernel": (Kind.OUTPUT, 4),
}
MLP_KINDS = {
  "layer_1/kernel": (Kind.INPUT, 1),
  "layer_1/bias": (Kind.INPUT, 1),
  "layer_2/kernel": (Kind.HIDDEN, 4),
  "layer_3/kernel": (Kind.HIDDEN, 4),
  "layer_4/kernel": (Kind.OUTPUT, 4),
  "layer_4/bias": (Kind.FINITE, 1),
}
EVERYTHING = {
  "model.positions": "learned",
  "model.biases": "all",
  "model.query_key_norm": True,
  "model.attention_sinks": True,
}


def config_of(recipe, **overrides):
  config = base.get_config(recipe)
  config.update_from_flattened_dict({**SMALL[recipe], **overrides})
  return finalize.finalize(config, "cpu")


@pytest.mark.parametrize(
  ("recipe", "wanted", "more"), [("lm", KINDS, EVERYTHING), ("mlp", MLP_KINDS, {})]
)
def test_the_letters_say_what_a_parameter_is(recipe, wanted, more):
  config = config_of(recipe, **{"model.base_width": 10}, **more)
  spec = model_spec(config)
  rules, legend, widths = spec.parameters, spec.legend, spec.widths
  for name, (kind, inputs) in wanted.items():
    vector = name.endswith(mup.VECTORS)
    found = widths.growth(letters_of(name, rules), legend, vector=vector)
    assert (found.kind, found.inputs) == (kind, inputs), name
    outputs = {Kind.OUTPUT: 1, Kind.FINITE: 1}.get(kind, 4)
    assert found.outputs == (1 if name.endswith("query_norm/scale") else outputs), name


def test_widths_of_experts_grow_and_their_number_does_not():
  keys = {"model.experts": 8, "model.dense_layers": 1, "model.shared_feedforward_size": 16}
  config = config_of("lm", **{"model.base_width": 10, "model.router_bias": True}, **keys)
  spec = model_spec(config)
  rules, legend, widths = spec.parameters, spec.legend, spec.widths
  wanted = {
    "layers/experts/router/kernel": (Kind.OUTPUT, 4, 1),
    "layers/experts/router/bias": (Kind.FINITE, 1, 1),
    "layers/experts/gate/kernel": (Kind.HIDDEN, 4, 4),
    "layers/experts/down/kernel": (Kind.HIDDEN, 4, 4),
    "layers/experts/shared/down/kernel": (Kind.HIDDEN, 4, 4),
    "dense_layers/attention/query/kernel": (Kind.HIDDEN, 4, 4),
    "dense_layers/mlp/down/kernel": (Kind.HIDDEN, 4, 4),
  }
  for name, (kind, inputs, outputs) in wanted.items():
    vector = name.endswith(mup.VECTORS)
    found = widths.growth(letters_of(name, rules), legend, vector=vector)
    assert (found.kind, found.inputs, found.outputs) == (kind, inputs, outputs), name


def test_larger_heads_are_that_many_fewer():
  config = config_of("lm", **{"model.base_width": 10, "model.base_head_size": 3})
  spec = model_spec(config)
  legend, widths = spec.legend, spec.widths
  assert [widths.dim_ratio(dim) for dim in ("head", "heads", "kv_heads")] == [2, 2, 2]
  assert widths.growth("NHD", legend).inputs == 4
  assert widths.growth("LH", legend, vector=True).outputs == 2
  assert config.model.attention_scale == pytest.approx(3**0.5 / 6)
  assert config_of("lm", **{"model.base_width": 10}).model.attention_scale == 6**-0.5


def drawn(recipe, **overrides):
  """Returns name -> standard deviation of the initial parameters."""
  config = config_of(recipe, **overrides)

  def deviations():
    module = MODELS[config.model.name].build(model_spec(config), rngs=nnx.Rngs(params=0))
    return jax.tree.map(jnp.std, nnx.to_pure_dict(nnx.state(module, nnx.Param)))

  return {name: float(x) for name, x in named_leaves(jax.jit(deviations)()).items()}


WIDE = {"model.model_size": 160, "model.feedforward_size": 224, "model.heads": 32}


def test_initial_deviations_are_those_of_table_8():
  found = drawn("lm", **WIDE, **{"model.base_width": 40})
  wanted = {
    "embed/table": 1,
    "layers/attention/query/kernel": 160**-0.5,
    "layers/attention/out/kernel": (32 * 6) ** -0.5 / 2,  # 2 layers: GPT-2's (2 x 2) ** -0.5
    "layers/mlp/up/kernel": 160**-0.5,
    "layers/mlp/down/kernel": 224**-0.5 / 2,
    "unembed/kernel": 40**-0.5,
  }
  assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=0.03)


def test_a_tied_table_is_drawn_and_scaled_by_the_base_width():
  tied = {"model.tied_embeddings": True, "model.scaled_embeddings": True}
  config = config_of("lm", **WIDE, **tied, **{"model.base_width": 40})
  assert config.model.embedding_standard_deviation == 40**-0.5
  assert nnx.eval_shape(
    lambda: layers.Embedding(model_spec(config), rngs=nnx.Rngs(params=0))
  ).scale == np.float32(40**0.5)
  config = config_of("lm", **WIDE, **tied)
  assert config.model.embedding_standard_deviation == 160**-0.5
  assert nnx.eval_shape(
    lambda: layers.Embedding(model_spec(config), rngs=nnx.Rngs(params=0))
  ).scale == np.float32(160**0.5)


@pytest.mark.parametrize(
  ("recipe", "more"),
  [("lm", {"model.tied_embeddings": True}), ("lm", {}), ("mlp", {})],
)
def test_products_of_the_unembedding_are_divided_by_the_ratio_of_the_widths(recipe, more):
  """Against the same parameters without muP, whose logits NumPy divides; a bias is not divided."""
  jobs = [make_job("single", recipe, **more, **{"model.base_width": width}) for width in (0, 10)]
  random = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: 0.2 * random.standard_normal(x.shape).astype(x.dtype), jobs[0].state.params
  )
  batch = host_batch(jobs[0])

  def recorded(job):
    def outputs(params, batch):
      with activations.recording() as found:
        job.program.sums(params, batch)
      return list(found.values())[-1]

    with job.tracing():
      return np.asarray(jax.jit(outputs)(params, batch))

  plain, ours = map(recorded, jobs)
  bias = params["layer_4"]["bias"] if recipe == "mlp" else 0
  assert plain.shape[-1] == (10 if recipe == "mlp" else 61)
  np.testing.assert_allclose(ours - bias, (plain - bias) / 4, rtol=1e-4, atol=1e-6)


def test_the_same_function_without_mup():
  """What `export` writes: the keys of a model that divides its logits itself."""
  scaled = {"model.scaled_embeddings": True, "model.logits_divisor": 3.0}
  config = config_of("lm", **{"model.base_width": 10}, **scaled)
  keys = mup.plain_keys(config.model)
  assert (keys["base_width"], keys["logits_divisor"]) == (0, 12.0)
  assert keys["embedding_multiplier"] == pytest.approx(10**0.5 / 40**0.5)
  off = config_of("lm").model
  assert mup.plain_keys(off) == dict(off.items())


def test_routers_under_mup_have_no_keys_without_it():
  config = config_of("lm", **{"model.experts": 4, "model.base_width": 10})
  with pytest.raises(ValueError, match=r"logits of the routers by model.model_size / 10 = 4, for"):
    mup.plain_keys(config.model)
