"""The verb `compare`: numerical parity of two configs, tensor by tensor."""

from collections.abc import Callable, Sequence

from commands import build, config_flag, flags, preflight_facts
from partitioning.mesh_sizes import mesh_text
from partitioning.rules import named_leaves, shape_text
from processes.watchdog import STARTING, Watchdog
from reports.drawings import plain
from reports.layout_text import plain_table
from runtime import exit_codes
from training import parity
from training.metrics.console import say
from training.setup import Job


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Trains both configs for three steps, and reports the difference of every tensor."""
  if flags.AGAINST.value is None:
    raise ValueError("compare needs a second config: --against=configs/single.py")
  ours, wanted = jobs = build.prepare(flags.CONFIG, flags.AGAINST, proof=True)
  data = parity.bring_together(jobs)
  sources = {"config": data[0].train.source, "against": data[1].train.source}
  preflight_facts.about_to_run(
    ours, sources, flags.workdir(), writes=False, more={"mesh, against": wanted.devices.sizes}
  )

  def run() -> int:
    watch.at("comparing", STARTING)  # it may take long, and its length is not learned
    found = parity.compare(jobs, data)
    titles = (config_flag.name(flags.CONFIG), config_flag.name(flags.AGAINST))
    say(table_text(jobs, titles, found))
    bound = parity.BOUNDS[ours.config.training.parameter_dtype]
    return exit_codes.CHECK_FAILED if parity.beyond(found, bound) else exit_codes.DONE

  return run


# ------------------------------ as text ------------------------------


def table_text(
  jobs: Sequence[Job], titles: Sequence[str], found: Sequence[parity.Difference]
) -> str:
  """Returns the two configs, the table, and the verdict below it."""
  config = jobs[0].config
  dtype, bound = config.training.parameter_dtype, parity.BOUNDS[config.training.parameter_dtype]
  shapes = {
    name: shape_text(leaf.shape) for name, leaf in named_leaves(jobs[0].state.params).items()
  }
  table = plain_table("", "tensor", "shape", "relative L2", "")
  for one in found:
    distance = "0" if one.note == parity.SAME else f"{one.distance:.2e}"
    note = one.note if one.distance <= bound else "> bound"
    table.add_row(one.what, one.name, shapes.get(one.name, ""), distance, note)
  meshes = (mesh_text(job.devices.sizes, job.devices.slices) for job in jobs)
  lines = [f"{title}: {mesh}" for title, mesh in zip(titles, meshes, strict=True)]
  lines.append(
    f"{parity.STEPS} steps of {config.optimizer.name} at {config.optimizer.learning_rate:g}, "
    f"{dtype} at {config.training.matmul_precision} precision; bound {bound:g}"
  )
  return "\n".join(
    [*lines, "", plain(table), "", _verdict(found, parity.beyond(found, bound), bound)]
  )


def _verdict(
  found: Sequence[parity.Difference], wrong: Sequence[parity.Difference], bound: float
) -> str:
  if wrong:
    first = wrong[0]
    return (
      f"different: {len(wrong)} of {len(found)} tensors are beyond {bound:g}; the first is "
      f"{first.what} {first.name}, off by {first.distance:.2e}"
    )
  same = sum(one.note == parity.SAME for one in found)
  if same == len(found):
    return f"equal to the bit: {same} tensors"
  largest = max(found, key=lambda one: one.distance)
  return (
    f"equal: {len(found)} tensors, {same} of them to the bit; the largest difference is "
    f"{largest.distance:.2e} ({largest.what} {largest.name})"
  )
