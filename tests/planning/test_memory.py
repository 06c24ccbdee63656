"""What a step holds, by formula, beside sums made by hand."""

import jax
import jax.numpy as jnp
import pytest

from planning import aot, memory, traced_step
from planning.step_facts import of_job
from tests.helpers.jobs import make_job
from tests.parity.latents import LATENTS
from training import named_activations

# Of the small decoder: rows, tokens, model, heads, key/value heads, head, feed-forward, layers.
B, T, D, N, K, H, F, L = 16, 12, 40, 8, 4, 6, 56, 2
FULL = {"training.rematerialization": "full"}
WIDE = 4  # bytes


def kept(strategy, **overrides):
  return traced_step.by_the_layers(of_job(make_job(strategy, "lm", **overrides)))[0]


def test_full_rematerialization_keeps_the_residual_of_each_layer():
  assert kept("single", **FULL) == L * B * T * D * WIDE
  assert kept("dp4_tp2", **FULL) == L * B * T * D * WIDE // 4
  regions = {"partitioning.sequence_parallel": True}
  assert kept("dp4_tp2", **FULL, **regions) == L * B * T * D * WIDE // 8
  accumulated = {"training.gradient_accumulation_steps": 2}
  assert kept("dp4_tp2", **FULL, **accumulated) == L * B * T * D * WIDE // 8
  split = {"mesh.context": 2, "model.context_attention": "gather"}
  assert kept("single", **FULL, **split) == L * B * T * D * WIDE // 2


def test_dots_saves_the_matmuls_that_the_backward_pass_reads():
  dots = {"training.rematerialization": "dots"}
  products = (N + 2 * K) * H // 2 + D + 2 * F // 2  # queries, keys, values; out; gate, up
  assert kept("dp4_tp2", **dots) == L * B // 4 * T * (D + products) * WIDE


def test_named_activations_are_on_the_device_or_on_the_host():
  """They are the numbers of the letters, which `layout` shows."""
  text = "query=save,gate=offload,layer_input=offload,attention_input=save"
  job = make_job("dp4_tp2", "lm", **{"training.rematerialization": text})
  found = traced_step.by_the_layers(of_job(job))
  tokens = L * B // 4 * T * WIDE
  assert found.kept == tokens * (N * H // 2 + D)
  assert found.offloaded == tokens * (F // 2 + D)
  named = named_activations.of_job(job)
  sums = named_activations.sums(named)
  assert (sums["save"], sums["offload"]) == (found.kept, found.offloaded)
  assert memory.of_the_host(of_job(job), found) == {"activations": found.offloaded}
  [key] = [one for one in named if one.name == "key"]
  assert (key.bytes, key.choice) == (tokens * K * H // 2, "recompute")
  assert named_activations.of_job(make_job("dp8", "mlp")) == []


def test_latent_vectors_are_kept_in_place_of_keys_and_values():
  """With sequence parallelism they are split as the residual is."""
  text = "full,latent=save,query_latent=save,attention_output=save"
  regions = {"partitioning.sequence_parallel": True}
  job = make_job("dp4_tp2", "lm", **LATENTS, **regions, **{"training.rematerialization": text})
  model, tokens = job.config.model, L * B // 4 * T * WIDE
  split = D + model.latent_size + model.query_latent_size + N * model.value_head_size
  assert traced_step.by_the_layers(of_job(job)).kept == tokens * split // 2
  assert named_activations.sums(named_activations.of_job(job))["save"] == tokens * split // 2


def test_dense_and_sparse_layers_keep_as_much_in_any_order():
  keys = {"model.experts": 4, "model.layers": 5, **FULL}
  first = kept("single", **keys, **{"model.dense_layers": 3})
  assert first == pytest.approx(5 * B * T * D * WIDE, rel=0.01)  # and sums of the routers
  assert kept("single", **keys, **{"model.mlp_only_layers": (1, 2, 4)}) == first


def test_the_host_has_the_optimizer_state_of_the_layers():
  [here, there] = (
    make_job("dp4_tp2", "lm", **{"optimizer.state_memory": where}) for where in ("device", "host")
  )
  parts, moved = memory.by_formula(of_job(here)), memory.by_formula(of_job(there))
  on_host = memory.of_the_host(of_job(there), traced_step.by_the_layers(of_job(there)))[
    "optimizer state"
  ]
  kernels = D * N * H + D * 2 * K * H + N * H * D + 3 * D * F
  assert on_host == 2 * WIDE * L * (kernels // 2 + 2 * D)
  assert parts["optimizer state"] - moved["optimizer state"] == on_host


def test_as_many_chunks_of_the_loss_as_layers_are_no_layers():
  [two, three] = (
    traced_step.by_the_layers(
      of_job(make_job("single", "lm", **FULL, **{"training.loss_chunks": chunks}))
    )
    for chunks in (L, 3)
  )
  assert two == three


def test_scores_are_what_one_layer_holds_of_long_rows():
  long = {**FULL, "data.sequence_length": 256, "data.global_batch_size": 1}
  long["training.attention_kernel"] = "xla"
  [one, split] = (
    traced_step.by_the_layers(of_job(make_job("single", "lm", **long, **more)))[1]
    for more in ({}, {"mesh.context": 2, "model.context_attention": "gather"})
  )
  scores = N * 256 * 256 * WIDE
  assert one > 5 / 8 * scores  # in four blocks
  assert scores < split < 3 * scores  # of half of the queries: with their gradients


@pytest.mark.parametrize("recipe", ["mlp", "mlp_tutorial"])
def test_without_layers_all_of_a_model_is_one(recipe):
  found = traced_step.by_the_layers(of_job(make_job("dp8", recipe)))
  assert found.kept == found.offloaded == 0
  assert found.most >= 2 * (40 + 56) * WIDE


def test_what_is_elementwise_is_computed_where_it_is_read():
  def chain(x, first, second):
    return jnp.tanh(jnp.tanh(x @ first)) @ second

  sizes = (8, 16), (16, 32), (32, 4)
  jaxpr = jax.make_jaxpr(chain)(*map(jnp.zeros, sizes)).jaxpr
  # The first product is there, for the second one's argument, and so is the second.
  assert traced_step._most_at_once(jaxpr, 0, 0, 0) == (8 * 32 + 8 * 4) * WIDE
  # x counts too where it is the body's own, until it has been read.
  assert traced_step._most_at_once(jaxpr, 0, 1, 1) == (8 * 32 + 8 * 16) * WIDE


def test_a_narrower_copy_replaces_what_it_is_made_of():
  def cast(x, first):
    y = (x @ first).astype(jnp.bfloat16)
    z = jnp.sum(x)
    return jnp.dot(y, y.T) * z.astype(jnp.bfloat16)

  jaxpr = jax.make_jaxpr(cast)(jnp.zeros((8, 16)), jnp.zeros((16, 64))).jaxpr
  assert traced_step._most_at_once(jaxpr, 0, 0, 0) == 8 * 64 * (WIDE + 2)


def test_not_all_is_there_at_a_time():
  job = make_job("dp4_tp2", "lm")
  parts = memory.by_formula(of_job(job))
  most = memory.at_once(parts)
  assert most < sum(parts.values())
  assert most > sum(parts[name] for name in ("parameters", "optimizer state", "saved activations"))
  accumulated = make_job("dp4_tp2", "lm", **{"training.gradient_accumulation_steps": 2})
  assert memory.by_formula(of_job(accumulated))["accumulated gradients"] == parts["gradients"]


# ---- Beside the compiler ----


def test_gradients_are_as_large_as_those_of_the_compiled_program():
  keys = {"model.layers": 1, "training.parameter_dtype": "bfloat16", "lora.rank": 3}
  job = make_job("fsdp8", "lm", **keys)
  compiled = job.compile(
    lambda params, batch: job.program.gradients(params, batch, None)[0],
    *(job.state.params, job.batch),
    in_shardings=(job.state_shardings.params, job.batch_shardings),
  ).function
  size = compiled.memory_analysis().output_size_in_bytes
  parts = memory.by_formula(of_job(job))
  assert 0 <= size - parts["gradients"] <= 8 * len(job.program.trained)  # the table of pointers
  twice = make_job("fsdp8", "lm", **keys, **{"training.gradient_accumulation_steps": 2})
  assert memory.by_formula(of_job(twice))["accumulated gradients"] == parts["gradients"]


STAGES = {
  "model.layers": 8,
  "model.model_size": 256,
  "model.feedforward_size": 1024,
  "model.heads": 8,
  "model.kv_heads": 4,
  "model.head_size": 32,
  "model.vocabulary_size": 1024,
  "model.vocabulary_multiple": 1,
  "data.sequence_length": 256,
  "data.global_batch_size": 8,
  "training.microbatches": 8,
}


@pytest.mark.long
@pytest.mark.parametrize(
  "keys",
  [
    {"mesh.stage": 2},
    {"mesh.stage": 4, "mesh.tensor": 2},
    {"mesh.stage": 2, "training.pipeline": "interleaved", **FULL},
    {"mesh.stage": 2, "training.pipeline": "gpipe"},
  ],
  ids=lambda keys: ", ".join(map(str, keys.values())),
)
def test_a_pipeline_needs_what_the_compiler_for_cpus_says(keys):
  job = make_job("single", "lm", **STAGES, **keys)
  peak, _ = aot.memory_of(job.compile_train_step().function, "cpu")
  assert memory.at_once(memory.by_formula(of_job(job))) == pytest.approx(peak, rel=0.1)
