"""A Llama-style decoder and its training over data x fsdp x tensor, in one file to copy and edit.

  python examples/one_file.py --mesh=data=4,tensor=2 --steps=200 --workdir=runs/one_file
  python examples/one_file.py --text='books/*.txt' --sequence_length=256 --separate_documents

It needs jax, optax and numpy. Where there is no accelerator, it makes as many simulated CPU devices
as the mesh asks for. The same command again resumes from the newest checkpoint, to the same bits.

Read it from top to bottom: config, text, layout, model, optimizer and step, checkpoints, the loop.
Names carry their dims: `q_BTNH` is batch, position, head, head size. The letters:

  B rows of a batch     D width of the residual     N heads of queries          L layers
  T positions           F width of the MLP          K heads of keys and values  V vocabulary
  S positions of keys   H size of a head            h half of it
"""

import argparse
import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import math
import os
import pathlib
import sys
import sysconfig
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# ------------------------------ config ------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
  """What a run is; each field is a flag, such as `--layers=6`."""

  mesh: str = "data=1"  # sizes of data, fsdp and tensor; an axis that is left out has size 1
  workdir: str = "runs/one_file"
  seed: int = 0

  layers: int = 3
  model_size: int = 128
  feedforward_size: int = 384
  heads: int = 8
  kv_heads: int = 4
  head_size: int = 16
  vocabulary_size: int = 256  # bytes
  norm_epsilon: float = 1e-6
  rotary_base: float = 10_000.0
  tied_embeddings: bool = False
  embedding_standard_deviation: float = 1.0  # D ** -0.5 where they are tied
  separate_documents: bool = False  # a token attends to its own document alone

  text: str = ""  # a glob of files, each a document; "": the source of Python's standard library
  sequence_length: int = 128
  global_batch_size: int = 32

  steps: int = 200
  learning_rate: float = 8e-3
  warmup_steps: int = -1  # -1: a twentieth of the steps
  final_fraction: float = 0.1  # of the learning rate, at the end of the cosine
  beta_1: float = 0.9
  beta_2: float = 0.95
  epsilon: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  parameter_dtype: str = "float32"  # or float64, for proofs
  compute_dtype: str = ""  # "": bfloat16 on accelerators, else that of the parameters
  rematerialize: bool = False  # compute a layer's activations again in the backward pass

  log_every: int = 10
  evaluate_every: int = 50
  evaluation_batches: int = 8  # 0: all
  save_every: int = 50
  keep: int = 2  # checkpoints
  prompt: str = "def "
  sample_tokens: int = 120
  temperature: float = 0.8


# What may change where a run resumes; on another mesh its numbers are the same but for rounding.
MAY_CHANGE = {"mesh", "workdir", "rematerialize", "log_every", "evaluate_every", "save_every"}
MAY_CHANGE |= {"evaluation_batches", "keep", "prompt", "sample_tokens", "temperature"}

# ------------------------------ text: documents, rows, batches ------------------------------

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
TEST = 0.05  # of the documents


def library() -> dict[str, pathlib.Path]:
  """Returns relative path -> file of the standard library's source, without its tests."""
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  found = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
  built = ("_sysconfigdata", "config-")  # they say on which machine this Python was compiled
  left_out = {name for name in found if name.startswith(built) or NOT_LIBRARY & {*name.split("/")}}
  return {name: path for name, path in found.items() if name not in left_out}


def documents(text: str, split: str) -> list[bytes]:
  """Returns the documents of `train` or `test`, in the order of a hash of their names."""
  files = {name: pathlib.Path(name) for name in glob.glob(text)} if text else library()
  order, found = sorted(files, key=lambda name: hashlib.md5(f"{split}{name}".encode()).digest()), []
  for name in order:
    content = files[name].read_bytes()
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    if len(files) < 1 / TEST:  # the end of each
      cut = round(len(content) * (1 - TEST))
      found.append(content[cut:] if split == "test" else content[:cut])
    elif (place < TEST) == (split == "test"):
      found.append(content)
  return found


@functools.lru_cache(maxsize=2)
def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
  """Returns the numbers of the rows in the order of an epoch, int64 [rows]."""
  raw = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(rows)
  return np.argsort(raw, kind="stable")


class Rows:
  """Documents packed one after the other, each ended by byte 0, and cut into rows of T tokens."""

  def __init__(self, config: Config, split: str):
    """Reads the documents of a split. Raises ValueError where they have no text to predict."""
    texts, self.length = documents(config.text, split), config.sequence_length
    self.tokens = np.frombuffer(b"".join(text + b"\0" for text in texts), np.uint8)
    self.document = np.repeat(np.arange(len(texts)), [len(text) + 1 for text in texts])
    self.count = -(-(len(self.tokens) - 1) // self.length)  # the last row is padded
    if self.count < 1:
      raise ValueError(f"--text={config.text}: there is no text in it to {split} on")

  def take(self, numbers_B: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the rows of these numbers, each array [B, T]; -1 and what is behind the end weigh 0.

    Segments are the documents of the targets: a document follows the 0 that ends the one before it.
    """
    slots_BT = numbers_B[:, None] * self.length + np.arange(self.length)
    there_BT = (slots_BT >= 0) & (slots_BT + 1 < len(self.tokens))
    slots_BT, nowhere = np.where(there_BT, slots_BT, 0), self.document[-1] + 1
    found = {
      "tokens": np.where(there_BT, self.tokens[slots_BT], 0),
      "targets": np.where(there_BT, self.tokens[slots_BT + 1], 0),
      "segments": np.where(there_BT, self.document[slots_BT + 1], nowhere),
    }
    found = {name: array.astype(np.int32) for name, array in found.items()}
    return {**found, "weights": there_BT.astype(np.float32)}

  def batch(self, step: int, size: int, seed: int) -> dict[str, np.ndarray]:
    """Returns the batch of a step: a function of step and seed, so no data state is ever saved."""
    places = (divmod(row, self.count) for row in range(step * size, (step + 1) * size))
    return self.take(np.array([epoch_order(self.count, seed, one)[at] for one, at in places]))


# ------------------------------ layout: names, letters, mesh axes ------------------------------

AXES = ("data", "fsdp", "tensor")
MESHES = ({}, {"data": 2}, {"fsdp": 2, "tensor": 2})  # on which `program` below is checked
PARAMETERS = {  # name -> its dims; the layers' are stacked along L
  "embed/table": "VD",
  "layers/attention_norm/scale": "LD",
  "layers/attention/query/kernel": "LDNH",
  "layers/attention/key/kernel": "LDKH",
  "layers/attention/value/kernel": "LDKH",
  "layers/attention/out/kernel": "LNHD",
  "layers/mlp_norm/scale": "LD",
  "layers/mlp/gate/kernel": "LDF",
  "layers/mlp/up/kernel": "LDF",
  "layers/mlp/down/kernel": "LFD",
  "final_norm/scale": "D",
  "unembed/kernel": "DV",
}
# Which mesh axes split a dim. Parameters are stored in parts along D, and gathered where they are
# used: that is all of FSDP. The batch is split over data and fsdp alike.
STORED = {"D": "fsdp", "N": "tensor", "K": "tensor", "F": "tensor", "V": "tensor"}
USED = {"B": ("data", "fsdp"), "N": "tensor", "K": "tensor", "F": "tensor", "V": "tensor"}


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh and the axes that split the dims of stored parameters and of what is computed."""

  mesh: Mesh
  stored: dict[str, Any]
  used: dict[str, Any]

  @classmethod
  def of(cls, config: Config, mesh: Mesh) -> "Layout":
    """Returns the one of a config; heads of keys that `tensor` does not divide are replicated."""
    heads = {"K": None} if config.kv_heads % mesh.shape["tensor"] else {}
    return cls(mesh, STORED | heads, USED | heads)

  def sharding(self, letters: str, axes: dict[str, Any]) -> NamedSharding:
    """Returns the sharding of an array with these dims; "": it is replicated."""
    return NamedSharding(self.mesh, P(*(axes.get(letter) for letter in letters)))

  def constrain(self, x: jax.Array, letters: str) -> jax.Array:
    """Returns x, split as what is computed is; XLA adds the communication that this takes."""
    assert x.ndim == len(letters), (x.shape, letters)
    return jax.lax.with_sharding_constraint(x, self.sharding(letters, self.used))


def mesh_sizes(config: Config) -> dict[str, int]:
  """Returns axis -> size; raises ValueError with all that does not fit."""
  given = dict(pair.partition("=")[::2] for pair in config.mesh.split(",") if pair)
  wrong = [f"there is no axis {axis}, but {', '.join(AXES)}" for axis in given.keys() - {*AXES}]
  wrong += [f"{axis} has size {n!r}" for axis, n in given.items() if not n.isdigit() or n == "0"]
  sizes = {axis: int(given.get(axis, 1)) for axis in AXES} if not wrong else {}
  if sizes:
    (data, fsdp, tensor), c = sizes.values(), config
    pairs = [("global_batch_size", data * fsdp), ("model_size", fsdp), ("heads", c.kv_heads)]
    pairs += [(name, tensor) for name in ("heads", "feedforward_size", "vocabulary_size")]
    found = [(name, getattr(c, name), n) for name, n in [*pairs, ("head_size", 2)]]
    wrong = [f"{name}={value} is no multiple of {n}" for name, value, n in found if value % n]
  if wrong:
    raise ValueError(f"--mesh={config.mesh}: {'; '.join(wrong)}")
  return sizes


def make_mesh(sizes: dict[str, int]) -> Mesh:
  """Returns a mesh of accelerators, or of simulated CPU devices where there are none."""
  count = math.prod(sizes.values())
  # With fewer threads than devices that wait for one another, collectives on CPUs deadlock.
  os.environ.setdefault("NPROC", str(4 * count))
  with contextlib.suppress(RuntimeError):  # the backend has started, with the devices that it has
    jax.config.update("jax_num_cpu_devices", count)
  devices, auto = jax.devices(), (jax.sharding.AxisType.Auto,) * len(sizes)
  if len(devices) < count:
    raise ValueError(f"a mesh of {sizes} takes {count} devices, and there are {len(devices)}")
  return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=auto, devices=devices[:count])


# ------------------------------ model ------------------------------


def initial_params(config: Config, key: jax.Array) -> dict[str, jax.Array]:
  """Draws kernels with a standard deviation of fan_in ** -0.5; scales of norms are 1.

  Kernels that write the residual are scaled down by the depth, as in GPT-2.
  """
  c, dtype = config, jnp.dtype(config.parameter_dtype)
  sizes = {"L": c.layers, "D": c.model_size, "F": c.feedforward_size, "V": c.vocabulary_size}
  sizes |= {"N": c.heads, "K": c.kv_heads, "H": c.head_size}

  def drawn(key: jax.Array, letters: str, deviation: float) -> jax.Array:
    shape = tuple(sizes[letter] for letter in letters)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(deviation, dtype)

  embed_key, layers_key, unembed_key = (jax.random.fold_in(key, number) for number in range(3))
  keys_L, params, number = jax.random.split(layers_key, c.layers), {}, 0
  for name, letters in PARAMETERS.items():
    if name.endswith("scale"):
      params[name] = jnp.ones([sizes[letter] for letter in letters], dtype)
    elif name == "embed/table":
      params[name] = drawn(embed_key, letters, c.embedding_standard_deviation)
    elif name == "unembed/kernel":
      if not c.tied_embeddings:
        params[name] = drawn(unembed_key, letters, c.model_size**-0.5)
    else:
      layer, writes = letters[1:], letters.endswith("D")
      fan_in = math.prod(sizes[letter] for letter in (layer[:-1] if writes else layer[:1]))
      deviation = (fan_in * (2 * c.layers if writes else 1)) ** -0.5
      kernel_keys_L = jax.vmap(jax.random.fold_in, (0, None))(keys_L, number)
      draw = functools.partial(drawn, letters=layer, deviation=deviation)
      params[name], number = jax.vmap(draw)(kernel_keys_L), number + 1
  return params


def wide(x: jax.Array) -> jax.Array:
  """Returns x in float32, or in float64 if it is."""
  return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, epsilon: float) -> jax.Array:
  """Returns x over its root mean square over D. Source: arXiv:1910.07467."""
  x = wide(x_BTD)
  x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
  return (x * wide(scale_D)[None, None]).astype(x_BTD.dtype)


def rotary_tables(positions_BT: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
  """Returns cosine and sine [B, T, 1, h] of the angle of each pair. Source: arXiv:2104.09864."""
  half, dtype = config.head_size // 2, wide(jnp.zeros((), config.compute_dtype)).dtype
  frequency_h = jnp.asarray(config.rotary_base, dtype) ** (-jnp.arange(half, dtype=dtype) / half)
  angle_BT1h = positions_BT.astype(dtype)[:, :, None, None] * frequency_h[None, None, None]
  return jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)


def rotate(x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Turns the pairs (i, i + h) of each head by the angles of its position."""
  (cos, sin), (a, b) = tables, jnp.split(wide(x_BTNH), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def positions_and_mask(segments_BT: jax.Array, separate: bool) -> tuple[jax.Array, jax.Array]:
  """Returns positions [B or 1, T], and True [B or 1, T, S] for keys that a query attends to."""
  slots_BT = jax.lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
  past_BTS = slots_BT[:1, None, :] <= slots_BT[:1, :, None]
  if not separate:
    return slots_BT[:1], past_BTS
  before_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  starts_BT = jnp.where(segments_BT != before_BT, slots_BT, 0)
  same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
  return slots_BT - jax.lax.cummax(starts_BT, axis=1), past_BTS & same_BTS


def logits_of(params: dict, batch: dict, config: Config, layout: Layout) -> jax.Array:
  """Returns the logits [B, T, V] of the next tokens, in float32 or wider."""
  epsilon, groups = config.norm_epsilon, config.heads // config.kv_heads
  dtype, scale = jnp.dtype(config.compute_dtype), config.head_size**-0.5
  # Kernels are cast before they are gathered, so that half as many bytes are sent in bfloat16.
  params = {name: x if "norm" in name else x.astype(dtype) for name, x in params.items()}
  constrain, letters = layout.constrain, PARAMETERS
  positions_BT, mask_BTS = positions_and_mask(batch["segments"], config.separate_documents)
  tables = rotary_tables(positions_BT, config)

  def block(x_BTD: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    p = {name: constrain(x, letters[name][1:]) for name, x in layer.items()}
    # Grouped-query attention. Sources: arXiv:1706.03762, arXiv:2305.13245.
    normed_BTD = rms_norm(x_BTD, p["layers/attention_norm/scale"], epsilon)
    q_BTNH = jnp.einsum("BTD,DNH->BTNH", normed_BTD, p["layers/attention/query/kernel"])
    k_BSKH = jnp.einsum("BSD,DKH->BSKH", normed_BTD, p["layers/attention/key/kernel"])
    v_BSKH = jnp.einsum("BSD,DKH->BSKH", normed_BTD, p["layers/attention/value/kernel"])
    q_BTNH, k_BSKH = rotate(q_BTNH, tables), rotate(k_BSKH, tables)
    q_BTNH = (wide(q_BTNH) * scale).astype(dtype)
    k_BSNH = constrain(jnp.repeat(k_BSKH, groups, axis=2), "BSNH")
    v_BSNH = constrain(jnp.repeat(v_BSKH, groups, axis=2), "BSNH")
    scores_BNTS = wide(jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH))
    scores_BNTS = jnp.where(mask_BTS[:, None], scores_BNTS, jnp.finfo(scores_BNTS.dtype).min)
    weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1).astype(dtype)
    heads_BTNH = jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BSNH)
    update_BTD = jnp.einsum("BTNH,NHD->BTD", heads_BTNH, p["layers/attention/out/kernel"])
    x_BTD = constrain(x_BTD + update_BTD, "BTD")
    # SwiGLU. Source: arXiv:2002.05202.
    normed_BTD = rms_norm(x_BTD, p["layers/mlp_norm/scale"], epsilon)
    gate_BTF = jnp.einsum("BTD,DF->BTF", normed_BTD, p["layers/mlp/gate/kernel"])
    up_BTF = jnp.einsum("BTD,DF->BTF", normed_BTD, p["layers/mlp/up/kernel"])
    hidden_BTF = constrain(jax.nn.silu(gate_BTF) * up_BTF, "BTF")
    update_BTD = jnp.einsum("BTF,FD->BTD", hidden_BTF, p["layers/mlp/down/kernel"])
    return constrain(x_BTD + update_BTD, "BTD"), None

  # Gathered over fsdp first: left to itself XLA moves the batch instead, and says so at length.
  table_VD = constrain(params["embed/table"], "VD")
  x_BTD = constrain(table_VD[batch["tokens"]], "BTD")
  layers = {name: x for name, x in params.items() if name.startswith("layers/")}
  block = jax.checkpoint(block, prevent_cse=False) if config.rematerialize else block
  x_BTD, _ = jax.lax.scan(block, x_BTD, layers)
  x_BTD = rms_norm(x_BTD, constrain(params["final_norm/scale"], "D"), epsilon)
  kernel_DV = table_VD.T if config.tied_embeddings else constrain(params["unembed/kernel"], "DV")
  return constrain(wide(jnp.einsum("BTD,DV->BTV", x_BTD, kernel_DV)), "BTV")


def loss_sums(params: dict, batch: dict, config: Config, layout: Layout) -> tuple[jax.Array, ...]:
  """Returns the weighted sum over tokens of the cross-entropy, in nats, and the sum of weights."""
  logits_BTV = logits_of(params, batch, config, layout)
  # A masked sum: a gather along V, which tensor splits, would need the full row on each device.
  tokens_V = jnp.arange(logits_BTV.shape[-1], dtype=jnp.int32)
  hot_BTV = batch["targets"][:, :, None] == tokens_V[None, None]
  target_BT = jnp.sum(jnp.where(hot_BTV, logits_BTV, jnp.zeros_like(logits_BTV)), axis=-1)
  losses_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT
  weights_BT = batch["weights"].astype(losses_BT.dtype)
  return jnp.sum(losses_BT * weights_BT), jnp.sum(weights_BT)


# ------------------------------ optimizer and step ------------------------------


def make_optimizer(config: Config) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Returns AdamW behind clipping by the global norm, and its rates: a rise, then a cosine."""
  peak, warmup, final = config.learning_rate, config.warmup_steps, config.final_fraction
  rates = optax.cosine_decay_schedule(peak, max(1, config.steps - warmup), alpha=final)
  if warmup:
    rising = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    rates = optax.join_schedules([rising, rates], [warmup])

  def decays(params: dict) -> dict:  # scales of norms do not
    return {name: not name.endswith("scale") for name in params}

  clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
  keys = {"b1": config.beta_1, "b2": config.beta_2, "eps": config.epsilon}
  adamw = optax.adamw(rates, **keys, weight_decay=config.weight_decay, mask=decays)
  return optax.chain(clip, adamw), rates


class Program:
  """The functions of a config on a mesh, jitted, and the shardings of what they take.

  `init`: key -> state. `step`: (state, batch) -> (state, metrics); it donates the state.
  `evaluate`: (params, batch) -> sums of losses and weights. `logits`: the same -> logits [B, T, V].
  """

  def __init__(self, config: Config, layout: Layout):
    optimizer, rates = make_optimizer(config)

    def init(key: jax.Array) -> dict:
      params, step = initial_params(config, key), jnp.zeros((), jnp.int32)
      return {"params": params, "optimizer": optimizer.init(params), "step": step}

    def mean_loss(params: dict, batch: dict) -> jax.Array:
      loss, weight = loss_sums(params, batch, config, layout)
      return loss / weight  # of the global batch, however it is split

    def step(state: dict, batch: dict) -> tuple[dict, dict]:
      params, number = state["params"], state["step"]
      loss, grads = jax.value_and_grad(mean_loss)(params, batch)
      grads = jax.lax.with_sharding_constraint(grads, stored)  # before all of them are read
      updates, moments = optimizer.update(grads, state["optimizer"], params)
      params = optax.apply_updates(params, updates)
      metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "learning_rate": rates(number)}
      return {"params": params, "optimizer": moments, "step": number + 1}, metrics

    state = jax.eval_shape(init, jax.random.key(0))
    stored = {name: layout.sharding(PARAMETERS[name], layout.stored) for name in state["params"]}
    rows, scalar = layout.sharding("BT", layout.used), layout.sharding("", {})
    each = (optimizer, lambda _, one: one, state["optimizer"], stored)  # as its parameter
    moments = optax.tree_utils.tree_map_params(*each, transform_non_params=lambda _: scalar)
    placed = {"params": stored, "optimizer": moments, "step": scalar}
    self.placed, self.rows, given = placed, rows, {"in_shardings": (stored, rows)}
    taken, made = {"in_shardings": (placed, rows)}, {"out_shardings": (placed, scalar)}
    bound = {"config": config, "layout": layout}
    self.init = jax.jit(init, out_shardings=placed)
    self.step = jax.jit(step, **taken, **made, donate_argnums=0)
    self.evaluate = jax.jit(functools.partial(loss_sums, **bound), **given, out_shardings=scalar)
    self.logits = jax.jit(functools.partial(logits_of, **bound), **given)


# ------------------------------ checkpoints ------------------------------


def named(tree: Any) -> dict[str, Any]:
  """Returns name -> leaf of a tree."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def save(workdir: pathlib.Path, state: dict, config: Config) -> None:
  """Writes a checkpoint, and gives it its name when it is on the disk: all of it or nothing."""
  arrays = {name: np.asarray(leaf) for name, leaf in named(jax.device_get(state)).items()}
  part = workdir / "part.npz"
  with open(part, "wb") as file:
    np.savez(file, config=json.dumps(dataclasses.asdict(config)), **arrays)
    file.flush()
    os.fsync(file.fileno())
  os.replace(part, workdir / f"step_{int(state['step']):08}.npz")
  folder = os.open(workdir, os.O_RDONLY)
  os.fsync(folder)
  os.close(folder)
  for old in sorted(workdir.glob("step_*.npz"))[: -config.keep]:
    old.unlink()


def restore(path: pathlib.Path, config: Config, placed: dict) -> dict:
  """Returns the state of a checkpoint of this config, on this mesh, whichever one wrote it."""
  try:
    with np.load(path) as file:
      arrays = {name: file[name] for name in file.files}
  except (zipfile.BadZipFile, ValueError, OSError) as error:
    raise ValueError(f"{path} cannot be read ({error}); without it, the one before is") from error
  was, now = json.loads(str(arrays["config"])), dataclasses.asdict(config)
  other = [name for name in now.keys() - MAY_CHANGE if now[name] != was.get(name)]
  if other:
    lines = [f"{name} was {was.get(name)!r} and is {now[name]!r}" for name in sorted(other)]
    raise ValueError(f"{path}: {'; '.join(lines)}; take another --workdir")
  leaves = [jax.device_put(arrays[name], one) for name, one in named(placed).items()]
  return jax.tree.unflatten(jax.tree.structure(placed), leaves)


# ------------------------------ the loop ------------------------------


def evaluate(program: Program, params: dict, rows: Rows, config: Config) -> dict[str, float]:
  """Returns the mean loss over the first batches of an order that is always the same."""
  size, sums = config.global_batch_size, np.zeros(2)
  order = epoch_order(rows.count, 0, 0)[: config.evaluation_batches * size or None]
  for first in range(0, len(order), size):
    numbers = order[first : first + size]
    batch = rows.take(np.pad(numbers, (0, size - len(numbers)), constant_values=-1))
    found = program.evaluate(params, jax.device_put(batch, program.rows))
    sums += [float(one) for one in found]
  loss = float(sums[0] / sums[1])
  return {"eval_loss": loss, "eval_bits_per_byte": loss / math.log(2)}  # a token is a byte


def sample(program: Program, params: dict, config: Config) -> str:
  """Continues the prompt, by a full forward pass for each token: there is no cache."""
  T, generator = config.sequence_length, np.random.default_rng(config.seed)
  tokens = [0, *config.prompt.encode()]
  for _ in range(config.sample_tokens):
    seen = np.array(tokens[-T:], np.int32)
    # As many rows as a batch has, all the same, so that the mesh can split them.
    tokens_BT = np.tile(np.pad(seen, (0, T - len(seen))), (config.global_batch_size, 1))
    batch = {"tokens": tokens_BT, "segments": np.zeros_like(tokens_BT)}
    logits_BTV = program.logits(params, jax.device_put(batch, program.rows))
    logits_V = np.asarray(logits_BTV[0, len(seen) - 1], np.float64)[:256]
    tokens.append(int(np.argmax(logits_V + config.temperature * generator.gumbel(size=256))))
  return bytes(tokens[1:]).decode(errors="replace")


def started(config: Config) -> tuple[Config, Layout]:
  """Returns the config with what follows from other values, and its layout on the devices."""
  mesh = make_mesh(mesh_sizes(config))
  compute = "bfloat16" if mesh.devices.flat[0].platform != "cpu" else config.parameter_dtype
  warmup = config.steps // 20 if config.warmup_steps < 0 else config.warmup_steps
  derived = {"compute_dtype": config.compute_dtype or compute, "warmup_steps": warmup}
  return dataclasses.replace(config, **derived), Layout.of(config, mesh)


def train(config: Config) -> dict:
  """Trains from the newest checkpoint to the last step; returns the state, or raises ValueError."""
  config, layout = started(config)
  program, workdir = Program(config, layout), pathlib.Path(config.workdir)
  training, test = Rows(config, "train"), Rows(config, "test")
  if found := sorted(workdir.glob("step_*.npz")):
    state = restore(found[-1], config, program.placed)
  else:
    state = program.init(jax.random.key(config.seed))
  start, size = int(state["step"]), sum(x.size for x in state["params"].values())
  workdir.mkdir(parents=True, exist_ok=True)
  log = workdir / "metrics.jsonl"
  lines = log.read_text().splitlines(keepends=True) if log.exists() else []
  log.write_text("".join(x for x in lines if x[-1] == "\n" and json.loads(x)["step"] <= start))
  print(f"{size:,} parameters, {training.count:,} rows, mesh {config.mesh}, from step {start}")

  def write(step: int, numbers: dict[str, Any]) -> None:
    line = {"step": step, **{name: float(value) for name, value in numbers.items()}}
    with open(log, "a") as file:
      file.write(json.dumps(line) + "\n")
    print("  ".join(f"{name} {value:.6g}" for name, value in line.items()), flush=True)

  for number in range(start, config.steps):
    batch = training.batch(number, config.global_batch_size, config.seed)
    state, metrics = program.step(state, jax.device_put(batch, program.rows))
    done, last = number + 1, number + 1 == config.steps
    if layout.mesh.devices.flat[0].platform == "cpu":
      jax.block_until_ready(state)  # simulated devices with several steps in flight can deadlock
    if last or (config.log_every and done % config.log_every == 0):
      write(done, metrics)
    if last or (config.evaluate_every and done % config.evaluate_every == 0):
      write(done, evaluate(program, state["params"], test, config))
    if last or (config.save_every and done % config.save_every == 0):
      save(workdir, state, config)
  if config.sample_tokens:
    print(sample(program, state["params"], config))
  return state


def program(sizes: dict[str, int]) -> Any:
  """Returns what `python main.py check` checks: a small step on a mesh, given as axis -> size."""
  import checks  # of this alone

  mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
  small = {"layers": 2, "model_size": 16, "feedforward_size": 24, "heads": 4, "kv_heads": 2}
  small |= {"head_size": 6, "vocabulary_size": 64, "sequence_length": 12, "global_batch_size": 8}
  # An epsilon far above any gradient: an update in proportion to it does not amplify rounding.
  small |= {"separate_documents": True, "warmup_steps": 0, "epsilon": 1.0}
  config, layout = started(Config(mesh, **small))
  functions, shape = Program(config, layout), (config.global_batch_size, config.sequence_length)

  def batch(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed).integers
    tokens, targets = draw(0, 64, (2, *shape), np.int32)
    segments = 1 + np.cumsum(draw(0, 4, shape) == 0, axis=1, dtype=np.int32)  # documents
    weights = draw(0, 3, shape).astype(np.float32)
    return {"tokens": tokens, "targets": targets, "segments": segments, "weights": weights}

  outputs = lambda state, batch: functions.logits(state["params"], batch)  # noqa: E731
  described = checks.Description(outputs=outputs, layers=2, **{name: name for name in batch(0)})
  state = lambda seed: functions.init(jax.random.key(seed))  # noqa: E731
  placed = (functions.placed, functions.rows)
  return checks.Program(functions.step, state, batch, layout.mesh, placed, described)


def main(arguments: list[str]) -> None:
  """Trains by a command line."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  for field in dataclasses.fields(Config):
    given = {"type": field.type, "default": field.default, "help": "default: %(default)r"}
    if field.type is bool:  # a flag and its opposite
      given["action"] = argparse.BooleanOptionalAction
    parser.add_argument(f"--{field.name}", **given)
  config = Config(**vars(parser.parse_args(arguments)))
  jax.config.update("jax_enable_x64", config.parameter_dtype == "float64")
  try:
    train(config)
  except ValueError as error:
    parser.exit(2, f"{error}\n")


if __name__ == "__main__":
  main(sys.argv[1:])
