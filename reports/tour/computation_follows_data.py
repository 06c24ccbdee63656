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


def elementwise(spec=("data", "tensor")):
  """Takes the sine of each number."""
  mesh = mesh_of(data=4, tensor=2)
  x = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
  x = jax.device_put(x, NamedSharding(mesh, P(*spec)))
  compiled = jax.jit(jnp.sin).lower(x).compile()
  return mesh, compiled, x, compiled(x)


def _elementwise(result) -> Shown:
  mesh, compiled, x, y = result
  kept = y.sharding.is_equivalent_to(x.sharding, x.ndim)
  where = "is sharded like x" if kept else "is not sharded like x"
  findings = [
    f"x is sharded as {scene.spec(x)}; sin(x) {where}: {scene.spec(y)}.",
    scene.communication(compiled, mesh),
  ]
  pictures = [
    picture(a.shape, a.sharding, title=title, dims=("row", "column"))
    for a, title in ((x, "x"), (y, "sin(x)"))
  ]
  return Shown(findings, pictures)


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
  findings = [
    f"x is sharded as {scene.spec(x)}, y as {scene.spec(y)}, and the product as {scene.spec(z)}.",
    scene.communication(compiled, mesh),
    _why(x, y),
    f"The product and NumPy's are {scene.close(z, right)}.",
  ]
  drawn = (
    (x, "x", ("row", "inner")),
    (y, "y", ("inner", "column")),
    (z, "x @ y", ("row", "column")),
  )
  pictures = [picture(a.shape, a.sharding, title=title, dims=dims) for a, title, dims in drawn]
  return Shown(findings, pictures)


def _why(x, y) -> str:
  """Returns whether each device has what its block of the product needs, by what it holds."""
  needed = x.shape[1]
  whole = x.sharding.shard_shape(x.shape)[1] == needed == y.sharding.shard_shape(y.shape)[0]
  if whole:
    return f"Each device has full rows of x and full columns of y, all {needed} numbers of each."
  x_has, y_has = x.sharding.shard_shape(x.shape)[1], y.sharding.shard_shape(y.shape)[0]
  return (
    f"An element is a sum of {needed} products. A device holds {x_has} numbers of its row of x and "
    f"{y_has} of its column of y. The rest has to come from other devices."
  )


def product_with_communication():
  """Multiplies x, sharded by columns, by y, sharded by rows: the same function, other layouts."""
  return product(x_spec=(None, "tensor"), y_spec=("tensor", None))


def different_devices(first=1, second=2):
  """Adds arrays that were placed on a device explicitly, and one that was not."""
  x = jax.device_put(jnp.ones(4), jax.devices()[first])
  y = jax.device_put(jnp.ones(4), jax.devices()[second])
  free = jnp.ones(4)
  try:
    return x, y, free, x + free, x + y
  except ValueError as error:
    return x, y, free, x + free, error


def _different_devices(result) -> Shown:
  x, y, free, followed, outcome = result
  on_x, on_y, made_on, ran_on = (_device(a) for a in (x, y, free, followed))
  findings = [
    f"x was placed on device {on_x}. z = jnp.ones(4) was created on device {made_on} and not "
    f"placed explicitly: x + z is on device {ran_on}."
  ]
  if isinstance(outcome, Exception):
    findings.append(
      f"y was placed on device {on_y}. x + y is refused ({type(outcome).__name__}): JAX does not "
      "choose for you."
    )
    return Shown(findings, text=str(outcome))
  findings.append(f"y was placed on device {on_y}. x + y is on device {_device(outcome)}.")
  return Shown(findings)


def _device(x) -> int:
  [device] = x.devices()
  return device.id


def before_the_first_step(width=100):
  """Asks the application for a network whose dims 8-way `tensor` does not divide.

  The application checks the layout of every array before it starts, and reports all errors.
  """
  config = importlib.import_module("configs.tp8").get_config("mlp_tutorial")
  config.model.model_size, config.model.feedforward_size = 64, width
  config = finalize.finalize(config, jax.default_backend())
  sizes = resolve_sizes(config.mesh, None)
  try:
    return prepare(config, Devices(jax.default_backend(), True, sizes))
  except LayoutError as error:
    return error


def _before_the_first_step(outcome) -> Shown:
  if isinstance(outcome, LayoutError):
    names = [failure.partition(":")[0] for failure in outcome.failures]
    findings = [
      f"Refused before the first step. One message names all {len(names)} wrong arrays: "
      f"{', '.join(names)}."
    ]
    return Shown(findings, text=str(outcome))
  return Shown(["Accepted: every dim is divisible by the axes that shard it."])


SCENES = (
  Scene("An elementwise map", elementwise, _elementwise),
  Scene("A matmul without communication", product, _product),
  Scene("A matmul with communication", product_with_communication, _product),
  Scene("Arrays that disagree", different_devices, _different_devices),
  Scene("The application checks first", before_the_first_step, _before_the_first_step),
)
