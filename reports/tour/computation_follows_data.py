"""The sharding of the arrays decides where the work is done, and the communication."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from configs.schema import finalize
from partitioning.mesh_sizes import resolve_sizes
from partitioning.rules import LayoutError
from reports.drawings import picture
from reports.tour import scene
from reports.tour.scene import Scene, Shown, mesh_of
from runtime.devices import Devices
from training.setup import prepare

TITLE = "Computation follows data"
OPENING = """
A program does not say which device does what. Each device computes on the blocks that it holds,
and the compiler inserts the communication that is needed: **collectives**, operations in which
several devices take part. They are the cost of a layout, and they can be read from the compiled
program. `python main.py` prints them in this way before the first step of a run.
"""


def elementwise():
  """Takes the sine of each number."""
  mesh = mesh_of(data=4, tensor=2)
  x = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
  x = jax.device_put(x, NamedSharding(mesh, P("data", "tensor")))
  compiled = jax.jit(jnp.sin).lower(x).compile()
  return mesh, compiled, x, compiled(x)


def _elementwise(result) -> Shown:
  mesh, compiled, x, y = result
  findings = [
    f"x is sharded as {scene.spec(x)}, and sin(x) as {scene.spec(y)}.",
    scene.communication(compiled, mesh),
  ]
  return Shown(findings, [_drawn(x, "x", "row", "column"), _drawn(y, "sin(x)", "row", "column")])


def _drawn(x, title, *dims):
  return picture(x.shape, x.sharding, title=title, dims=dims)


def product(x_spec=("data", None), y_spec=(None, "tensor")):
  """Multiplies x, sharded by rows, by y, sharded by columns.

  An element of the product is a row of x times a column of y.
  """
  mesh = mesh_of(data=4, tensor=2)
  generator = np.random.default_rng(0)
  x, y = (generator.standard_normal(shape, np.float32) for shape in ((16, 12), (12, 8)))
  x_placed = jax.device_put(x, NamedSharding(mesh, P(*x_spec)))
  y_placed = jax.device_put(y, NamedSharding(mesh, P(*y_spec)))
  compiled = jax.jit(jnp.matmul).lower(x_placed, y_placed).compile()
  return mesh, compiled, x_placed, y_placed, compiled(x_placed, y_placed), x @ y


def _product(result) -> Shown:
  mesh, compiled, x, y, z, right = result
  needed, x_has, y_has = x.shape[1], scene.shard(x)[1], scene.shard(y)[0]
  if needed == x_has == y_has:
    why = f"Each device has full rows of x and full columns of y, all {needed} numbers of each."
  else:
    why = (
      f"An element is a sum of {needed} products. A device holds {x_has} numbers of its row of x "
      f"and {y_has} of its column of y. The rest has to come from other devices."
    )
  findings = [
    f"x is sharded as {scene.spec(x)}, y as {scene.spec(y)}, and the product as {scene.spec(z)}.",
    scene.communication(compiled, mesh),
    why,
    f"The product and NumPy's are {scene.close(z, right)}.",
  ]
  pictures = [
    _drawn(x, "x", "row", "inner"),
    _drawn(y, "y", "inner", "column"),
    _drawn(z, "x @ y", "row", "column"),
  ]
  return Shown(findings, pictures)


def product_with_communication():
  """Multiplies x, sharded by columns, by y, sharded by rows: the same function, other layouts."""
  return product(x_spec=(None, "tensor"), y_spec=("tensor", None))


def different_devices():
  """Adds arrays that were placed on a device explicitly, and one that was not."""
  x = jax.device_put(jnp.ones(4), jax.devices()[1])
  y = jax.device_put(jnp.ones(4), jax.devices()[2])
  z = jnp.ones(4)
  try:
    return x, y, z, x + z, x + y
  except ValueError as error:
    return x, y, z, x + z, error


def _different_devices(result) -> Shown:
  *arrays, error = result
  on_x, on_y, on_z, ran_on = (device.id for x in arrays for device in x.devices())
  findings = [
    f"x was placed on device {on_x}. z = jnp.ones(4) was created on device {on_z} and not placed "
    f"explicitly: x + z is on device {ran_on}.",
    f"y was placed on device {on_y}. x + y is refused ({type(error).__name__}): JAX does not "
    "choose for you.",
  ]
  return Shown(findings, text=str(error))


def before_the_first_step():
  """Asks the application for a network whose dims 8-way `tensor` does not divide.

  The application checks the layout of every array before it starts, and reports all errors.
  """
  config = importlib.import_module("configs.tp8").get_config("mlp_tutorial")
  config.model.model_size, config.model.feedforward_size = 64, 100
  config = finalize.finalize(config, jax.default_backend())
  sizes = resolve_sizes(config.mesh, None)
  try:
    return prepare(config, Devices(jax.default_backend(), True, sizes))
  except LayoutError as error:
    return error


def _before_the_first_step(error: LayoutError) -> Shown:
  names = [failure.partition(":")[0] for failure in error.failures]
  findings = [
    f"Refused before the first step. One message names all {len(names)} wrong arrays: "
    f"{', '.join(names)}."
  ]
  return Shown(findings, text=str(error))


SCENES = (
  Scene("An elementwise map", elementwise, _elementwise),
  Scene("A matmul without communication", product, _product),
  Scene("A matmul with communication", product_with_communication, _product),
  Scene("Arrays that disagree", different_devices, _different_devices),
  Scene("The application checks first", before_the_first_step, _before_the_first_step),
)
