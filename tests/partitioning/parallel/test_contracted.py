"""`contracted`: what einsum gives; on CPUs one matmul, where no merged dim is sharded."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partitioning.constraints import activation_layout
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from partitioning.parallel.sharded_function import contracted
from partitioning.rules import Dim

LEGEND = {
  **{"B": Dim("batch", None), "T": Dim("sequence", None), "D": Dim("model", 10)},
  **{"N": Dim("heads", 2), "H": Dim("head", 3)},
}
TABLE = {"batch": ("data",), "sequence": ("context",), "model": (), "heads": (), "head": ()}
CASES = {"column": ("BTD", "NHD", "BTNH"), "row": ("BTNH", "DNH", "BTD")}


def arrays(x_letters, letters):
  sizes = {"B": 4, "T": 6, "D": 10, "N": 2, "H": 3}
  random = np.random.default_rng(0)
  return (
    random.normal(size=[sizes[one] for one in given]).astype(np.float32)
    for given in (x_letters, letters)
  )


def traced(x_letters, letters, *, context=1, on_cpus=True):
  """Returns (result, gradients) as a traced function of two devices, and its arguments."""
  given = x, kernel = [*arrays(x_letters, letters)]

  def both(x, kernel):
    function = lambda x, kernel: contracted(x_letters, x, letters, kernel)  # noqa: E731
    result, transpose = jax.vjp(function, x, kernel)
    return result, *transpose(jnp.cos(result))

  sizes = {**dict.fromkeys(AXES, 1), "data": 2, "context": context}
  mesh = make_mesh(sizes, jax.devices()[: 2 * context])
  with jax.set_mesh(mesh), activation_layout(LEGEND, TABLE, platform="cpu" if on_cpus else "tpu"):
    return jax.jit(both).trace(x, kernel), given


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_numpy(case):
  x_letters, letters, out = CASES[case]
  function, (x, kernel) = traced(x_letters, letters)
  wanted = np.einsum(f"{x_letters},{letters}->{out}", x, kernel)
  weights = np.cos(wanted)
  result, d_x, d_kernel = function.lower().compile()(x, kernel)
  np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(
    d_x, np.einsum(f"{out},{letters}->{x_letters}", weights, kernel), rtol=1e-5, atol=1e-5
  )
  np.testing.assert_allclose(
    d_kernel, np.einsum(f"{out},{x_letters}->{letters}", weights, x), rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize(
  ("context", "on_cpus", "merged"), [(1, True, True), (2, True, False), (1, False, False)]
)
def test_dims_are_merged_on_cpus_where_the_sequence_is_not_sharded(context, on_cpus, merged):
  function, _ = traced("BTD", "NHD", context=context, on_cpus=on_cpus)
  matmuls = [one for one in function.jaxpr.eqns if one.primitive.name == "dot_general"]
  assert len(matmuls) == 3
  assert all(all(x.aval.ndim == 2 for x in one.invars) == merged for one in matmuls)


@pytest.mark.parametrize("case", CASES)
def test_the_smaller_dim_of_a_kernel_gradient_comes_first(case):
  x_letters, letters, _ = CASES[case]
  program = traced(x_letters, letters)[0].lower().compile().as_text()
  gradients = re.findall(r"f32\[(\d+),(\d+)\]\S* dot\(.*lhs_contracting_dims=\{0\}", program)
  assert gradients == [("6", "10")]
