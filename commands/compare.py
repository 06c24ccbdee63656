"""The verb `compare`: numerical parity of two configs, tensor by tensor."""

from collections.abc import Callable

from commands import build, config_flag, flags, preflight_facts
from processes.watchdog import STARTING, Watchdog
from reports import parity_text
from runtime import exit_codes
from training import parity
from training.metrics.console import say


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
    say(parity_text.text(jobs, titles, found))
    bound = parity.BOUNDS[ours.config.training.parameter_dtype]
    return exit_codes.CHECK_FAILED if parity.beyond(found, bound) else exit_codes.DONE

  return run
