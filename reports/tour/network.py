"""A network under two strategies."""

import importlib
import time

import jax
import numpy as np

from configs.schema import finalize, validate
from partitioning import rules
from partitioning.mesh_sizes import resolve_sizes
from reports.drawings import picture
from reports.tour import scene
from reports.tour.scene import Scene, Shown
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


def job_of(strategy: str, width: int = WIDTH) -> Job:
  """Returns the job of a config in configs/, its layout checked, nothing started."""
  config = importlib.import_module(f"configs.{strategy}").get_config("mlp_tutorial")
  config.model.model_size = config.data.global_batch_size = width
  platform = jax.default_backend()
  config = finalize.finalize(config, platform)
  sizes = resolve_sizes(config.mesh, None)
  validate.check(config, sizes)
  return prepare(config, Devices(platform, platform == "cpu", sizes))


def layouts(strategies=STRATEGIES):
  """Computes the sharding of the parameters. No device has done anything yet."""
  return [(strategy, job_of(strategy)) for strategy in strategies]


def _layouts(jobs) -> Shown:
  findings, pictures = [], []
  for strategy, job in jobs:
    placements = job.placements["parameters"]
    sizes = job.devices.sizes
    cut = [p.name for p in placements.values() if rules.copies(p, sizes) < job.mesh.size]
    held = sum(rules.bytes_per_device(p, sizes) for p in placements.values())
    findings.append(
      f"{strategy}: {rules.size_text(held)} of parameters on each device. "
      + (f"Sharded: {', '.join(cut)}." if cut else "Every parameter is replicated on every device.")
    )
    for name in ("layer_2/kernel", "layer_3/kernel"):
      sharding = job.state_shardings.params[name.split("/")[0]]["kernel"]
      dims = tuple(placements[name].letters)
      title = f"{strategy}: {name}"
      pictures.append(picture(placements[name].shape, sharding, title=title, dims=dims))
  return Shown(findings, pictures)


def training(strategies=STRATEGIES, steps=10):
  """Compiles the train step for each strategy and takes ten steps from the same parameters."""
  runs = []
  for strategy in strategies:
    job = job_of(strategy)
    data, state = splits.open_data(job).train, job.initial_state()
    step = job.compile_train_step().function
    losses, seconds = [], []
    for number in range(steps):
      began = time.perf_counter()
      state, metrics = step(state, data.batch(number, job.batch_shardings))
      losses.append(float(metrics["loss"]))
      seconds.append(time.perf_counter() - began)
    runs.append((strategy, job, step, losses, min(seconds[1:])))
  return runs


def _training(runs) -> Shown:
  findings, tables, measured = [], [], []
  for strategy, job, step, losses, seconds in runs:
    rows = scene.sent(step, job.mesh)
    axes = sorted({axis for row in rows for axis in row.axes})
    tables.append(f"{strategy}, sent in one step:\n{collectives.format_summary(rows)}")
    findings.append(
      f"{strategy}: the loss goes from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps. "
      f"Collectives run along {' and '.join(axes) or 'no axis'}."
    )
    measured.append(f"{strategy}: {1000 * seconds:.1f} ms a step, at best.")
  losses = [np.array(run[3]) for run in runs]
  findings.append(
    f"What must not change: all {len(losses[0])} losses are {scene.close(losses[1], losses[0])}."
  )
  findings.append(f"What changes: {_changes(runs)}.")
  return Shown(findings, text="\n\n".join(tables), measured=measured)


def _changes(runs) -> str:
  """Returns what the two strategies differ in, with the numbers of both."""
  facts = []
  for _, job, step, _, _ in runs:
    placements = job.placements["parameters"].values()
    held = sum(rules.bytes_per_device(p, job.devices.sizes) for p in placements)
    rows = job.batch_shardings["inputs"].shard_shape(job.batch["inputs"].shape)[0]
    sending = sum(row.bytes for row in scene.sent(step, job.mesh))
    facts.append(
      {
        "rows on a device": str(rows),
        "parameters on a device": rules.size_text(held),
        "in the collectives of a step": rules.size_text(sending),
      }
    )
  ours, theirs = facts
  different = [
    f"{key}: {ours[key]}, then {theirs[key]}" for key in ours if ours[key] != theirs[key]
  ]
  return "; ".join(different) or "nothing"


SCENES = (
  Scene("Layouts", layouts, _layouts, parts=(job_of,)),
  Scene("Training", training, _training),
)
