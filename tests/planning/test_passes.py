"""What the stages of a pipeline compute, send and keep, by formula, beside sums made by hand.

The collectives' bytes are those of the compiled programs, which tests/parity counts.
"""

import functools
from collections import defaultdict

import pytest

from planning import memory, step_facts, terms, traced_step
from planning.step_facts import of_job
from tests.helpers.jobs import make_job

# Of the small decoder: rows, tokens, model, heads, key/value heads, head, feed-forward, vocabulary.
B, T, D, N, K, H, F, V, L = 16, 12, 40, 8, 4, 6, 56, 72, 4
S, M, WIDE = 2, 4, 4
KERNELS = D * H * 2 * (N + K) + 3 * D * F  # of a layer
ATTENTION = 2 * 2 * B * N * T * T * H
FORWARD = L * (2 * B * T * KERNELS + ATTENTION)
LOGITS = 2 * B * T * D * V
INTERLEAVED, GPIPE = {"training.pipeline": "interleaved"}, {"training.pipeline": "gpipe"}
# Passes of a chunk over a microbatch on each stage, in both directions, the bubble included.
ROUNDS = M + S - 1


@functools.cache
def staged(**keys):
  more = {"model.layers": L, "mesh.stage": S, "training.microbatches": M, **keys}
  return of_job(make_job("single", "lm", **more))


def sent(step):
  found = defaultdict(lambda: [0, 0])
  for term in terms.step_terms(step):
    found[term.kind, term.axes][0] += term.runs
    found[term.kind, term.axes][1] += round(term.runs * term.elements * term.itemsize)
  return {key: tuple(pair) for key, pair in found.items()}


@pytest.mark.parametrize(
  ("keys", "chunks", "losses"),
  [
    ({}, ROUNDS / M, 3),
    ({"training.pipeline_ends": "conditional"}, ROUNDS / M, 3),
    (INTERLEAVED, (2 * M + S - 1) / (2 * M), 3),
    (GPIPE, ROUNDS / M, 4 * ROUNDS / M),  # whose losses are computed again too, in every tick
  ],
)
def test_a_stage_computes_its_layers_four_times_and_the_losses_of_all_rows(keys, chunks, losses):
  """Forward, again, and two products for gradients; the bubble's passes are computed too."""
  found = sum(work.flops * runs for work, runs, _ in traced_step.operations(staged(**keys)))
  assert found == 4 * FORWARD / S * chunks + losses * LOGITS


def test_a_pass_sends_what_its_layers_do_and_a_tick_two_permutes():
  """One microbatch of two devices' rows; kernels are gathered in each of a chunk's three passes."""
  found = sent(staged(**{"mesh.fsdp": 2, "training.pipeline_gather": "tick"}))
  each, norms = L // S * ROUNDS, 2 * D
  once = (2 * V * D + D) * WIDE
  kernels = each * (3 * KERNELS + 2 * norms) * WIDE
  assert found["all-gather", ("fsdp",)] == (each * (3 * 7 + 2 * 2) + 3, kernels + once)
  gradients = each * KERNELS + (ROUNDS + M) * V * D
  assert found["reduce-scatter", ("fsdp",)] == (each * 7 + ROUNDS + M, gradients * WIDE)
  residual = B // M // 2 * T * D * WIDE
  assert found["collective-permute", ("stage",)] == (2 * ROUNDS, 2 * ROUNDS * residual)
  # Half of the table and of the head each, and the whole last norm.
  assert found["all-reduce", ("stage",)] == (3, (V * D + D // 2) * WIDE)


def test_gathered_once_per_step_fsdp_sends_each_parameter_once():
  step = staged(**{"mesh.fsdp": 2, "training.pipeline_gather": "step"})
  found = sent(step)
  every = L // S * (KERNELS + 2 * D) + 2 * V * D + D
  assert found["all-gather", ("fsdp",)] == (12, every * WIDE)
  assert found["reduce-scatter", ("fsdp",)] == (12, every * WIDE)
  assert found["all-reduce", ("stage",)] == (3, (2 * V * D + D) * WIDE)
  parts = memory.by_formula(step)
  assert parts["parameters"] == every * WIDE / 2
  assert parts["parameters, gathered"] == parts["accumulated gradients"] == every * WIDE


@pytest.mark.parametrize(
  ("keys", "inputs", "copy"),
  [({}, 2 * S - 3, 0), (INTERLEAVED, 2 * 2 * S, 1), (GPIPE, 2 * ROUNDS, 0)],
)
def test_memory_is_that_of_a_chunk_and_the_kept_inputs(keys, inputs, copy):
  full = {"training.rematerialization": "full"}
  step = staged(**keys, **full)
  parts, chunks = memory.by_formula(step), step.pipeline.chunks
  row = B // M * T * D * WIDE
  layers, others = L // S * (KERNELS + 2 * D), 2 * V * D + D
  assert parts["saved inputs of chunks"] == inputs * row
  assert parts["saved activations"] == L // (S * chunks) * row
  assert parts["parameters"] == (layers + others) * WIDE
  assert parts["accumulated gradients"] == (layers + others) * WIDE
  assert parts["gradients"] == (layers // chunks + others) * WIDE
  assert parts.get("parameters by chunk", 0) == copy * layers * WIDE
  # A CPU's compiler copies what loops read and write.
  assert parts.get("parameters of a chunk", 0) == 2 * copy * layers // chunks * WIDE
  assert parts["kernels of one layer"] == 2 * (KERNELS + 2 * D) * WIDE
  assert parts["logits"] == B // M * T * V * WIDE
  assert set(memory.at_peak(parts)) >= {"saved inputs of chunks"}


def test_a_last_tick_alone_has_memory_of_its_own():
  two, four = (
    memory.by_formula(staged(**{"mesh.stage": stages, "mesh.data": 1})) for stages in (2, 4)
  )
  assert two["last backward pass"] == two["gradients"] + two["saved activations"]
  assert "last backward pass" not in four


def test_memory_does_not_grow_with_the_microbatches_of_1f1b():
  rows = {"data.global_batch_size": 64}
  few, many = (staged(**rows, **{"training.microbatches": n}) for n in (16, 32))
  twice = staged(**{"data.global_batch_size": 128, "training.microbatches": 32})
  assert memory.by_formula(few) == memory.by_formula(twice)
  assert memory.at_once(memory.by_formula(many)) < memory.at_once(memory.by_formula(few))


def test_without_stages_a_pass_is_over_all_layers():
  step = of_job(make_job("single", "lm", **{"training.gradient_accumulation_steps": 2}))
  assert step.passes == step_facts.Passes(2, 4, 4, 2, 2, 2)
  assert step.chunk_layers == 2
  assert traced_step.part_of(step).keys.model.layers == 2
