"""Ahead-of-time compilation of the train step for a topology, attached or not."""

import concurrent.futures
import copy
import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import pathlib
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

# Experimental: no public name describes devices that are not attached (jax 0.10.2 to 0.12.0).
from jax.experimental import topologies as described
from jax.sharding import Mesh
from ml_collections import ConfigDict

from configs.schema import finalize, model_checks, validate
from partitioning import rules
from partitioning.mesh_sizes import resolve_sizes
from partitioning.rules import HOST
from planning import buffers, gpu_target
from planning.interconnect import Places, in_order
from planning.step_facts import of_job
from planning.topology import Topology, of_devices, parse, require_devices, with_slices
from runtime import devices, files
from runtime.chips import Rates, overridden
from training import compiler_options, setup

# The compiler's message about a program that is too large: all of it, or without its arguments. The
# wording is the only source, as jaxlib's error has no fields; if it changes, the error is raised
# unchanged (tests/planning/test_tpu.py). "The total memory required for HLO temporaries" counts the
# arguments, as the buffers show that XLA writes of such a program.
_OUT_OF_MEMORY = re.compile(
  r"(?:Used |total memory required for HLO temporaries \()([\d.]+)([KMGT])"
  r"|Total size of HLO temporaries \(([\d.]+)([KMGT])\) exceeds"
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


_POLL_SECONDS = 0.05
_PROGRAM, _MOST_PROGRAMS = ".program", 200  # of planning.cache_dir; some MB each

# The devices of this process that `train` would use; () if a plan is for others.
Here = tuple[jax.Device, ...]


def is_attached(topology: Topology, here: Here) -> bool:
  """Returns whether a topology is that of the attached devices."""
  return bool(here) and of_devices(here) == topology.name


@dataclasses.dataclass(frozen=True, eq=False)
class NamedDevice:
  """A device of a topology without a compiler: meshes and layouts are made of it, no programs.

  JAX takes a thread or an object of its own for each device that it simulates: with 8,192 of them
  a plan took a minute.
  """

  id: int
  platform: str = "cpu"
  device_kind: str = "cpu"
  process_index: int = 0


@dataclasses.dataclass(frozen=True)
class Program:
  """The compiled train step.

  Attributes:
    text: the optimized HLO; "" if the compiler failed.
    peak_bytes: peak memory of a device, by the compiler; even if it does not fit.
    fits: whether the compiler could allocate it.
    host_bytes: of arrays in the host's memory, for one device.
    at_peak: its buffers; None where XLA wrote none.
  """

  text: str
  peak_bytes: int
  fits: bool
  host_bytes: int = 0
  at_peak: buffers.Assignment | None = None

  @property
  def allocated_bytes(self) -> int:
    """Returns the bytes that a device must have: the peak and, as far as known, gaps in it."""
    found = self.at_peak
    return max(self.peak_bytes, found.peak + found.gaps if found else 0)

  def packed(self) -> bytes:
    """Returns it as a file has it; `unpacked` reads it."""
    return zlib.compress(json.dumps(dataclasses.asdict(self)).encode())

  @staticmethod
  def unpacked(content: bytes) -> "Program":
    """Returns the program of a file."""
    found = json.loads(zlib.decompress(content))
    if at_peak := found["at_peak"]:
      those = tuple(buffers.Buffer(**one) for one in at_peak["buffers"])
      curve = tuple(at_peak["curve"])
      found["at_peak"] = buffers.Assignment(**{**at_peak, "buffers": those, "curve": curve})
    return Program(**found)


def compiler_there(topology: Topology) -> bool:
  """Returns whether the compiler for TPUs, or for a GPU of these, is installed."""
  if topology.platform == "gpu":
    return gpu_target.compiler_there(topology.chip)
  return topology.platform == "tpu" and importlib.util.find_spec("libtpu") is not None


def compiled_here(topology: Topology, here: Here) -> bool:
  """Returns whether there is a compiler for a topology; for attached devices, JAX's own."""
  attached_or_cpu = is_attached(topology, here) or topology.platform == "cpu"
  return attached_or_cpu or compiler_there(topology)


@dataclasses.dataclass(frozen=True)
class Target:
  """A config and the devices that it is planned for.

  Attributes:
    keys: the config as parsed, with overrides.
    topology: the devices of one slice.
    rates: achieved shares of the chip's constants.
    here: the devices of this process.
  """

  keys: ConfigDict
  topology: Topology
  rates: Rates
  here: Here

  def changed(self, overrides: Mapping[str, Any]) -> "Target":
    """Returns the target with overrides: dotted key -> value."""
    keys = copy.deepcopy(self.keys)
    keys.update_from_flattened_dict(dict(overrides))
    return dataclasses.replace(self, keys=keys)

  def job(self) -> setup.Job:
    """Returns the job; see `prepare`."""
    return prepare(self.keys, self.topology, self.here)


def target_of(
  config: ConfigDict,
  topology: str | None = None,
  *,
  simulate: bool = False,
  here: Here | None = None,
) -> Target:
  """Returns a config with its devices, started where they have to be.

  Args:
    config: as parsed, with overrides.
    topology: `v5p:4x4x4`; None: that of the attached devices.
    simulate: simulated devices instead of the attached ones.
    here: the devices of this process, if they are started already.

  Raises:
    ValueError: bad input: the topology, the mesh, a constant.
  """
  chips, rates = overridden(config.planning.constants)
  if topology is None:
    here = attached(config, simulate=simulate)
    topology = of_devices(here)
  found = parse(topology, chips)
  if here is None:
    require_started(config, found)
  return Target(config, found, rates, here or ())


def attached(config: ConfigDict, *, simulate: bool) -> Here:
  """Starts the devices that `train` would use.

  Raises:
    ValueError: the mesh does not fit them, no constants are known for their kind, or the backend of
      attached hardware did not start.
  """
  slices = config.mesh_dcn.to_dict()
  try:
    devices.start(config.mesh.to_dict(), slices=[slices], simulate=simulate)
  except RuntimeError as error:
    raise ValueError(str(error)) from error
  return tuple(jax.devices())


def require_started(config: ConfigDict, topology: Topology) -> None:
  """Has JAX simulate as many devices as a topology of CPUs has; others need not be there.

  Raises:
    ValueError: mesh_dcn asks for another number of slices than the topology has, or for too many.
  """
  config = with_slices(config, topology)
  count = require_devices(topology, math.prod(config.mesh_dcn.values()))
  if topology.platform == "cpu":
    jax.config.update("jax_num_cpu_devices", count)


def start(topology: Topology, slices: int, here: Here) -> tuple[Any, ...]:
  """Returns devices of a topology, or as many that have only names if it has no compiler here.

  Args:
    topology: of one slice.
    slices: how many there are.
    here: the devices of this process.

  Raises:
    ValueError: the compiler knows no such topology.
  """
  count = topology.devices * slices
  if is_attached(topology, here):
    return here
  if topology.platform == "gpu" and compiler_there(topology):
    given = gpu_target.description(topology.chip, count)
    return tuple(described.get_topology_desc(**given).devices)
  if topology.platform == "tpu" and compiler_there(topology):
    # Without `wrap` the compiler takes every axis for one without wraparound links.
    more: dict[str, Any] = {"wrap": (*topology.wraps(), False)[:3]}
    if slices > 1:
      more["num_slices"] = slices
    if math.prod(topology.shape) == 1:  # by default a host has four chips
      more["chips_per_host_bounds"] = (1, 1, 1)
    if topology.chip.name == "v4":  # by default its two cores are two devices
      more["chip_config_name"] = "megacore"
    try:
      found = described.get_topology_desc(platform="tpu", topology_name=topology.name, **more)
    except Exception as error:  # jaxlib raises various errors for unknown shapes
      raise ValueError(
        f"--topology={topology.name}: the compiler knows no such slice "
        f"({' '.join(str(error).split())[:200]})"
      ) from error
    return tuple(found.devices)
  if topology.platform == "cpu":
    return tuple(jax.devices("cpu")[:count])
  return _named(count)


@functools.cache  # JAX compares meshes by their devices
def _named(count: int) -> tuple[NamedDevice, ...]:
  return tuple(map(NamedDevice, range(count)))


def prepare(config: ConfigDict, topology: Topology, here: Here) -> setup.Job:
  """Makes a job of a config and a topology, with the platform defaults of the topology.

  Args:
    config: as parsed, with overrides.
    topology: of one slice.
    here: the devices of this process.

  Raises:
    ValueError: the mesh has a different number of devices, or the layout is refused.
  """
  config = with_slices(config, topology)
  over = {axis: size for axis, size in config.mesh_dcn.items() if size != 1}
  slices = math.prod(over.values())
  found = start(topology, slices, here)
  sizes = resolve_sizes(config.mesh, len(found), over)
  capability = topology.chip.compute_capability
  config, choices = finalize.with_choices(config, topology.platform, sizes, capability)
  validate.check(config, sizes)
  model_checks.check_attention_device(config.training, topology.platform, capability)
  setup.check_matmul_dtype(config.training.matmul_dtype, topology.chip)
  simulated = topology.platform == "cpu"
  if config.training.parameter_dtype == "float64":
    jax.config.update("jax_enable_x64", True)
  its_devices = devices.Devices(topology.platform, simulated, sizes, over, found)
  return setup.prepare(config, its_devices, choices)


def compile_step(
  ready: setup.Job, dumped: pathlib.Path | None = None, kept: str | None = None
) -> Program:
  """Compiles the step that `train` would compile; a program that does not fit is a valid result.

  Of a program for TPUs the machine code, which takes nine tenths of the compiler's time, is not
  waited for where XLA has written the buffers before: the compiler goes on in a thread, until this
  process ends.

  Args:
    ready: the job.
    dumped: where XLA writes buffers, by `buffers.xla_flags`; None: nowhere.
    kept: the beginning of the paths of compiled programs, which stands for the topology, the code
      and the compiler; None: none are kept.
  """
  lowered, options = ready.lowered_train_step()
  devices = [device.id for device in ready.mesh.devices.flat]
  facts = json.dumps([without_numbers(lowered.as_text()), devices, options], sort_keys=True)
  place = kept and epath.Path(f"{kept}.{hashlib.sha256(facts.encode()).hexdigest()[:24]}{_PROGRAM}")
  if place and place.exists():
    return Program.unpacked(files.read_bytes(place))
  made: concurrent.futures.Future[Program] = concurrent.futures.Future()

  def compile_it() -> None:
    try:
      compiled = compiler_options.compile_with(lowered, *options)
      made.set_result(_program(compiled, ready.devices.platform))
    except BaseException as error:
      made.set_exception(error)

  threading.Thread(target=compile_it, name="compiler", daemon=True).start()
  while not made.done() and not (dumped and buffers.accepted(dumped)):
    time.sleep(_POLL_SECONDS)
  at_peak = buffers.read(dumped, of_job(ready)) if dumped else None
  if not made.done():
    text = buffers.program_text(dumped)
    found = Program(text, at_peak.peak, True, at_peak.host, at_peak)
  elif error := made.exception():
    found = dataclasses.replace(_refused(error, ready), at_peak=at_peak)
  else:
    found = dataclasses.replace(made.result(), at_peak=at_peak)
  if place:
    place.parent.mkdir(parents=True, exist_ok=True)
    files.replace(place, found.packed(), shared=True)
    files.keep_newest(place.parent, (_PROGRAM,), _MOST_PROGRAMS)
  return found


# A number at the top level of a lowered program, where the optimizer's and its schedule's are:
# those of a loop's bounds and slices stand within the loop.
_NUMBER = re.compile(
  r"^(    %\w+ = stablehlo.constant dense<)(-?[\d.]+(?:[eE][+-]\d+)?)(> : tensor<[if]\d+>)$",
  re.MULTILINE,
)


def without_numbers(text: str) -> str:
  """Returns a lowered program with a place holder for each number of the optimizer's schedule.

  Two programs that differ in them alone have the same buffers and take the same time. 0, 1 and -1
  stay: the compiler leaves out what adds, or multiplies by, them.
  """

  def replaced(found: re.Match) -> str:
    return found[0] if abs(float(found[2])) in (0, 1) else f"{found[1]}#{found[3]}"

  return _NUMBER.sub(replaced, text)


def compile_to_run(ready: setup.Job) -> tuple[Program, Callable | None]:
  """Returns the compiled step, and the function itself; None if it does not fit."""
  try:
    compiled = ready.compile_train_step().function
  except jax.errors.JaxRuntimeError as error:
    return _refused(error, ready), None
  return _program(compiled, ready.devices.platform), compiled


def _program(compiled: jax.stages.Compiled, platform: str) -> Program:
  peak, host = memory_of(compiled, platform)
  return Program(compiled.as_text(), peak, True, host)


def _refused(error: BaseException, ready: setup.Job) -> Program:
  """Returns the program that the compiler has no memory for; raises any other error."""
  used = isinstance(error, jax.errors.JaxRuntimeError) and needed(str(error), _held(ready))
  if not used:
    raise error
  return Program("", used, False)


def memory_of(compiled: Any, platform: str) -> tuple[int, int]:
  """Returns the peak memory of a device and the bytes in its host's memory, of a compiled step."""
  stats = compiled.memory_analysis()
  allocated = stats.argument_size_in_bytes + stats.temp_size_in_bytes
  allocated += stats.output_size_in_bytes - stats.alias_size_in_bytes
  # The peak is that of all arguments, those in host memory too, and of the larger of two sums of
  # temporaries: the device's and the host's (libtpu 0.0.42).
  peak = stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes
  host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
  if stats.host_temp_size_in_bytes:
    peak = min(peak, allocated)
  if platform != "tpu":  # a CPU's peak excludes temporaries, a GPU's the gaps between them
    peak = allocated
  return peak, host


def _held(ready: setup.Job) -> int:
  placed = [p for rows in ready.placements.values() for p in rows.values() if p.memory != HOST]
  return sum(rules.bytes_per_device(p, ready.devices.sizes) for p in placed)


def needed(error: str, arguments: int) -> int | None:
  """Returns the bytes per device that a rejected program needs.

  Args:
    error: the compiler's message.
    arguments: bytes of the state and the batch on a device.

  Returns:
    None if the message is about something else.
  """
  if (found := _OUT_OF_MEMORY.search(error)) is None:
    return None
  if found[1]:
    return int(float(found[1]) * _UNITS[found[2]])
  return arguments + int(float(found[3]) * _UNITS[found[4]])


def places(mesh: Mesh, topology: Topology) -> Places:
  """Returns the places of a mesh's devices in the topology."""
  flat = list(mesh.devices.flat)
  slices = np.array([getattr(device, "slice_index", None) or 0 for device in flat])
  if not (topology.chip.torus and hasattr(flat[0], "coords")):
    # The mesh may have them in another order: where an axis goes over slices, for one.
    numbered = in_order(topology, len(flat))
    numbers = np.argsort(np.argsort([device.id for device in flat]))
    return Places(topology, numbered.coordinates[numbers], numbered.slices[numbers])
  coordinates = np.array([device.coords[: topology.chip.torus] for device in flat])
  return Places(topology, coordinates, slices)
