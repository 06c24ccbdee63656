"""A job: a config with its devices and its checked layout; nothing is started yet."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from input_pipeline.ramp import Ramp, Shape
from models import model_spec
from models.decoder_flops import active_elements
from partitioning import shardings
from partitioning.constraints import ActivationLayout, activation_layout
from partitioning.dims import Legend, Table
from partitioning.mesh import make_mesh
from partitioning.rules import DEVICE, Placement, named_leaves
from partitioning.verdict import TABLES, Layout, check_layout
from runtime import chips
from runtime.devices import Devices, memory_bytes
from training import compiler_options
from training.choices import Choice
from training.gradient_reduction import reduced_once_over
from training.optimizers import host_state
from training.parameter_gathers import gathered_once
from training.pipelined import schedule_of
from training.state import State, merged, split
from training.step import Program, abstract_batch, make_program
from training.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class Job:
  """A run before it starts.

  Attributes:
    config: finalized and checked.
    devices: platform, whether simulated, the mesh's sizes.
    mesh: the device mesh.
    legend: the model's letters.
    program: the pure functions.
    state: the abstract state (ShapeDtypeStructs).
    batch: the abstract global batch.
    placements: `parameters`, `optimizer`, `batch`: name -> Placement.
    activations: how the activations are sharded, in the order of the forward pass.
    choices: the defaults that follow from platform and mesh.
    given: the config before its defaults were filled in; None where nothing resumes.
  """

  config: ConfigDict
  devices: Devices
  mesh: Mesh
  legend: Legend
  program: Program
  state: State
  batch: dict[str, jax.ShapeDtypeStruct]
  placements: dict[str, dict[str, Placement]]
  activations: ActivationLayout
  choices: tuple[Choice, ...] = ()
  given: ConfigDict | None = None

  @property
  def compiler_defaults(self) -> dict[str, str | bool]:
    """Returns the compiler options of its devices that the config leaves in place."""
    found = compiler_options.of_device(self.mesh.devices.flat[0])
    return compiler_options.resolved(self.config.compiler_options, found)[0]

  @property
  def state_shardings(self) -> State:
    """Returns the NamedSharding of every leaf of the state."""
    return State(
      NamedSharding(self.mesh, PartitionSpec()),
      shardings.shardings(self.state.params, self.placements["parameters"], self.mesh),
      shardings.shardings(
        self.state.optimizer, self.placements["optimizer"], self.mesh, "optimizer/"
      ),
      jax.tree.map(lambda _: NamedSharding(self.mesh, PartitionSpec()), self.state.variables),
    )

  @property
  def placed_state(self) -> State:
    """Returns the abstract state with its shardings: what a checkpoint is restored into."""
    return jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
      self.state,
      self.state_shardings,
    )

  @property
  def batch_shardings(self) -> dict[str, NamedSharding]:
    """Returns the NamedSharding of every array of the batch."""
    return shardings.shardings(self.batch, self.placements["batch"], self.mesh, "batch/")

  @contextlib.contextmanager
  def tracing(self, activations: Table | None = None) -> Iterator[None]:
    """Sets the context of a trace: mesh, activation table, matmul precision.

    Args:
      activations: dim name -> mesh axes; None: the config's.
    """
    precision = self.config.training.matmul_precision
    tables = self.config.partitioning
    table = tables.activations if activations is None else activations
    reduced = self.config.training.gradient_reduction_dtype
    with (
      jax.set_mesh(self.mesh),
      activation_layout(
        self.legend,
        table,
        parameters=tables.parameters,
        gradient_dtype=None if reduced == "compute" else jnp.dtype(reduced),
        collective_matmul=tables.collective_matmul,
        reshard_after_forward=tables.reshard_after_forward,
      ),
      jax.default_matmul_precision(precision),
    ):
      yield

  def initial_state(self, given: Any = None) -> State:
    """Returns the initial state, drawn on its devices, and checked against its specs.

    Args:
      given: nested dict of placed parameters that come from elsewhere; the others are drawn.

    Raises:
      LayoutError: a leaf is not sharded as its spec says.
    """
    key = jax.random.key(self.config.seed)
    more = () if given is None else (given,)
    state = self.compile_init(*more).function(key, *more)
    if given is not None:
      state = dataclasses.replace(state, params=merged(state.params, given))
    self.check_placed(state)
    return state

  def check_placed(self, state: State) -> None:
    """Compares every leaf's actual sharding with its spec; raises LayoutError."""
    shardings.check_placed(state.params, self.placements["parameters"], self.mesh)
    shardings.check_placed(state.optimizer, self.placements["optimizer"], self.mesh, "optimizer/")

  def compile(
    self,
    function: Callable,
    *arguments: Any,
    activations: Table | None = None,
    options: dict[str, str] | None = None,
    **jit: Any,
  ) -> "Compiled":
    """Compiles a function of the program for abstract arguments, and takes the time.

    Args:
      function: a function of jax arrays.
      *arguments: what it takes, concrete or abstract.
      activations: dim name -> mesh axes; None: the config's.
      options: XLA options in addition to the config's, which take precedence.
      **jit: further arguments of `jax.jit`.
    """
    began = time.monotonic()
    _, given = compiler_options.resolved(self.config.compiler_options, {})
    given = {**(options or {}), **given}
    if activations is not None:
      # jax.jit caches traces by function, and does not know the table that one was made under.
      function = functools.wraps(function)(functools.partial(function))
    with self.tracing(activations):
      lowered = jax.jit(function, **jit).lower(*arguments)
      compiled = compiler_options.compile_with(lowered, self.compiler_defaults, given)
    return Compiled(compiled, time.monotonic() - began)

  def compile_init(self, *given: Any) -> "Compiled":
    """Compiles `key -> state`, or with parameters `(key, given) -> state without them`."""
    key = jax.random.key(self.config.seed)
    # It runs once. On CPUs, LLVM at its default level takes four times as long to compile it,
    # longer than the train step.
    options = {"xla_backend_optimization_level": "1"} if self.devices.platform == "cpu" else None
    placed = self.state_shardings
    if given:
      _, drawn = split(placed.params, frozenset(named_leaves(given[0])).__contains__)
      placed = dataclasses.replace(placed, params=drawn)
    return self.compile(self.program.init, key, *given, options=options, out_shardings=placed)

  def parameter_counts(self) -> tuple[int, int]:
    """Returns the elements of all parameters, and of those that one token uses."""
    elements = {p.name: math.prod(p.shape) for p in self.placements["parameters"].values()}
    return sum(elements.values()), active_elements(self.config.model, elements)

  def compile_train_step(self, shape: Shape | None = None) -> "Compiled":
    """Compiles `(state, batch) -> (state, metrics)`; the state that it is given is donated.

    Args:
      shape: of the batches of a stage of a ramp; None: of the last.
    """
    return self.compile(
      self.program.train_step,
      self.state,
      self.batch if shape is None else abstract_batch(self.config, self.legend, shape),
      in_shardings=(self.state_shardings, self.batch_shardings),
      out_shardings=(self.state_shardings, NamedSharding(self.mesh, PartitionSpec())),
      donate_argnums=0,
    )

  def compile_eval_step(self) -> "Compiled":
    """Compiles `(params, batch) -> sums`; `(params, batch, None, variables)` where it has any."""
    state, placed = self.state, self.state_shardings
    return self.compile(
      self.program.sums,
      state.params,
      self.batch,
      *([None, state.variables] if state.variables else []),
      in_shardings=(
        placed.params,
        self.batch_shardings,
        *([None, placed.variables] if state.variables else []),
      ),
      out_shardings=NamedSharding(self.mesh, PartitionSpec()),
    )


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A compiled function, and the seconds that tracing and compiling took."""

  function: jax.stages.Compiled
  seconds: float


def prepare(config: ConfigDict, devices: Devices, choices: Sequence[Choice] = ()) -> Job:
  """Makes a job of a finalized config and its devices, and checks the layout.

  Args:
    config: finalized.
    devices: that it runs on.
    choices: how its unset keys were filled in, to be shown.

  Raises:
    LayoutError: with every failure of the layout in one message.
    ValueError: parameters and optimizer state do not fit the memory, the devices have no 8-bit
      matmuls of the config's kind, or `training.gradient_reduction=step` is not possible.
  """
  legend = model_spec(config).legend
  count = math.prod(devices.sizes.values())
  there = devices.described or jax.devices()[:count]
  check_matmul_dtype(config, chips.known(there[0]))
  mesh = make_mesh(devices.sizes, there, devices.slices)
  program = make_program(config)
  spec = program.spec
  program = dataclasses.replace(program, pipeline=schedule_of(spec, devices.sizes))
  state = program.abstract_state()
  batch = abstract_batch(config, legend)
  layout = _check_layout(config, legend, program, state, batch, mesh)
  _check_ramp(config, legend, program, state, mesh)
  placements = layout.placements
  if config.optimizer.state_memory == "host":
    trained, _ = program.split(state.params)
    moved = host_state.on_host(placements["optimizer"], program.stack, trained, state.optimizer)
    placements = {**placements, "optimizer": moved}
  if not devices.described:  # a plan says whether it fits devices that are not attached
    _check_memory(config, placements, devices)
  placed = shardings.shardings(state.params, placements["parameters"], mesh)
  specs = jax.tree.map(lambda sharding: sharding.spec, placed)
  memory = _memory_of_device(devices) if program.pipeline else None
  program = dataclasses.replace(
    program,
    param_specs=specs,
    gathered=gathered_once(spec, devices.sizes, placements["parameters"], program.trained, memory),
    reduce_once_over=reduced_once_over(
      spec, devices.sizes, placements["parameters"], program.variables
    ),
    norm_specs=jax.tree.map(
      lambda leaf, spec: shardings.spread(spec, leaf.shape, devices.sizes), state.params, specs
    ),
  )
  return Job(
    *(config, devices, mesh, legend, program, state, batch, placements),
    activations=layout.activations,
    choices=tuple(choices),
  )


def _check_ramp(config, legend, program, state, mesh) -> None:
  """Checks the layout of the batches of each stage of a ramp; raises ValueError with all of it."""
  ramp = Ramp.of(config.data)
  seen, wrong = {ramp.last}, []
  for first, stop, shape in ramp.stages(config.training.steps):
    if shape in seen:
      continue
    seen.add(shape)
    batch = abstract_batch(config, legend, shape)
    try:
      _check_layout(config, legend, program, state, batch, mesh)
    except ValueError as error:
      wrong.append(f"steps {first + 1} to {stop}, {batch_text(config, shape)}: {error}")
  if wrong:
    raise ValueError("\n".join(wrong))


def batch_text(config: ConfigDict, shape: Shape) -> str:
  """Returns `32 rows of 64 tokens`, the batch of a stage of a ramp."""
  length = config.data.sequence_length // shape.pieces
  of = f" of {length} tokens" if TASKS[config.task].of_tokens else ""
  return f"{shape.rows * shape.pieces} rows{of}"


def stage_lines(config: ConfigDict) -> list[str]:
  """Returns a line for each stage of the ramps of batch size and sequence length; [] without."""
  stages = list(Ramp.of(config.data).stages(config.training.steps))
  if len(stages) < 2:
    return []
  return [
    f"steps {first + 1} to {stop}: {batch_text(config, shape)}" for first, stop, shape in stages
  ]


def check_matmul_dtype(config: ConfigDict, chip: chips.Chip | None) -> None:
  """Refuses 8-bit matmuls that the chip does not compute faster; None, a CPU's, emulates them.

  Raises:
    ValueError: the chip is known, and it has none of this kind.
  """
  dtype = config.training.matmul_dtype
  if chip is None or chip.name == "cpu" or dtype == "compute":
    return
  faster = {"int8": chip.int8_flops > chip.flops, "float8": chip.float8_flops > chip.flops}
  if not faster[dtype]:
    others = [one for one, is_so in faster.items() if is_so] or ["compute"]
    raise ValueError(
      f"training.matmul_dtype={dtype!r}: on {chip.name} its matmuls are not faster than those of "
      f"bfloat16, {chip.flops / 1e12:g} TFLOP/s; set training.matmul_dtype={others[0]}"
    )


def _check_layout(config, legend, program, state, batch, mesh) -> Layout:
  """Returns the verdict on the layout, by a trace of one microbatch's forward pass."""
  count = config.training.gradient_accumulation_steps
  microbatch = {
    name: jax.ShapeDtypeStruct((array.shape[0] // count, *array.shape[1:]), array.dtype)
    for name, array in batch.items()
  }

  def trace() -> None:
    with jax.set_mesh(mesh):
      key = jax.eval_shape(jax.random.key, 0)
      jax.eval_shape(program.sums, state.params, microbatch, key, state.variables)

  return check_layout(
    state.params,
    state.optimizer,
    batch,
    trace,
    optimizer_init=program.optimizer.init,
    names=program.letters,
    batch_letters={name: letters for name, (letters, _) in TASKS[config.task].batch.items()},
    legend=legend,
    tables={title: config.partitioning[title] for title in TABLES},
    sizes=dict(mesh.shape),
    overrides=config.partitioning.overrides,
    max_replicated_bytes=config.partitioning.max_replicated_bytes,
  )


def _memory_of_device(devices: Devices) -> float | None:
  """Returns the bytes of one device; None where it is not known."""
  if devices.described:
    chip = chips.known(devices.described[0])
    return None if chip is None else chip.hbm_bytes or None
  return memory_bytes(devices) / (math.prod(devices.sizes.values()) if devices.simulated else 1)


def _check_memory(config, placements, devices: Devices) -> None:
  """Refuses a state that is larger than the memory, before anything is allocated."""
  held = [*placements["parameters"].values(), *placements["optimizer"].values()]
  if not devices.simulated:  # else all memory is this machine's
    held = [p for p in held if p.memory == DEVICE]
  needed = sum(shardings.bytes_per_device(p, devices.sizes) for p in held)
  where = "per device"
  if devices.simulated:
    needed *= math.prod(devices.sizes.values())
    where = "on all simulated devices together"
  limit = config.memory_limit_gib
  available = memory_bytes(devices) if limit is None else int(limit * 2**30)
  if needed > available:
    whose = "this machine has" if limit is None else f"memory_limit_gib={limit:g} allows"
    raise ValueError(
      f"parameters and optimizer state need {shardings.size_text(needed)} {where}, and {whose} "
      f"{shardings.size_text(available)}; make the model smaller, or split it over more devices "
      f"(mesh.fsdp, mesh.tensor)"
    )
