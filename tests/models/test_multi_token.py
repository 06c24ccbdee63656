"""Layers that predict further tokens: their loss beside NumPy's, their tensors, what is refused."""

import jax
import numpy as np
import pytest
from flax import nnx

from interop import name_maps, read_weights
from models import model_spec, multi_token
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job
from tests.interop import folders
from tests.models import numpy_decoder
from tests.models.test_mixers import FLOAT64

FURTHER = {
  "model.mtp_layers": 2,
  "training.mtp_weight": 0.7,
  "model.separate_documents": True,
  "data.sequence_length": 24,
}


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_loss_is_numpys(chunks):
  with jax.enable_x64(True):
    job = make_job("single", "lm", **FURTHER, **FLOAT64, **{"training.loss_chunks": chunks})
    params, batch = first_state(job).params, host_batch(job)

    def both(params, batch):
      model = nnx.merge(job.program.graphdef, params)
      return model.loss_sums(batch, jax.random.key(0)), model.loss_sums(batch)

    sums, evaluated = jax.device_get(
      job.compile(both, job.state.params, job.batch).function(params, batch)
    )
  arrays = {name: np.asarray(x) for name, x in named_leaves(params).items()}
  wanted = numpy_decoder.loss_of_further_tokens(job.config, arrays, batch) / 2
  assert len({*batch["segments"].ravel()}) > 1
  assert wanted > 0
  assert float(sums["mtp_loss"]) == pytest.approx(wanted, rel=1e-12)
  assert float(sums["loss"]) == pytest.approx(float(evaluated["loss"]) + 0.7 * wanted, rel=1e-12)
  assert "mtp_loss" not in evaluated  # whose loss is the cross-entropy of the next token


def test_no_target_is_beyond_its_document_or_row():
  batch = {
    "targets": np.array([[5, 6, 7, 8, 9]]),
    "weights": np.array([[1.0, 1.0, 0.5, 1.0, 1.0]]),
    "segments": np.array([[0, 0, 0, 1, 1]]),
  }
  job = make_job("single", "lm")
  with job.tracing():
    found = jax.device_get(
      multi_token.with_further_tokens(jax.tree.map(jax.numpy.asarray, batch), 2)
    )
  assert found["weights_1"].tolist() == [[1.0, 0.5, 0.0, 1.0, 0.0]]
  assert found["weights_2"].tolist() == [[0.5, 0.0, 0.0, 0.0, 0.0]]
  assert found["targets_1"][0, :2].tolist() == [6, 7]
  assert found["targets_2"][0, 0] == 7


NAMES = {
  "deepseek_v3": (
    *(
      "model.layers.3.enorm.weight",
      "model.layers.3.hnorm.weight",
      "model.layers.3.eh_proj.weight",
    ),
    *("model.layers.3.shared_head.norm.weight", "model.layers.3.mlp.experts.7.up_proj.weight"),
  ),
  "qwen3_next": (
    *("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
    *("mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"),
  ),
  "qwen3_5": ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"),
}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_read_and_joined_by_their_names(name, tmp_path):
  model_type = folders.described(name).model_type
  job = folders.job_of(name, "dp2_fsdp2_tp2", **{"model.mtp_layers": 1})
  spec = model_spec(job.config)
  folders.write_folder(tmp_path, job, model_type)
  stored = folders.tensors_of(tmp_path / "model.safetensors")
  assert {*NAMES[name]} <= {*stored}
  width = spec.model_size
  with jax.enable_x64(True):
    source = read_weights.open_folder(str(tmp_path), spec, "checkpoint.initialize_from")
    params = named_leaves(jax.device_get(read_weights.read(source, job.placed_state.params)))
  for tensor in name_maps.tensors(spec, model_type).values():
    again = name_maps.joined(
      tensor, name_maps.sizes_of(spec), lambda name, place: params[name][place]
    )
    np.testing.assert_array_equal(again, stored[tensor.name], err_msg=tensor.name)
  both = next(stored[one] for one in NAMES[name] if one.endswith(("eh_proj.weight", "fc.weight")))
  np.testing.assert_array_equal(params["mtp_layers/from_embedding/kernel"][0], both[:, :width].T)


def test_a_family_without_such_layers_is_refused():
  spec = model_spec(folders.job_of("llama", **{"model.mtp_layers": 1}).config)
  with pytest.raises(ValueError, match="'llama' has no tensor for mtp_layers/embedding_norm"):
    name_maps.tensors(spec, "llama")
  spec = model_spec(folders.job_of("qwen3_next", **{"model.mtp_layers": 2}).config)
  with pytest.raises(ValueError, match="has one layer that predicts a further token"):
    name_maps.tensors(spec, "qwen3_next")


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"mesh.stage": 2}, "the last stage would have more layers than the others"),
    ({"data.sequence_length": 2}, "no row has a target for the last of model.mtp_layers=2"),
    ({"model.mtp_layers": 0}, "training.mtp_weight=0.7"),
    ({"training.mtp_weight": 0.0}, "training.mtp_weight=0.0"),
  ],
)
def test_what_does_not_go_together_is_refused(keys, message):
  with pytest.raises(ValueError, match=message):
    make_job("single", "lm", **{**FURTHER, **keys})
