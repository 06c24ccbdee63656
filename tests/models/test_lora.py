"""Adapters: which layers have one, how it starts, what it adds, and its merge into the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import adapters, model_spec, transformer
from models.layers import Linear
from models.spec import RESIDUAL
from partitioning.parallel.matmuls import Dropped, column_parallel
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job

ROWS = {"data.global_batch_size": 5, "data.sequence_length": 7}
RANDOM = np.random.default_rng(4)
RANK_3 = {"lora.rank": 3, "lora.alpha": 5.0, **ROWS}


@pytest.fixture(scope="module")
def job():
  return make_job("single", "lm", **RANK_3)


@pytest.mark.parametrize(
  ("targets", "said"),
  [
    (
      ("query", "q_proj"),
      r"lora\.targets: 'q_proj' matches no linear layer; .* The layers are query, key, value, out, "
      r"gate, up, down; embeddings",
    ),
    ((), r"lora\.targets: \(\) names no layer"),
  ],
)
def test_targets_that_match_nothing_are_refused(targets, said):
  with pytest.raises(ValueError, match=said):
    make_job("single", "lm", **RANK_3, **{"lora.targets": targets})


def test_an_adapter_is_an_entry_of_the_parameter_table(job):
  table = model_spec(job.config).parameters
  assert table["layers/attention/query/lora_a"] == "LDr"
  assert table["layers/attention/query/lora_b"] == "LrNH"
  places = job.placements["parameters"]
  assert places["layers/attention/out/lora_a"].shape == (2, 8, 6, 3)
  assert places["layers/mlp/down/lora_b"].shape == (2, 3, 40)
  # Only the adapters are trained, and have optimizer state.
  assert job.program.trained == {name for name in places if "/lora_" in name}
  moments = {name.split("/", 3)[3] for name in job.placements["optimizer"] if "/mu/" in name}
  assert moments == job.program.trained


def test_targets_and_more_trained_parameters():
  chosen = make_job(
    "single", "lm", **RANK_3, **{"lora.targets": ("query", "layers/mlp/*")}
  ).program.params
  names = {name.rpartition("/")[0] for name in named_leaves(chosen) if "/lora_" in name}
  assert names == {"layers/attention/query", *(f"layers/mlp/{x}" for x in ("gate", "up", "down"))}
  also = make_job("single", "lm", **RANK_3, **{"training.trainable": ("final_norm/*",)}).program
  assert {name for name in also.trained if "/lora_" not in name} == {"final_norm/scale"}
  assert len(also.trained) == 15


def test_a_starts_within_its_bound_b_at_zero_and_the_kernel_as_without(job):
  def drawn(config):
    layer = Linear("layers/mlp/down", model_spec(config), rngs=nnx.Rngs(params=7))
    return jax.device_get(nnx.to_pure_dict(nnx.state(layer, nnx.Param)))

  ours, plain = drawn(job.config), drawn(make_job("single", "lm").config)
  assert {*plain} == {"kernel"}
  np.testing.assert_array_equal(ours["kernel"], plain["kernel"])
  assert not ours["lora_b"].any()
  a, bound = np.asarray(ours["lora_a"]), 56**-0.5
  assert a.shape == (56, 3)
  assert np.abs(a).max() <= bound
  assert np.abs(a).max() > 0.95 * bound
  assert a.std() == pytest.approx(bound / 3**0.5, rel=0.15)
  assert abs(np.corrcoef(a[:40, 0], ours["kernel"][0, :40])[0, 1]) < 0.5


def logits(job, params):
  model, tokens = job.program.module(params), host_batch(job)["tokens"]
  return np.asarray(
    job.compile(transformer.Transformer.__call__, model, tokens).function(model, tokens)
  )


def test_before_the_first_step_logits_are_those_of_the_base_bit_for_bit(job):
  params = jax.device_get(first_state(job).params)
  zeros = {n: x if not n.endswith("lora_b") else 0 * x for n, x in named_leaves(params).items()}
  params = jax.tree.unflatten(jax.tree.structure(params), zeros.values())
  base = make_job("single", "lm", **ROWS)
  without = jax.tree.unflatten(
    jax.tree.structure(base.state.params), [zeros[n] for n in named_leaves(base.state.params)]
  )
  assert logits(job, params).tobytes() == logits(base, without).tobytes()


@pytest.mark.parametrize(
  ("dtype", "bound", "rate"), [("float32", 1e-6, 0.3), ("bfloat16", 3e-4, 0.0)]
)
def test_what_an_adapter_sees_with_dropout_is_scaled_up(rate, dtype, bound):
  job = make_job(
    "single", "lm", **{**RANK_3, "data.sequence_length": 64, "training.compute_dtype": dtype}
  )
  layer = Linear("layers/mlp/up", model_spec(job.config), rngs=nnx.Rngs(params=7))
  random = RANDOM
  layer.kernel[...] = jnp.zeros(layer.kernel.shape, jnp.float32)
  layer.lora_b[...] = jnp.asarray(random.standard_normal(layer.lora_b.shape), jnp.float32)
  x_BTD = jnp.asarray(random.standard_normal((5, 64, 40)), dtype)
  keep_BTD = jnp.asarray(random.random(x_BTD.shape) >= rate)
  dropped = Dropped(keep_BTD, "BTD", rate) if rate else None
  with job.tracing():
    [found] = jax.jit(lambda: column_parallel(x_BTD, [layer], RESIDUAL, dropped))()
  arrays = (x_BTD, jnp.float32(5 / 3) * layer.lora_a[...], layer.lora_b[...], found)
  x, a, b, found = (np.asarray(one.astype(dtype), np.float64) for one in arrays)
  wanted = (x * np.asarray(keep_BTD) / (1 - rate)) @ a @ b
  slope = np.sum(found * wanted) / np.sum(wanted**2)  # but for the roundings, which average out
  assert slope == pytest.approx(1, abs=bound)
  assert np.linalg.norm(found - wanted) < 20 * bound * np.linalg.norm(wanted)


def test_merged_kernels_are_those_of_numpy_rounded_once(job):
  params = jax.device_get(first_state(job).params)
  params["layers"]["mlp"]["up"]["kernel"] = params["layers"]["mlp"]["up"]["kernel"].astype(
    jnp.bfloat16
  )
  found = adapters.merge_adapters(model_spec(job.config), params)
  assert {*named_leaves(found)} == {n for n in named_leaves(params) if "/lora_" not in n}
  for name, letters in (("up", "LDr,LrF->LDF"), ("down", "LFr,LrD->LFD")):
    layer = {key: np.asarray(x, np.float64) for key, x in params["layers"]["mlp"][name].items()}
    wanted = layer["kernel"] + 5 / 3 * np.einsum(letters, layer["lora_a"], layer["lora_b"])
    kernel = found["layers"]["mlp"][name]["kernel"]
    assert kernel.dtype == params["layers"]["mlp"][name]["kernel"].dtype
    within = 2.0**-8 if kernel.dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(np.asarray(kernel, np.float64), wanted, rtol=within, atol=1e-6)
  assert found["final_norm"]["scale"] is params["final_norm"]["scale"]
