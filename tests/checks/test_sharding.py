"""`replication` and `budget`: arrays that are replicated, and what is sent for nothing."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from checks import budget, replication
from checks.case import Case
from tests.checks import decoder

EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}
ATTENTION = {"query_key_value": P(None, None, None, "tensor"), "out": P(None, "tensor")}
# Name -> how the program is made, what is found, and where.
STATE = {
  # Attention is replicated over an axis that shards the rest (at EP=64 in a public report; the
  # axis is fsdp here).
  "attention": (
    ((), {"specs": ATTENTION}),
    "2 state leaves are the same on all 2 devices of axis fsdp",
    "params/query_key_value, params/out",
  ),
  # In a table of rules the last one wins, and replicates.
  "last rule wins": (
    ((), {"specs": {"up": P(), "down": P()}}),
    "2 state leaves are the same on all 2 devices of axis tensor",
    "params/down, params/up",
  ),
  # No rules for the optimizer's state.
  "momentum": (
    (("momentum_replicated",), {"momentum": True}),
    "6 state leaves are the same on all 2 devices of axis fsdp",
    "momentum/query_key_value",
  ),
  "logits": ((("logits_replicated",), {}), "all rows of the batch", "float32[8,12,40]"),
}
BUDGETS = {
  # The parameters of all layers are gathered before the scan.
  "gathered_at_once": (decoder.MESH, "of all 2 layers are gathered at once", "outside of loops"),
  # Rows are gathered between layers.
  "batch_gathered": (decoder.MESH, "activations are gathered over fsdp", "in a loop"),
  # Gradients are constrained to be replicated.
  "gradients_replicated": (decoder.MESH, "are all-reduced, and kept in full", "decoder.py"),
  # jax-ml/jax#21562
  "involuntary": (EIGHT, "replicates 2 tensors to change their sharding", "gather f32[8,12,8]"),
}


@pytest.mark.parametrize("name", STATE)
def test_replicated_arrays_are_found(name):
  (bugs, more), what, where = STATE[name]
  findings = replication.check_one(Case(decoder.program(decoder.MESH, *bugs, **more))).findings
  [finding] = [one for one in findings if what in one.what]
  assert where in finding.where
  others = {"momentum": 2, "last rule wins": 2}
  assert len(findings) == others.get(name, 1)


def test_an_axis_without_a_use():
  specs = dict.fromkeys(decoder.SPECS, P())
  case = Case(decoder.program({"data": 2, "tensor": 2}, specs=specs))
  [finding] = replication.check_one(case).findings
  assert finding.what == "mesh axis tensor cuts neither the state nor the batch"


@pytest.mark.parametrize("bug", BUDGETS)
@pytest.mark.usefixtures("lines_of_python")
def test_collectives_that_need_not_be_there_are_found(bug):
  sizes, what, where = BUDGETS[bug]
  findings = budget.check_one(Case(decoder.program(sizes, bug))).findings
  [finding] = [one for one in findings if what in one.what]
  assert where in finding.where + "".join(finding.lines)
  # Where all rows are on every device, so are the gradients of all.
  assert len(findings) == 1 or bug == "gathered_at_once"


@pytest.mark.usefixtures("lines_of_python")
def test_a_clean_mesh_gives_no_finding(clean):
  assert replication.check_one(clean).findings == []
  outcome = budget.check_one(clean)
  assert outcome.findings == []
  places = {tuple(line.split()[:3]) for line in outcome.lines}
  assert ("all-gather", "fsdp", "in") in places  # of parameters, in the loop over layers
  assert ("all-reduce", "tensor", "in") in places


def test_a_budget_is_held_to_its_bytes(clean):
  limits = {"tensor": 1e6, "all-gather fsdp": 100.0}
  describe = dataclasses.replace(clean.describe, budget=limits)
  case = Case(dataclasses.replace(clean.program, describe=describe))
  case.compiled = clean.compiled
  [finding] = budget.check_one(case).findings
  assert finding.what == "all-gather fsdp takes more than describe.budget allows"
  assert finding.numbers["total_bytes"] > finding.numbers["budget_bytes"] == 100
