"""Flax's example lm1b, for `check`: its model, its train step and its sharding rules, as they are.

FLAX_LM1B names the folder examples/lm1b of a checkout of Flax; its data pipeline is not imported.

  FLAX_LM1B=flax/examples/lm1b python -m checks benchmarks/checked/flax_lm1b.py
"""

import importlib
import os
import sys
from unittest import mock

import jax
import optax
from jax.sharding import PartitionSpec as P

from benchmarks.checked.packed import LENGTH, ROWS, VOCABULARY, packed_rows
from checks.program import Description, Program, make_mesh

sys.path[:0] = [os.environ["FLAX_LM1B"], os.environ["FLAX_LM1B"] + "/configs"]
importlib.import_module("flax.training.checkpoints")  # which looks for TensorFlow
for name in ("tensorflow", "clu", "input_pipeline", "temperature_sampler"):
  sys.modules[name] = mock.MagicMock()  # of the data, which is not used here
models, train, utils, default = map(
  importlib.import_module, ("models", "train", "utils", "default")
)

MESHES = [{}, {"data": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]


def _batch(seed):
  inputs, _, positions, segments = packed_rows(seed)
  return {"inputs": inputs, "inputs_position": positions, "inputs_segmentation": segments}


def program(sizes):
  """Returns the example with small sizes on a mesh."""
  config = default.get_config()
  config.update(per_device_batch_size=ROWS, max_target_length=LENGTH)
  mesh = make_mesh(sizes, tuple(config.mesh_axes))
  known = models.TransformerConfig(
    vocab_size=VOCABULARY,
    output_vocab_size=VOCABULARY,
    dtype=None,  # that of the parameters, so that float64 is possible
    emb_dim=32,
    num_heads=4,
    num_layers=2,
    qkv_dim=32,
    mlp_dim=64,
    max_len=LENGTH,
    dropout_rate=config.dropout_rate if "LM1B_DROPOUT" in os.environ else 0.0,
    attention_dropout_rate=0.0,
  )
  model = models.TransformerLM(known.replace(deterministic=True))
  rate = train.create_learning_rate_schedule(config.learning_rate, warmup_steps=2)
  optimizer = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)

  def initial(seed):
    return utils.setup_initial_state(model, optimizer, config, jax.random.PRNGKey(seed), mesh)

  def step(state, batch):
    return train.train_step(state, batch, known, rate, 0.0, jax.random.PRNGKey(1))

  def outputs(state, batch):
    return model.apply(
      {"params": state.params},
      batch["inputs"],
      inputs_positions=batch["inputs_position"],
      inputs_segmentation=batch["inputs_segmentation"],
    )

  describe = Description(
    outputs=outputs,
    tokens="inputs",
    segments="inputs_segmentation",
    looks_ahead=-1,
    rows_in_any_order="LM1B_DROPOUT" not in os.environ,
  )
  shardings = (initial(0)[1], P(config.data_sharding))
  return Program(step, lambda seed: initial(seed)[0], _batch, mesh, shardings, describe)
