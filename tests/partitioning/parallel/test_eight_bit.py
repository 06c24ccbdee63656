"""8-bit matmuls beside NumPy: values, gradients, magnitudes; what is gathered for them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.spec import RESIDUAL
from partitioning import dtypes
from partitioning.parallel.matmuls import EightBit, column_parallel, row_parallel
from tests.helpers.jobs import make_job
from tests.parity.comparison import COLLECTIVE_MATMUL, MESHES, SEQUENCE_PARALLEL

B, T, D, F, N, K, H = 16, 16, 40, 56, 8, 4, 6
SHAPES = {"DF": (D, F), "DKH": (D, K, H), "NHD": (N, H, D)}
LARGEST = {"int8": (127, 127), "float8": (448, 57344)}


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A weight of the matmuls."""

  letters: str
  array: jax.Array
  dtype: str
  known: tuple = ()

  def effective_kernel(self):
    return self.array

  def low_rank(self):
    return None

  def eight_bit(self):
    return EightBit(self.dtype, self.known)


def products(dtype, x, kernels, known):
  """Returns x times some kernels: letters -> array."""
  weights = [Kernel(name, k, dtype, known.get(name, ())) for name, k in kernels.items()]
  if "NHD" in kernels:
    return {"NHD": row_parallel(x, weights[0], RESIDUAL)}
  return dict(zip(kernels, column_parallel(x, weights, RESIDUAL), strict=True))


def passes(dtype, x, kernels, pulled, known):
  """Returns the products; gradients of x, of the kernels and of the known magnitudes."""
  results, back = jax.vjp(functools.partial(products, dtype), x, kernels, known)
  return results, back(pulled)


def inputs(*names, seed=0):
  """Returns x, kernels and the gradients of their products; tokens and outputs of unlike size."""
  random = np.random.default_rng(seed)

  def draw(*shape):
    return random.standard_normal(shape).astype(np.float32)

  width = (N, H) if "NHD" in names else (D,)
  sizes = np.exp(draw(B, T))
  x = draw(B, T, *width) * sizes.reshape(B, T, *(1,) * len(width))
  kernels = {name: draw(*SHAPES[name]) * np.exp(draw(SHAPES[name][-1])) for name in names}
  outputs = {name: (D,) if name == "NHD" else SHAPES[name][1:] for name in names}
  return x, kernels, {name: draw(B, T, *shape) * 1e-6 for name, shape in outputs.items()}


def on(mesh, dtype, x, kernels, pulled, known=None):
  """Returns what `passes` does on a mesh, and the compiled program."""
  job = make_job("single", "lm", **mesh)
  with job.tracing():
    function = jax.jit(functools.partial(passes, dtype))
    compiled = function.lower(x, kernels, pulled, known or {}).compile()
    return *jax.device_get(compiled(x, kernels, pulled, known or {})), compiled.as_text()


# ---- NumPy ----


def rounded(x, axes, dtype, gradient=False, magnitude=None):
  """Returns the 8-bit numbers as wider ones, and their scale, of as many dims."""
  largest = LARGEST[dtype][gradient]
  if magnitude is None:
    magnitude = np.max(np.abs(x), axis=axes, keepdims=True)
  scale = (np.asarray(magnitude, np.float32) / np.float32(largest)).astype(np.float32)
  values = np.clip(x * (1 / scale), -largest, largest).astype(np.float32)
  if dtype == "int8":
    return np.round(values).astype(np.int64), scale
  kind = ml_dtypes.float8_e5m2 if gradient else ml_dtypes.float8_e4m3fn
  return values.astype(kind).astype(np.float64), scale


def expected(dtype, x, kernels, pulled, known=None):
  """Returns what `passes` does, by the formulas of docs/memory.md, each with all dims flat."""
  known, results, of_x, of_kernels = known or {}, {}, 0.0, {}
  tokens, by_token = x.reshape(B * T, -1), dtype == "int8"
  for name, kernel in kernels.items():
    known_x, known_w, known_g = known.get(name, (None, None, None))
    matrix = kernel.reshape(N * H, D) if name == "NHD" else kernel.reshape(D, -1)
    xs, scale_x = rounded(tokens, 1 if by_token else None, dtype, magnitude=known_x)
    ws, scale_w = rounded(matrix, 0 if by_token else None, dtype, magnitude=known_w)
    shape = pulled[name].shape
    results[name] = ((xs @ ws) * (scale_x * scale_w)).reshape(shape)
    g = pulled[name].reshape(B * T, -1)
    if by_token:
      gs, scale_g = rounded(g * scale_w, 1, dtype, True)
      of_x = of_x + (gs @ ws.T) * scale_g
      of_kernel = (xs * scale_x).T @ g
    else:
      gs, scale_g = rounded(g, None, dtype, True, known_g)
      of_x = of_x + (gs @ ws.T) * (scale_g * scale_w)
      of_kernel = (xs.T @ gs) * (scale_x * scale_g)
    of_kernels[name] = of_kernel.reshape(kernel.shape)
  return results, of_x.reshape(x.shape), of_kernels


def assert_close(found, wanted):
  """Compares trees; one number that is rounded otherwise is off by a hundred times the bound."""
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    bound = 2e-6 * np.max(np.abs(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)


SPLIT = {**MESHES["data2_fsdp2_tensor2"], **SEQUENCE_PARALLEL}
RING = {**MESHES["fsdp2_tensor4"], **COLLECTIVE_MATMUL}  # 4 tokens of a device, in both directions


@pytest.mark.parametrize(
  ("dtype", "names", "mesh"),
  [
    ("int8", ("DF", "DKH"), {}),
    ("float8", ("NHD",), {}),
    ("int8", ("NHD",), SPLIT),
    ("float8", ("DF", "DKH"), SPLIT),
    *((dtype, names, RING) for dtype in LARGEST for names in (("DF", "DKH"), ("NHD",))),
  ],
)
def test_values_and_gradients_are_those_of_numpy_on_every_mesh(dtype, names, mesh):
  given = inputs(*names)
  results, (of_x, of_kernels, _), _ = on(mesh, dtype, *given)
  assert_close((results, of_x, of_kernels), expected(dtype, *given))


def test_delayed_scaling_takes_known_magnitudes_and_returns_those_of_the_step():
  # tensor=8 does not divide the 4 key/value heads: their kernel and results have copies.
  x, kernels, pulled = inputs("DF", "DKH")
  known = {name: (np.float32(9.0), np.float32(2.0), np.float32(3e-6)) for name in kernels}
  for mesh in ({}, MESHES["tensor8"]):
    results, (of_x, of_kernels, seen), _ = on(mesh, "float8", x, kernels, pulled, known)
    wanted = expected("float8", x, kernels, pulled, known)
    assert np.max(np.abs(x)) > 9  # what is larger than known is clipped
    assert_close((results, of_x, of_kernels), wanted)
    for name, kernel in kernels.items():
      magnitudes = [np.max(np.abs(array)) for array in (x, kernel, pulled[name])]
      np.testing.assert_allclose(seen[name], magnitudes, rtol=1e-6)


def test_a_history_moves_on_by_a_step():
  history = jnp.asarray([[[3.0, 1.0, 5.0]] * 3])
  with jax.numpy_dtype_promotion("standard"):
    seen = jax.grad(
      lambda h: sum((i + 1) * x for i, x in enumerate(dtypes.known_magnitudes(h[0])))
    )(history)
  np.testing.assert_array_equal(seen[0], [[1, 0, 0], [2, 0, 0], [3, 0, 0]])
  assert [float(x) for x in dtypes.known_magnitudes(history[0])] == [5, 5, 5]
  moved = dtypes.advanced_history(history, seen.at[0, 1, 0].set(jnp.inf))
  np.testing.assert_array_equal(moved[0], [[1, 3, 1], [0, 3, 1], [3, 3, 1]])


@pytest.mark.parametrize("dtype", LARGEST)
def test_what_is_not_finite_stays_so_and_zeros_stay_zeros(dtype):
  x, kernels, pulled = inputs("NHD")
  x[0], x[3, 5, 7, 2], x[4, 6, 0, 0] = 0.0, np.nan, np.inf
  results, (of_x, _, _), _ = on(MESHES["data4_tensor2"], dtype, x, kernels, pulled)
  finite = np.isfinite(results["NHD"])
  if dtype == "float8":
    assert not finite.any()
    return
  assert not finite[3, 5].any()
  assert not finite[4, 6].any()
  assert finite.sum() == finite.size - 2 * D
  np.testing.assert_array_equal(results["NHD"][0], 0)
  assert np.isfinite(of_x).all()


@pytest.mark.parametrize("dtype", LARGEST)
def test_kernels_and_tokens_are_gathered_in_8_bits(dtype):
  mesh = {**MESHES["fsdp4_tensor2"], **SEQUENCE_PARALLEL}
  *_, text = on(mesh, dtype, *inputs("DF"))
  gathered = re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* all-gather\(", text)
  assert ("s8", f"{F // 2},{D}") in gathered
  assert ("s8", f"{B // 4},{T},{D}") in gathered
  # Scales of tokens, and the gradient of the products, whose outputs `tensor` splits, not tokens.
  others = {shape for kind, shape in gathered if kind != "s8"}
  assert others <= {f"{B // 4},{T},1"}
  if dtype == "int8":
    assert re.search(r"s32\[[\d,]*\]\S* dot\(", text)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("names", [("DF",), ("NHD",)])
def test_rings_pass_8_bit_numbers_around(dtype, names):
  *_, text = on({**MESHES["fsdp2_tensor4"], **COLLECTIVE_MATMUL}, dtype, *inputs(*names))
  sent = re.findall(r"= (\w+)\[([\d,]*)\]\S* collective-permute\(", text)
  half = f"{B // 2},{T // 4 // 2},{D}"
  # Each of two halves three times: inputs of columns, once in both passes; gradients of rows,
  # which int8 takes as they are for those of the kernel; and sums.
  small = names == ("DF",) or dtype == "float8"
  assert sent.count(("s8", half)) == (6 if small else 0)
  assert sent.count(("f32", half)) == (6 if small else 12)
  # The scales of tokens go with them.
  scales = 6 if names == ("DF",) and dtype == "int8" else 0
  assert sent.count(("f32", f"{B // 2},{T // 4 // 2},1")) == scales
  assert len(sent) == 12 + scales
