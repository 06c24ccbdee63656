"""The verb `plan`: predicts a run on devices that need not be attached."""

from commands import config_flag, flags, plan_process
from commands.refusal import refuse


def run() -> int:
  """Makes and prints the plan, in a separate process."""
  try:
    return plan_process.run(
      flags.CONFIG.value,
      flags.TOPOLOGY.value,
      flags.workdir(),
      title=config_flag.name(flags.CONFIG),
      simulate=flags.SIMULATE.value,
      debug=flags.DEBUG.value,
      command=flags.command_line(),
    )
  except (ValueError, OSError, RuntimeError) as error:
    return refuse(error)
