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
from reports.tour.scene import Scene, close, draw, mesh_of, say, sent_text, shard, show, spec
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
  """Takes the sine of each number: the result is sharded like x, and nothing is sent."""
  mesh = mesh_of(data=4, tensor=2)
  x = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
  x = jax.device_put(x, NamedSharding(mesh, P("data", "tensor")))
  compiled = jax.jit(jnp.sin).lower(x).compile()
  y = compiled(x)
  draw(x, "x")
  draw(y, "sin(x)")
  say(f"x is sharded as {spec(x)}, and sin(x) as {spec(y)}. Sent: {sent_text(compiled, mesh)}.")


def product(x_spec=("data", None), y_spec=(None, "tensor")):
  """Multiplies x, sharded by rows, by y, sharded by columns.

  An element of the product is a row of x times a column of y. Each device has full rows of x and
  full columns of y.
  """
  mesh = mesh_of(data=4, tensor=2)
  generator = np.random.default_rng(0)
  x, y = (generator.standard_normal(shape, np.float32) for shape in ((16, 12), (12, 8)))
  x_placed = jax.device_put(x, NamedSharding(mesh, P(*x_spec)))
  y_placed = jax.device_put(y, NamedSharding(mesh, P(*y_spec)))
  compiled = jax.jit(jnp.matmul).lower(x_placed, y_placed).compile()
  z = compiled(x_placed, y_placed)
  draw(x_placed, "x", ("row", "inner"))
  draw(y_placed, "y", ("inner", "column"))
  draw(z, "x @ y")
  rows, columns = shard(x_placed), shard(y_placed)
  say(f"x is sharded as {spec(x_placed)}, y as {spec(y_placed)}, and the product as {spec(z)}.")
  say(f"A device has {rows[1]} of 12 numbers of a row of x, {columns[0]} of a column of y.")
  say(f"Sent: {sent_text(compiled, mesh)}.")
  say(f"The product and NumPy's are {close(z, x @ y)}.")


def product_with_communication():
  """Multiplies x, sharded by columns, by y, sharded by rows: the same function, other layouts.

  An element is a sum of 12 products, of which a device can compute a part. The rest has to come
  from other devices.
  """
  product(x_spec=(None, "tensor"), y_spec=("tensor", None))


def different_devices():
  """Adds arrays that were placed on a device explicitly, and one that was not.

  The one that was not follows. Where two disagree, JAX does not choose for you.
  """
  x = jax.device_put(jnp.ones(4), jax.devices()[1])
  y = jax.device_put(jnp.ones(4), jax.devices()[2])
  z = jnp.ones(4)
  say(f"x is on {x.devices()}, y on {y.devices()}, z on {z.devices()}.")
  say(f"x + z is on {(x + z).devices()}.")
  try:
    x + y
  except ValueError as error:
    say(f"x + y is refused ({type(error).__name__}).")
    show(str(error))


def before_the_first_step():
  """Asks the application for a network whose dims 8-way `tensor` does not divide.

  The application checks the layout of every array before it starts, and reports all errors.
  """
  config = importlib.import_module("configs.tp8").get_config("mlp_tutorial")
  config.model.model_size, config.model.feedforward_size = 64, 100
  config = finalize.finalize(config, jax.default_backend())
  sizes = resolve_sizes(config.mesh, None)
  try:
    prepare(config, Devices(jax.default_backend(), True, sizes))
  except LayoutError as error:
    say(f"Refused before the first step: {len(error.failures)} wrong arrays, in one message.")
    show(str(error))


SCENES = (
  Scene("An elementwise map", elementwise),
  Scene("A matmul without communication", product),
  Scene("A matmul with communication", product_with_communication),
  Scene("Arrays that disagree", different_devices),
  Scene("The application checks first", before_the_first_step),
)
