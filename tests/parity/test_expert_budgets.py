"""What a step with experts sends is what formulas say, and its exchange of tokens in each round."""

import pytest

from planning import terms
from planning.step_facts import of_job
from runtime import collectives
from tests.parity.budgets import (
  INVOLUNTARY,
  SEQUENCE_PARALLEL,
  added_up,
  budget,
  compile_step,
  job_of,
)
from tests.parity.expert_cases import STRATEGIES

SHORT = "fsdp=2 x expert=2 x tensor=2"


@pytest.mark.parametrize(
  "strategy", [pytest.param(x, marks=() if x == SHORT else pytest.mark.long) for x in STRATEGIES]
)
def test_an_exchange_sends_what_its_terms_say(strategy):
  job = job_of(strategy)
  ours = compile_step(job)
  # Also under rematerialization: no round of the forward pass is repeated in the backward pass.
  assert ours.sent() == budget(job)
  found, sent = collectives.collectives(ours.text, job.mesh), {}
  for one in found:
    if not one.exact:  # in the loop over rounds
      arrays, size = sent.get((one.kind, one.axes), (0, 0))
      sent[one.kind, one.axes] = arrays + one.count * one.arrays, size + one.count * one.bytes
  rounds = [one for one in terms.expert_exchange(of_job(job)) if "of the exchange" in one.why]
  assert sent == added_up(rounds, job)
  assert INVOLUNTARY not in ours.said
  table = collectives.format_summary(collectives.summarize(found))
  assert ("+ x" in table) == ("gathered" not in strategy)


@pytest.mark.long
def test_sequence_parallel_experts_send_what_their_terms_say():
  ours = compile_step(job_of(SHORT, **SEQUENCE_PARALLEL))
  assert ours.sent() == budget(ours.job)
