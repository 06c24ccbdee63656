"""A job: a config brought together with its devices, its layout judged, nothing started yet."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from models import MODELS, find
from partitioning import rules, shardings
from partitioning.constraints import ActivationLayout, activation_layout
from partitioning.dims import Legend, resolve
from partitioning.mesh import make_mesh
from partitioning.rules import LayoutError, Placement
from runtime.devices import Devices, memory_bytes
from training.state import State
from training.step import Program, abstract_batch, make_program
from training.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class Job:
  """What is known of a run before it starts.

  Attributes:
    config: finalized and checked.
    devices: platform, whether simulated, the mesh's sizes.
    mesh: the device mesh.
    legend: the model's letters.
    program: the pure functions.
    state: the abstract state (ShapeDtypeStructs).
    batch: the abstract global batch.
    placements: `parameters`, `optimizer`, `batch`: name -> Placement.
    activations: how the activations lie, in the order of the forward pass.
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
  def tracing(self) -> Iterator[None]:
    """Sets what the program is traced under: mesh, activation table, matmul precision."""
    precision = self.config.training.matmul_precision
    tables = self.config.partitioning
    with (
      jax.set_mesh(self.mesh),
      activation_layout(self.legend, tables.activations, parameters=tables.parameters),
      jax.default_matmul_precision(precision),
    ):
      yield

  def initial_state(self) -> State:
    """Returns the first state, drawn where it lies, and checked against its specs.

    Raises:
      LayoutError: a leaf lies otherwise than its spec says.
    """
    state = self.compile_init().function(jax.random.key(self.config.seed))
    self.check_placed(state)
    return state

  def check_placed(self, state: State) -> None:
    """Compares every leaf's actual sharding with its spec; raises LayoutError."""
    shardings.check_placed(state.params, self.placements["parameters"], self.mesh)
    shardings.check_placed(state.optimizer, self.placements["optimizer"], self.mesh, "optimizer/")

  def compile(
    self, function: Callable, *arguments: Any, options: dict[str, str] | None = None, **jit: Any
  ) -> "Compiled":
    """Compiles a function of the program for abstract arguments, and takes the time.

    Args:
      function: a function of jax arrays.
      *arguments: what it takes, concrete or abstract.
      options: XLA options besides those of the config, which come first.
      **jit: further arguments of `jax.jit`.
    """
    began = time.monotonic()
    given = filter(None, self.config.compiler_options.split(","))
    options = {**(options or {}), **dict(map(_option, given))}
    with self.tracing():
      compiled = (
        jax.jit(function, **jit).lower(*arguments).compile(compiler_options=options or None)
      )
    return Compiled(compiled, time.monotonic() - began)

  def compile_init(self) -> "Compiled":
    """Compiles `key -> state`."""
    key = jax.random.key(self.config.seed)
    # It runs once. On CPUs, LLVM at its default level takes four times as long over it, longer
    # than over the train step.
    options = {"xla_backend_optimization_level": "1"} if self.devices.platform == "cpu" else None
    return self.compile(self.program.init, key, options=options, out_shardings=self.state_shardings)

  def compile_train_step(self) -> "Compiled":
    """Compiles `(state, batch) -> (state, metrics)`; the state that it is given is donated."""
    return self.compile(
      self.program.train_step,
      self.state,
      self.batch,
      in_shardings=(self.state_shardings, self.batch_shardings),
      out_shardings=(self.state_shardings, NamedSharding(self.mesh, PartitionSpec())),
      donate_argnums=0,
    )

  def compile_eval_step(self) -> "Compiled":
    """Compiles `(params, batch) -> sums`; `(params, batch, None, variables)` where it has any."""
    state, lies = self.state, self.state_shardings
    return self.compile(
      self.program.sums,
      state.params,
      self.batch,
      *([None, state.variables] if state.variables else []),
      in_shardings=(
        lies.params,
        self.batch_shardings,
        *([None, lies.variables] if state.variables else []),
      ),
      out_shardings=NamedSharding(self.mesh, PartitionSpec()),
    )


def _option(text: str) -> tuple[str, str | bool]:
  """Returns name and value of `name=value`; as in XLA_FLAGS, true and false are written small."""
  name, _, value = text.partition("=")
  return name, {"true": True, "false": False}.get(value.lower(), value)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A compiled function, and the seconds that tracing and compiling took."""

  function: jax.stages.Compiled
  seconds: float


def prepare(config: ConfigDict, devices: Devices) -> Job:
  """Brings a finalized config together with its devices, and judges the layout.

  Raises:
    LayoutError: with every failure of the layout in one message.
    ValueError: parameters and optimizer state do not fit the memory.
  """
  legend = find(config.model.name).legend(config)
  count = math.prod(devices.sizes.values())
  mesh = make_mesh(devices.sizes, devices.described or jax.devices()[:count], devices.slices)
  program = make_program(config)
  state = program.abstract_state()
  batch = abstract_batch(config, legend)
  placements, failures = _place(config, legend, program, state, batch, devices.sizes)
  activations = _trace_activations(config, legend, program, state, batch, mesh)
  failures += [
    f"activation {c.letters} {shardings.shape_text(c.shape)}: {failure}"
    for c in activations.seen
    for failure in c.failures
    if not any(said.endswith(failure) for said in failures)  # of a parameter, already
  ]
  if not failures:
    every = [p for section in placements.values() for p in section.values()]
    used = rules.used_axes(every) | activations.axes()
    failures = rules.unused_axes(devices.sizes, used)
    failures += _replicated(config, placements, devices.sizes)
  if failures:
    raise LayoutError(dict.fromkeys(failures))
  if not devices.described:  # whether it fits devices that are not here, a plan says
    _check_memory(config, placements, devices)
  lies = shardings.shardings(state.params, placements["parameters"], mesh)
  specs = jax.tree.map(lambda sharding: sharding.spec, lies)
  program = dataclasses.replace(
    program,
    param_specs=specs,
    norm_specs=jax.tree.map(
      lambda leaf, spec: shardings.spread(spec, leaf.shape, devices.sizes), state.params, specs
    ),
  )
  return Job(config, devices, mesh, legend, program, state, batch, placements, activations)


def _place(config, legend, program, state, batch, sizes):
  """Places parameters, optimizer state and batch; returns the placements and all failures."""
  tables, overrides = config.partitioning, config.partitioning.overrides
  failures = []
  for title in ("parameters", "activations", "optimizer"):
    failures += rules.check_table(f"partitioning.{title}", tables[title], legend, sizes)
  if failures:  # with a wrong table every parameter would fail again
    raise LayoutError(failures)
  names = MODELS[config.model.name].parameters(config)
  parameters, wrong = rules.place_parameters(
    state.params, names, legend, tables.parameters, sizes, overrides
  )
  optimizer, wrong_optimizer = rules.place_optimizer(
    state.optimizer,
    parameters,
    legend,
    tables.optimizer,
    sizes,
    overrides,
    init=program.optimizer.init,
  )
  failures += wrong + [w for w in wrong_optimizer if not wrong]
  failures += rules.unknown_overrides(overrides, [*parameters, *optimizer])
  arrays = {}
  for name, array in batch.items():
    letters = TASKS[config.task].batch[name][0]
    found = resolve(letters, array.shape, legend, tables.activations, sizes)
    failures += [f"batch/{name}: {failure}" for failure in found.failures]
    arrays[f"batch/{name}"] = Placement(
      f"batch/{name}", array.shape, array.dtype, letters, "activations", found.spec, found.notes
    )
  return {"parameters": parameters, "optimizer": optimizer, "batch": arrays}, failures


def _trace_activations(config, legend, program, state, batch, mesh) -> ActivationLayout:
  """Traces one microbatch of the forward pass, to see every activation and how it would lie."""
  count = config.training.gradient_accumulation_steps
  microbatch = {
    name: jax.ShapeDtypeStruct((array.shape[0] // count, *array.shape[1:]), array.dtype)
    for name, array in batch.items()
  }
  tables = config.partitioning
  with (
    jax.set_mesh(mesh),
    activation_layout(
      legend, tables.activations, parameters=tables.parameters, judging=True
    ) as seen,
  ):
    key = jax.eval_shape(jax.random.key, 0)
    jax.eval_shape(program.sums, state.params, microbatch, key, state.variables)
  return seen


def _replicated(config, placements, sizes) -> list[str]:
  """Returns a failure where more is replicated than the config allows."""
  limit = config.partitioning.max_replicated_bytes
  held = [*placements["parameters"].values(), *placements["optimizer"].values()]
  count = shardings.replicated_bytes(held, sizes)
  if limit is None or count <= limit:
    return []
  devices = math.prod(sizes.values())
  largest = max(
    (p for p in held if shardings.copies(p, sizes) == devices),
    key=lambda p: shardings.bytes_per_device(p, sizes),
  )
  return [
    f"{shardings.size_text(count)} per device are replicated, and "
    f"partitioning.max_replicated_bytes={limit} ({shardings.size_text(limit)}); the largest is "
    f"{largest.name} {shardings.shape_text(largest.shape)}; split its dims in "
    "partitioning.parameters"
  ]


def _check_memory(config, placements, devices: Devices) -> None:
  """Refuses a state that is larger than the memory, before anything is allocated."""
  held = [*placements["parameters"].values(), *placements["optimizer"].values()]
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
