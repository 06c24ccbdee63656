"""What each strategy's compiled step sends is what formulas say, array by array and to the byte."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from partitioning import rules
from partitioning.parallel import collectives as manual
from planning import terms
from runtime import collectives, hlo
from tests.helpers.jobs import make_job
from tests.parity.budgets import (
  COMMAND,
  INVOLUNTARY,
  LONG,
  PAGE,
  STRATEGIES,
  Step,
  budget,
  compile_step,
  job_of,
  of_sources,
  page,
  said_while,
  shared_job,
  step,
)
from tests.parity.variants import FAMILIES, LEARNED
from training.setup import Job


def assert_within_budget(ours: Step) -> None:
  """Compares all that a step sends with the terms of its job."""
  assert ours.sent() == budget(ours.job)


CASES = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in STRATEGIES]


@pytest.mark.parametrize("strategy", CASES)
def test_a_step_sends_what_its_terms_say(strategy):
  assert_within_budget(step(strategy))


LARGEST = "dp2_fsdp2_tp2, sequence-parallel"


# Tied embeddings, learned positions, biases and norms of heads; adapters, without other gradients.
@pytest.mark.parametrize(
  ("strategy", "keys"),
  [
    (LARGEST, LEARNED),
    pytest.param("dp4_tp2", LEARNED, marks=pytest.mark.long),
    pytest.param("dp2_fsdp2_tp2", FAMILIES, marks=pytest.mark.long),
    pytest.param("dp4_tp2", {"lora.rank": 3}, marks=pytest.mark.long),
  ],
)
def test_a_step_of_other_decoders_sends_what_its_terms_say(strategy, keys):
  assert_within_budget(compile_step(job_of(strategy, **keys)))


def test_dropout_sends_nothing():
  ours = compile_step(job_of("dp4_tp2", **{"model.dropout_rate": 0.3}))
  assert_within_budget(ours)
  assert "rng" in ours.text or "xor" in ours.text


def test_norms_across_heads_send_a_sum_of_squares_of_each_token():
  keys = {"model.query_key_norm": True, "model.query_key_norm_across_heads": True}
  job, plain = job_of("dp4_tp2", **keys), shared_job("dp4_tp2")
  assert_within_budget(compile_step(job))
  (_, more), (_, without) = (
    of_sources(one, *terms.SOURCES)["all-reduce", ("tensor",)] for one in (job, plain)
  )
  assert more - without == 4 * 2 * 4 * 12 * 4  # of queries and of keys, forward and backward: L b T


def test_sinks_of_attention_send_their_gradients_and_nothing_else():
  ours = compile_step(job_of("dp2_fsdp2_tp2", **{"model.attention_sinks": True}))
  assert_within_budget(ours)
  key = "all-reduce", ("data", "fsdp")
  (arrays, size), (before, without) = ours.sent()[key], budget(shared_job("dp2_fsdp2_tp2"))[key]
  # Of the half of the eight heads that a device has, in each of two layers, 4 bytes.
  assert (arrays - before, size - without) == (2, 2 * 4 * 4)


@pytest.mark.long  # as traced: test_half_of_each_chunk_goes_each_way
def test_a_ring_of_collective_matmuls_sends_halves_in_both_directions():
  # 16 tokens over 4 devices: 4 each, two in each direction.
  keys = {"data.sequence_length": 16}
  ours = compile_step(job_of("fsdp=2 x tensor=4, collective matmul", **keys))
  assert_within_budget(ours)
  assert ours.sent()["collective-permute", ("tensor",)][0] == 2 * (10 * 2 + 2) * 3


def test_fsdp_is_fsdp8_on_eight_devices():
  ours, wanted = make_job("fsdp", "lm"), make_job("fsdp8", "lm")
  assert ours.devices == wanted.devices
  assert ours.placements == wanted.placements
  assert ours.config.partitioning == wanted.config.partitioning


@pytest.mark.parametrize("strategy", CASES)
def test_no_involuntary_rematerialization(strategy):
  # XLA says so on stderr only, while it compiles.
  assert INVOLUNTARY not in step(strategy).said


def test_an_involuntary_rematerialization_would_be_seen():
  mesh = job_of("dp2_fsdp2_tp2").mesh
  rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "tensor")))
  # XLA knows no way from the one to the other.
  tiles = NamedSharding(mesh, PartitionSpec("fsdp", "data"))
  x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows)
  moved = jax.jit(jnp.sin, out_shardings=tiles)
  _, said = said_while(lambda: moved.lower(x).compile())
  assert INVOLUNTARY in said


# ---- Depth ----


def test_the_layers_are_gathered_one_by_one():
  ours = step("fsdp8")
  model = ours.job.config.model
  found = collectives.collectives(ours.text, ours.job.mesh)
  sizes = [c.bytes for c in found if c.kind == "all-gather" and "while" in c.source]
  assert max(sizes) == 4 * model.model_size * model.feedforward_size
  assert all(c.arrays == 1 for c in found if c.kind == "all-gather")


def test_what_is_sent_is_linear_in_the_layers_and_the_program_does_not_grow():
  jobs = [shared_job(LARGEST), *(job_of(LARGEST, **{"model.layers": n}) for n in (3, 4))]
  steps = [step(LARGEST), compile_step(jobs[2])]
  for ours in steps:
    assert_within_budget(ours)  # of the program of three layers, only the budget is looked at
  two, three, four = map(without_norm, jobs)
  assert two.keys() == three.keys() == four.keys()
  for key in two:
    for a, b, c in zip(two[key], three[key], four[key], strict=True):
      assert c - b == b - a >= 0, key
  assert three["all-gather", ("fsdp",)] > two["all-gather", ("fsdp",)]
  for size in (instructions, len):  # 1 %: how the norm cuts what it sums, and the digits of sizes
    found = [size(ours.text) for ours in steps]
    assert max(found) <= 1.01 * min(found), found


def without_norm(job: Job) -> dict:
  """Returns a budget but for scalars, of which each depth has others: those of the norm."""
  return of_sources(job, *terms.SOURCES)


def instructions(text: str) -> int:
  """Returns how many instructions a program has."""
  program = hlo.parse(text)
  return sum(len(c.instructions) for c in program.computations.values())


# ---- The loss in chunks ----


@pytest.mark.parametrize("strategy", ["fsdp8", "dp2_fsdp2_tp2, sequence-parallel"])
def test_a_loss_in_chunks_sends_no_more_for_kernels_and_never_has_all_logits(strategy):
  whole = step(strategy)
  cut = compile_step(job_of(strategy, **{"training.loss_chunks": 4}))
  before, after = whole.sent(), cut.sent()
  assert after.keys() == before.keys()
  for key, (_, size) in after.items():
    assert size <= before[key][1], key
  [logits] = [one for one in whole.job.activations.seen if one.letters == "BTV"]
  here = rules.shard_shape(logits.shape, logits.spec, whole.job.devices.sizes)
  text = f"f32[{','.join(map(str, here))}]"
  assert text in whole.text
  assert text not in cut.text


# ---- What the budget must catch ----


def test_a_budget_catches_dropped_constraints(monkeypatch):
  monkeypatch.setattr(jax.lax, "with_sharding_constraint", lambda x, spec: x)
  with pytest.raises(AssertionError):
    assert_within_budget(compile_step(job_of("fsdp8")))


def test_a_budget_catches_kernels_that_are_kept(monkeypatch):
  # Neither gathered again, nor let go: without checkpoints each device keeps every layer's.
  monkeypatch.setattr(jax, "checkpoint", lambda function, **_: function)
  ours = compile_step(job_of("fsdp8"))
  with pytest.raises(AssertionError):
    assert_within_budget(ours)
  stacked = r"f32\[2,40,56\]"  # [L, D, F] whole; a device's share is [2, 5, 56]
  assert re.search(stacked, ours.text)
  assert not re.search(stacked, step("fsdp8").text)


def test_a_budget_catches_a_sum_that_is_taken_again(monkeypatch):
  # The transpose of psum: right, and one collective more for each block.
  plain = step("dp4_tp2")
  monkeypatch.setattr(manual, "total", lambda x, axes: jax.lax.psum(x, axes) if axes else x)
  ours = compile_step(job_of("dp4_tp2"))
  with pytest.raises(AssertionError):
    assert_within_budget(ours)
  key = "all-reduce", ("tensor",)
  more = ours.sent()[key][1] - plain.sent()[key][1]
  assert more == 4 * (2 * 2 + 1) * 4 * 12 * 40  # float32, 2 L + 1 times b T D


# ---- The page ----


@pytest.mark.long
def test_the_page_is_what_the_terms_say():
  assert PAGE.read_text() == page(), f"stale: run {COMMAND}"


@pytest.mark.long
def test_a_page_that_says_otherwise_is_stale(monkeypatch):
  monkeypatch.setattr(terms, "SOURCES", terms.SOURCES[1:])
  assert PAGE.read_text() != page()
