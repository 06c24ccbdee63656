"""The vision transformer beside NumPy."""

import numpy as np
import pytest

from models import model_spec
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job


def norm(x, layer, epsilon):
  centred = x - x.mean(-1, keepdims=True)
  scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
  return scaled * layer["scale"] + layer["bias"]


def gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def logits(params, image, model):
  """Returns the logits of one image, a patch and a head at a time."""
  side, size = model.image_size, model.patch_size
  pixels = image.reshape(side, side, model.channels)
  corners = [(i, j) for i in range(0, side, size) for j in range(0, side, size)]
  patches = np.stack([pixels[i : i + size, j : j + size].reshape(-1) for i, j in corners])
  x = patches @ params["patches"]["kernel"] + params["patches"]["bias"]
  x = x + params["positions"]["table"]
  for number in range(model.layers):
    layer = {name: values[number] for name, values in named_leaves(params["layers"]).items()}

    def part(name, layer=layer):
      return {key.rpartition("/")[2]: x for key, x in layer.items() if key.startswith(f"{name}/")}

    normed = norm(x, part("attention_norm"), model.norm_epsilon)
    update = layer["attention/out/bias"]
    for head in range(model.heads):
      q, k, v = (
        normed @ layer[f"attention/{name}/kernel"][:, head] + layer[f"attention/{name}/bias"][head]
        for name in ("query", "key", "value")
      )
      weights = np.exp(q @ k.T / np.sqrt(q.shape[-1]))
      weights /= weights.sum(-1, keepdims=True)
      update = update + weights @ v @ layer["attention/out/kernel"][head]
    x = x + update
    normed = norm(x, part("mlp_norm"), model.norm_epsilon)
    hidden = gelu(normed @ layer["mlp/up/kernel"] + layer["mlp/up/bias"])
    x = x + hidden @ layer["mlp/down/kernel"] + layer["mlp/down/bias"]
  mean = norm(x, params["final_norm"], model.norm_epsilon).mean(0)
  return mean @ params["head"]["kernel"] + params["head"]["bias"]


def test_the_sums_are_numpys():
  job = make_job("dp4_tp2", "vit", **{"training.matmul_precision": "highest"})
  state, batch = first_state(job), host_batch(job)
  wide = {n: np.asarray(x, np.float64) for n, x in named_leaves(state.params).items()}
  params = {}
  for name, value in wide.items():
    *path, last = name.split("/")
    place = params
    for key in path:
      place = place.setdefault(key, {})
    place[last] = value
  found = np.stack([logits(params, x, job.config.model) for x in batch["inputs"].astype(float)])
  logs = found - np.log(np.exp(found).sum(axis=1, keepdims=True))
  weights, targets = batch["weights"].astype(float), batch["targets"]
  right = found.argmax(axis=1) == targets
  wanted = {
    "loss": -(logs[np.arange(len(found)), targets] * weights).sum(),
    "correct": (right * weights).sum(),
  }
  assert 0 < wanted["correct"] < weights.sum()
  ours = job.compile(job.program.sums, state.params, batch).function(state.params, batch)
  for name, value in wanted.items():
    np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)


def test_operations_of_a_vit_b_16():
  # ViT-B/16 at 224 x 224 (arXiv:2010.11929, table 1; 86 M parameters): 17.5 billion multiplications
  # and additions forward (arXiv:2205.01580 counts a fused one as one operation), three times as
  # many with the backward pass, two operations each.
  sizes = {"model_size": 768, "feedforward_size": 3072, "heads": 12, "layers": 12}
  keys = {**sizes, "patch_size": 16, "channels": 3, "output_size": 1000, "input_size": 224**2 * 3}
  job = make_job("single", "vit", **{f"model.{key}": value for key, value in keys.items()})
  assert model_spec(job.config).train_flops_per_example() == pytest.approx(6 * 17.5e9, rel=0.01)
  parameters = sum(np.prod(p.shape) for p in job.placements["parameters"].values())
  assert parameters == pytest.approx(86e6, rel=0.01)
