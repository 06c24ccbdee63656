"""State in fewer bytes on meshes: the same bits as on one device, resumed on another, no messages.

Given the same gradients, that is: these differ between meshes in the last bits of their sums.
"""

import numpy as np
import pytest

from partitioning.rules import LayoutError, named_leaves
from tests.helpers.flips import altered
from tests.helpers.jobs import replica_check
from tests.parity.budgets import INVOLUNTARY, job_of
from tests.parity.updates import Updates
from training.replica_check import CopiesDifferError

NARROW = {"training.parameter_dtype": "bfloat16", "optimizer.state_dtype": "int8"}
# Of a network with few arrays, of which blocks of 128 leave eight parts of each dim.
MLP = {"model.input_size": 16, "model.model_size": 64, "model.feedforward_size": 128, **NARROW}
RUNS = Updates(MLP, steps=2, recipe="mlp", x64=False)
MESHES = ("dp8, ZeRO-1", "dp2_fsdp2_tp2")


def assert_same_bits(ours, wanted):
  assert ours.keys() == wanted.keys()
  assert {x.dtype.name for x in ours.values()} == {"bfloat16", "float32", "uint8", "int32"}
  assert [name for name, x in wanted.items() if x.tobytes() != ours[name].tobytes()] == []


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_computes_the_same_bits(mesh):
  assert_same_bits(RUNS.trained(mesh), RUNS.trained("single"))
  begun = RUNS.take("single", RUNS.first("single"), 0)
  assert not any(np.array_equal(x, RUNS.trained(mesh)[name]) for name, x in begun.items())


@pytest.mark.parametrize("mesh", MESHES)
def test_an_update_sends_nothing_but_what_updated_parameters(mesh):
  job, _, ours = RUNS.compiled(mesh)
  sent = {kind: size for kind, (_, size) in ours.sent().items()}
  split = {n.partition("mu/")[2] for n, p in job.placements["optimizer"].items() if any(p.spec)}
  split = {name.removesuffix("/codes") for name in split}
  params = [x for name, x in named_leaves(job.state.params).items() if name in split]
  gathered = {("all-gather", ("data",)): sum(4 * x.size for x in params)}
  assert sent == (gathered if "ZeRO-1" in mesh else {})
  assert INVOLUNTARY not in ours.said


def test_it_is_saved_and_resumes_on_another_mesh_to_the_bit(tmp_path):
  assert_same_bits(RUNS.resumed(tmp_path, *MESHES), RUNS.trained("single"))


def test_a_mesh_that_would_cut_blocks_is_refused():
  with pytest.raises(LayoutError) as refusal:
    job_of("fsdp8", **NARROW, **{"model.model_size": 32, "model.feedforward_size": 128})
  assert (
    "optimizer/inner/0/mu/layers/mlp/up/kernel/scales: shards of 4 of dim D = 32 (mesh axis "
    "fsdp=8) would cut blocks of 8, whose shape 1 x 8 x 16 is the same on every mesh; split it "
    "over at most 4 devices, or set optimizer.state_dtype=bfloat16"
  ) in str(refusal.value)


def test_copies_of_codes_are_compared():
  job, state = RUNS.compiled("dp2_fsdp2_tp2")[0], RUNS.first("dp2_fsdp2_tp2")
  check = replica_check(job)
  check.before_save(1, state)
  mu = state.optimizer.inner[0].mu
  blocks = mu["layer_2"]["kernel"]
  mu["layer_2"]["kernel"] = blocks._replace(codes=altered(blocks.codes, 3, (5, 1)))
  with pytest.raises(CopiesDifferError, match="mu/layer_2/kernel/codes"):
    check.before_save(2, state)
