"""Multi-head latent attention: values beside NumPy, on meshes, and in pieces from its cache."""

import functools

import jax
import numpy as np
import pytest

from models import latent_attention, transformer
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job
from tests.models import numpy_decoder
from tests.models.test_transformer import assert_pieces_give_what_the_whole_gives
from tests.parity.comparison import assert_equal, train
from tests.parity.latents import LATENTS, MESHES

FLOAT64 = {
  "training.parameter_dtype": "float64",
  "training.compute_dtype": "float64",
  "training.matmul_precision": "highest",
}
# What other models have, and what else attention can do.
OPTIONS = {
  "model.query_latent_size": 0,
  "model.rotary_pairs": "adjacent",
  "model.attention_soft_cap": 2.0,
  "model.window": 5,
  "model.separate_documents": True,
}


@pytest.mark.parametrize("keys", [{}, OPTIONS])
def test_the_loss_is_numpys(keys):
  with jax.enable_x64(True):
    job = make_job("single", "lm", **{**LATENTS, **FLOAT64, **keys})
    params, batch = first_state(job).params, host_batch(job)
    function = job.compile(job.program.sums, job.state.params, job.batch).function
    sums = function(params, batch)
    names = ("tokens", "targets", "weights", "segments")
    arrays = {name: np.asarray(x) for name, x in named_leaves(params).items()}
    wanted = numpy_decoder.loss(job.config, arrays, *(batch[name] for name in names))
    assert float(sums["loss"] / sums["weight"]) == pytest.approx(wanted, rel=1e-12)


@functools.cache
def on_one_device(options=False):
  return train("lm", "float64", {**LATENTS, **(OPTIONS if options else {})})


@functools.cache
def on_mesh(mesh):
  return train("lm", "float64", {**LATENTS, **MESHES[mesh]})


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_on_a_mesh_are_those_of_one_device(mesh):
  assert_equal(on_mesh(mesh), on_one_device(), "float64")


def test_gradients_of_options_on_a_mesh_are_those_of_one_device():
  ours = train("lm", "float64", {**LATENTS, **OPTIONS, **MESHES["all, gathered"]})
  assert_equal(ours, on_one_device(True), "float64")


def test_tensor_splits_heads_and_fsdp_every_kernel():
  job = on_mesh("fsdp2_tensor4, sequence-parallel").job
  names = {n: p for n, p in job.placements["parameters"].items() if "attention/" in n}
  kernels = {n.split("/")[-2]: tuple(p.spec) for n, p in names.items() if n.endswith("kernel")}
  assert kernels == {
    "query_latent": (None, "fsdp", None),
    "latent": (None, "fsdp", None),
    "rotary_key": (None, "fsdp", None),
    "query": (None, "fsdp", "tensor", None),
    "key_value": (None, "fsdp", "tensor", None),
    "out": (None, "tensor", None, "fsdp"),
  }
  seen = {one.letters: tuple(one.spec) for one in job.activations.seen}
  assert seen["BRC"] == ("fsdp", "tensor", None)  # gathered instead of the residual
  assert seen["BTKJ"] == seen["BTNU"] == ("fsdp", None, "tensor", None)


# ---- The cache ----


@pytest.mark.parametrize("absorbed", [True, False, None])
@pytest.mark.parametrize("strategy", ["single", "dp2_fsdp2_tp2"])
def test_reading_in_pieces_gives_the_logits_of_reading_at_once(strategy, absorbed, monkeypatch):
  if absorbed is not None:
    monkeypatch.setattr(latent_attention, "_absorbs", lambda *_: absorbed)
  with jax.enable_x64(True):
    job = make_job(strategy, "lm", **{**LATENTS, **FLOAT64, "model.window": 5})
    assert_pieces_give_what_the_whole_gives(job, 1e-12)


def test_the_cache_has_latent_vectors_and_rotary_keys_alone():
  job = make_job("single", "lm", **LATENTS)
  cache = jax.eval_shape(lambda: transformer.empty_cache(job.config, rows=3, slots=5))
  arrays = {name: x for name, x in vars(cache).items() if name != "lengths"}
  model = job.config.model
  numbers = model.layers * (model.latent_size + model.rotary_size)
  assert sum(x.size for x in arrays.values()) == 3 * 5 * numbers
  for name, x in arrays.items():
    assert len(transformer.CACHE[name]) == x.ndim


def test_projections_are_absorbed_for_a_token_and_not_for_a_prompt():
  latents, kernel = (1, 4096, 512), (512, 16, 128 + 128)  # of DeepSeek-V2-Lite
  assert latent_attention._absorbs((1, 1, 16, 192), latents, kernel)
  assert not latent_attention._absorbs((1, 4096, 16, 192), latents, kernel)
