"""A quantized base: read from a run and from a model folder, told by its digest, merged into."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from models import model_spec
from partitioning.rules import named_leaves, nested
from runtime import forms
from tests.helpers.jobs import SMALL, first_state, make_job
from tests.interop import folders
from training import base_parameters, restore
from training.checkpointing import integrity, reading
from training.checkpointing.checkpointer import Checkpointer

KEYS = {
  **SMALL["lm"],
  "model.model_size": 128,
  "model.feedforward_size": 256,
  "model.vocabulary_size": 256,
  "model.vocabulary_multiple": 128,
}
NF4 = {"training.frozen_dtype": "nf4", "lora.rank": 2, "lora.alpha": 6.0}
SPLIT = {"mesh.fsdp": 2, "mesh.tensor": 2}


def job(**more):
  return make_job("single", "lm", **KEYS, **more)


def save(workdir, state, prepared, base=None):
  """Writes a checkpoint of step 4."""
  state = dataclasses.replace(state, step=jnp.int32(4))
  record = {"versions": {}, "data": {"name": "rows", "rows": ""}, **(base.record() if base else {})}
  tree = restore.trained_part(prepared.program, state) if base else vars(state)
  with Checkpointer(epath.Path(workdir) / integrity.FOLDER) as checkpoints:
    checkpoints.save(4, tree, config=forms.plain(prepared.config), record=record)


def arrays_of(tree):
  return {name: np.asarray(x) for name, x in named_leaves(jax.device_get(tree)).items()}


def flags(**more):
  return [f"{key}={value}" for key, value in {**KEYS, **more}.items()]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  """Returns the workdir of a run that saves all parameters, and these by name."""
  workdir, prepared = tmp_path_factory.mktemp("base"), job()
  state = first_state(prepared)
  save(workdir, state, prepared)
  return workdir, arrays_of(state.params)


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
  """Returns the workdir of a run on that base in nf4, and its parameters by name."""
  workdir = tmp_path_factory.mktemp("tuned")
  prepared = job(**NF4, **{"checkpoint.initialize_from": str(base[0])})
  state, _, found = restore.first_state(prepared)
  random = np.random.default_rng(3)
  params = jax.tree_util.tree_map_with_path(
    lambda path, x: (
      jnp.asarray(random.standard_normal(x.shape), x.dtype)
      if "lora_b" in jax.tree_util.keystr(path)
      else x
    ),
    state.params,
  )
  save(workdir, dataclasses.replace(state, params=params), prepared, found)
  return workdir, arrays_of(params)


def test_every_mesh_reads_the_codes_that_numpy_has_from_runs_and_folders(base, main, tmp_path):
  workdir, kernels = base
  code, out, err = main(
    "export", "configs/single", *flags(), f"--checkpoint={workdir}", f"--to={tmp_path}/folder"
  )
  assert (code, err) == (0, ""), out
  for where, mesh in ((workdir, SPLIT), (tmp_path / "folder", {})):
    prepared = job(**NF4, **mesh)
    wanted = named_leaves(prepared.placed_state.params)
    reader = base_parameters.ParameterReader(prepared)
    _, _, read = reader.read(str(where), wanted, optional=reader.adapters)
    assert {*read} == {*wanted} - {*reader.adapters}
    assert all(x.sharding == wanted[name].sharding for name, x in read.items())
    spec, read = model_spec(prepared.config), arrays_of(read)
    for name, x in kernels.items():
      if kind := spec.format_of(name):
        for part, codes in kind.encoded(x, np).items():
          assert read[name.removesuffix("kernel") + part].tobytes() == codes.tobytes(), (name, part)
      else:
        assert read[name].tobytes() == x.astype(jnp.bfloat16).tobytes()
  assert read["layers/attention/out/kernel_codes"].shape == (2, 64, 8, 6)  # the width first


def test_checkpoints_have_the_adapters_and_find_their_base(base, tuned):
  workdir, params = tuned
  stored = reading.stored_arrays(workdir / integrity.FOLDER / "4")
  assert not [name for name in stored if "kernel" in name and name.startswith("params")]
  step, read, _ = base_parameters.model_state(job(**NF4, **SPLIT), str(workdir))
  assert step == 4
  read = arrays_of(read)
  assert all(read[name].tobytes() == x.tobytes() for name, x in params.items())
  other = job(**{**NF4, "training.frozen_dtype": "bfloat16"})
  with pytest.raises(ValueError, match=r"in nf4, those of \S+, and training\.frozen_dtype=bfloat1"):
    base_parameters.model_state(other, str(workdir))


def test_without_a_base_the_codes_are_decoded(tuned, tmp_path):
  prepared, params = job(**NF4), tuned[1]
  state = first_state(prepared)
  state = dataclasses.replace(state, params=jax.tree.map(jnp.asarray, nested(params)))
  save(tmp_path, state, prepared)
  plain = job(**{**NF4, "training.frozen_dtype": "float32"})
  step, found = base_parameters.unquantized_parameters(prepared, plain, str(tmp_path))
  assert step == 4
  found, spec = arrays_of(found), model_spec(prepared.config)
  for name in named_leaves(plain.state.params):
    if kind := spec.format_of(name):
      parts = {part: params[name.removesuffix("kernel") + part] for part in kind.parts}
      np.testing.assert_allclose(found[name], np.asarray(kind.decoded(parts)), rtol=1e-6)
    else:
      assert found[name].tobytes() == params[name].tobytes()


def test_adapters_are_merged_into_the_kernels_as_they_were(base, tuned, main, tmp_path):
  workdir, params = tuned
  code, out, err = main(
    *("export", "configs/single", *flags(**NF4)),
    *(f"--checkpoint={workdir}", "--merge", f"--to={tmp_path}/to"),
  )
  assert (code, err) == (0, ""), out
  written = folders.tensors_of(tmp_path / "to" / "model.safetensors")
  for layer in range(2):
    a, b = (params[f"layers/mlp/up/lora_{x}"][layer] for x in "ab")
    kernel = base[1]["layers/mlp/up/kernel"][layer] + 3 * a @ b
    np.testing.assert_allclose(
      written[f"model.layers.{layer}.mlp.up_proj.weight"], kernel.T, rtol=1e-5, atol=1e-5
    )
  table = base[1]["embed/table"].astype("float32")
  np.testing.assert_array_equal(written["model.embed_tokens.weight"], table)
