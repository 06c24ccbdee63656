"""What devices send one another to exchange tokens between experts is what theory says."""

import pytest

from analysis import collectives
from tests.parity.budgets import INVOLUNTARY, compile_step, job_of
from tests.parity.expert_cases import STRATEGIES
from tests.parity.expert_terms import sent, theory

SHORT = "fsdp=2 x expert=2 x tensor=2"


@pytest.mark.parametrize(
  "strategy", [pytest.param(x, marks=() if x == SHORT else pytest.mark.long) for x in STRATEGIES]
)
def test_an_exchange_sends_what_theory_says(strategy):
  job = job_of(strategy)
  ours = compile_step(job)
  found = collectives.collectives(ours.text, job.mesh)
  # Also under rematerialization: no round of the forward pass is repeated in the backward pass.
  assert sent(found) == {key: (row.arrays, row.bytes) for key, row in theory(job).items()}
  assert INVOLUNTARY not in ours.said
  table = collectives.format_summary(collectives.summarize(found))
  assert ("+ x" in table) == ("gathered" not in strategy)
