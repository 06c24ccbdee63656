"""Pipeline stages write, score and evaluate as one device does: texts and scores stage by stage."""

import functools

import jax
import numpy as np
import pytest

from inference.request import Request
from inference.sampler import Sampler
from inference.scoring import Continuation, Scorer
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.parity.mixers import HYBRID_EXPERTS
from tests.parity.variants import FAMILIES

KEYS = {
  "training.parameter_dtype": "float64",
  "training.compute_dtype": "float64",
  "training.matmul_precision": "highest",
}
MESHES = {
  "stage2_data2": {"mesh.stage": 2, "mesh.data": 2},
  "stage4_tensor2": {"mesh.stage": 4, "mesh.tensor": 2},
  "stage2_fsdp2_context2": {"mesh.stage": 2, "mesh.fsdp": 2, "mesh.context": 2},
}
# Windows and rotary bases take turns: each layer needs its own. Hybrids have two stacks of layers.
FAMILY = {**FAMILIES, "model.layers": 4}
HYBRID = "hybrid: "
MESHES |= {f"{HYBRID}{name}": MESHES[name] for name in ("stage2_data2", "stage2_fsdp2_context2")}
CASES = [pytest.param(x, marks=() if x == "stage2_data2" else pytest.mark.long) for x in MESHES]
# Its losses are computed in some ticks only.
CHUNKS = {
  **{"mesh.stage": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
  **{"training.pipeline": "interleaved", "training.microbatches": 4},
}
EVALUATED = {**MESHES, "stage2_fsdp2_tensor2, interleaved": CHUNKS}
GREEDY = Request((bytes([3, 5, 7]), b"", bytes([9, 60, 9, 1, 2])), 7, temperature=0.0)


def prepared(mesh):
  model = HYBRID_EXPERTS if mesh.startswith(HYBRID) else FAMILY
  return make_job("single", "lm", **{**model, **KEYS, **EVALUATED.get(mesh, {})})


def one_device(mesh):
  return f"{HYBRID if mesh.startswith(HYBRID) else ''}one device"


@functools.cache
def written(mesh):
  """Returns texts by greedy decoding."""
  with jax.enable_x64(True):
    job = prepared(mesh)
    return Sampler(job, GREEDY)(first_state(job).params, GREEDY)


@functools.cache
def scores(mesh):
  """Returns log-likelihoods of continuations."""
  random = np.random.default_rng(5)
  given = [Continuation(random.integers(1, 61, n).astype(np.uint32), n // 2) for n in (5, 9, 12)]
  with jax.enable_x64(True):
    job = prepared(mesh)
    found = Scorer(job)((first_state(job).params, {}), given)
  return [one.log_likelihood for one in found]


@functools.cache
def evaluated(mesh):
  """Returns the sums over a batch, by the forward passes of the schedule."""
  with jax.enable_x64(True):
    job = prepared(mesh)
    found = job.compile_eval_step().function(first_state(job).params, place(job, host_batch(job)))
    return {name: float(x) for name, x in jax.device_get(found).items() if np.ndim(x) == 0}


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_texts_are_those_of_one_device(mesh):
  assert written(mesh) == written(one_device(mesh))
  assert len({*written(mesh)}) == len(GREEDY.prompts)


@pytest.mark.parametrize("mesh", CASES)
def test_scores_are_those_of_one_device(mesh):
  np.testing.assert_allclose(scores(mesh), scores(one_device(mesh)), rtol=1e-12)


@pytest.mark.parametrize(
  "mesh", [*CASES, pytest.param("stage2_fsdp2_tensor2, interleaved", marks=pytest.mark.long)]
)
def test_an_evaluation_is_that_of_one_device(mesh):
  ours, wanted = evaluated(mesh), evaluated(one_device(mesh))
  assert ours.keys() == wanted.keys() >= {"loss", "weight"}
  for name, value in wanted.items():
    assert ours[name] == pytest.approx(value, rel=1e-12), name
