"""A network under two strategies."""

import importlib
import time

import jax

from configs.schema import finalize, validate
from partitioning import rules
from partitioning.mesh_sizes import resolve_sizes
from reports.tour.scene import Scene, close, draw, say, say_measured, sent, show
from runtime import collectives
from runtime.devices import Devices
from training import splits
from training.setup import Job, prepare

TITLE = "A network under two strategies"
WIDTH = 128
STRATEGIES = ("dp8", "dp4_tp2")
OPENING = f"""
Four layers, [784, W, W, W, 10], trained on W random rows by plain gradient descent: the network
of JAX's tutorial on distributed arrays, and a recipe of this project. Here W is {WIDTH}, which
takes seconds. In full: `python main.py --config=configs/dp4_tp2.py:mlp_tutorial`.

`dp8` shards only the batch. `dp4_tp2` also shards the two inner layers, layer 2 by the columns of
its kernel (column-parallel) and layer 3 by the rows (row-parallel). The output of layer 2 on a
device is then the input that layer 3 needs there.
"""


def job_of(strategy: str) -> Job:
  """Returns the job of a config in configs/, its layout checked, nothing started."""
  config = importlib.import_module(f"configs.{strategy}").get_config("mlp_tutorial")
  config.model.model_size = config.data.global_batch_size = WIDTH
  platform = jax.default_backend()
  config = finalize.finalize(config, platform)
  sizes = resolve_sizes(config.mesh, None)
  validate.check(config, sizes)
  return prepare(config, Devices(platform, platform == "cpu", sizes))


def layouts():
  """Computes the sharding of the parameters. No device has done anything yet."""
  for strategy in STRATEGIES:
    job = job_of(strategy)
    parameters, sizes = job.placements["parameters"].values(), job.devices.sizes
    cut = [p.name for p in parameters if rules.copies(p, sizes) < job.mesh.size]
    held = sum(rules.bytes_per_device(p, sizes) for p in parameters)
    say(
      f"{strategy}: {rules.size_text(held)} of parameters on each device. Sharded: "
      f"{', '.join(cut) or 'none'}."
    )
    for name in ("layer_2", "layer_3"):
      p = job.placements["parameters"][f"{name}/kernel"]
      sharding = job.state_shardings.params[name]["kernel"]
      kernel = jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding)
      draw(kernel, f"{strategy}: {p.name}", tuple(p.letters))


def training():
  """Compiles the train step for each strategy and takes ten steps from the same parameters.

  The losses must not change. What changes is how many rows a device has, and what is sent.
  """
  histories = []
  for strategy in STRATEGIES:
    job = job_of(strategy)
    data, state = splits.open_data(job).train, job.initial_state()
    step = job.compile_train_step().function
    losses, seconds = [], []
    for number in range(10):
      began = time.perf_counter()
      state, metrics = step(state, data.batch(number, job.batch_shardings))
      losses.append(float(metrics["loss"]))
      seconds.append(time.perf_counter() - began)
    histories.append(losses)
    rows = job.batch_shardings["inputs"].shard_shape(job.batch["inputs"].shape)[0]
    say(
      f"{strategy}: the loss goes from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} "
      f"steps, with {rows} rows on a device."
    )
    show(f"{strategy}, sent in one step:\n{collectives.format_summary(sent(step, job.mesh))}")
    say_measured(f"{strategy}: {1000 * min(seconds[1:]):.1f} ms a step, at best.")
  say(f"All losses of the two strategies are {close(*histories)}.")


SCENES = (Scene("Layouts", layouts, parts=(job_of,)), Scene("Training", training))
