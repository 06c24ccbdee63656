"""`invariance`: steps that depend on what they must not depend on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from checks import equality, invariance
from checks.case import Case
from tests.checks import decoder

# Bug -> what is found, and the likely cause.
MUTANTS = {
  # Averages of microbatches with different numbers of tokens (meta-pytorch/torchtune#1875,
  # ml-explore/mlx-lm#1413).
  "mean_of_means": ("2 microbatches changes loss at step 1", "each microbatch's mean"),
  # Masked positions count in the loss (huggingface/transformers#2759).
  "masked_counted": ("what stands at masked positions changes loss at step 1", "counts masked"),
  # The weight of a row depends on its place: a textbook error.
  "rows_weighted": ("another order of rows changes loss at step 1", "weighted by their place"),
}


@pytest.fixture
def known(monkeypatch, one):
  """Has `equality` take the bounds of the decoder without bugs: rounding is the same."""
  _, bounds, wide = equality.reference_of(one)
  trained = functools.cache(lambda case: (equality.train(case, wide=wide), bounds, wide))
  monkeypatch.setattr(equality, "reference_of", trained)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("bug", MUTANTS)
def test_what_must_not_matter(bug):
  what, cause = MUTANTS[bug]
  case = Case(decoder.program({}, bug))
  changes = [one for one in invariance._variants(case.program) if what.startswith(one[0])]
  [finding] = [finding for one in changes for finding in invariance._to_rounding(case, *one)]
  assert finding.what.startswith(what)
  assert cause in finding.cause


def test_a_clean_program_gives_no_finding(one, clean):
  outcome = invariance.check(one, one)
  assert outcome.findings == []
  assert outcome.note == (
    "two runs, restored state, types and shardings, donation, another order of rows, "
    "2 microbatches, what stands at masked positions"
  )
  assert [*invariance._kept_types(clean), *invariance._donated(clean)] == []


def test_numbers_of_the_host_make_two_runs_differ(one):
  """A textbook error."""
  found = invariance.check(Case(decoder.program({}, "noise_of_host")), one).findings
  assert found[0].what == "two runs from the same state on the same batch differ in 1 leaf"
  assert found[0].where == "state/params/norm"


def test_a_checkpoint_that_rounds(one):
  """Modelled on KempnerInstitute/KempnerForge#114: moments are restored in fewer bits."""

  def save_and_restore(state):
    rounded = {k: m.astype(jnp.bfloat16).astype(m.dtype) for k, m in state["momentum"].items()}
    return {**state, "momentum": rounded}

  program = decoder.program({}, momentum=True)
  describe = dataclasses.replace(program.describe, save_and_restore=save_and_restore)
  case = Case(dataclasses.replace(program, describe=describe))
  [finding] = invariance.check(case, one).findings
  assert "8 leaves were restored with other bits" in finding.what
  assert finding.where == "momentum/down"


def test_a_checkpoint_that_leaves_a_part_out():
  """As random numbers' state in huggingface/accelerate#4283, NVIDIA-NeMo/Megatron-Bridge#3832."""
  program = decoder.program({}, momentum=True)
  describe = dataclasses.replace(
    program.describe, save_and_restore=lambda state: {"params": state["params"]}
  )
  case = Case(dataclasses.replace(program, describe=describe))
  [finding] = invariance._restored(case, case.start, after=None)
  assert finding.what == "the restored state is another tree"


def test_a_step_that_narrows_the_state():
  """Modelled on AI-Hypercomputer/maxtext#495, where the state is widened."""
  case = Case(decoder.program({}, "state_narrowed"))
  [finding] = invariance._kept_types(case)
  assert finding.lines == [
    "params/head: float32[16, 40] cut by no axis becomes bfloat16[16, 40] cut by no axis"
  ]
  [finding] = invariance._donated(case)
  assert "of the state's buffers are not reused" in finding.what


def test_a_step_that_was_not_told_to_donate(one):
  """Modelled on poets-ai/elegy#226."""
  program = dataclasses.replace(one.program, step=jax.jit(one.program.step))
  [finding] = invariance._donated(Case(program))
  assert finding.numbers["reused_bytes"] == 0
