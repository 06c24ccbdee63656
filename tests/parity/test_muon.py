"""Muon on meshes: as on one device, resumed on another, and what its update sends."""

import pytest

from planning import terms
from tests.parity.budgets import INVOLUNTARY, MUON, UPDATES, Step, budget, job_of, of_sources
from tests.parity.expert_cases import WITH_DENSE
from tests.parity.updates import Updates, assert_equal

MESHES = [name for name in UPDATES if name != "dp8"]  # of which a complete step is compiled
RUNS = Updates(MUON, steps=2)


@pytest.mark.parametrize("mesh", MESHES)
def test_muon_trains_as_on_one_device(mesh):
  assert_equal(RUNS.trained(mesh), RUNS.trained("single"))


@pytest.mark.parametrize("mesh", MESHES)
def test_the_update_sends_what_its_terms_say(mesh):
  job, _, ours = RUNS.compiled(mesh)
  assert ours.sent() == of_sources(job, terms.updated_parameters, terms.matrix_exchanges)
  assert INVOLUNTARY not in ours.said


def test_a_step_sends_what_its_gradients_and_its_update_send():
  job = job_of("dp8", **MUON)
  ours = Step(job, job.compile_train_step().function.as_text(), "")
  assert ours.sent() == budget(job)


@pytest.mark.parametrize("mesh", ["fsdp8", "dp8, ZeRO-1"])
def test_the_state_has_one_number_for_each_of_muons_parameters(mesh):
  job = RUNS.compiled(mesh)[0]
  placed = job.placements["optimizer"]
  momenta = {n: p for n, p in placed.items() if "/momentum/" in n}
  assert len(momenta) == 7
  for name, momentum in momenta.items():
    parameter = name.partition("/momentum/")[2]
    assert momentum.shape == job.placements["parameters"][parameter].shape
    assert not any(n != name and n.endswith(parameter) for n in placed)
    assert any(axes for axes in momentum.spec), name


def test_muon_is_saved_and_resumes_on_another_mesh(tmp_path):
  assert_equal(RUNS.resumed(tmp_path, "fsdp8", "tp8"), RUNS.trained("single"))


@pytest.mark.long
def test_experts_are_matrices_of_their_own_on_any_mesh():
  runs, mesh = Updates({**MUON, **WITH_DENSE}, steps=2), "fsdp=2 x expert=2 x tensor=2"
  assert_equal(runs.trained(mesh), runs.trained("single"))
