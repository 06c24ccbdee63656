"""Quantized kernels: their codes and scales beside NumPy's, number by number; what is refused."""

import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.quantized import NF4, Format, QuantizedKernel
from partitioning.rules import LayoutError
from tests.helpers.jobs import make_job

RANDOM = np.random.default_rng(5)
KEYS = {"lora.rank": 3, "model.model_size": 128, "training.frozen_dtype": "nf4"}


def test_nf4_has_the_quantiles_that_its_authors_have_published():
  # arXiv:2305.14314: 8 quantiles below 0 and 9 above, 0 shared, the outermost 0.9677083, over the
  # largest; as the published code computes them.
  quantile = statistics.NormalDist().inv_cdf
  above = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
  below = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
  wanted = np.sort([*above, 0.0, *below]) / max(above)
  np.testing.assert_allclose(NF4, wanted, atol=3e-7)


def blocks_by_hand(kernel, axis):
  """Yields (index of the block, its 64 elements), of the dim that is blocked."""
  moved = np.moveaxis(kernel, axis, -1)
  for place in np.ndindex(moved.shape[:-1]):
    for number in range(moved.shape[-1] // 64):
      yield (*place, number), moved[place][64 * number : 64 * number + 64]


@pytest.mark.parametrize(
  ("letters", "shape"), [("DNH", (128, 3, 16)), ("FD", (192, 128)), ("EDM", (2, 64, 80))]
)
def test_codes_and_scales_are_those_of_numpy(letters, shape):
  kernel = RANDOM.standard_normal(shape).astype(np.float32) * 0.02
  kernel[tuple(slice(0, 64 if x == "D" else 1) for x in letters)] = 0.0  # a block of zeros
  axis = letters.index("D")
  last = max(n for n, letter in enumerate(letters) if letter != "D")
  for dtype in ("int8", "nf4"):
    kind = Format.of(letters, dtype)
    arrays = {name: np.asarray(x) for name, x in jax.jit(kind.encoded)(kernel).items()}
    on_host = kind.encoded(kernel, np)
    assert all(arrays[name].tobytes() == x.tobytes() for name, x in on_host.items())
    stored = kind.axis  # of the width; experts' is behind the experts
    assert stored == (-2 if letters == "FD" else -len(letters) + letters.startswith("E"))
    # By hand: the scale of each block, in the kernel's own order of dims.
    sizes = [n // 64 if x == "D" else n for x, n in zip(letters, shape, strict=True)]
    scales = np.moveaxis(np.zeros(sizes), axis, -1)
    for place, block in blocks_by_hand(kernel, axis):
      scales[place] = np.abs(block).max()
    scales = np.moveaxis(scales, -1, axis)
    if dtype == "nf4":  # quantized again, in groups of scales
      size = math.gcd(shape[last], 64)
      rows = np.moveaxis(scales, last, -1)
      groups = rows.reshape(*rows.shape[:-1], -1, size)
      middle = (groups.max(-1, keepdims=True) + groups.min(-1, keepdims=True)) / 2
      step = np.abs(groups - middle).max(-1, keepdims=True) / 127
      rounded = np.round((groups - middle) / step) * step + middle
      rounded = np.moveaxis(rounded.reshape(rows.shape), -1, last)
      assert np.abs(rounded - scales).max() < 0.51 * step.max()
    exact, used = (
      np.moveaxis(x, axis, -1) for x in (scales, scales if dtype == "int8" else rounded)
    )
    wanted = np.zeros_like(np.moveaxis(kernel, axis, -1), np.float64)
    for place, block in blocks_by_hand(kernel, axis):
      *others, number = place
      if not exact[place]:
        codes = np.zeros(64)
      elif dtype == "int8":
        codes = np.round(block / exact[place] * 127) / 127
      else:
        nearest = np.abs(block[:, None] / exact[place] - np.array(NF4)).argmin(axis=1)
        codes = np.array(NF4)[nearest]
      wanted[(*others, slice(64 * number, 64 * number + 64))] = codes * used[place]
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    found = QuantizedKernel(arrays, kind).astype(jnp.dtype("float32"))
    found = np.moveaxis(np.asarray(found), axis, -1)
    np.testing.assert_allclose(found, wanted, atol=1e-7)
    bound = {"int8": 0.006, "nf4": 0.1}[dtype] * 0.02
    assert np.sqrt(np.mean((found - np.moveaxis(kernel, axis, -1)) ** 2)) < bound


def test_a_slice_and_a_stack_have_the_same_bits():
  kernel = RANDOM.standard_normal((2, 128, 3, 64)).astype(np.float32)
  kind = Format.of("DNH", "nf4")
  whole = kind.encoded(kernel, np)
  part = kind.encoded(kernel[1:, 64:, 1:2], np)
  cuts = {"kernel_codes": 32, "kernel_scales": 1, "kernel_scale_steps": 1}
  for name, first in cuts.items():
    assert part[name].tobytes() == whole[name][1:, first:, 1:2].tobytes()


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    (
      {"mesh.fsdp": 4},
      r"kernel_scales: dim Ⓓ \(model\) = 2 blocks of 64 .* fsdp=4; make model 256, or set mesh",
    ),
    (
      {"mesh.tensor": 8, "model.feedforward_size": 256, "model.kv_heads": 8},
      r"mlp/gate/kernel_scale_steps: dim Ⓕ \(feedforward\) = 4 blocks of 64 is not divisible by "
      r"mesh axis tensor=8; make feedforward 512, or",
    ),
  ],
)
def test_shards_that_would_cut_a_block_are_refused(keys, said):
  with pytest.raises(LayoutError, match=said):
    make_job("single", "lm", **KEYS, **keys)


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"lora.rank": 0}, r"frozen_dtype=nf4: all parameters are trained, and none is frozen"),
    ({"model.model_size": 200}, r"do not divide model\.model_size=200; make it 192 or 256"),
    ({"training.frozen_dtype": "int4"}, r"'int4': one of bfloat16, float32, int8, nf4"),
  ],
)
def test_what_cannot_be_quantized_is_refused(keys, said):
  with pytest.raises(ValueError, match=said):
    make_job("single", "lm", **{**KEYS, **keys})


def test_what_is_quantized_and_what_the_parameters_are():
  job = make_job("single", "lm", **KEYS, **{"training.trainable": ("layers/mlp/up/kernel",)})
  plain = make_job("single", "lm", **{**KEYS, "training.frozen_dtype": "bfloat16"})
  assert job.parameter_counts() == plain.parameter_counts()
  dtypes = {name: np.dtype(x.dtype).name for name, x in job.placements["parameters"].items()}
  assert dtypes["layers/mlp/down/kernel_codes"] == "uint8"
  assert dtypes["layers/mlp/up/kernel"] == "float32"  # trained
  assert {dtypes[name] for name in ("embed/table", "unembed/kernel", "final_norm/scale")} == {
    "bfloat16"
  }
