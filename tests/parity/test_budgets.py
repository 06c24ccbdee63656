"""What steps send, beside tests/parity/test_strategies.py: options, depth, chunks of the loss."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from partitioning import rules
from planning import terms
from runtime import collectives
from tests.helpers.jobs import make_job
from tests.parity.budgets import (
  COMMAND,
  INVOLUNTARY,
  MEETING,
  PAGE,
  assert_within_budget,
  budget,
  compile_step,
  job_of,
  measured,
  of_sources,
  page,
  said_while,
  shared_job,
  trained,
)
from tests.parity.comparison import assert_equal
from tests.parity.variants import FAMILIES, LEARNED

LARGEST = "dp2_fsdp2_tp2, sequence-parallel"
NORMS = {"model.query_key_norm": True, "model.query_key_norm_across_heads": True}
SINKS = {"model.attention_sinks": True}


@pytest.mark.parametrize(
  ("strategy", "keys"),
  [
    # Tied embeddings, learned positions, biases, norms of heads, sinks; and dropout sends nothing.
    (LARGEST, {**LEARNED, **NORMS, **SINKS, "model.dropout_rate": 0.3}),
    (MEETING, {}),
    pytest.param("dp2_fsdp2_tp2", FAMILIES, marks=pytest.mark.long),
    pytest.param("dp4_tp2", {"lora.rank": 3}, marks=pytest.mark.long),
  ],
)
def test_a_step_of_other_decoders_sends_what_its_terms_say(strategy, keys):
  ours = compile_step(job_of(strategy, **keys))
  assert_within_budget(ours)
  assert INVOLUNTARY not in ours.said


def test_norms_across_heads_and_sinks_are_counted_by_hand():
  """The budget itself, that compiled steps are held to: a sum of squares of each token; a sink."""
  job, plain = job_of("dp4_tp2", **NORMS), shared_job("dp4_tp2")
  (_, more), (_, without) = (
    of_sources(one, *terms.SOURCES)["all-reduce", ("tensor",)] for one in (job, plain)
  )
  assert more - without == 4 * 2 * 4 * 12 * 4  # of queries and of keys, forward and backward: L b T
  job, plain = (job_of("dp2_fsdp2_tp2", **keys) for keys in (SINKS, {}))
  (arrays, size), (before, without) = (
    budget(x)["all-reduce", ("data", "fsdp")] for x in (job, plain)
  )
  # Of the half of the eight heads that a device has, in each of two layers, 4 bytes.
  assert (arrays - before, size - without) == (2, 2 * 4 * 4)


def test_fsdp_is_fsdp8_on_eight_devices():
  ours, wanted = make_job("fsdp", "lm"), make_job("fsdp8", "lm")
  assert ours.devices == wanted.devices
  assert ours.placements == wanted.placements
  assert ours.config.partitioning == wanted.config.partitioning


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
  _, ours = trained("fsdp8")
  model = ours.job.config.model
  found = collectives.collectives(ours.text, ours.job.mesh)
  sizes = [c.bytes for c in found if c.kind == "all-gather" and "while" in c.source]
  assert max(sizes) == 8 * model.model_size * model.feedforward_size
  assert all(c.arrays == 1 for c in found if c.kind == "all-gather")


def test_what_is_sent_is_linear_in_the_layers_and_the_program_does_not_grow():
  jobs = [job_of(LARGEST, **{"model.layers": n}) for n in (2, 3, 4)]
  # But for scalars, of which each depth has others: those of the norm.
  two, three, four = (of_sources(job, *terms.SOURCES) for job in jobs)
  assert two.keys() == three.keys() == four.keys()
  for key in two:
    for a, b, c in zip(two[key], three[key], four[key], strict=True):
      assert c - b == b - a >= 0, key
  assert three["all-gather", ("fsdp",)] > two["all-gather", ("fsdp",)]
  found = []
  for job in jobs[::2]:
    with job.tracing():
      found.append(
        jax.jit(job.program.train_step).lower(job.state, job.batch).as_text().count(" = ")
      )
  assert max(found) <= 1.01 * min(found), found


# ---- The loss in chunks ----


def test_a_loss_in_chunks_sends_no_more_for_kernels_and_never_has_all_logits():
  (run, whole), (ours, cut) = trained(LARGEST), measured(LARGEST, **{"training.loss_chunks": 4})
  assert_equal(ours, run, "float64")
  before, after = whole.sent(), cut.sent()
  assert after.keys() == before.keys()
  for key, (_, size) in after.items():
    assert size <= before[key][1], key
  [logits] = [one for one in whole.job.activations.seen if one.letters == "BTV"]
  here = rules.shard_shape(logits.shape, logits.spec, whole.job.devices.sizes)
  text = f"f64[{','.join(map(str, here))}]"
  assert text in whole.text
  assert text not in cut.text


# ---- What the budget must catch ----


def test_a_budget_catches_kernels_that_are_kept(monkeypatch):
  # Neither gathered again, nor let go: without checkpoints each device keeps every layer's.
  plain = trained("fsdp8")[1].text
  monkeypatch.setattr(jax, "checkpoint", lambda function, **_: function)
  ours = compile_step(job_of("fsdp8"))
  with pytest.raises(AssertionError):
    assert_within_budget(ours)
  stacked = r"\[2,40,56\]"  # [L, D, F] whole; a device's share is [2, 5, 56]
  assert re.search(rf"f32{stacked}", ours.text)
  assert not re.search(rf"f64{stacked}", plain)


# ---- The page ----


@pytest.mark.long
def test_the_page_is_what_the_terms_say(monkeypatch):
  assert PAGE.read_text() == page(), f"stale: run {COMMAND}"
  monkeypatch.setattr(terms, "SOURCES", terms.SOURCES[1:])
  assert PAGE.read_text() != page()
