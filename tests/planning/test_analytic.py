"""What a step computes and how long it takes, by formula; what it sends is in tests/parity."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from models import model_spec
from planning import analytic, terms, traced_step
from planning.interconnect import in_order
from planning.step_facts import of_job
from planning.topology import parse
from runtime.chips import CHIPS, Rates
from tests.helpers.jobs import make_job
from tests.parity.budgets import budget, compile_step, job_of, of_sources, shared_job


def test_gradients_of_bfloat16_parameters_are_sent_as_the_compiled_program_does():
  # On a CPU the compute dtype is float32; over data gradients are reduced once per step.
  keys = {"training.parameter_dtype": "bfloat16", "training.gradient_accumulation_steps": 2}
  job = job_of("data=4 x fsdp=2 (HSDP)", **{"model.layers": 1, **keys})
  assert job.program.reduce_once_over == "data"
  assert compile_step(job).sent() == budget(job)


@functools.cache
def times_of(topology, **overrides):
  job = job_of("data=4 x fsdp=2 (HSDP)", **overrides)
  where = in_order(parse(topology), 8)
  return analytic.times(of_job(job), where, parse(topology).chip, Rates())


def test_what_fsdp_sends_is_hidden_as_far_as_other_work_lasts():
  slow = times_of("h100:8")
  busy = slow.step - slow.exposed
  # One operation after another; `busy` is a difference of two larger numbers.
  assert busy >= max(slow.compute, slow.memory) * (1 - 1e-9)
  assert slow.communication > busy
  assert slow.exposed == pytest.approx(slow.communication - busy)


@pytest.mark.parametrize(("topology", "exposed"), [("h100:8", 0.0), ("2xv5p:2x2x1", 0.75)])
def test_between_slices_a_share_is_exposed_whatever_else_there_is_to_do(topology, exposed):
  job = job_of("data=4 x fsdp=2 (HSDP)")
  where = in_order(parse(topology), 8)
  counted = analytic.counted(of_job(job), where)
  quick = dataclasses.replace(parse(topology).chip, link_bandwidth=1e15, slow_bandwidth=1e15)
  wires = [
    (term, size, dataclasses.replace(wire, bandwidth=1e15, latency=0.0))
    for term, size, wire in counted.sent
  ]
  times = dataclasses.replace(counted, sent=wires).times(
    quick, Rates(slow_overlap=0.25, hop_seconds=1e-18)
  )
  hidden = {term.why for term, *_ in wires if term.hidden}
  slow = [one for one in times.sent if one.source in hidden and one.wire.network == "DCN"]
  assert bool(slow) == bool(exposed)
  assert all(one.exposed_seconds == pytest.approx(exposed * one.seconds) for one in slow)
  assert not any(
    one.exposed_seconds for one in times.sent if one.source in hidden and one not in slow
  )


def test_experts_multiply_their_rows_and_read_each_kernel_once():
  """Two of 4 experts for each token."""
  keys = {"model.experts": 4, "training.rematerialization": "none"}
  job = make_job("single", "lm", **keys, **{"training.grouped_matmul": "ragged"})
  step = of_job(job)
  model, tokens = step.model, step.tokens
  width = model.expert_feedforward_size
  each = 2 * 2 * tokens * model.model_size * width
  found = [one for one in traced_step.operations(step) if one[0].flops == each]
  # Of gate, up and down: forward, again where they are differentiated, and two backward.
  assert [runs for _, runs, _ in found] == 3 * 4 * [model.layers]
  # Rows of both sides and all kernels, in float32, and the sizes of the groups: a kernel is not
  # read once more for each tile of rows.
  rows, kernels = 2 * tokens * (model.model_size + width), 4 * model.model_size * width
  assert {work.bytes for work, *_ in found} == {4 * (rows + kernels + 4)}


# Of the small decoder, per device: rows, tokens, model, heads, key/value heads, head, feed-forward.
ROWS, T, D, N, K, H, F, LAYERS, V = 2, 12, 40, 8, 4, 6, 56, 2, 72
TOKENS = ROWS * T
SCORES = 2 * ROWS * N * T * T * H  # FLOPs of one of the two matmuls of all queries with all keys
FORWARD = {
  "projections": 2 * TOKENS * D * H * (2 * N + 2 * K),
  "attention": 2 * SCORES,
  "mlp": 3 * 2 * TOKENS * D * F,
}


def test_traced_flops_are_those_of_the_models_matmuls():
  logits = 2 * TOKENS * D * V
  assert times_of("h100:8").work.flops == 3 * (LAYERS * sum(FORWARD.values()) + logits)


def test_float8_runs_the_layers_matmuls_at_twice_the_rate_and_gathers_fewer_bytes():
  plain, ours = times_of("h100:8"), times_of("h100:8", **{"training.matmul_dtype": "float8"})
  kernels = 3 * LAYERS * (FORWARD["projections"] + FORWARD["mlp"])
  assert (ours.work.flops, ours.work.eight_bit) == (plain.work.flops, kernels)
  # The others are in float32, which runs at half the rate of bfloat16.
  assert ours.compute / plain.compute == pytest.approx(1 - kernels / plain.work.flops * 3 / 4)


@pytest.mark.parametrize(
  ("strategy", "kind"),
  [
    ("dp2_fsdp2_tp2, sequence-parallel", "all-gather"),
    ("fsdp=2 x tensor=4, collective matmul", "collective-permute"),
  ],
)
def test_8_bit_kernels_and_inputs_are_gathered_in_a_byte_each(strategy, kind):
  plain, ours = shared_job(strategy), job_of(strategy, **{"training.matmul_dtype": "int8"})
  wanted, sent = (of_sources(one, *terms.SOURCES) for one in (plain, ours))
  tensor = ours.devices.sizes["tensor"]
  kernels = 2 * LAYERS * (D * H * (2 * N + 2 * K) + 3 * D * F) // tensor
  rows = 16 // (ours.mesh.size // tensor)
  # A device's own part of a ring is not sent.
  share = (tensor - 1) / tensor if kind == "collective-permute" else 1
  inputs = 4 * LAYERS * rows * T * D * share
  for key, numbers in ((("all-gather", ("fsdp",)), kernels), ((kind, ("tensor",)), inputs)):
    assert sent[key][1] == wanted[key][1] - 3 * numbers, key


def test_rematerialization_computes_the_layers_again():
  plain, again = times_of("h100:8"), times_of("h100:8", **{"training.rematerialization": "full"})
  last = 2 * TOKENS * D * F  # of a layer's last matmul no gradient needs the result
  more = LAYERS * (sum(FORWARD.values()) - last)
  assert again.work.flops - plain.work.flops == more


# Each way to split the work; with tp8 each device projects all key/value heads.
@pytest.mark.parametrize(
  "strategy",
  [
    "dp2_fsdp2_tp2, 2 microbatches",
    "fsdp=2 x tensor=4, collective matmul",
    "data=4 x context=2, ring",
    "fsdp=2 x context=4, gathered",
  ],
)
def test_every_strategy_shares_the_same_flops_evenly(strategy):
  job = shared_job(strategy)
  found = sum(work.flops * runs for work, runs, _ in traced_step.operations(of_job(job)))
  each = model_spec(job.config).train_flops_per_example()
  wanted = each * job.config.data.global_batch_size / job.mesh.size
  assert found == pytest.approx(wanted, rel=0.01)


def test_muon_s_iterations_are_counted_on_the_device_that_has_the_most():
  """Each takes 4 A^2 B + 2 A^3 FLOPs of a matrix A x B, and a matrix is on one device."""
  job = job_of("data=4 x fsdp=2 (HSDP)", **{"optimizer.name": "muon"})
  found = traced_step.of_matrices(of_job(job))
  sides = ((D, N * H), (K * H, D), (D, F))  # of four, four and six matrices, one for each device
  wanted = sum(5 * (4 * a * a * b + 2 * a**3) for a, b in sides)
  assert sum(work.flops * runs for work, runs, _ in found) == wanted
  assert all(wide for work, _, wide in found if work.flops)  # in float32, as what is computed here
  assert traced_step.of_matrices(of_job(shared_job("fsdp8"))) == []


def test_float32_matmuls_take_twice_as_long_on_gpus():
  half, wide = (
    times_of("h100:8", **{"training.compute_dtype": dtype}) for dtype in ("bfloat16", "float32")
  )
  assert half.work.flops == wide.work.flops
  assert wide.compute == pytest.approx(2 * wide.work.flops / (989.5e12 * CHIPS["h100"].formula))
  assert half.compute < wide.compute


@functools.cache
def scores_bytes(length, **overrides):
  """Returns the HBM bytes of a step of one row, over those of all scores in float32, once."""
  job = make_job(
    "single", "lm", **{"data.global_batch_size": 1, "data.sequence_length": length, **overrides}
  )
  found = sum(work.bytes * runs for work, runs, _ in traced_step.operations(of_job(job)))
  return found / (LAYERS * N * length**2 * 4)


def test_plain_attention_moves_its_scores_through_hbm_again_and_again():
  # Forward: written, read by max, exp and sum, and as weights; backward as often. Five eighths of
  # the scores are computed, in four blocks.
  assert 5 < scores_bytes(1024) < 15
  more = scores_bytes(1024, **{"training.rematerialization": "full"}) - scores_bytes(1024)
  assert 2 < more < 6


def test_a_kernel_that_keeps_its_scores_moves_next_to_none():
  sizes = {"model.head_size": 128, "training.attention_kernel": "splash"}
  assert scores_bytes(1024, **sizes) < 0.5 * scores_bytes(1024, **{"model.head_size": 128})


def traffic(function, *shapes, fused=True):
  """Returns the HBM bytes of a function of float32 arrays."""
  jaxpr = jax.make_jaxpr(function)(*map(jnp.zeros, shapes)).jaxpr
  tracer = traced_step._Tracer(1.0, fused=fused)
  tracer.close(jaxpr, tracer.walk(jaxpr, {x: tracer.fresh(x) for x in jaxpr.invars}, 1), 1)
  return sum(work.bytes * runs for work, runs, _ in tracer.found)


@pytest.mark.parametrize(
  ("function", "shapes", "elements"),
  [
    # Each matmul reads both arguments and writes; tanh is not fused into what reads it: a matmul.
    (
      lambda x, y, z: jnp.tanh(x @ y) @ z,
      [(5, 7), (7, 11), (11, 3)],
      (35 + 77 + 55) + (55 + 55) + (55 + 33 + 15),
    ),
    (lambda x, y: jnp.tanh(x @ y).sum(), [(5, 7), (7, 11)], 35 + 77 + 55 + 55 + 1),
    (lambda x, y: (x @ y.T).T @ y, [(5, 7), (5, 7)], (35 + 35 + 25) + (25 + 35 + 35)),
    (lambda x, y: (x + y) * 2.0, [(5, 7), (5, 7)], 35 + 35 + 35 + 70),  # a sum of two is written
    (lambda x: jnp.tanh(x) * 2.0, [(5, 7)], 35 + 35),  # read once, written once
    (lambda x: x[:2].sum(), [(5, 7)], 14 + 1),  # of a slice the slice is read
    (lambda x: x - x.max(), [(5, 7)], 35 + 1 + 35 + 35),  # a reduction, and its result with x
    (lambda x: jnp.take(x, jnp.arange(3), axis=0).sum(), [(50, 7)], 21 + 21 + 21 + 1),
    # The first carry is written; each of three turns writes the sum of the carry and its row, and
    # reads it to write the next carry.
    (
      lambda x: jax.lax.scan(lambda c, row: (jnp.tanh(c + row), None), jnp.zeros(7), x)[0],
      [(3, 7)],
      7 + 3 * (14 + 7 + 7 + 7),
    ),
  ],
)
def test_what_is_read_and_written(function, shapes, elements):
  assert traffic(function, *shapes) == pytest.approx(4 * elements, rel=0.05)


def test_without_fusion_each_elementwise_operation_reads_and_writes():
  def chain(x, y, z):
    return jnp.tanh(x @ y + z) * 2.0

  shapes = (5, 7), (7, 11), (1, 11)
  matmul, row, whole = 35 + 77 + 55, 11, 55
  # Of the sum, tanh and the product; z is broadcast where it is read.
  wanted = matmul + (whole + row + whole) + 2 * whole + 2 * whole
  assert traffic(chain, *shapes, fused=False) == 4 * wanted
  # Fused, the product is read once, and z with it: counted as no more than what is written.
  assert traffic(chain, *shapes) == 4 * (matmul + whole + whole)


def test_groups_along_axes():
  job = job_of("dp2_fsdp2_tp2")
  assert analytic.groups(of_job(job), ("tensor",)).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
  assert analytic.groups(of_job(job), ("data", "tensor")).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_blockwise_attention_computes_the_pairs_of_blocks_that_can_see_each_other():
  """Of 8 blocks of 128 a quarter of the layers sees all before, the others a window of 128."""
  length, tile = 1024, 128
  keys = {"model.layers": 4, "model.window": tile, "model.global_every": 4}
  more = {"data.sequence_length": length, "data.global_batch_size": 1, **keys}

  def flops(kernel, **overrides):
    job = make_job("single", "lm", **more, **{"training.attention_kernel": kernel}, **overrides)
    return sum(work.flops * runs for work, runs, _ in traced_step.operations(of_job(job)))

  full, window = 8 * 9 // 2, 8 + 7
  # Two products forward; backward the scores again, and four products.
  pairs = (2 + 5) * (full + 3 * window)
  # All scores are computed in four blocks of queries, and not again.
  square = (2 + 4) * 4 * 8 * 8 * 5 // 8
  each = 2 * tile * tile * 6 * 8
  assert flops("xla") - flops("blockwise") == (square - pairs) * each


def test_splash_attention_over_gathered_keys_computes_up_to_all_blocks():
  split = {"mesh.context": 2, "model.context_attention": "gather"}
  sizes = {"data.sequence_length": 1024, "data.global_batch_size": 1, **split}
  splash, every = (
    sum(
      work.flops * runs
      for work, runs, _ in traced_step.operations(
        of_job(make_job("single", "lm", **sizes, **{"training.attention_kernel": kernel}))
      )
    )
    for kernel in ("splash", "xla")
  )
  # Which are seen, the device says: nine products instead of six, and that of the output.
  each = 2 * LAYERS * N * H * 512 * 1024
  assert splash - every == pytest.approx(3 * each + each / 1024)


def test_splash_attention_computes_the_blocks_that_its_masks_leave():
  """Of one layer all before, of the other a window."""
  length, keys = 1024, {"model.window": 128, "model.global_every": 2}
  share = ((1 + 1 / 8) / 2 + 2 / 8) / 2
  more = {"data.sequence_length": length, "data.global_batch_size": 1, **keys}
  jobs = [
    make_job("single", "lm", **more, **{"training.attention_kernel": kernel})
    for kernel in ("splash", "xla")
  ]
  splash, every = (
    sum(work.flops * runs for work, runs, _ in traced_step.operations(of_job(job))) for job in jobs
  )
  each = 2 * LAYERS * N * H * length * length
  # Two products forward, seven backward, beside six of five eighths of all scores; and the product
  # of the output with its gradient.
  assert splash - every == pytest.approx((9 * share - 6 * 5 / 8) * each + each / length)
