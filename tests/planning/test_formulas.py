"""What a step sends, by formula, beside what is proved of the compiled programs."""

from collections import defaultdict

import pytest

from planning import formulas
from planning.hardware import Rates
from planning.topologies import parse
from planning.traffic import in_order
from tests.parity.budgets import STRATEGIES, job_of
from tests.parity.theory import theory

# What the norm of the gradients and the mean of the loss send: scalars.
SCALARS = 200


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_sent_is_what_the_proved_budget_says(strategy):
  job = job_of(strategy)
  found = defaultdict(lambda: [0, 0])
  for term in formulas.terms(job):
    found[term.kind, term.axes][0] += term.runs
    found[term.kind, term.axes][1] += round(term.runs * term.elements * term.itemsize)
  wanted = {key: row.bytes for key, row in theory(job).items() if row.bytes > 4 * SCALARS}
  assert found.keys() == wanted.keys()
  for key, size in wanted.items():
    assert found[key][1] == pytest.approx(size, rel=0.01, abs=4 * SCALARS), key


def times_of(topology, **overrides):
  job = job_of("data=4 x fsdp=2 (HSDP)", **overrides)
  where = in_order(parse(topology), 8)
  return formulas.times(job, where, parse(topology).chip, Rates())


def test_what_fsdp_sends_is_hidden_as_far_as_products_last():
  slow = times_of("h100:8")
  assert slow.communication > slow.compute
  assert slow.exposed == pytest.approx(slow.communication - max(slow.compute, slow.memory))
  assert slow.step == pytest.approx(max(slow.compute, slow.memory) + slow.exposed)


def test_rematerialization_computes_the_forward_pass_again():
  plain, again = times_of("h100:8"), times_of("h100:8", **{"training.rematerialization": "full"})
  assert again.work.flops == pytest.approx(4 / 3 * plain.work.flops)


def test_groups_along_axes():
  job = job_of("dp2_fsdp2_tp2")
  assert formulas.groups(job, ("tensor",)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
  assert formulas.groups(job, ("data", "tensor")) == [[0, 1, 4, 5], [2, 3, 6, 7]]
