"""Plain reference implementations of a decoder, an MLP and their train step: jax, optax, dicts.

What the application's speed and losses are measured against, so it imports nothing of it. Each
model is a table of PartitionSpecs, a function that draws nothing, and a loss; `compile_step` is
the usual `jax.jit` of value_and_grad and an optax update, with its shardings. Sizes are those of
the arrays that are passed in.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH = ("data", "fsdp")  # the axes that split the rows


def lm_specs(kv_axis: str | None = "tensor") -> dict:
  """Returns the decoder's PartitionSpecs; key/value heads that `tensor` does not divide: None."""
  return {
    "embed": {"table": P("tensor", "fsdp")},
    "layers": {
      "attention_norm": {"scale": P(None, "fsdp")},
      "attention": {
        "query": {"kernel": P(None, "fsdp", "tensor", None)},
        "key": {"kernel": P(None, "fsdp", kv_axis, None)},
        "value": {"kernel": P(None, "fsdp", kv_axis, None)},
        "out": {"kernel": P(None, "tensor", None, "fsdp")},
      },
      "mlp_norm": {"scale": P(None, "fsdp")},
      "mlp": {
        "gate": {"kernel": P(None, "fsdp", "tensor")},
        "up": {"kernel": P(None, "fsdp", "tensor")},
        "down": {"kernel": P(None, "tensor", "fsdp")},
      },
    },
    "final_norm": {"scale": P("fsdp")},
    "unembed": {"kernel": P("fsdp", "tensor")},
  }


MLP_SPECS = {
  "layer_1": {"kernel": P(), "bias": P()},
  "layer_2": {"kernel": P(None, "tensor"), "bias": P("tensor")},
  "layer_3": {"kernel": P("tensor", None), "bias": P()},
  "layer_4": {"kernel": P(), "bias": P()},
}


def rms_norm(x, scale, epsilon):
  """Scales x to unit root mean square over its last dim. Source: arXiv:1910.07467."""
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)


def rotary(x, base):
  """Turns the pairs (i, i + H/2) of x [B, T, N, H] by their position. Source: arXiv:2104.09864."""
  half = x.shape[-1] // 2
  frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = (jnp.arange(x.shape[1])[:, None] * frequency)[:, None, :]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(p, x, rotary_base):
  """Grouped-query attention to the past. Sources: arXiv:1706.03762, arXiv:2305.13245."""
  q = rotary(jnp.einsum("btd,dnh->btnh", x, p["query"]["kernel"]), rotary_base)
  k = rotary(jnp.einsum("btd,dkh->btkh", x, p["key"]["kernel"]), rotary_base)
  v = jnp.einsum("btd,dkh->btkh", x, p["value"]["kernel"])
  groups = q.shape[2] // k.shape[2]
  k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
  q = q * q.shape[-1] ** -0.5
  scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
  past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
  weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1).astype(x.dtype)
  return jnp.einsum("btnh,nhd->btd", jnp.einsum("bnts,bsnh->btnh", weights, v), p["out"]["kernel"])


def swiglu(p, x):
  """Returns down(silu(gate(x)) * up(x)). Source: arXiv:2002.05202."""
  hidden = jax.nn.silu(x @ p["gate"]["kernel"]) * (x @ p["up"]["kernel"])
  return hidden @ p["down"]["kernel"]


def lm_loss(params, batch, mesh, *, dtype, norm_epsilon, rotary_base):
  """Returns the weighted mean cross-entropy of the next tokens, in nats."""
  by_batch = NamedSharding(mesh, P(BATCH, None, None))
  constrain = jax.lax.with_sharding_constraint

  def block(x, p):
    kernels = jax.tree.map(lambda kernel: kernel.astype(dtype), (p["attention"], p["mlp"]))
    x = x + attention(
      kernels[0], rms_norm(x, p["attention_norm"]["scale"], norm_epsilon), rotary_base
    )
    x = x + swiglu(kernels[1], rms_norm(x, p["mlp_norm"]["scale"], norm_epsilon))
    return constrain(x, by_batch), None

  # Gathered over fsdp first: left to itself XLA moves the batch instead, and says so at length.
  table = constrain(params["embed"]["table"], NamedSharding(mesh, P("tensor", None)))
  x = constrain(table.astype(dtype)[batch["tokens"]], by_batch)
  x, _ = jax.lax.scan(block, x, params["layers"])
  x = rms_norm(x, params["final_norm"]["scale"], norm_epsilon)
  logits = (x @ params["unembed"]["kernel"].astype(dtype)).astype(jnp.float32)
  logits = constrain(logits, NamedSharding(mesh, P(BATCH, None, "tensor")))
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
  return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])


def mlp_loss(params, batch, mesh, *, dtype):
  """Returns the mean over the batch of the squared error, summed over the outputs."""
  params = jax.tree.map(lambda p: p.astype(dtype), params)
  x = batch["inputs"].astype(dtype)
  for name in ("layer_1", "layer_2", "layer_3"):
    x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
    if name == "layer_2":
      x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(BATCH, "tensor")))
  outputs = x @ params["layer_4"]["kernel"] + params["layer_4"]["bias"]
  errors = jnp.sum((outputs.astype(jnp.float32) - batch["targets"]) ** 2, axis=-1)
  return jnp.sum(errors * batch["weights"]) / jnp.sum(batch["weights"])


def adamw(
  *, learning_rate, warmup_steps, steps, weight_decay, clip_norm, beta_1, beta_2, epsilon
) -> optax.GradientTransformation:
  """Returns AdamW, warmed up from 1/warmup_steps, then a cosine to a tenth; kernels decay."""
  schedule = optax.cosine_decay_schedule(learning_rate, steps - warmup_steps, alpha=0.1)
  if warmup_steps:
    first = learning_rate / warmup_steps
    warmup = optax.linear_schedule(first, learning_rate, max(1, warmup_steps - 1))
    schedule = optax.join_schedules([warmup, schedule], [warmup_steps])

  def is_matrix(params):
    return jax.tree.map_with_path(lambda path, _: path[-1].key in ("kernel", "table"), params)

  return optax.chain(
    optax.clip_by_global_norm(clip_norm),
    optax.adamw(
      schedule, b1=beta_1, b2=beta_2, eps=epsilon, weight_decay=weight_decay, mask=is_matrix
    ),
  )


def compile_step(
  loss_function: Callable, specs: Any, optimizer: optax.GradientTransformation, mesh: Mesh, arrays
) -> tuple[Callable, Callable]:
  """Compiles one train step.

  Args:
    loss_function: (params, batch, mesh) -> scalar.
    specs: the PartitionSpec of each parameter.
    optimizer: optax's.
    mesh: with at least the axes `data`, `fsdp` and `tensor`.
    arrays: (params, batch), or their ShapeDtypeStructs; the batch's rows are the first dim.

  Returns:
    start: params -> (params, optimizer state), laid out on the mesh.
    step: (params, optimizer state, batch) -> the same two, and the loss and the norm of
      the gradients; it donates the first two.
  """
  everywhere, by_row = NamedSharding(mesh, P()), NamedSharding(mesh, P(BATCH))
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  params, batch = arrays
  optimizer_state = jax.eval_shape(optimizer.init, params)
  optimizer_shardings = optax.tree_utils.tree_map_params(
    optimizer,
    lambda _, sharding: sharding,
    optimizer_state,
    shardings,
    transform_non_params=lambda _: everywhere,
  )
  init = jax.jit(optimizer.init, out_shardings=optimizer_shardings)

  def start(params):
    params = jax.device_put(params, shardings)
    return params, init(params)

  def step(params, optimizer_state, batch):
    loss, grads = jax.value_and_grad(loss_function)(params, batch, mesh)
    updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return optax.apply_updates(params, updates), optimizer_state, metrics

  step = jax.jit(
    step,
    in_shardings=(shardings, optimizer_shardings, by_row),
    out_shardings=(shardings, optimizer_shardings, everywhere),
    donate_argnums=(0, 1),
  )
  return start, step.lower(params, optimizer_state, batch).compile()


def train(
  step: Callable, state: tuple, batches: Iterable, *, wait_each_step: bool
) -> tuple[tuple, float]:
  """Runs one step per batch and waits for the last; returns the state and the last loss.

  Args:
    step: of `compile_step`.
    state: (params, optimizer state); donated.
    batches: laid out on the mesh, at least one.
    wait_each_step: let no step start before the one before it is done: simulated devices that
      have several in flight can deadlock.
  """
  for batch in batches:
    *state, metrics = step(*state, batch)
    if wait_each_step:
      jax.block_until_ready(metrics)
  jax.block_until_ready(state)
  return tuple(state), float(metrics["loss"])
