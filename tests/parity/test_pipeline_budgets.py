"""What a step sends along `stage` is what theory says, array by array and to the byte."""

import pytest

from tests.parity.budgets import INVOLUNTARY, compile_step
from tests.parity.pipeline_terms import STRATEGIES, job_of, theory
from tests.parity.theory import norm

SHORT = "data=2 x stage=2, GPipe"


def scalars(job):
  """Returns (kind, axes) -> scalars of the gradients' norm along `stage`."""
  return {("all-reduce", axes): count for axes, count in norm(job).items() if "stage" in axes}


@pytest.mark.parametrize(
  "strategy", [pytest.param(x, marks=() if x == SHORT else pytest.mark.long) for x in STRATEGIES]
)
def test_a_pipeline_sends_what_theory_says(strategy):
  job = job_of(strategy)
  ours = compile_step(job)
  wanted = {key: (row.arrays, row.bytes) for key, row in theory(job).items()}
  for key, count in scalars(job).items():
    arrays, size = wanted.get(key, (0, 0))
    wanted[key] = arrays + count, size + 4 * count
  assert {key: sent for key, sent in ours.sent().items() if "stage" in key[1]} == wanted
  assert INVOLUNTARY not in ours.said


def test_ticks_are_counted_by_hand():
  # 4 microbatches on 4 stages, 7 ticks with 2 rows of 12 tokens of 40 numbers in float32, each way.
  row = theory(job_of("data=2 x stage=4"))["collective-permute", ("stage",)]
  assert (row.arrays, row.bytes) == (2 * 7, 2 * 7 * 2 * 12 * 40 * 4)
  # 4 microbatches of 2 chunks on 2 stages: 9 ticks; 9 arrays of a chunk's parameters, there and
  # back in one round, since of two chunks each stage keeps one.
  row = theory(job_of("stage=2 x fsdp=2 x tensor=2, interleaved, sequence-parallel"))
  assert row["collective-permute", ("stage",)].arrays == 2 * 9 + 2 * 9
