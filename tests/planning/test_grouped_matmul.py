"""Grouped matmuls as the compiler for TPUs makes them: as many FLOPs as are useful."""

import functools

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from partitioning.parallel.expert_exchange import Way, grouped_matmul
from planning import aot
from planning.roofline import Costs
from planning.topology import parse
from runtime import hlo

ROWS, INPUTS, OUTPUTS, GROUPS = 4096, 1024, 512, 16
USEFUL = 2 * ROWS * INPUTS * OUTPUTS


def flops(function, topology, *shapes):
  """Returns the FLOPs of a compiled function by the names of its instructions."""
  [device, *_] = aot.start(parse(topology), 1, ())
  sharding = SingleDeviceSharding(device)
  given = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in shapes]
  program = hlo.parse(jax.jit(function).lower(*given).compile().as_text())
  costs, entry = Costs(program), program.computations[program.entry]
  found = {one.name: costs.work(entry, one).flops for one in entry.instructions.values()}
  return {name: count for name, count in found.items() if count}


ROW, KERNEL = ((ROWS, INPUTS), "bfloat16"), ((GROUPS, INPUTS, OUTPUTS), "bfloat16")
RESULT, SIZES = ((ROWS, OUTPUTS), "bfloat16"), ((GROUPS,), "int32")
product = functools.partial(grouped_matmul, how=Way("ragged"))


def of_rows(x, kernels, sizes, dy):
  """Returns the gradient of the rows."""
  return jax.vjp(lambda x: product(x, kernels, sizes), x)[1](dy)


def of_kernels(x, kernels, sizes, dy):
  """Returns the gradient of the kernels."""
  return jax.vjp(lambda kernels: product(x, kernels, sizes), kernels)[1](dy)


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
@pytest.mark.plan
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_forward_and_both_gradients_have_the_useful_flops(topology):
  forward = flops(lambda x, k, s: product(x, k, s), topology, ROW, KERNEL, SIZES)
  assert list(forward.values()) == [pytest.approx(USEFUL, rel=0.05)]
  for gradient in (of_rows, of_kernels):
    found = flops(gradient, topology, ROW, KERNEL, SIZES, RESULT)
    assert list(found.values()) == [pytest.approx(USEFUL, rel=0.05)], gradient.__doc__


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
@pytest.mark.plan
def test_ragged_dot_s_own_gradient_of_the_kernels_is_dense():
  """The reason for megablox: before jax 0.12 it has as many times the FLOPs as there are groups."""
  grouped = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)

  def dense(x, kernels, sizes, dy):
    return jax.vjp(lambda k: jax.lax.ragged_dot(x, k, sizes), kernels)[1](dy)

  found = flops(dense, "v5p:2x2x1", ROW, KERNEL, SIZES, RESULT)
  assert sum(found.values()) == pytest.approx((1 if grouped else GROUPS) * USEFUL, rel=0.05)
