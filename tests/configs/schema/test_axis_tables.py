"""The axis tables name the dims of their models."""

import pytest

from configs.schema import axis_tables
from models import model_spec
from partitioning.mesh_sizes import AXES
from tests.helpers.jobs import make_job
from tests.parity.latents import LATENTS
from tests.parity.mixers import CONVOLUTION, DELTA, KIMI, MAMBA

EVERY_DIM = {"model.positions": "learned", "lora.rank": 3}
EXPERTS = {"model.experts": 4, "model.dense_layers": 1, "model.shared_feedforward_size": 8}
ONE_PART = {**MAMBA, "model.layer_types": ("mixer", "mlp", "full")}


@pytest.mark.parametrize("recipe", ["lm", "mlp"])
def test_the_axis_tables_hold_the_dims_that_the_model_has_and_no_other(recipe):
  keys = (
    [
      *(EVERY_DIM, LATENTS, EXPERTS, DELTA, {**DELTA, **EXPERTS}, KIMI, CONVOLUTION, ONE_PART),
      {"model.mtp_layers": 1},
    ]
    if recipe == "lm"
    else [{}]
  )
  jobs = [make_job("single", recipe, **one) for one in keys]
  job = jobs[0]
  tables = axis_tables.AXIS_TABLES[job.config.model.name]
  letters = "".join(
    letters for one in jobs for letters in model_spec(one.config).parameters.values()
  )
  assert {*tables["parameters"]} == {job.legend[letter].name for letter in letters}
  letters = "".join(c.letters for one in jobs for c in one.activations.seen)
  letters += "".join(array.letters for array in job.placements["batch"].values())
  if recipe == "lm":
    letters += "ot"  # of the caches of generation alone, and of what is stored of a teacher
  assert {*tables["activations"]} == {job.legend[letter].name for letter in letters}
  every = {dim.name for dim in job.legend.values()}
  assert {*tables["parameters"], *tables["activations"]} == every
  assert {axis for t in tables.values() for axes in t.values() for axis in axes} <= {*AXES}
