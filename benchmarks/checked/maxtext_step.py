"""MaxText's pre-training step, for `check`: its model, optimizer, sharding rules and train step.

Runs in an environment of its own, with MaxText from PyPI; only sizes are set here.

  PYTHONPATH=meshwright python -m checks meshwright/benchmarks/checked/maxtext_step.py
"""

import os

import jax
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common import train_state_nnx
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils, sharding

from benchmarks.checked.packed import LENGTH, ROWS, VOCABULARY, packed_rows
from checks.program import Description, Program

MESHES = [{}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2}]


def _config(sizes, devices, given):
  root = os.path.dirname(os.path.abspath(pyconfig.__file__))
  settings = {
    "run_name": "check",
    "base_output_directory": "unused",
    "enable_checkpointing": False,
    "dataset_type": "synthetic",
    "skip_jax_distributed_system": True,
    "hardware": "cpu",
    "attention": "dot_product",
    "max_target_length": LENGTH,
    "vocab_size": VOCABULARY,
    "base_emb_dim": 32,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "enable_dropout": False,
    "dtype": "float32",
    "matmul_precision": "highest",
    "steps": 10,
    **{f"ici_{axis}_parallelism": size for axis, size in sizes.items()},
    **given,
  }
  settings["per_device_batch_size"] = settings.pop("rows", ROWS) / devices
  words = [f"{key}={value}" for key, value in settings.items()]
  return pyconfig.initialize(["train", os.path.join(root, "base.yml"), *words])


def _batch(seed):
  inputs, targets, positions, segments = packed_rows(seed)
  found = {}
  for name, values in (("inputs", inputs), ("targets", targets)):
    found |= {name: values, f"{name}_position": positions, f"{name}_segmentation": segments}
  return found


def program(sizes, **given):
  """Returns MaxText's step on a mesh, made as its train_compile.py makes it.

  Args:
    sizes: of the mesh axes.
    **given: keys of its config, and `rows` of the global batch; the others are small sizes.
  """
  count = int(np.prod([*sizes.values(), 1]))
  config = _config(sizes, count, given)
  devices = maxtext_utils.create_device_mesh(config, jax.devices()[:count])
  mesh = jax.sharding.Mesh(devices, config.mesh_axes)
  create, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
  rate = maxtext_utils.create_learning_rate_schedule(config)
  optimizer = optimizers.get_optimizer(config, rate, model, mesh=mesh)

  def create_state():
    made = create()
    return train_state_nnx.TrainStateNNX(made, nnx.Optimizer(made, optimizer, wrt=nnx.Param))

  placed = maxtext_utils.get_abstract_state(config, mesh, create_state, True)[2]
  with logical_axis_rules(config.logical_axis_rules):
    graph = nnx.split(nnx.eval_shape(create_state))[0]

  def state(seed):
    del seed  # MaxText draws the parameters from its config's own
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
      return jax.jit(lambda: nnx.state(create_state()), out_shardings=placed)()

  def step(state, batch):
    rules = logical_axis_rules(config.logical_axis_rules)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), rules:
      new, metrics = train.train_step(graph, config, placed, None, state, dict(batch))
    return new, {"loss": metrics["scalar"]["learning/loss"]}

  def outputs(state, batch):
    rules = logical_axis_rules(config.logical_axis_rules)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), rules:
      return nnx.merge(graph, state).model(
        decoder_input_tokens=batch["inputs"],
        decoder_positions=batch["inputs_position"],
        decoder_segment_ids=batch["inputs_segmentation"],
        enable_dropout=False,
      )

  describe = Description(
    outputs=outputs,
    tokens="inputs",
    segments="inputs_segmentation",
    targets="targets",
  )
  rows = sharding.get_input_data_sharding(config, mesh)
  return Program(step, state, _batch, mesh, (placed, rows), describe)
