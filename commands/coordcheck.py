"""The verb `coordcheck`: whether activations are as large at every width of the model."""

import sys
from collections.abc import Callable

from etils import epath
from ml_collections import ConfigDict

from commands import build, flags, preflight_facts
from configs.schema import finalize, validate
from partitioning import rules
from processes import coordination as groups
from processes.watchdog import STARTING, Watchdog
from reports import coordcheck_result
from runtime import exit_codes, files
from runtime.devices import Devices
from runtime.printable import printable
from training import coordinate_check, splits
from training.metrics.console import say
from training.setup import Job


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Trains the config's model at several widths, and reports how activations depend on them."""
  config, steps = flags.CONFIG.value, flags.STEPS.value
  [its_devices] = build.start_devices(config)
  resolved = finalize.finalize(config, its_devices.platform, its_devices.sizes)
  validate.check(resolved, its_devices.sizes)
  sections = resolved.model, resolved.lora, resolved.task
  coordinate_check.check(*sections, steps=steps, sizes=its_devices.sizes)
  at = coordinate_check.widths(resolved.model, flags.WIDTHS.value)
  jobs = [_job(config, resolved, width, its_devices) for width in at]
  batches = splits.training_batches(jobs[0].config, splits.sharing(jobs[0]))
  file = flags.SVG.value and epath.Path(flags.SVG.value)
  if file and (file.is_dir() or not file.parent.is_dir()):
    raise ValueError(f"--svg={file}: give a file in a folder that exists")
  preflight_facts.about_to_run(jobs[0], {"train": batches.source}, flags.workdir(), writes=False)

  def run() -> int:
    trained = []
    for width, job in zip(at, jobs, strict=True):

      def said(what: str, width: int = width) -> None:
        watch.at(f"width {width}: {what}", STARTING)

      placed = job.batch_shardings
      one = coordinate_check.train(
        job, lambda step, placed=placed: batches.batch(step, placed), steps, said=said
      )
      trained.append(one)
    found = coordinate_check.slopes(coordinate_check.points(trained), at)
    say(coordcheck_result.text(jobs, found))
    if file and not _written(file, coordcheck_result.svg(jobs, found)):
      return exit_codes.FAILED
    flat = all(one.flat for one in found)
    return exit_codes.DONE if flat else exit_codes.CHECK_FAILED

  return run


def _job(config: ConfigDict, resolved: ConfigDict, width: int, its_devices: Devices) -> Job:
  """Returns the job of a width; its refusals say which width it is."""
  try:
    return build.job(coordinate_check.of_width(config, resolved, width), its_devices)
  except ValueError as error:
    raise ValueError(f"at width {width}: {error}") from error


def _written(file: epath.Path, picture: str) -> bool:
  """Writes the picture; returns False after a message where that fails."""
  try:
    if groups.current().first:
      files.replace(file, picture)
  except OSError as error:
    print(printable(f"error: --svg={file}: {error}"), file=sys.stderr, flush=True)
    return False
  say(f"wrote {file}, {rules.size_text(len(picture.encode()))}")
  return True
