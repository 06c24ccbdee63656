"""SOAP on meshes: as on one device, resumed on another, and what its update sends."""

from collections import defaultdict

import jax
import numpy as np
import pytest

from planning import terms
from planning.step_facts import of_job
from runtime import collectives
from tests.parity.budgets import INVOLUNTARY, SOAP, UPDATES, added_up
from tests.parity.expert_cases import WITH_DENSE
from tests.parity.updates import Updates, assert_equal, on_host
from tests.training.checkpointing.states import CONFIG, RECORD, abstract, tree_of
from training.checkpointing.checkpointer import Checkpointer
from training.state import State

# The first step makes the bases, the third refreshes them, and the last uses these.
RUNS = Updates({**SOAP, "optimizer.arguments": "precondition_frequency=2"}, steps=4)
# Bases are eigenvectors up to their signs, and so are moments in them: parameters are compared, and
# of the state what has no sign.
SIGNED = ("/mu/", "_basis/")
# Those beside the two that differ most take the longest to compile.
SHORT = ("dp8, ZeRO-1", "dp2_fsdp2_tp2")
MESHES = [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in UPDATES]


def unsigned(leaves):
  return {
    name: np.abs(x) if any(part in name for part in SIGNED) else x for name, x in leaves.items()
  }


@pytest.mark.parametrize(
  "mesh", [pytest.param(x, marks=pytest.mark.long) if x == "dp8, ZeRO-1" else x for x in MESHES]
)
def test_soap_trains_as_on_one_device(mesh):
  assert_equal(unsigned(RUNS.trained(mesh)), unsigned(RUNS.trained("single")))


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_and_refreshes_send_what_their_terms_say(mesh):
  job, _, ours = RUNS.compiled(mesh)
  found = defaultdict(lambda: (0, 0)), defaultdict(lambda: (0, 0))
  for one in collectives.collectives(ours.text, job.mesh):
    sums = found["/cond/branch_1_fun/" in one.source]
    arrays, size = sums[one.kind, one.axes]
    sums[one.kind, one.axes] = (arrays + one.count * one.arrays, size + one.count * one.bytes)
  sources = (terms.matrix_exchanges, terms.updated_parameters)
  sent = [term for source in sources for term in terms.sent_by(source, of_job(job))]
  for refresh, sums in enumerate(found):
    assert sums == added_up([x for x in sent if ("new bases" in x.why) == refresh], job), refresh
  assert INVOLUNTARY not in ours.said


@pytest.mark.parametrize("mesh", SHORT)
def test_squares_are_split_as_their_kernels_are(mesh):
  job = RUNS.compiled(mesh)[0]
  shards = {"dp8, ZeRO-1": 8, "dp2_fsdp2_tp2": 4}[mesh]
  squares = {n: p for n, p in job.placements["optimizer"].items() if "/left" in n or "/right" in n}
  assert len(squares) == 4 * 7
  for name, placement in squares.items():
    axes = [a for entry in placement.spec if entry for a in np.atleast_1d(entry)]
    assert np.prod([job.devices.sizes[axis] for axis in axes]) == shards, name
    assert placement.shape[-1] == placement.shape[-2]


def test_soap_resumes_to_the_bit_and_on_another_mesh(tmp_path):
  """Saved before the refresh, whose statistics, bases and moments are all in the checkpoint."""
  with jax.enable_x64(True):
    state = RUNS.take(SHORT[0], RUNS.first(SHORT[0]), 2)
    with Checkpointer(tmp_path) as checkpointer:
      checkpointer.save(2, tree_of(state), config=CONFIG, record=RECORD)
    resumed = {}
    for mesh in SHORT:
      with Checkpointer(tmp_path, read_only=True) as checkpointer:
        _, tree = checkpointer.restore(abstract(RUNS.compiled(mesh)[0]))
      resumed[mesh] = on_host(RUNS.take(mesh, State(**tree), RUNS.steps - 2))
  for name, x in RUNS.trained(SHORT[0]).items():
    np.testing.assert_array_equal(resumed[SHORT[0]][name], x)
  assert_equal(unsigned(resumed[SHORT[1]]), unsigned(RUNS.trained("single")))


@pytest.mark.long
def test_experts_are_matrices_of_their_own_on_any_mesh():
  runs, mesh = Updates({**RUNS.keys, **WITH_DENSE}, steps=3), "fsdp=2 x expert=2 x tensor=2"
  assert_equal(unsigned(runs.trained(mesh)), unsigned(runs.trained("single")))
