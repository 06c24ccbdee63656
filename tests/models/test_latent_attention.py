"""Multi-head latent attention: values beside NumPy, on meshes, and in pieces from its cache."""

import functools
import math

import jax
import numpy as np
import pytest

from models import latent_attention, model_spec, transformer
from partitioning.rules import named_leaves
from tests.configs.loading import finalized
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
BIASES = {"model.biases": "attention", "model.norm_epsilon": 1e-2, "model.latent_norm_epsilon": 0.1}


def with_biases(path, x):
  """Returns a bias that is not zero; another parameter as it is."""
  return 0.3 * np.cos(np.arange(x.size)).reshape(x.shape) if path[-1].key == "bias" else x


@pytest.mark.parametrize("keys", [{}, OPTIONS, BIASES])
def test_the_loss_is_numpys(keys):
  with jax.enable_x64(True):
    job = make_job("single", "lm", **{**LATENTS, **FLOAT64, **keys})
    params, batch = first_state(job).params, host_batch(job)
    params = jax.tree.map_with_path(with_biases, params)
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


# The others in `make test-long`.
OFTEN = ("all, ring",)


@pytest.mark.parametrize(
  "mesh", [pytest.param(x, marks=() if x in OFTEN else pytest.mark.long) for x in MESHES]
)
def test_gradients_on_a_mesh_are_those_of_one_device(mesh):
  assert_equal(on_mesh(mesh), on_one_device(), "float64")


@pytest.mark.long
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


@pytest.mark.parametrize(
  ("heads", "width", "query_latent", "published"),
  [
    # DeepSeek-V2-Lite and V3: q (or q_a, its norm, q_b), kv_a, its norm, kv_b and o of a layer.
    (16, 2048, 0, 6_291_456 + 1_179_648 + 512 + 2_097_152 + 4_194_304),
    (128, 7168, 1536, 11_010_048 + 1536 + 37_748_736 + 4_128_768 + 512 + 16_777_216 + 117_440_512),
  ],
)
def test_a_layer_has_the_published_parameters(heads, width, query_latent, published):
  keys = {"head_size": 192, "rotary_size": 64, "value_head_size": 128, "latent_size": 512}
  keys |= {"heads": heads, "kv_heads": heads, "model_size": width, "attention": "latent"}
  keys |= {"query_latent_size": query_latent, "layers": 1}
  config = finalized("lm", **{f"model.{key}": value for key, value in keys.items()})
  spec = model_spec(config)
  own = [dims for name, dims in spec.parameters.items() if name.startswith("layers/attention/")]
  assert sum(math.prod(spec.sizes(dims)) for dims in own) == published


# ---- The cache ----


LONG = pytest.mark.long


@pytest.mark.parametrize(
  ("strategy", "absorbed"),
  [
    ("single", True),
    ("single", False),
    pytest.param("dp2_fsdp2_tp2", None, marks=LONG),
    pytest.param("dp2_fsdp2_tp2", True, marks=LONG),
    pytest.param("dp2_fsdp2_tp2", False, marks=LONG),
  ],
)
def test_reading_in_pieces_gives_the_logits_of_reading_at_once(strategy, absorbed, monkeypatch):
  if absorbed is not None:
    monkeypatch.setattr(latent_attention, "_absorbs", lambda *_: absorbed)
  with jax.enable_x64(True):
    job = make_job(strategy, "lm", **{**LATENTS, **FLOAT64, "model.window": 5})
    assert_pieces_give_what_the_whole_gives(job, 1e-12)


def test_the_cache_has_latent_vectors_and_rotary_keys_alone():
  job = make_job("single", "lm", **LATENTS)
  cache = jax.eval_shape(lambda: transformer.empty_cache(model_spec(job.config), rows=3, slots=5))
  arrays = {name: x for name, x in cache.items() if name != "lengths"}
  model = job.config.model
  numbers = model.layers * (model.latent_size + model.rotary_size)
  assert sum(x.size for x in arrays.values()) == 3 * 5 * numbers
  for name, x in arrays.items():
    assert len(transformer.CACHE[name]) == x.ndim


def test_projections_are_absorbed_for_a_token_and_not_for_a_prompt():
  latents, kernel = (1, 4096, 512), (512, 16, 128 + 128)  # of DeepSeek-V2-Lite
  assert latent_attention._absorbs((1, 1, 16, 192), latents, kernel)
  assert not latent_attention._absorbs((1, 4096, 16, 192), latents, kernel)
