"""Fused attention kernels in traced programs, each counted as one operation.

A kernel reads its arguments from HBM and writes its results to it: forward queries, keys and
values, and the output with the logarithms of the sums of the softmax; backward these, the output
and its gradient, and three gradients. Scores stay on the chip. Kernels are JAX's splash attention
on TPUs and cuDNN's attention on GPUs, which is recognized by the names of JAX's primitives, or as a
`jax.jit` of such a name: without a GPU the primitives cannot be traced.
"""

import math
import re
from typing import Any

import numpy as np

# Splash attention -> its matmuls: of the scores (again), and of what is made of them.
_SPLASH = {"fwd": 2, "dkv": 4, "dq": 3}
# cuDNN's attention -> its matmuls whose third dim is the head size of queries and keys, of values.
_CUDNN = {"fwd": (1, 1), "bwd": (3, 2)}
_NAME = re.compile(r"dot_product_attention_(fwd|bwd)(?:_wrapper)?(?:_window(\d+))?$")


def is_kernel(equation: Any) -> bool:
  """Returns whether an equation is a kernel of cuDNN's attention, whose body is not inspected."""
  return _cudnn_name(equation) is not None


def flops(equation: Any) -> float:
  """Returns the operations of a kernel's matmuls; 0 for what is no attention kernel.

  Blocks of scores that the mask excludes are skipped: of cuDNN's, exactly what is excluded.
  """
  if (found := _cudnn_name(equation)) is not None:
    return _of_cudnn(equation, found)
  return _of_splash(equation) if equation.primitive.name == "pallas_call" else 0.0


def _cudnn_name(equation: Any) -> re.Match | None:
  name = equation.primitive.name
  return _NAME.match(equation.params["name"] if name in ("jit", "pjit") else name)


def _of_cudnn(equation: Any, found: re.Match) -> float:
  """Returns them of arguments that start with q_BTNH, k_BSKH and v_BSKU; the mask is causal."""
  (rows, queries, heads, size), (_, keys, _, _), (*_, of_values) = (
    x.aval.shape for x in equation.invars[:3]
  )
  window = int(found[2] or equation.params.get("sliding_window_length") or keys)
  # Query t of `queries`, the last of which attends to the last key.
  pairs = np.minimum(np.arange(keys - queries, keys) + 1, window).sum()
  of_keys, of_heads = _CUDNN[found[1]]
  return 2.0 * rows * heads * float(pairs) * (of_keys * size + of_heads * of_values)


def _of_splash(equation: Any) -> float:
  called = str(equation.params.get("name") or equation.params.get("name_and_src_info", ""))
  products = next((n for part, n in _SPLASH.items() if part in called), 0)
  arrays = [x.aval.shape for x in equation.invars if x.aval.ndim > 2 and x.aval.dtype.kind != "i"]
  if not products or len(arrays) < 2:
    return 0.0
  queries, keys = arrays[:2]
  grid = equation.params["grid_mapping"].grid  # ends in heads and blocks: of queries, of keys
  count, most = grid[-3 if "dkv" in called else -2], grid[-1]
  share = (1 + 1 / count) / 2 if most == count else most / count  # with a window, fewer
  return products * 2.0 * math.prod(queries) * keys[-2] * share
