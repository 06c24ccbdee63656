"""A tiny decoder over data x fsdp x context x tensor, right but for the bugs that are asked for.

Packed documents, grouped by segments with padding (0), a scan over layers, plain SGD or momentum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from checks.program import Description, Program, make_mesh

MESH = {"fsdp": 2, "tensor": 2}
AXES = ("data", "fsdp", "context", "tensor")
B, T, D, F, N, H, V, L = 8, 12, 16, 24, 2, 6, 40, 2
ROWS = ("data", "fsdp")
SPECS = {
  "embed": P("tensor", "fsdp"),
  "positions": P(),
  "norm": P(),
  "query_key_value": P(None, "fsdp", None, "tensor", None),
  "out": P(None, "tensor", None, "fsdp"),
  "up": P(None, "fsdp", "tensor"),
  "down": P(None, "tensor", "fsdp"),
  "head": P("fsdp", "tensor"),
}
SHAPES = {
  "embed": (V, D),
  "positions": (T, D),
  "norm": (L, D),
  "query_key_value": (L, D, 3, N, H),
  "out": (L, N, H, D),
  "up": (L, D, F),
  "down": (L, F, D),
  "head": (D, V),
}
RATE = 0.1


def parameters(seed, mesh, bugs):
  """Returns name -> parameter."""
  keys = jax.random.split(jax.random.key(seed), len(SHAPES))
  if "init_by_mesh" in bugs:
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, mesh.size)
  drawn = {
    name: jax.random.normal(key, shape) * shape[-2] ** -0.5
    for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
  }
  return drawn | {"norm": jnp.ones((L, D)), "positions": 0.3 * drawn["positions"]}


def batch(seed):
  """Returns rows of packed documents: tokens, targets, segments (0: padding) and weights."""
  draw = np.random.default_rng(seed)
  tokens = draw.integers(1, V, (B, T + 1)).astype(np.int32)
  segments = np.ones((B, T), np.int32)
  for row in range(B):
    segments[row, 5 + row % 3 :] = 2
    segments[row, T - row * 7 % 5 :] = 0
  weights = (segments > 0).astype(np.float32)
  return {
    "tokens": np.where(segments > 0, tokens[:, :-1], 0).astype(np.int32),
    "targets": tokens[:, 1:],
    "segments": segments,
    "weights": weights,
  }


def mask_of(segments, window, bugs, first=0):
  """Returns [B, T, S]: which positions S each position T sees."""
  places = first + jnp.arange(segments.shape[1])
  back = places[:, None] - places[None, :]
  seen = jnp.ones_like(back, bool) if "not_causal" in bugs else back >= 0
  if window:
    seen &= back <= window if "window_off_by_one" in bugs else back < window
  seen = jnp.broadcast_to(seen, (segments.shape[0], *seen.shape))
  if "no_document_borders" not in bugs:
    same = segments[:, :, None] == segments[:, None, :]
    if "padding_is_seen" in bugs:
      same |= (segments == 0)[:, None, :]
      seen |= (segments == 0)[:, None, :]
    seen &= same
  return seen | (back == 0)[None]


def attention(x, w, segments, window, bugs):
  q, k, v = jnp.einsum("BTD,DcNH->cBTNH", x, w["query_key_value"])
  scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / np.sqrt(H)
  seen = mask_of(segments, window, bugs)[:, None]
  low = jnp.asarray(-6.0 if "weak_mask" in bugs else -jnp.inf, scores.dtype)
  scores = jnp.where(seen, scores, scores + low if "weak_mask" in bugs else low)
  values = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores, -1), v)
  return jnp.einsum("BTNH,NHD->BTD", values, w["out"])


def normalized(x, scale, bugs):
  # The bug: statistics of the whole batch.
  axis = None if "batch_statistics" in bugs else -1
  size = jnp.mean(jnp.square(x), axis=axis, keepdims=True)
  return x / jnp.sqrt(size + 1e-6) * scale[None, None, :]


def mlp(x, up, down, mesh, bugs):
  if "psum_missing" not in bugs:
    return jnp.einsum("BTF,FD->BTD", jax.nn.gelu(jnp.einsum("BTD,DF->BTF", x, up)), down)
  local = lambda x, up, down: jax.nn.gelu(x @ up) @ down  # noqa: E731
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(P(ROWS), P(None, "tensor"), P("tensor", None)),
    out_specs=P(ROWS),
    check_vma=False,
  )(x, up, down)


def positions_of(params, x, mesh, bugs):
  if "positions_by_block" not in bugs:
    return x + params["positions"][None].astype(x.dtype)

  def local(x, positions):  # each block of the sequence counts from 0
    return x + positions[None, : x.shape[1]]

  spec = P(ROWS, "context")
  return jax.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=spec, check_vma=False)(
    x, params["positions"].astype(x.dtype)
  )


def logits_of(params, batch, mesh, *, window=0, bugs=()):
  """Returns [B, T, V]."""
  constrain = functools.partial(jax.lax.with_sharding_constraint)
  sharded = lambda *axes: jax.sharding.NamedSharding(mesh, P(*axes))  # noqa: E731
  table = params["embed"]
  if "involuntary" not in bugs:  # the table is gathered over fsdp, which cuts the rows, too
    table = constrain(table, sharded("tensor"))
  x = table[batch["tokens"]]
  x = constrain(positions_of(params, x, mesh, bugs), sharded(ROWS, "context"))
  # The blocks of a ring that were masked by their own positions see the same block of others.
  segments = batch["segments"]
  blocks = jnp.arange(T) // (T // mesh.shape["context"])
  if "mask_by_block" in bugs and mesh.shape["context"] > 1:
    segments = jnp.ones_like(segments)
  if "own_block_alone" in bugs:
    segments = segments + 8 * blocks[None].astype(segments.dtype)

  stacked = {name: params[name] for name in ("norm", "query_key_value", "out", "up", "down")}
  if "gathered_at_once" in bugs:
    stacked = {name: constrain(value, sharded()) for name, value in stacked.items()}

  def layer(x, w):
    x = x + attention(normalized(x, w["norm"], bugs), w, segments, window, bugs)
    if "batch_gathered" in bugs:
      x = constrain(x, sharded())
    x = x + mlp(normalized(x, w["norm"], bugs), w["up"], w["down"], mesh, bugs)
    return constrain(x, sharded(ROWS, "context")), None

  x, _ = jax.lax.scan(layer, x, stacked)
  logits = jnp.einsum("BTD,DV->BTV", x, params["head"])
  return constrain(logits, sharded() if "logits_replicated" in bugs else sharded(ROWS))


def loss_of(params, batch, mesh, *, window=0, bugs=(), parts=1):
  if parts > 1:
    cut = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    one = lambda part: loss_of(params, part, mesh, window=window, bugs=bugs)  # noqa: E731
    found = [one(jax.tree.map(lambda x, i=i: x[i], cut)) for i in range(parts)]
    if "mean_of_means" in bugs:
      return sum(total / weight for total, weight in found) / parts, jnp.ones(())
    return sum(total for total, _ in found), sum(weight for _, weight in found)
  logits = logits_of(params, batch, mesh, window=window, bugs=bugs)
  chosen = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
  losses = jax.nn.logsumexp(logits, -1) - chosen
  weights = batch["weights"].astype(losses.dtype)
  if "masked_counted" in bugs:
    weights = jnp.ones_like(weights)
  if "rows_weighted" in bugs:
    weights = weights * (1 + jnp.arange(len(weights), dtype=weights.dtype))[:, None]
  if "mean_over_devices" in bugs:
    mean = lambda x, w: jax.lax.pmean((x * w).sum() / w.sum(), ROWS)  # noqa: E731
    rows = P(ROWS)
    total = jax.shard_map(mean, mesh=mesh, in_specs=(rows, rows), out_specs=P(), check_vma=False)(
      losses, weights
    )
    return total, jnp.ones((), losses.dtype)
  return (losses * weights).sum(), weights.sum()


def make_step(mesh, bugs=(), window=0, parts=1):
  """Returns (state, batch) -> (state, metrics)."""

  def mean_loss(params, batch):
    total, weight = loss_of(params, batch, mesh, window=window, bugs=bugs, parts=parts)
    return total / weight

  def step(state, batch):
    loss, gradients = jax.value_and_grad(mean_loss)(state["params"], batch)
    named = lambda *axes: jax.sharding.NamedSharding(mesh, P(*axes))  # noqa: E731
    if "gradients_replicated" in bugs:
      gradients = jax.lax.with_sharding_constraint(gradients, named())
      norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients.values()))
      gradients = {k: g / jnp.maximum(norm, 1.0) for k, g in gradients.items()}
    if "scaled_by_axis" in bugs:
      gradients["up"] *= mesh.shape["tensor"]
    if "local_norm" in bugs:
      gradients = clipped_by_own_shard(gradients, mesh)
    if "not_reduced" in bugs:  # as if the rows of the first devices were all
      first = jax.tree.map(lambda x: x[: B // (mesh.shape["data"] * mesh.shape["fsdp"])], batch)
      gradients["norm"] = jax.grad(mean_loss)(state["params"], first)["norm"]
    if "noise_of_host" in bugs:
      shape = jax.ShapeDtypeStruct((), jnp.float32)
      draw = lambda: np.float32(HOST.normal())  # noqa: E731
      noise = jax.pure_callback(draw, shape)
      gradients["norm"] += 0.1 * noise.astype(gradients["norm"].dtype)
    params = {k: p - RATE * gradients[k].astype(p.dtype) for k, p in state["params"].items()}
    state = {**state, "params": params, "step": state["step"] + 1}
    if "momentum" in state:
      state["momentum"] = {k: 0.9 * m + gradients[k] for k, m in state["momentum"].items()}
    if "state_narrowed" in bugs:
      state["params"]["head"] = state["params"]["head"].astype(jnp.bfloat16)
    return state, {"loss": loss}

  return step


HOST = np.random.default_rng(0)


def clipped_by_own_shard(gradients, mesh):
  """Scales each device's shard of a gradient by that shard's norm."""

  def local(g):
    return g / jnp.maximum(jnp.sqrt(jnp.sum(g * g)) * 8, 1.0)

  cut = lambda g, spec: jax.shard_map(  # noqa: E731
    local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )(g)
  return {k: cut(g, SPECS[k]) for k, g in gradients.items()}


def program(sizes, *bugs, window=0, momentum=False, specs=None, **known):
  """Returns the decoder on a mesh."""
  mesh = make_mesh(sizes, AXES)
  placed = SPECS | (specs or {})

  def state(seed):
    params = parameters(seed, mesh, bugs)
    more = {"momentum": jax.tree.map(jnp.zeros_like, params)} if momentum else {}
    return {"params": params, **more, "step": jnp.zeros((), jnp.int32)}

  shardings = {"params": placed, "step": P()}
  if momentum:
    whole = "momentum_replicated" in bugs
    shardings["momentum"] = {k: P() for k in SPECS} if whole else placed
  describe = Description(
    outputs=lambda state, batch: logits_of(state["params"], batch, mesh, window=window, bugs=bugs),
    tokens="tokens",
    segments="segments",
    weights="weights",
    targets="targets",
    window=window,
    layers=L,
    same={"2 microbatches": make_step(mesh, bugs, window, parts=2)},
    replicated=("positions",),
    **known,
  )
  rows = P(ROWS, "context")
  return Program(make_step(mesh, bugs, window), state, batch, mesh, (shardings, rows), describe)
