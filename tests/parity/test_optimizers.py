"""Optimizers on meshes: as on one device, resumed on another, and what their updates send."""

from collections import defaultdict

import jax
import numpy as np
import pytest

from planning import terms
from planning.step_facts import of_job
from runtime import collectives
from tests.helpers.jobs import make_job
from tests.parity.budgets import INVOLUNTARY, MUON, SOAP, Step, added_up, budget, job_of, of_sources
from tests.parity.expert_cases import WITH_DENSE
from tests.parity.updates import CONSTANT, FLOAT64, Updates, assert_equal

PLAIN = {**FLOAT64, **CONSTANT}
RUNS = {
  "muon": Updates({**PLAIN, **MUON}, steps=2),
  # The first step makes the bases, the third refreshes them, and the last uses these.
  "soap": Updates({**PLAIN, **SOAP, "optimizer.arguments": "precondition_frequency=2"}, steps=4),
  "adafactor": Updates(
    {
      **PLAIN,
      "optimizer.name": "adafactor",
      "optimizer.arguments": "min_dim_size_to_factor=4,momentum=0.9,dtype_momentum=float64",
      "optimizer.weight_decay": 0.0,
    },
    steps=3,
  ),
  "schedule-free adamw": Updates(
    {**FLOAT64, "optimizer.name": "schedule_free_adamw", "optimizer.warmup_steps": 2}, steps=3
  ),
}
ZERO_1, ALL_THREE = "dp8, ZeRO-1", "dp2_fsdp2_tp2"
# The meshes that differ most; of all others: python -m tests.parity.matrix.
MESHES = dict.fromkeys(RUNS, (ZERO_1, ALL_THREE)) | {"adafactor": ("fsdp8", ALL_THREE)}
CASES = [(name, mesh) for name, meshes in MESHES.items() for mesh in meshes]
# SOAP's bases are eigenvectors up to their signs, and so are moments in them: parameters are
# compared, and of the state what has no sign.
SIGNED = ("/mu/", "_basis/")


def unsigned(leaves):
  return {
    name: np.abs(x) if any(part in name for part in SIGNED) else x for name, x in leaves.items()
  }


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_updates_are_those_of_one_device(name, mesh):
  found, wanted = (RUNS[name].trained(one) for one in (mesh, "single"))
  assert_equal(unsigned(found), unsigned(wanted))


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_updates_send_what_their_terms_say(name, mesh):
  job, _, ours = RUNS[name].compiled(mesh)
  assert INVOLUNTARY not in ours.said
  if name != "soap":
    # No term is of the means of a factored moment over dims that are split.
    known = of_sources(job, terms.updated_parameters, terms.matrix_exchanges)
    assert ours.sent() == known or name == "adafactor"
    return
  found = defaultdict(lambda: (0, 0)), defaultdict(lambda: (0, 0))
  for one in collectives.collectives(ours.text, job.mesh):
    sums = found["/cond/branch_1_fun/" in one.source]
    arrays, size = sums[one.kind, one.axes]
    sums[one.kind, one.axes] = (arrays + one.count * one.arrays, size + one.count * one.bytes)
  sources = (terms.matrix_exchanges, terms.updated_parameters)
  sent = [term for source in sources for term in terms.sent_by(source, of_job(job))]
  for refresh, sums in enumerate(found):
    assert sums == added_up([x for x in sent if ("new bases" in x.why) == refresh], job), refresh


# SOAP's before the refresh, whose statistics, bases and moments are all in the checkpoint.
@pytest.mark.parametrize(("name", "last"), [("muon", 1), ("soap", 2), ("schedule-free adamw", 1)])
def test_a_run_resumes_to_the_bit_and_on_another_mesh(name, last, tmp_path):
  runs, (one, other) = RUNS[name], MESHES[name]
  moved = runs.resumed(tmp_path / "moved", one, other, last)
  assert_equal(unsigned(moved), unsigned(runs.trained("single")))
  same = runs.resumed(tmp_path / "same", one, one, last)
  for leaf, x in runs.trained(one).items():
    np.testing.assert_array_equal(same[leaf], x, err_msg=leaf)


def test_adafactor_resumes_on_another_mesh(tmp_path):
  runs = RUNS["adafactor"]
  assert_equal(runs.resumed(tmp_path, *MESHES["adafactor"]), runs.trained("single"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["muon", "soap"])
def test_experts_are_matrices_of_their_own_on_any_mesh(name):
  runs = Updates({**RUNS[name].keys, **WITH_DENSE}, steps=3)
  mesh = "fsdp=2 x expert=2 x tensor=2"
  assert_equal(unsigned(runs.trained(mesh)), unsigned(runs.trained("single")))


def test_a_step_sends_what_its_gradients_and_its_update_send():
  job = job_of("dp8", **MUON)
  ours = Step(job, job.compile_train_step().function.as_text(), "")
  assert ours.sent() == budget(job)


# ------------------------------ where state is ------------------------------


def test_muons_state_has_one_number_for_each_of_its_parameters():
  job = RUNS["muon"].compiled(ZERO_1)[0]
  placed = job.placements["optimizer"]
  momenta = {n: p for n, p in placed.items() if "/momentum/" in n}
  assert len(momenta) == 7
  for name, momentum in momenta.items():
    parameter = name.partition("/momentum/")[2]
    assert momentum.shape == job.placements["parameters"][parameter].shape
    assert not any(n != name and n.endswith(parameter) for n in placed)
    assert any(axes for axes in momentum.spec), name


@pytest.mark.parametrize(("mesh", "shards"), [(ZERO_1, 8), (ALL_THREE, 4)])
def test_soaps_squares_are_split_as_their_kernels_are(mesh, shards):
  job = RUNS["soap"].compiled(mesh)[0]
  squares = {n: p for n, p in job.placements["optimizer"].items() if "/left" in n or "/right" in n}
  assert len(squares) == 4 * 7
  for name, placement in squares.items():
    axes = [a for entry in placement.spec if entry for a in np.atleast_1d(entry)]
    assert np.prod([job.devices.sizes[axis] for axis in axes]) == shards, name
    assert placement.shape[-1] == placement.shape[-2]


@pytest.mark.parametrize("strategy", ["dp8", "fsdp8", "dp4_tp2"])
def test_factored_state_is_sharded_as_what_is_left_of_its_parameter(strategy):
  with jax.enable_x64(True):
    job = make_job(strategy, "lm", **RUNS["adafactor"].keys)
  rows = job.placements["optimizer"]["optimizer/0/v_row/layers/mlp/up/kernel"]
  columns = job.placements["optimizer"]["optimizer/0/v_col/layers/mlp/up/kernel"]
  axes = {"dp8": (None, None), "fsdp8": ("fsdp", None), "dp4_tp2": (None, "tensor")}[strategy]
  assert (rows.letters, tuple(rows.spec)) == ("LD", (None, axes[0]))  # F, the largest, is gone
  assert (columns.letters, tuple(columns.spec)) == ("LF", (None, axes[1]))


@pytest.mark.parametrize(
  ("keys", "trees"),
  [
    (RUNS["schedule-free adamw"].keys, ("iterates", "second_moment")),
    ({"model.base_width": 10}, ("mu", "nu")),  # AdamW under muP
  ],
)
def test_state_of_the_parameters_shapes_is_sharded_as_they_are(keys, trees):
  with jax.enable_x64("training.parameter_dtype" in keys):
    job = job_of(ALL_THREE, **keys)
  placed = job.placements["optimizer"]
  for parameter, p in job.placements["parameters"].items():
    for tree in trees:
      [found] = [x for name, x in placed.items() if name.endswith(f"/{tree}/{parameter}")]
      assert (found.letters, found.spec) == (p.letters, p.spec), (tree, parameter)
