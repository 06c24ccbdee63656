"""What each strategy's compiled step sends is what theory says, array by array and to the byte."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from analysis import collectives, hlo
from partitioning import shardings
from partitioning.parallel import collectives as manual
from planning import analytic
from tests.helpers.jobs import make_job
from tests.parity import theory as parity_theory
from tests.parity.budgets import (
  COMMAND,
  INVOLUNTARY,
  LONG,
  PAGE,
  STRATEGIES,
  Step,
  compile_step,
  job_of,
  page,
  said_while,
  shared_job,
  step,
)
from tests.parity.theory import norm, theory
from training.setup import Job

LARGEST = "dp2_fsdp2_tp2, sequence-parallel"


def budget(job: Job) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
  """Returns (kind, axes) -> (arrays, bytes) of theory."""
  return {key: (row.arrays, row.bytes) for key, row in theory(job).items()}


def assert_within_budget(ours: Step) -> None:
  """Compares all that a step sends with theory."""
  assert ours.sent() == budget(ours.job)


CASES = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in STRATEGIES]


@pytest.mark.parametrize("strategy", CASES)
def test_a_step_sends_what_theory_says(strategy):
  assert_within_budget(step(strategy))


def test_dropout_sends_nothing():
  ours = compile_step(job_of("dp4_tp2", **{"model.dropout_rate": 0.3}))
  assert_within_budget(ours)
  assert "rng" in ours.text or "xor" in ours.text


def test_norms_across_heads_send_a_sum_of_squares_of_each_token():
  keys = {"model.query_key_norm": True, "model.query_key_norm_across_heads": True}
  job, plain = job_of("dp4_tp2", **keys), shared_job("dp4_tp2")
  tensor = "all-reduce", ("tensor",)
  more = compile_step(job).sent()[tensor][1] - theory(plain)[tensor].bytes
  # Of queries and of keys, forward and backward: 4 L b T; and the norm's sums for their scales.
  squares = 4 * 2 * 4 * 12 * 4
  assert squares <= more <= squares + 4 * 8
  planned = [
    sum(
      term.runs * term.elements * term.itemsize
      for term in analytic.terms(one)
      if "tensor" in term.axes
    )
    for one in (job, plain)
  ]
  assert planned[0] - planned[1] == squares


def test_sinks_of_attention_send_their_gradients_and_nothing_else():
  ours = compile_step(job_of("dp2_fsdp2_tp2", **{"model.attention_sinks": True}))
  wanted = budget(ours.job)
  arrays, size = wanted["all-reduce", ("data", "fsdp")]
  # Of the half of the eight heads that a device has, in each of two layers, 4 bytes.
  wanted["all-reduce", ("data", "fsdp")] = arrays + 2, size + 2 * 4 * 4
  assert ours.sent() == wanted


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
  """Returns a budget but for the norm's scalars, of which each depth has others."""
  left_out = norm(job)
  found = {}
  for (kind, axes), (arrays, size) in budget(job).items():
    scalars = left_out.get(axes, 0) if kind == "all-reduce" else 0
    found[kind, axes] = (arrays - scalars, size - 4 * scalars)
  return {key: sent for key, sent in found.items() if sent != (0, 0)}


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
  here = shardings.shard_shape(logits.shape, logits.spec, whole.job.devices.sizes)
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
def test_the_page_is_what_theory_says():
  assert PAGE.read_text() == page(), f"stale: run {COMMAND}"


@pytest.mark.long
def test_a_page_that_says_otherwise_is_stale(monkeypatch):
  monkeypatch.setattr(parity_theory, "TERMS", parity_theory.TERMS[1:])
  assert PAGE.read_text() != page()
