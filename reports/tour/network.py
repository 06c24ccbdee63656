"""A network under two strategies."""

import importlib
import time

import jax

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
  return [(strategy, job_of(strategy)) for strategy in STRATEGIES]


def _held(job: Job) -> str:
  """Returns the bytes of parameters on each device."""
  placements = job.placements["parameters"].values()
  return rules.size_text(sum(rules.bytes_per_device(p, job.devices.sizes) for p in placements))


def _layouts(jobs) -> Shown:
  findings, pictures = [], []
  for strategy, job in jobs:
    placements = job.placements["parameters"]
    cut = [
      p.name for p in placements.values() if rules.copies(p, job.devices.sizes) < job.mesh.size
    ]
    findings.append(
      f"{strategy}: {_held(job)} of parameters on each device. "
      + (f"Sharded: {', '.join(cut)}." if cut else "Every parameter is replicated on every device.")
    )
    for name in ("layer_2/kernel", "layer_3/kernel"):
      sharding = job.state_shardings.params[name.split("/")[0]]["kernel"]
      dims = tuple(placements[name].letters)
      title = f"{strategy}: {name}"
      pictures.append(picture(placements[name].shape, sharding, title=title, dims=dims))
  return Shown(findings, pictures)


def training():
  """Compiles the train step for each strategy and takes ten steps from the same parameters."""
  runs = []
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
    runs.append((strategy, job, step, losses, min(seconds[1:])))
  return runs


def _training(runs) -> Shown:
  findings, tables, measured, changes = [], [], [], []
  for strategy, job, step, losses, seconds in runs:
    sent = scene.sent(step, job.mesh)
    axes = sorted({axis for row in sent for axis in row.axes})
    tables.append(f"{strategy}, sent in one step:\n{collectives.format_summary(sent)}")
    findings.append(
      f"{strategy}: the loss goes from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps. "
      f"Collectives run along {' and '.join(axes)}."
    )
    measured.append(f"{strategy}: {1000 * seconds:.1f} ms a step, at best.")
    rows = job.batch_shardings["inputs"].shard_shape(job.batch["inputs"].shape)[0]
    changes.append((str(rows), _held(job), rules.size_text(sum(row.bytes for row in sent))))
  names = ("rows on a device", "parameters on a device", "in the collectives of a step")
  what = [
    f"{name}: {ours}, then {theirs}" for name, ours, theirs in zip(names, *changes, strict=True)
  ]
  findings += [
    f"What must not change: all {len(losses)} losses are {scene.close(runs[1][3], runs[0][3])}.",
    f"What changes: {'; '.join(what)}.",
  ]
  return Shown(findings, text="\n\n".join(tables), measured=measured)


SCENES = (
  Scene("Layouts", layouts, _layouts, parts=(job_of,)),
  Scene("Training", training, _training),
)
