"""The PyTorch side of benchmarks/gpu.py and nanogpt_cpu.py: flash attention, fused AdamW.

A GPT-2 (learned positions, LayerNorm, biases, GELU) or a Llama (arXiv:2302.13971: rotary positions,
RMSNorm, SwiGLU; grouped-query attention), both with tied embeddings, written with `torch.nn` and
nothing of the application. Parameters are float32; matmuls run in bfloat16 under autocast, the
softmax of the loss in float32. It speaks the protocol of benchmarks/gpu_protocol.py;
`python -m benchmarks.gpu` starts it as `python -m benchmarks.gpu_torch`.
"""

import math
import pathlib
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import gpu_protocol


class Block(nn.Module):
  """A pre-norm decoder layer."""

  def __init__(self, sizes: dict):
    """Makes the layer of sizes as in benchmarks/gpu_protocol.py."""
    super().__init__()
    self.sizes = sizes
    width, heads, kv, head = (sizes[k] for k in ("width", "heads", "kv_heads", "head_size"))
    self.gpt, bias = sizes["family"] == "gpt2", sizes["biases"]
    self.approximate = "none" if sizes["activation"] == "gelu_erf" else "tanh"
    self.attention_norm, self.mlp_norm = (_norm(sizes) for _ in range(2))
    self.query = nn.Linear(width, heads * head, bias=bias)
    self.key = nn.Linear(width, kv * head, bias=bias)
    self.value = nn.Linear(width, kv * head, bias=bias)
    self.out = nn.Linear(heads * head, width, bias=bias)
    if not self.gpt:
      self.gate = nn.Linear(width, sizes["feedforward"], bias=bias)
    self.up = nn.Linear(width, sizes["feedforward"], bias=bias)
    self.down = nn.Linear(sizes["feedforward"], width, bias=bias)

  def forward(self, x, rope):
    """Returns the residual after the layer."""
    batch, length, _ = x.shape
    normed = self.attention_norm(x)
    q, k, v = (
      linear(normed).view(batch, length, -1, self.sizes["head_size"]).transpose(1, 2)
      for linear in (self.query, self.key, self.value)
    )
    if rope is not None:
      q, k = _rotate(q, rope), _rotate(k, rope)
    mixed = functional.scaled_dot_product_attention(
      q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
    normed = self.mlp_norm(x)
    if self.gpt:
      return x + self.down(functional.gelu(self.up(normed), approximate=self.approximate))
    return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
  """A GPT-2 or a Llama."""

  def __init__(self, sizes: dict):
    """Makes the model of sizes as in benchmarks/gpu_protocol.py."""
    super().__init__()
    self.sizes = sizes
    self.embed = nn.Embedding(sizes["vocabulary"], sizes["width"])
    self.positions = (
      nn.Embedding(sizes["length"], sizes["width"]) if sizes["family"] == "gpt2" else None
    )
    self.layers = nn.ModuleList([Block(sizes) for _ in range(sizes["layers"])])
    self.final_norm = _norm(sizes)
    if sizes["family"] != "gpt2":
      half = sizes["head_size"] // 2
      frequency = sizes["rotary_base"] ** (-torch.arange(half, dtype=torch.float32) / half)
      angles = torch.arange(sizes["length"])[:, None] * frequency
      self.register_buffer("rope", torch.stack([angles.cos(), angles.sin()]), persistent=False)
    else:
      self.rope = None

  def forward(self, tokens, targets):
    """Returns the mean cross-entropy."""
    x = self.embed(tokens)
    if self.positions is not None:
      x = x + self.positions.weight[: tokens.shape[1]]
    for layer in self.layers:
      x = layer(x, self.rope)
    logits = functional.linear(self.final_norm(x), self.embed.weight)
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _norm(sizes: dict) -> nn.Module:
  if sizes["family"] == "gpt2":
    return nn.LayerNorm(sizes["width"], eps=sizes["epsilon"])
  return nn.RMSNorm(sizes["width"], eps=sizes["epsilon"])


def _rotate(x, rope):
  cos, sin = rope
  a, b = x.float().chunk(2, dim=-1)
  return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def load(model: Decoder, folder: pathlib.Path) -> None:
  """Loads the parameters that the application started from."""
  names = gpu_protocol.torch_names(model.sizes)
  state = {}
  for name, (file, layer, transposed) in names.items():
    array = np.load(folder / f"{file}.npy", mmap_mode="r")
    array = array if layer is None else array[layer]
    own = model.get_parameter(name)
    # Kernels are inputs first there, outputs first here; heads are dims of their own there.
    if transposed:
      array = array.reshape(own.shape[1], own.shape[0]).T
    state[name] = torch.from_numpy(np.array(array).reshape(own.shape))
  model.load_state_dict(state)


class Side:
  """The model, its optimizer and its batches."""

  def __init__(self, description: dict):
    """Builds and compiles; see benchmarks/gpu_protocol.py for the description."""
    self._device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    self._model = Decoder(description["sizes"])
    load(self._model, pathlib.Path(description["parameters"]))
    self._model.to(self._device)
    keys = description["optimizer"]
    decayed = [p for name, p in self._model.named_parameters() if gpu_protocol.decays(name)]
    others = [p for name, p in self._model.named_parameters() if not gpu_protocol.decays(name)]
    self._optimizer = torch.optim.AdamW(
      [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
      lr=keys["learning_rate"],
      betas=(keys["beta_1"], keys["beta_2"]),
      eps=keys["epsilon"],
      weight_decay=keys["weight_decay"],
      fused=True,
    )
    self._clip, self._warmup = keys["clip_norm"], keys["warmup_steps"]
    self._rate = keys["learning_rate"]
    self._steps, self._description = keys["steps"], description
    self._dtype = getattr(torch, description["compute_dtype"])
    self._loss = torch.compile(self._model) if description["compile"] else self._model
    self._batch = gpu_protocol.train_batch(description)
    self._done = 0

  def _mean_loss(self, pair: tuple[np.ndarray, np.ndarray]):
    tokens, targets = (torch.from_numpy(x.astype(np.int64)).to(self._device) for x in pair)
    narrow = self._dtype != torch.float32
    with torch.autocast(self._device, self._dtype, enabled=narrow):
      return self._loss(tokens, targets)

  def _share_of_rate(self) -> float:
    if self._done < self._warmup:
      return (self._done + 1) / self._warmup
    if self._steps is None:
      return 1.0
    share = min(1.0, (self._done - self._warmup) / (self._steps - self._warmup))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))

  def run(self, steps: int, validate: bool = False, **_: object) -> dict:
    """Runs some steps; see benchmarks/gpu_protocol.py."""
    began = time.perf_counter(), time.process_time()
    for _ in range(steps):
      for group in self._optimizer.param_groups:
        group["lr"] = self._rate * self._share_of_rate()
      loss = self._mean_loss(self._batch(self._done))
      loss.backward()
      nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
      self._optimizer.step()
      self._optimizer.zero_grad(set_to_none=True)
      self._done += 1
    last = float(loss.detach())  # waits for the device
    seconds, processor = time.perf_counter() - began[0], time.process_time() - began[1]
    found = {"seconds": seconds, "processor": processor, "loss": last}
    if validate:
      with torch.no_grad():
        losses = [
          float(self._mean_loss(x)) for x in gpu_protocol.validation_batches(self._description)
        ]
      found["validation"] = sum(losses) / len(losses)
    return found

  def facts(self) -> dict:
    """Returns versions and sizes."""
    parameters = sum(p.numel() for p in self._model.parameters())
    peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else 0
    return {
      "library": f"torch {torch.__version__}",
      "device": torch.cuda.get_device_name() if self._device == "cuda" else "cpu",
      "parameters": parameters,
      "peak_bytes": peak,
    }


if __name__ == "__main__":
  gpu_protocol.serve(Side)
