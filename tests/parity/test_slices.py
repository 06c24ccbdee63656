"""Several slices, simulated by groups of devices: one device's numbers, and who speaks to whom."""

import pytest

from runtime import collectives
from tests.parity.comparison import SEQUENCE_PARALLEL, assert_equal, reference, train

SLICED = {
  "fsdp in and over 2 slices": {"mesh.fsdp": 2, "mesh_dcn.fsdp": 2, "mesh.data": 2},
  "data over 2 slices of fsdp and tensor": {
    "mesh_dcn.data": 2,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    **SEQUENCE_PARALLEL,
  },
  "stages over 2 slices of data": {
    "mesh_dcn.stage": 2,
    "mesh.data": 4,
    "training.microbatches": 4,
  },
}


def slices_of(groups, job):
  """Returns how many slices each group of devices touches."""
  count = 1
  for size in job.devices.slices.values():
    count *= size
  each = job.mesh.size // count
  places = [device.id // each for device in job.mesh.devices.flat]
  return {len({places[place] for place in group}) for group in groups}


CASES = [pytest.param(name, marks=[pytest.mark.long] * ("stages" in name)) for name in SLICED]


@pytest.mark.parametrize("mesh", CASES)
def test_trains_as_one_device_does_and_only_slow_axes_cross_slices(mesh):
  ours = train("lm", "float64", SLICED[mesh])
  assert_equal(ours, reference("lm", "float64"), "float64")
  slow, crossing = set(ours.job.devices.slices), set()
  found = collectives.collectives(ours.trained.text, ours.job.mesh)
  for one in found:
    touched = slices_of(one.groups, ours.job)
    if not slow & set(one.axes):
      assert touched == {1}, f"{one.name} along {one.axes} leaves its slice"
    elif max(touched) > 1:
      crossing |= set(one.axes)
  assert slow <= crossing
  assert any(one.axes in (("tensor",), ("fsdp",), ("data",)) for one in found)
