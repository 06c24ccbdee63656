"""What steps with latent attention send is what theory says, compiled and planned."""

from collections import defaultdict

import pytest

from models import latent_attention, transformer
from models.spec import RESIDUAL
from planning import analytic, traced_cost
from tests.parity.budgets import compile_step, job_of, latent_job
from tests.parity.latents import LATENTS, STRATEGIES
from tests.parity.theory import theory

LARGEST = "dp2_fsdp2_tp2, sequence-parallel"
SCALARS = 200  # of the norm of the gradients, and the mean of the loss


def budget(job):
  """Returns (kind, axes) -> (arrays, bytes) of theory."""
  return {key: (row.arrays, row.bytes) for key, row in theory(job).items()}


@pytest.mark.parametrize(
  "strategy",
  [pytest.param(x, marks=() if x == LARGEST else pytest.mark.long) for x in STRATEGIES],
)
def test_a_step_sends_what_theory_says(strategy):
  ours = compile_step(latent_job(strategy))
  assert ours.sent() == budget(ours.job)


@pytest.mark.long
def test_a_budget_catches_that_the_residual_is_gathered(monkeypatch):
  job = latent_job("dp4_tp2, sequence-parallel")
  monkeypatch.setattr(latent_attention, "_IN_PLACE", RESIDUAL)
  key, more = ("all-gather", ("tensor",)), compile_step(job).sent()
  assert more[key][1] > budget(job)[key][1]


def planned(job):
  """Returns (kind, axes) -> bytes of the plan."""
  found = defaultdict(int)
  for term in analytic.terms(job):
    found[term.kind, term.axes] += round(term.runs * term.elements * term.itemsize)
  return found


def assert_planned(job, sent):
  """Compares a plan with (kind, axes) -> bytes."""
  found, wanted = planned(job), {key: size for key, size in sent.items() if size > 4 * SCALARS}
  assert found.keys() == wanted.keys()
  for key, size in wanted.items():
    assert found[key] == pytest.approx(size, rel=0.01, abs=4 * SCALARS), key


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_says_the_same(strategy):
  job = latent_job(strategy)
  assert_planned(job, {key: row.bytes for key, row in theory(job).items()})


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["dp2_fsdp2_tp2", LARGEST])
def test_a_plan_without_latent_vectors_of_queries_is_what_is_sent(strategy):
  job = job_of(strategy, **{**LATENTS, "model.query_latent_size": 0})
  assert_planned(job, {key: size for key, (_, size) in compile_step(job).sent().items()})


# Without sequence parallelism every device along tensor computes the latent vectors.
@pytest.mark.parametrize("strategy", ["fsdp8", LARGEST, "data=4 x context=2, ring"])
def test_devices_share_the_flops_of_the_model(strategy):
  job = latent_job(strategy)
  found = sum(work.flops * runs for work, runs, _ in traced_cost.operations(job))
  each = transformer.train_flops_per_example(job.config)
  assert found == pytest.approx(each * job.config.data.global_batch_size / job.mesh.size, rel=0.01)
