"""What steps with latent attention send is what formulas say, to the byte."""

import pytest

from models import model_spec
from planning import traced_step
from planning.step_facts import of_job
from tests.parity.budgets import budget, compile_step, latent_job
from tests.parity.latents import STRATEGIES

LARGEST = "dp2_fsdp2_tp2, sequence-parallel"


@pytest.mark.parametrize(
  "strategy",
  [pytest.param(x, marks=() if x == LARGEST else pytest.mark.long) for x in STRATEGIES],
)
def test_a_step_sends_what_its_terms_say(strategy):
  ours = compile_step(latent_job(strategy))
  assert ours.sent() == budget(ours.job)


# Without sequence parallelism every device along tensor computes the latent vectors.
@pytest.mark.parametrize("strategy", ["fsdp8", LARGEST, "data=4 x context=2, ring"])
def test_devices_share_the_flops_of_the_model(strategy):
  job = latent_job(strategy)
  found = sum(work.flops * runs for work, runs, _ in traced_step.operations(of_job(job)))
  each = model_spec(job.config).train_flops_per_example()
  assert found == pytest.approx(each * job.config.data.global_batch_size / job.mesh.size, rel=0.01)
