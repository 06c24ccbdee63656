"""What devices send one another to exchange tokens between experts is what theory says."""

from collections import Counter

import pytest

from analysis import collectives
from planning import analytic
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_planner_s_formulas_are_those_of_the_theory(strategy):
  job = job_of(strategy)
  wanted, found = Counter(), Counter()
  for (kind, axes, _), row in theory(job).items():
    if axes == ("expert",):
      wanted[kind] += row.bytes
  for term in analytic.terms(job):
    if term.axes == ("expert",) and term.kind in wanted:
      found[term.kind] += round(term.runs * term.elements * term.itemsize)
  assert found == wanted
