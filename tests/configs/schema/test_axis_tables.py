"""The axis tables name the dims of their models."""

import pytest

from configs.schema import axis_tables
from models import MODELS
from partitioning.mesh_sizes import AXES
from tests.helpers.jobs import make_job


@pytest.mark.parametrize("recipe", ["lm", "mlp"])
def test_the_axis_tables_hold_the_dims_that_the_model_has_and_no_other(recipe):
  every_dim = {"model.positions": "learned", "lora.rank": 3}
  job = make_job("single", recipe, **(every_dim if recipe == "lm" else {}))
  tables = axis_tables.AXIS_TABLES[job.config.model.name]
  letters = "".join(MODELS[job.config.model.name].PARAMETERS.values())
  assert {*tables["parameters"]} == {job.legend[letter].name for letter in letters}
  letters = "".join(c.letters for c in job.activations.seen)
  letters += "".join(array.letters for array in job.placements["batch"].values())
  assert {*tables["activations"]} == {job.legend[letter].name for letter in letters}
  every = {dim.name for dim in job.legend.values()}
  assert {*tables["parameters"], *tables["activations"]} == every
  assert {axis for t in tables.values() for axes in t.values() for axis in axes} <= {*AXES}
