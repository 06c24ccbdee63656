"""What devices send one another to exchange tokens between experts is what formulas say."""

from collections import defaultdict

import pytest

from analysis import collectives
from planning import terms
from tests.parity.budgets import INVOLUNTARY, added_up, compile_step, job_of, of_sources
from tests.parity.expert_cases import STRATEGIES

SHORT = "fsdp=2 x expert=2 x tensor=2"


def exchanged(found):
  """Returns arrays and bytes of the exchange, of all collectives of a step, and of its rounds."""
  sums = defaultdict(lambda: (0, 0)), defaultdict(lambda: (0, 0))
  for one in found:
    if (one.axes == ("expert",) and one.kind != "all-reduce") or "/pmax" in one.source:
      for some in sums if not one.exact else sums[:1]:
        arrays, size = some[one.kind, one.axes]
        some[one.kind, one.axes] = arrays + one.count * one.arrays, size + one.count * one.bytes
  return sums


@pytest.mark.parametrize(
  "strategy", [pytest.param(x, marks=() if x == SHORT else pytest.mark.long) for x in STRATEGIES]
)
def test_an_exchange_sends_what_its_terms_say(strategy):
  job = job_of(strategy)
  ours = compile_step(job)
  found = collectives.collectives(ours.text, job.mesh)
  # Also under rematerialization: no round of the forward pass is repeated in the backward pass.
  every, rounds = exchanged(found)
  most = [one for one in terms.sent_by(terms.scalars, job) if "most tokens" in one.why]
  assert every == {**of_sources(job, terms.expert_exchange), **added_up(most, job)}
  of_rounds = [one for one in terms.expert_exchange(job) if "of the exchange" in one.why]
  assert rounds == added_up(of_rounds, job)
  assert INVOLUNTARY not in ours.said
  table = collectives.format_summary(collectives.summarize(found))
  assert ("+ x" in table) == ("gathered" not in strategy)
