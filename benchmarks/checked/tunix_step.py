"""tunix's fine-tuning step, for `check`: its Llama, its sharding rules and PeftTrainer's own step.

Runs in an environment of its own, with google-tunix from PyPI; only sizes are set here.

  PYTHONPATH=meshwright python -m checks meshwright/benchmarks/checked/tunix_step.py

tunix constrains activations on accelerators alone; with TUNIX_CONSTRAINED they are on CPUs, too.
"""

import os

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft import peft_trainer

from benchmarks.checked.packed import VOCABULARY, packed_rows
from checks.program import Description, Program, make_mesh

MESHES = [{}, {"fsdp": 4}, {"fsdp": 2, "tp": 2}]
if "TUNIX_CONSTRAINED" in os.environ:
  llama.shard = lambda x, axes: jax.lax.with_sharding_constraint(x, jax.P(*axes))
SIZES = llama.ModelConfig(
  num_layers=2,
  vocab_size=VOCABULARY,
  embed_dim=32,
  hidden_dim=64,
  num_heads=4,
  head_dim=8,
  num_kv_heads=2,
  rope_theta=10_000,
  norm_eps=1e-5,
)


def _batch(seed):
  tokens, _, positions, segments = packed_rows(seed)
  return {"tokens": tokens, "positions": positions, "segments": segments}


def _inputs(batch):
  """Returns the arguments of tunix's loss; documents are packed by the mask alone."""
  segments = batch["segments"]
  causal = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
  same = segments[:, :, None] == segments[:, None, :]
  return {
    "input_tokens": batch["tokens"],
    "input_mask": segments > 0,
    "positions": batch["positions"],
    "attention_mask": same & causal,
  }


def program(sizes):
  """Returns tunix's step with small sizes on a mesh."""
  mesh = make_mesh(sizes, ("fsdp", "tp"))
  adamw = optax.adamw(1e-3)
  settings = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=10)
  trainer = peft_trainer.PeftTrainer(llama.Llama3(SIZES, rngs=nnx.Rngs(0)), adamw, settings)
  trainer.with_gen_model_input_fn(_inputs)

  def create(seed):
    model = llama.Llama3(SIZES, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, adamw, wrt=nnx.Param)  # as PeftTrainer makes it

  graph, abstract = nnx.split(nnx.eval_shape(lambda: create(0)))
  placed = nnx.get_named_sharding(abstract, mesh)

  def state(seed):
    with mesh:
      return jax.jit(lambda: nnx.state(create(seed)), out_shardings=placed)()

  def step(state, batch):
    with mesh:
      model, optimizer = nnx.merge(graph, state)
      loss, _, _ = trainer._train_step(model, optimizer, batch)
      return nnx.state((model, optimizer)), {"loss": loss}

  def outputs(state, batch):
    given = _inputs(batch)
    del given["input_mask"]
    with mesh:
      return nnx.merge(graph, state)[0](**given, cache=None)[0]

  describe = Description(outputs=outputs, tokens="tokens", segments="segments")
  return Program(step, state, _batch, mesh, (placed, jax.P("fsdp")), describe)
