"""The vision transformer on meshes: it trains as on one device, and sends what formulas say."""

import pytest

from planning import terms
from tests.helpers.jobs import make_job
from tests.parity.budgets import VIT_STRATEGIES, assert_within_budget, measured, of_sources
from tests.parity.comparison import SEQUENCE_PARALLEL, assert_equal, reference, train

SHORT = "dp2_fsdp2_tp2, sequence-parallel"
CASES = [pytest.param(x, marks=[pytest.mark.long] * (x != SHORT)) for x in VIT_STRATEGIES]


@pytest.mark.parametrize("strategy", CASES)
def test_it_trains_as_on_one_device_and_sends_what_its_terms_say(strategy):
  ours, step = measured(strategy, "vit")
  assert_equal(ours, reference("vit", "float64"), "float64")
  assert_within_budget(step, 8)


# With other options on all meshes: python -m tests.parity.matrix.
def test_where_the_sequence_is_split_too_it_trains_as_on_one_device():
  mesh = {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2, **SEQUENCE_PARALLEL}
  assert_equal(train("vit", "float64", mesh), reference("vit", "float64"), "float64")


def test_a_plan_gathers_keys_and_values_of_whole_images():
  job = make_job("single", "vit", **{"mesh.data": 2, "mesh.context": 4})
  sent = of_sources(job, terms.sequence_attention)
  assert sent["all-gather", ("context",)][1] == 4 * 2 * 2 * 12 * 16 * 40  # of L, k and v, b T D
