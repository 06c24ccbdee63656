"""Flax's example gemma, for `check`: its model, its train step and its sharding rules, as they are.

FLAX_GEMMA names the folder examples/gemma of a checkout of Flax; its data pipeline is not imported.

  FLAX_GEMMA=flax/examples/gemma python -m checks benchmarks/checked/flax_gemma.py
"""

import importlib
import os
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.checked.packed import VOCABULARY, packed_rows
from checks.program import Description, Program

sys.path[:0] = [os.environ["FLAX_GEMMA"]]
for name in ("clu", "grain", "input_pipeline", "sampler", "sentencepiece", "tokenizer"):
  sys.modules[name] = mock.MagicMock()  # of the data and of logs, which are not used here
train, transformer, transformer_cfg = map(
  importlib.import_module, ("train", "transformer", "transformer_cfg")
)
sow_lib = importlib.import_module("sow_lib")

MESHES = [{}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2}]


def _batch(seed):
  names = ("inputs", "targets", "inputs_position", "inputs_segmentation")
  return dict(zip(names, packed_rows(seed), strict=True))


def program(sizes):
  """Returns the example with small sizes on a mesh."""
  axes = ("fsdp", "tensor")
  shape = [sizes.get(axis, 1) for axis in axes]
  devices = jax.devices()[: int(np.prod(shape))]
  mesh = jax.make_mesh(shape, axes, devices=devices)
  known = transformer_cfg.TransformerConfig.from_dict(
    num_layers=2,
    num_embed=VOCABULARY,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    head_dim=16,
    num_kv_heads=1,
    use_post_attn_norm=False,
    use_post_ffw_norm=False,
    attention_types=(1, 1),
    final_logit_softcap=None,
    dtype=jnp.float32,
    shd_config=transformer_cfg.ShardingConfig.fsdp_tp_sharding(
      fsdp_axis_name="fsdp", tensor_parallel_axis_name="tensor"
    ),
  )
  rate = train.create_learning_rate_schedule(learning_rate=0.0016, warmup_steps=2)

  def parts(seed):
    rngs = nnx.Rngs(params=seed, dropout=seed)
    with jax.set_mesh(mesh):
      model = transformer.Transformer(known, rngs=rngs, sow_config=sow_lib.SowConfig())
      tx = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
      return nnx.split((model, nnx.Optimizer(model, tx=tx, wrt=nnx.Param), rngs))

  graph, first = parts(0)

  def step(state, batch):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      model, optimizer, rngs = nnx.merge(graph, state)
      metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
      train.jax_train_step(model, optimizer, rngs, batch, metrics)
      return nnx.state((model, optimizer, rngs)), {"loss": metrics.compute()["loss"]}

  def outputs(state, batch):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      model = nnx.merge(graph, state)[0]
      segments = batch["inputs_segmentation"]
      mask = transformer.make_causal_attn_mask(batch["inputs"] > 0)
      mask &= segments[:, :, None] == segments[:, None, :]  # as the train step makes it
      places = batch["inputs_position"]
      return model(batch["inputs"], positions=places, attention_mask=mask, cache=None)[0]

  def placed(x):  # counters were made on the first device
    return x.sharding if isinstance(x.sharding, NamedSharding) else P()

  describe = Description(
    outputs=outputs, tokens="inputs", segments="inputs_segmentation", targets="targets"
  )
  shardings = (jax.tree.map(placed, first), P("fsdp"))
  return Program(step, lambda seed: parts(seed)[1], _batch, mesh, shardings, describe)
