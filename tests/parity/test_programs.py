"""What the compiled programs hold: initial parameters, dropout, collectives, types."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models import layers
from partitioning.rules import named_leaves
from runtime import collectives
from tests.helpers.jobs import STRATEGIES, make_job


def summary(compiled, job):
  """Returns {(kind, axes): (count, bytes)} of a compiled program."""
  found = collectives.collectives(compiled.as_text(), job.mesh)
  rows = collectives.summarize(found)
  return {(row.kind, row.axes): (row.count, row.bytes) for row in rows}


@pytest.mark.parametrize(
  "recipe", [pytest.param("lm", marks=pytest.mark.long), "mlp", "mlp_tutorial"]
)
def test_initial_parameters_are_the_same_bits_on_every_mesh_and_need_no_collective(recipe):
  _, wanted = drawn("single", recipe)
  assert any(np.std(leaf) > 0 for leaf in wanted.values())
  # How an array is drawn does not depend on which model it is in: all meshes for one model, one
  # of three axes for the others. On eight devices, `fsdp` is `fsdp8`.
  others = [name for name in STRATEGIES if name not in ("single", "fsdp")]
  for strategy in others if recipe == "lm" else ("dp2_fsdp2_tp2",):
    sent, found = drawn(strategy, recipe)
    assert sent == {}, strategy
    assert found.keys() == wanted.keys()
    for name, leaf in found.items():
      assert leaf.tobytes() == wanted[name].tobytes(), (strategy, name)


def drawn(strategy, recipe):
  """Returns what drawing the first state sends, and name -> initial parameter."""
  job = make_job(strategy, recipe)
  draw = job.compile_init().function
  state = draw(jax.random.key(job.config.seed))
  job.check_placed(state)
  return summary(draw, job), named_leaves(jax.device_get(state.params))


def test_drawing_dropout_needs_no_collective():
  job = make_job("dp2_fsdp2_tp2", "lm")
  spec = NamedSharding(job.mesh, PartitionSpec(("data", "fsdp")))
  x_BTD = jax.ShapeDtypeStruct((16, 12, 40), jnp.float32, sharding=spec)
  compiled = job.compile(
    lambda x, key: layers.dropout(x, 0.25, key, jnp.arange(x.shape[1])),
    x_BTD,
    jax.random.key(0),
    out_shardings=spec,
  ).function
  assert summary(compiled, job) == {}
  dropped = np.asarray(compiled(jax.device_put(jnp.ones(x_BTD.shape), spec), jax.random.key(0)))
  assert 0.2 < np.mean(dropped == 0) < 0.3
  assert np.allclose(dropped[dropped != 0], 4 / 3)


def tutorial_collectives(data, tensor):
  """Returns what theory says of the network [784, W, W, W, 10] with W = B = 512, in float32.

  Each gradient is summed over `data`, and with them the loss and the weights. Over `tensor`,
  the row-split product of the forward pass and the column-split one of the backward pass leave
  partial sums of one activation [B / data, W] each. For the norm each device sums the squares
  of its eighth of seven tensors, one scalar each; the last bias, of 10, is too short to cut.
  """
  width = batch = 512
  split = width * width // tensor + width // tensor + width * width // tensor  # W2, b2, W3
  whole = 784 * width + width + width + width * 10 + 10  # W1, b1, b3, W4, b4
  expected = {("all-reduce", ("data",)): 4 * (split + whole) + 4 + 4}  # + loss, weights
  if tensor == 1:
    expected["all-reduce", ("data",)] += 4 * 7
  else:
    # The squares of W2, which the axes cut in two dims, are summed over one and then the other.
    expected["all-reduce", ("data",)] += 4
    expected["all-reduce", ("tensor",)] = 2 * 4 * batch // data * width + 4
    expected["all-reduce", ("data", "tensor")] = 4 * 6
  return expected


@pytest.mark.parametrize(
  ("strategy", "data", "tensor", "counts"),
  [
    ("dp8", 8, 1, {("data",): 2}),
    ("dp4_tp2", 4, 2, {("data",): 2, ("tensor",): 2, ("data", "tensor"): 2}),
  ],
)
def test_the_tutorials_network_communicates_as_theory_says(strategy, data, tensor, counts):
  job = make_job(
    strategy,
    "mlp_tutorial",
    **{
      "model.input_size": 784,
      "model.model_size": 512,
      "model.feedforward_size": 512,
      "data.global_batch_size": 512,
    },
  )
  found = summary(job.compile_train_step().function, job)
  assert {key: size for key, (_, size) in found.items()} == tutorial_collectives(data, tensor)
  # XLA combines small all-reduces; how many are left is pinned, so that a new one shows.
  assert {axes: count for (_, axes), (count, _) in found.items()} == counts


def test_the_tutorials_layout():
  job = make_job("dp4_tp2", "mlp_tutorial")
  specs = {name: tuple(p.spec) for name, p in job.placements["parameters"].items()}
  assert specs["layer_1/kernel"] == (None, None)
  assert specs["layer_2/kernel"] == (None, "tensor")  # by columns
  assert specs["layer_3/kernel"] == ("tensor", None)  # by rows
  assert specs["layer_4/kernel"] == (None, None)


@pytest.mark.parametrize(
  ("recipe", "precision"), [("lm", "float64"), ("mlp", "float32"), ("mlp_tutorial", "float64")]
)
def test_the_step_returns_the_types_that_it_was_given(recipe, precision):
  with jax.enable_x64(precision == "float64"):
    job = make_job("dp4_tp2", recipe, **{"training.parameter_dtype": precision})
    with job.tracing():
      after, metrics = jax.eval_shape(job.program.train_step, job.state, job.batch)
    before = job.state
  assert jax.tree.structure(after) == jax.tree.structure(before)
  for (name, old), new in zip(named_leaves(before).items(), jax.tree.leaves(after), strict=True):
    assert (old.shape, old.dtype, old.weak_type) == (new.shape, new.dtype, new.weak_type), name
  assert {m.dtype for m in metrics.values()} == {jnp.dtype(precision)}


@pytest.mark.parametrize(
  ("strategy", "dtype"),
  [("single", "bfloat16"), ("fsdp8", "float32"), ("tp8", "bfloat16")],
)
def test_nothing_of_a_kernels_size_is_kept_for_the_backward_pass(strategy, dtype):
  """Neither cast nor turned: the kernels as they are stored are there anyway."""
  job = make_job(strategy, "lm", **{"training.compute_dtype": dtype})
  with job.tracing():
    gradients, key = job.program.gradients, jax.random.key(0)
    program = jax.make_jaxpr(gradients)(job.state.params, job.batch, key)
  sizes = {leaf.size for leaf in jax.tree.leaves(job.state.params["layers"]) if leaf.ndim > 2}
  loops = scans(program.jaxpr)
  assert len(loops) == 2, "the layers, and back"
  kept = [out.aval.shape for out in loops[0].outvars]
  assert not [shape for shape in kept if int(np.prod(shape)) in sizes]


def scans(jaxpr):
  """Returns the outermost loops over layers, in their order."""
  found = []
  for equation in jaxpr.eqns:
    if equation.primitive.name == "scan":
      found.append(equation)
      continue
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      found += scans(inner)
  return found
