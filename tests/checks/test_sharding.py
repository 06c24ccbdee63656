"""`replication` and `budget`: arrays that are replicated, and what is sent for nothing."""

import dataclasses
import pathlib
import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

from checks import budget, replication
from checks.case import Case
from tests.checks import decoder

EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}
ATTENTION = {"query_key_value": P(None, None, None, "tensor"), "out": P(None, "tensor")}
# Name -> how the program is made, what is found, and where.
STATE = {
  # Attention is replicated over an axis that shards the rest: Flax's example lm1b, which
  # docs/check.md has (the axis is fsdp here).
  "attention": (
    ((), {"specs": ATTENTION}),
    "2 state leaves are the same on all 2 devices of axis fsdp",
    ("params/query_key_value", "params/out"),
  ),
  # In a table of rules the last one wins, and replicates: a textbook error.
  "last rule wins": (
    ((), {"specs": {"up": P(), "down": P()}}),
    "2 state leaves are the same on all 2 devices of axis tensor",
    ("params/down", "params/up"),
  ),
  # The moments of a sharded parameter are replicated (marin-community/marin#7987).
  "momentum": (
    (("momentum_replicated",), {"momentum": True}),
    "6 state leaves are the same on all 2 devices of axis fsdp",
    ("momentum/query_key_value",),
  ),
  # A constraint without the axis that cuts the rows (Physical-Intelligence/openpi#193).
  "logits": ((("logits_replicated",), {}), "all rows of the batch", ("float32[8,12,40]",)),
}
BUDGETS = {
  # The parameters of all layers are gathered before the scan (pytorch/xla#6379 has the same of
  # gathers that the compiler joins).
  "gathered_at_once": (decoder.MESH, "of all 2 layers are gathered at once", "outside of loops"),
  # Rows are gathered between layers (NVIDIA/TransformerEngine#2023).
  "batch_gathered": (decoder.MESH, "activations are gathered over fsdp", "in a loop"),
  # The optimizer is sharded, and gradients are all-reduced (deepspeedai/DeepSpeed#156,
  # karpathy/llm.c#421).
  "gradients_replicated": (decoder.MESH, "are all-reduced, and kept in full", "decoder.py"),
  # Involuntary full rematerialization (jax-ml/jax#21562).
  "involuntary": (EIGHT, "replicates 2 tensors to change the sharding", "gather f32[8,12,8]"),
}


@pytest.mark.parametrize("name", STATE)
def test_replicated_arrays_are_found(name):
  (bugs, more), what, where = STATE[name]
  findings = replication.check(Case(decoder.program(decoder.MESH, *bugs, **more))).findings
  [finding] = [one for one in findings if what in one.what]
  assert all(text in finding.where for text in where)
  # The line of the initializer that makes each leaf.
  made = re.findall(r"made at (\S+):(\d+)", finding.where)
  maker = "zeros_like" if name == "momentum" else "random.normal"
  assert len(made) == (0 if name == "logits" else min(3, int(finding.what.split()[0])))
  assert all(maker in pathlib.Path(file).read_text().splitlines()[int(i) - 1] for file, i in made)
  others = {"momentum": 2, "last rule wins": 2}
  assert len(findings) == others.get(name, 1)


def test_the_line_of_a_leaf_whose_initializer_sets_a_mesh():
  program = decoder.program(decoder.MESH)

  def state(seed):
    with getattr(jax, "set_mesh", lambda mesh: mesh)(program.mesh):  # not in jax 0.6
      return jax.jit(program.state)(seed)

  lines = replication._initializers(Case(dataclasses.replace(program, state=state)))
  assert lines["params/up"].startswith("tests/checks/decoder.py:")


def test_an_axis_without_a_use():
  """A textbook error: the axis has a size, and no rule names it."""
  specs = dict.fromkeys(decoder.SPECS, P())
  case = Case(decoder.program({"data": 2, "tensor": 2}, specs=specs))
  [finding] = replication.check(case).findings
  assert finding.what == "mesh axis tensor cuts neither the state nor the batch"


@pytest.mark.parametrize("bug", BUDGETS)
@pytest.mark.usefixtures("lines_of_python")
def test_collectives_that_need_not_be_there_are_found(bug):
  sizes, what, where = BUDGETS[bug]
  findings = budget.check(Case(decoder.program(sizes, bug))).findings
  [finding] = [one for one in findings if what in one.what]
  assert where in finding.where + "".join(finding.lines)
  # Where all rows are on every device, so are the gradients of all.
  assert len(findings) == 1 or bug == "gathered_at_once"


@pytest.mark.usefixtures("lines_of_python")
def test_a_clean_mesh_gives_no_finding(clean):
  assert replication.check(clean).findings == []
  outcome = budget.check(clean)
  assert outcome.findings == []
  assert outcome.lines[0] == "in loops:"
  loops = outcome.lines[1 : outcome.lines.index("outside of loops:")]
  kinds = [tuple(line.split()[:2]) for line in loops]
  assert ("all-gather", "fsdp") in kinds  # of parameters, in the loop over layers
  assert ("all-reduce", "tensor") in kinds


def test_a_budget_is_held_to_its_bytes(clean):
  limits = {"tensor": 1e6, "all-gather fsdp": 100.0}
  describe = dataclasses.replace(clean.describe, budget=limits)
  case = Case(dataclasses.replace(clean.program, describe=describe))
  case.compiled = clean.compiled
  [finding] = budget.check(case).findings
  assert finding.what == "all-gather fsdp takes more than describe.budget allows"
  assert finding.numbers["total_bytes"] > finding.numbers["budget_bytes"] == 100
