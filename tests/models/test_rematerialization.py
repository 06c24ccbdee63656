"""Rematerialization by name: which arrays have names, what is saved, and that no number changes."""

import functools

import jax
import numpy as np
import pytest

from planning import traced_step
from runtime import rematerialization
from runtime.rematerialization import NAMES
from tests.helpers.jobs import first_state, host_batch, make_job, place

KEY = "training.rematerialization"
POST_NORMS = {"model.pre_norms": False, "model.post_norms": True}
PLAIN = {"model.gated": False, "model.activation": "gelu"}
RING = {"mesh.context": 2, "model.context_attention": "ring"}
SPLASH = {
  "training.attention_kernel": "splash",
  "data.sequence_length": 128,
  "model.head_size": 128,
}


def named_arrays(job):
  """Returns name -> shapes of the arrays that have it in the forward pass of a batch."""
  with job.tracing():
    key = jax.eval_shape(jax.random.key, 0)
    traced = jax.make_jaxpr(job.program.sums)(job.state.params, job.batch, key)
  found = {}
  for equation in traced_step.equations(traced.jaxpr):
    if equation.primitive.name == "name":
      found.setdefault(equation.params["name"], []).append(equation.outvars[0].aval.shape)
  return found


@pytest.mark.parametrize(
  "changes", [{}, POST_NORMS, PLAIN, RING], ids=["", "post", "plain", "ring"]
)
def test_each_name_is_that_of_one_array_with_the_dims_of_the_table(changes):
  job = make_job("single", "lm", **changes)
  sizes = {"B": 16, "R": 12, "T": 12, "D": 40, "N": 8, "K": 4, "H": 6, "F": 56}
  found = named_arrays(job)
  assert {*found} == {*rematerialization.names_of(job.config.model)}
  for name, shapes in found.items():
    wanted = [sizes[letter] for letter in NAMES[name]]
    if name == "attention_output" and changes is RING:  # a shard, and its normalizers
      wanted[1] //= 2
      assert [*map(list, shapes)] == [wanted, [16, 4, 2, 6]]
    else:
      assert [*map(list, shapes)] == [wanted], name


def saved(job):
  """Returns what the layers save for the backward pass: (memory, shape), and the backward scan."""
  with job.tracing():
    key = jax.eval_shape(jax.random.key, 0)
    traced = jax.make_jaxpr(job.program.gradients)(job.state.params, job.batch, key)
  scans = [
    one
    for one in traced_step.equations(traced.jaxpr)
    if one.primitive.name == "scan" and one.params["length"] == job.config.model.layers
  ]
  [forward], [backward] = (
    [one for one in scans if one.params["reverse"] == way and len(one.invars) > 6]
    for way in (False, True)
  )
  _, carried = traced_step.fixed_and_carried(forward)
  arrays = [x.aval for x in forward.outvars[carried:]]
  found = [
    ("host" if x.memory_space == jax.memory.Space.Host else "device", x.shape[1:]) for x in arrays
  ]
  return sorted(found), backward


def shape(name):
  sizes = {"B": 16, "R": 12, "T": 12, "D": 40, "N": 8, "K": 4, "H": 6, "F": 56}
  return tuple(sizes[letter] for letter in NAMES[name])


@pytest.mark.parametrize("even", [True, False])
def test_each_name_is_saved_where_the_table_says(even):
  """Nothing else is, but the layers' input; the backward pass needs all but the last update."""
  names = enumerate(rematerialization.names_of(make_job("single", "lm").config.model))
  choices = {name: "save" if number % 2 == even else "offload" for number, name in names}
  text = ",".join(f"{name}={choice}" for name, choice in choices.items())
  found, _ = saved(make_job("single", "lm", **{KEY: text}))
  memories = {"save": "device", "offload": "host"}
  assert found == sorted(
    (memories[choice], shape(name)) for name, choice in choices.items() if name != "mlp_update"
  )


@pytest.mark.parametrize(
  ("changes", "normalizers", "kernel"),
  [
    (RING, (32, 4, 2, 6), "ppermute"),
    pytest.param(SPLASH, (16, 8, 128), "pallas_call", marks=pytest.mark.long),
  ],
)
def test_the_normalizer_of_the_softmax_is_saved_with_the_output(changes, normalizers, kernel):
  """So that neither a ring nor a kernel need run again. Its shards are stacked."""

  def runs(backward):
    inside = traced_step.equations(traced_step.body(backward))
    return sum(one.primitive.name == kernel for one in inside)

  again = runs(saved(make_job("single", "lm", **{KEY: "full"}, **changes))[1])
  found, backward = saved(make_job("single", "lm", **{KEY: "attention_output=offload"}, **changes))
  assert [memory for memory, _ in found] == ["device", "host", "host"]
  assert ("host", normalizers) in found
  assert runs(backward) < again


def test_elementwise_operations_alone_are_repeated():
  """Of arrays of all tokens there remain matmuls' results, scores' sums and norms' statistics."""

  def of(text):
    found, backward = saved(make_job("single", "lm", **{KEY: text}))
    matmuls = [x for x in traced_step.equations(traced_step.body(backward)) if is_matmul(x)]
    return [shape for _, shape in found], len(matmuls)

  def is_matmul(equation):
    return equation.primitive.name == "dot_general"

  (every, matmuls), (kept, again) = of("none"), of("elementwise")
  assert again == matmuls
  rows, hidden = 16 * 12, 56
  wide = [shape for shape in kept if np.prod(shape) == rows * hidden]
  assert len(wide) == 2  # gate and up
  assert len([shape for shape in every if np.prod(shape) == rows * hidden]) > 3
  assert sum(map(np.prod, kept)) < 0.7 * sum(map(np.prod, every))


@functools.cache
def gradients(strategy, text, dtype="float32"):
  with jax.enable_x64(dtype == "float64"):
    job = make_job(strategy, "lm", **{KEY: text, "training.parameter_dtype": dtype})
    placed = job.state_shardings.params, job.batch_shardings
    compiled = job.compile(
      lambda params, batch: job.program.gradients(params, batch, jax.random.key(0))[:3],
      *(job.state.params, job.batch),
      in_shardings=placed,
    ).function
    batch = place(job, host_batch(job))
    return jax.tree.leaves(jax.device_get(compiled(first_state(job).params, batch)))


@pytest.mark.parametrize(
  "text",
  [
    "layer_input=offload,query=offload,key=save,attention_input=save,mlp_input=offload,hidden=save",
    "elementwise",
  ],
)
def test_gradients_are_the_same(text):
  """To the bit, offloaded or saved; to rounding, computed again: XLA fuses it with other things."""
  if "offload" in text:
    saving = gradients("single", text.replace("offload", "save"))
    assert all(map(np.array_equal, saving, gradients("single", text)))
  for ours, wanted in zip(
    gradients("single", text, "float64"), gradients("single", "none", "float64"), strict=True
  ):
    assert np.linalg.norm(ours - wanted) <= 1e-12 * np.linalg.norm(wanted)
