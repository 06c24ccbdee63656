"""Makes jobs of the configs of the command line: finalized, checked, on their devices."""

import copy
import dataclasses

import jax
from ml_collections import ConfigDict

from commands import config_flag, flags
from configs.keys import table
from configs.schema import finalize, model_checks, validate
from partitioning import mesh_sizes
from processes.coordination import current, of_processes
from runtime import compilation_cache, devices
from training import run_tokenizer, setup


def prepare(*config_flags_given, proof: bool = False) -> list[setup.Job]:
  """Finalizes and checks the configs, starts the devices, checks the layouts."""
  configs = [flag.value for flag in config_flags_given]
  jobs = []
  for config, its_devices in zip(configs, start_devices(*configs), strict=True):
    if proof:
      from training import parity  # of `compare` alone

      given = config.optimizer.name
      parity.prove(config, its_devices.platform, keep=config_flag.set_keys(flags.SET.value))
      if config.optimizer.name != given:  # arguments set for that optimizer do not apply
        validate.reset_optimizer(config)
    jobs.append(job(config, its_devices))
  return jobs


def of_checkpoint(location: str = "") -> tuple[setup.Job, str]:
  """Returns the job of --config, with the tokenizer of a checkpoint, and where that is.

  Args:
    location: of the checkpoint; "": that of --checkpoint, or of the workdir.
  """
  location = location or flags.CHECKPOINT.value or str(flags.workdir())
  flags.CONFIG.value.distillation.update(table.section("distillation"))  # the teacher is done
  run_tokenizer.adopt(flags.CONFIG.value, location)
  [ready] = prepare(flags.CONFIG)
  return ready, location


def start_devices(*configs: ConfigDict) -> list[devices.Devices]:
  """Starts JAX's backend; returns the devices of each config."""
  return devices.start(
    *(config.mesh.to_dict() for config in configs),
    slices=[config.mesh_dcn.to_dict() for config in configs],
    simulate=flags.SIMULATE.value,
    processes=current().count,
    of_processes=of_processes() if any(config.training.elastic for config in configs) else 0,
  )


def job(config: ConfigDict, its_devices: devices.Devices) -> setup.Job:
  """Finalizes and checks a config, and checks its layout.

  Raises:
    ValueError: keys that do not go together, or a layout that is refused.
  """
  given, (config, choices) = copy.deepcopy(config), finalized(config, its_devices)
  return dataclasses.replace(setup.prepare(config, its_devices, choices), given=given)


def finalized(
  config: ConfigDict, its_devices: devices.Devices
) -> tuple[ConfigDict, tuple[finalize.Choice, ...]]:
  """Returns a config for its devices, checked, and what was chosen; sets up JAX for it.

  Raises:
    ValueError: keys that do not go together.
  """
  platform, capability = its_devices.platform, devices.compute_capability(its_devices)
  sizes = its_devices.sizes
  if config.training.elastic:  # the config is that of the whole mesh
    sizes = mesh_sizes.resolve_sizes(config.mesh, None, config.mesh_dcn)
  config, choices = finalize.with_choices(config, platform, sizes, capability)
  validate.check(config, sizes)
  model_checks.check_attention_device(config.training, platform, capability)
  if config.training.parameter_dtype == "float64":
    jax.config.update("jax_enable_x64", True)
  if config.compilation_cache_dir:
    compilation_cache.use(config.compilation_cache_dir)
  return config, choices
