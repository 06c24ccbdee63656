"""Activations are laid out by their letters: what that changes, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from partitioning.constraints import activation_layout, constrain, record
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from partitioning.rules import Dim
from runtime.collectives import collectives

LEGEND = {
  "B": Dim("batch", None),
  "T": Dim("sequence", None),
  "D": Dim("model", 12),
  "F": Dim("feedforward", 20),
  "K": Dim("kv_heads", 7, may_replicate=True),
}
TABLE = {
  "batch": ("data",),
  "sequence": ("context",),
  "model": (),
  "feedforward": ("tensor",),
  "kv_heads": ("tensor",),
}


def mesh(**sizes):
  """Returns a mesh over as many of the eight devices as the sizes ask for."""
  sizes = {axis: sizes.get(axis, 1) for axis in AXES}
  count = functools.reduce(lambda a, b: a * b, sizes.values())
  return make_mesh(sizes, jax.devices()[:count])


@pytest.fixture
def data_tensor():
  """A mesh of data=2 and tensor=4, set for the test."""
  made = mesh(data=2, tensor=4)
  with jax.set_mesh(made):
    yield made


def abstract(*shape, sharding=None):
  """Returns an abstract float32 array."""
  return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


# ---- What is refused ----


def test_without_a_layout_it_is_refused(data_tensor):
  with pytest.raises(RuntimeError, match=r'constrain\(x, "BF"\): no activation_layout\(\) is in'):
    jax.eval_shape(lambda x: constrain(x, "BF"), abstract(6, 20))


def test_without_a_mesh_it_is_refused_and_none_is_invented():
  with (
    activation_layout(LEGEND, TABLE),
    pytest.raises(RuntimeError, match=r'constrain\(x, "BF"\): no mesh is set; use jax.set_mesh'),
  ):
    jax.eval_shape(lambda x: constrain(x, "BF"), abstract(6, 20))


WRONG = [
  ("BTF", (6, 20), "activation BTF of shape (6, 20): dims BTF have rank 3"),
  ("BX", (6, 20), "activation BX of shape (6, 20): dim X is not in the legend (B batch, T seq"),
  ("BF", (6, 12), "dim F (feedforward) has size 12, its legend says 20"),
  (
    "BF",
    (5, 20),
    "activation BF of shape (5, 20): dim B (batch) = 5 is not divisible by mesh axis data=2; "
    "make batch 4 or 6, or set mesh.data=1",
  ),
  ("FF", (20, 20), "mesh axis tensor splits both dim F and dim F"),
]


@pytest.mark.parametrize(("letters", "shape", "said"), WRONG)
def test_wrong_letters_are_refused_with_the_numbers(data_tensor, letters, shape, said):
  with activation_layout(LEGEND, TABLE), pytest.raises(ValueError, match="activation") as refusal:
    jax.eval_shape(lambda x: constrain(x, letters), abstract(*shape))
  assert said in str(refusal.value)


def test_all_that_is_wrong_with_one_activation_comes_together(data_tensor):
  with activation_layout(LEGEND, TABLE), pytest.raises(ValueError, match="activation") as refusal:
    jax.eval_shape(lambda x: constrain(x, "BXF"), abstract(5, 3, 22))
  for part in ("batch) = 5", "dim X", "has size 22", "feedforward) = 22 is not divisible"):
    assert part in str(refusal.value)


# ---- Recorded, for a verdict on all of them ----


def test_while_the_layout_is_checked_failures_are_recorded(data_tensor):
  def forward(x, y):
    for _ in range(2):
      x = constrain(x, "BF")
    return x, constrain(y, "BTK"), constrain(y, "BX")

  with activation_layout(LEGEND, TABLE, checking=True) as layout:
    jax.eval_shape(forward, abstract(5, 20), abstract(6, 3, 7))
  assert [(c.letters, c.shape) for c in layout.seen] == [
    ("BF", (5, 20)),  # once, though it was met twice
    ("BTK", (6, 3, 7)),
    ("BX", (6, 3, 7)),
  ]
  odd, noted, ranked = layout.seen
  assert "batch) = 5 is not divisible by mesh axis data=2" in str(odd.failures[0])
  assert noted.failures == ()
  assert noted.notes == ("kv_heads=7 is replicated: tensor=4 does not divide it",)
  assert tuple(noted.spec) == ("data", None, None)
  assert "dims BX have rank 2" in str(ranked.failures[0])
  assert layout.axes() == {"data", "tensor"}


def test_what_is_traced_is_recorded_in_any_case(data_tensor):
  def forward(x):
    record("FD", (20, 12))  # has no constraint, such as an operand inside of a shard_map
    return constrain(x, "BF")

  with activation_layout(LEGEND, TABLE) as layout:
    jax.eval_shape(forward, abstract(6, 20))
    with pytest.raises(ValueError, match="activation BF of shape"):
      record("BF", (5, 20))
  assert [(c.letters, c.shape, tuple(c.spec)) for c in layout.seen[:2]] == [
    ("FD", (20, 12), ("tensor", None)),
    ("BF", (6, 20), ("data", "tensor")),
  ]
  assert layout.axes() == {"data", "tensor"}


def test_where_all_axes_are_manual_nothing_is_constrained(data_tensor):
  split = PartitionSpec("data", "tensor")
  manual = jax.shard_map(lambda x: constrain(x, "BF"), in_specs=split, out_specs=split)
  legend = {**LEGEND, "F": Dim("feedforward", None)}
  x_BF = jnp.arange(120.0).reshape(6, 20)
  with activation_layout(legend, TABLE) as layout:
    assert (jax.jit(manual)(x_BF) == x_BF).all()
  assert [(c.shape, tuple(c.spec)) for c in layout.seen] == [((3, 5), (None, None))]


# ---- What it does to a program ----


def project(x_BD, w_DF):
  """A product whose result the compiler alone would split over data only."""
  return constrain(x_BD @ w_DF, "BF")


def compile_project(over, table=None, function=project):
  """Compiles `function` for a batch that is split over data and a kernel that is whole."""
  x_BD = abstract(6, 12, sharding=NamedSharding(over, PartitionSpec("data")))
  w_DF = abstract(12, 20, sharding=NamedSharding(over, PartitionSpec()))
  with activation_layout(LEGEND, table or TABLE):
    # A function of its own each time: jax.jit remembers traces by function and mesh.
    return jax.jit(lambda x, w: function(x, w)).lower(x_BD, w_DF).compile()


def lies_as(compiled, over, *entries):
  """Returns whether the result of rank 2 lies as the entries say."""
  wanted = NamedSharding(over, PartitionSpec(*entries))
  return compiled.output_shardings.is_equivalent_to(wanted, 2)


def test_a_constraint_acts(data_tensor, monkeypatch):
  constrained = compile_project(data_tensor)
  assert lies_as(constrained, data_tensor, "data", "tensor")
  monkeypatch.setattr(jax.lax, "with_sharding_constraint", lambda x, spec: x)
  free = compile_project(data_tensor)
  assert lies_as(free, data_tensor, "data", None)
  assert free.as_text() != constrained.as_text()
  assert "f32[3,5]" in constrained.as_text()  # a piece of [6, 20]
  assert "f32[3,5]" not in free.as_text()


def test_it_acts_on_the_gradient(data_tensor):
  def loss(x, w):
    return jnp.sum(constrain(x @ w, "BF") ** 2)

  compiled = compile_project(data_tensor, function=jax.grad(loss))
  reduced = {(c.kind, c.axes) for c in collectives(compiled.as_text(), data_tensor)}
  assert ("all-reduce", ("tensor",)) in reduced  # F is summed over, and is split over tensor


def test_inside_shard_map_its_manual_axes_are_left_out():
  shapes = []

  def piece(x_BTF):
    shapes.append(x_BTF.shape)
    return constrain(x_BTF * 2, "BTF")

  split = PartitionSpec(None, "context")
  manual = functools.partial(jax.shard_map, in_specs=split, out_specs=split, axis_names={"context"})
  both = mesh(data=2, context=2, tensor=2)
  x_BTF = jnp.arange(6.0 * 10 * 20).reshape(6, 10, 20)
  with jax.set_mesh(both), activation_layout(LEGEND, TABLE):
    y_BTF = jax.jit(manual(piece))(x_BTF)
    with pytest.raises(ValueError, match="context"):  # what naming the axis there would give
      jax.jit(manual(lambda x: jax.lax.with_sharding_constraint(x, split)))(x_BTF)
  assert set(shapes) == {(6, 5, 20)}
  assert (y_BTF == 2 * x_BTF).all()
  wanted = NamedSharding(both, PartitionSpec("data", "context", "tensor"))
  assert y_BTF.sharding.is_equivalent_to(wanted, 3)  # the automatic axes were laid out
