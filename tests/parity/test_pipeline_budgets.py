"""What a step sends along `stage` is what formulas say, array by array and to the byte."""

import pytest

from planning import terms
from tests.parity.budgets import INVOLUNTARY, budget, compile_step, of_sources, staged_job
from tests.parity.pipeline_cases import STRATEGIES

SHORT = "data=2 x stage=2, GPipe"


def of_stages(sums):
  return {key: pair for key, pair in sums.items() if "stage" in key[1]}


@pytest.mark.parametrize(
  "strategy", [pytest.param(x, marks=() if x == SHORT else pytest.mark.long) for x in STRATEGIES]
)
def test_a_pipeline_sends_what_its_terms_say(strategy):
  ours = compile_step(staged_job(strategy))
  select = of_stages if "interleaved" in strategy else dict
  assert select(ours.sent()) == select(budget(ours.job))
  assert INVOLUNTARY not in ours.said


def test_ticks_are_counted_by_hand():
  # 4 microbatches on 4 stages, 7 ticks with 2 rows of 12 tokens of 40 numbers in float32, each way.
  key = "collective-permute", ("stage",)
  sent = of_sources(staged_job("data=2 x stage=4"), terms.pipeline_sends)[key]
  assert sent == (2 * 7, 2 * 7 * 2 * 12 * 40 * 4)
  # 4 microbatches of 2 chunks on 2 stages: 9 ticks; 9 arrays of a chunk's parameters, there and
  # back in one round, since of two chunks each stage keeps one.
  job = staged_job("stage=2 x fsdp=2 x tensor=2, interleaved, sequence-parallel")
  assert of_sources(job, terms.pipeline_sends)[key][0] == 2 * 9 + 2 * 9
