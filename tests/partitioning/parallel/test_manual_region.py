"""Manual regions: what is communicated for axes that have one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from partitioning.parallel.manual_region import manual_region

ROWS, WIDTH, FEATURES = 6, 5, 4


def multiplied():
  """Returns the gradients of sum(x w y), w gathered over fsdp=2, and the program's text."""
  mesh = Mesh(
    np.array(jax.devices()[:2]).reshape(1, 2, 1),
    ("data", "fsdp", "tensor"),
    axis_types=(AxisType.Auto,) * 3,
  )

  def on_device(x, w):
    return x @ jax.lax.all_gather(w, "fsdp", axis=1, tiled=True)

  def loss(x, w, y):
    specs = (PartitionSpec("fsdp", None), PartitionSpec(None, "fsdp"))
    return jnp.sum(manual_region(on_device, specs, specs[0])(x, w) * y)

  draws = np.random.default_rng(0)
  x, w, y = (draws.normal(size=s) for s in ((ROWS, WIDTH), (WIDTH, FEATURES), (ROWS, FEATURES)))
  with jax.enable_x64(True), jax.set_mesh(mesh):
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w, y).compile()
    return (x, w, y), compiled(x, w, y), compiled.as_text()


def test_axes_of_one_device_need_no_all_reduce():
  # With jax 0.12.0.1 they have none either if the specs do not name them.
  (x, w, y), (d_x, d_w), text = multiplied()
  np.testing.assert_allclose(d_x, y @ w.T, rtol=0, atol=1e-14)
  np.testing.assert_allclose(d_w, x.T @ y, rtol=0, atol=1e-14)
  assert "reduce-scatter(" in text
  assert not re.search(r"replica_groups=\{\{0\},\{1\}\}", text)
