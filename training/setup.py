"""A job: a config with its devices and its checked layout; nothing is started yet."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from input_pipeline.ramp import Shape
from models.spec import QUANTIZED_PARTS, TEACHER
from models.transformer import active_elements
from partitioning import rules
from partitioning.constraints import ActivationLayout, activation_layout
from partitioning.mesh import make_mesh
from partitioning.rules import DEVICE, Legend, Placement, Table, named_leaves
from partitioning.verdict import Layout, check_layout
from processes.coordination import current
from runtime import chips, executables, forms, transfers
from runtime.devices import Devices, memory_bytes
from runtime.executables import Executables, described
from training import compiler_options
from training.checkpointing.consensus import Together
from training.specs import GROUPS, BatchSpec, Resolved, resolve
from training.state import State, merged, split, teacher_branch
from training.step import Program, make_program
from training.tasks import DPO

with epy.lazy_imports():  # of elastic runs, microbatches, groups, and state in the host's memory
  from training import elastic, microbatches, outer
  from training.optimizers import host_state


@dataclasses.dataclass(frozen=True)
class Job:
  """A run before it starts.

  Attributes:
    config: finalized and checked.
    devices: platform, whether simulated, the mesh's sizes.
    mesh: the device mesh.
    legend: the model's letters.
    batches: the arrays of each step's batch.
    program: the pure functions.
    state: the abstract state (ShapeDtypeStructs).
    batch: the abstract global batch.
    placements: `parameters`, `optimizer`, `batch`: name -> Placement.
    activations: how the activations are sharded, in the order of the forward pass.
    choices: the defaults that follow from platform and mesh (`configs.schema.finalize.Choice`).
    given: the config before its defaults were filled in; None where nothing resumes.
    executables: where its compiled programs are stored; None where they are not.
  """

  config: ConfigDict
  devices: Devices
  mesh: Mesh
  legend: Legend
  batches: BatchSpec
  program: Program
  state: State
  batch: dict[str, jax.ShapeDtypeStruct]
  placements: dict[str, dict[str, Placement]]
  activations: ActivationLayout
  choices: tuple[Any, ...] = ()
  given: ConfigDict | None = None
  executables: Executables | None = None

  @property
  def consensus(self) -> Together:
    """Returns the consensus of the run's processes about checkpoints."""
    return Together(current(), timeout_seconds=self.config.processes.start_timeout_seconds)

  @property
  def compiler_defaults(self) -> dict[str, str | bool]:
    """Returns the compiler options of its devices that the config leaves in place."""
    found = compiler_options.of_device(self.mesh.devices.flat[0])
    return compiler_options.resolved(self.config.compiler_options, found)[0]

  def storing(self) -> "Job":
    """Returns the job with the store of its programs, if there may be one."""
    config = self.config
    given = compiler_options.resolved(config.compiler_options, {})[1]
    options = [self.compiler_defaults, given]
    store = executables.of_run(forms.plain(config), self.mesh, options, self._all_have)
    return dataclasses.replace(self, executables=store)

  def _all_have(self, program: str, own: bool) -> bool:
    seconds = self.config.processes.start_timeout_seconds
    return current().all_true(f"stored/{program}", own, timeout_seconds=seconds)

  @property
  def needs_reference(self) -> bool:
    """Returns whether its batches have a reference that is stored; see `training.reference`."""
    return self.config.task == DPO and not self.config.lora.rank

  @property
  def state_shardings(self) -> State:
    """Returns the NamedSharding of every leaf of the state."""
    return State(
      NamedSharding(self.mesh, PartitionSpec()),
      rules.shardings(self.state.params, self.placements["parameters"], self.mesh),
      rules.shardings(self.state.optimizer, self.placements["optimizer"], self.mesh, "optimizer/"),
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
    return rules.shardings(self.batch, self.placements["batch"], self.mesh, "batch/")

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
        slices=self.devices.slices,
        platform=self.devices.platform,
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
    rules.check_placed(state.params, self.placements["parameters"], self.mesh)
    rules.check_placed(state.optimizer, self.placements["optimizer"], self.mesh, "optimizer/")

  def compile(
    self,
    function: Callable,
    *arguments: Any,
    name: str = "",
    activations: Table | None = None,
    options: dict[str, str | bool] | None = None,
    **jit: Any,
  ) -> "Compiled":
    """Compiles a function of the program for abstract arguments, and takes the time.

    Args:
      function: a function of jax arrays.
      *arguments: what it takes, concrete or abstract.
      name: of a function that the config, the mesh and its arguments determine: then a program
        that is stored is read in place of compiling. All processes call it.
      activations: dim name -> mesh axes; None: the config's.
      options: XLA options in addition to the config's, which take precedence.
      **jit: further arguments of `jax.jit`.
    """
    began = time.monotonic()
    given = self._options(options)
    store = self.executables if name else None
    devices = [*self.mesh.devices.flat]
    if store:
      own = [described(arguments), described(jit), repr(activations), given]
      shared = [repr(self.program.gathered), repr(self.program.reduce_once_over)]
      key = store.key(name, [*own, *shared])
      if found := store.load(name, key, devices):
        return self._timed(found, began, stored=True)

    def finish(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
      return compiler_options.compile_with(lowered, self.compiler_defaults, given)

    lowered = self._lowered(function, *arguments, activations=activations, **jit)
    with self.tracing(activations):
      compiled = store.compiled(name, key, lowered, finish, devices) if store else finish(lowered)
    return self._timed(compiled, began)

  def _timed(
    self, function: jax.stages.Compiled, began: float, *, stored: bool = False
  ) -> "Compiled":
    function = transfers.alone_at_first(function, self.devices.platform)
    return Compiled(function, time.monotonic() - began, stored)

  def _options(self, options: Mapping[str, str | bool] | None = None) -> dict[str, str | bool]:
    """Returns the compiler options that must not be left out, the config's over those given."""
    without = compiler_options.WITHOUT_GPU if self.devices.lowered_for else {}
    config = compiler_options.resolved(self.config.compiler_options, {})[1]
    return {**without, **(options or {}), **config}

  def _lowered(
    self, function: Callable, *arguments: Any, activations: Table | None = None, **jit: Any
  ) -> jax.stages.Lowered:
    if activations is not None:
      # jax.jit caches traces by function, and does not know the table that one was made under.
      function = functools.wraps(function)(functools.partial(function))
    with self.tracing(activations):
      traced = jax.jit(function, **jit).trace(*arguments)
      return traced.lower(lowering_platforms=self.devices.lowered_for)

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
    return self.compile(
      self.program.init, key, *given, name="init", options=options, out_shardings=placed
    )

  def parameter_counts(self) -> tuple[int, int]:
    """Returns the elements of all parameters of the model, and of those that one token uses."""
    of_teacher = named_leaves(teacher_branch(self.state.params))
    placed = self.placements["parameters"].values()
    elements = {p.name: _elements(p) for p in placed if p.name not in of_teacher}
    return sum(elements.values()), active_elements(self.config.model, elements)

  def compile_train_step(
    self,
    shape: Shape | None = None,
    *,
    step: Callable | None = None,
    aside: Sequence[NamedSharding] = (),
  ) -> "Compiled":
    """Compiles `(state, batch) -> (state, metrics)`; the state that it is given is donated.

    Args:
      shape: of the batches of a stage of a ramp; None: of the last.
      step: a function that returns (metrics, more, ...) in place of the metrics.
      aside: how these more are sharded.
    """
    batch = self.batch if shape is None else self.batches.abstract(self.legend, shape)
    jit, given = self._jit_of_train_step, (self.state, batch)
    if step is None:
      return self.compile(self.program.train_step, *given, name="train step", **jit)
    state, metrics = jit["out_shardings"]
    jit["out_shardings"] = state, (metrics, *aside)
    return self.compile(step, *given, name="train step, and digests", **jit)

  def lowered_train_step(self) -> tuple[jax.stages.Lowered, list[dict[str, str | bool]]]:
    """Returns the program of the train step, and the options, as `compile_with` takes them."""
    step, jit = self.program.train_step, self._jit_of_train_step
    lowered = self._lowered(step, self.state, self.batch, **jit)
    return lowered, [self.compiler_defaults, self._options()]

  @property
  def _jit_of_train_step(self) -> dict[str, Any]:
    return {
      "in_shardings": (self.state_shardings, self.batch_shardings),
      "out_shardings": (self.state_shardings, NamedSharding(self.mesh, PartitionSpec())),
      "donate_argnums": 0,
    }

  def compile_eval_step(self) -> "Compiled":
    """Compiles `(params, batch) -> sums`; `(params, batch, None, variables)` where it has any."""
    state, placed = self.state, self.state_shardings
    return self.compile(
      self.program.sums,
      state.params,
      self.batch,
      *([None, state.variables] if state.variables else []),
      name="evaluation step",
      in_shardings=(
        placed.params,
        self.batch_shardings,
        *([None, placed.variables] if state.variables else []),
      ),
      out_shardings=NamedSharding(self.mesh, PartitionSpec()),
    )


def _elements(placement: Placement) -> int:
  """Returns the elements of a parameter; of a quantized kernel all are those of its codes."""
  name, count = placement.name, math.prod(placement.shape)
  if not name.endswith(QUANTIZED_PARTS):
    return count
  in_a_byte = 2 if placement.dtype == jnp.uint8 else 1
  return count * in_a_byte if name.endswith(QUANTIZED_PARTS[0]) else 0


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A compiled function, and the seconds that it took to compile it, or to read what is stored."""

  function: jax.stages.Compiled
  seconds: float
  stored: bool = False


def prepare(config: ConfigDict, devices: Devices, choices: Sequence[Any] = ()) -> Job:
  """Makes a job of a finalized config and its devices, and checks the layout.

  Args:
    config: finalized.
    devices: that it runs on.
    choices: how its unset keys were filled in, to be shown.

  Raises:
    LayoutError: with every failure of the layout in one message.
    ValueError: the batch of an elastic run cannot be divided by the replicas that there are,
      parameters and optimizer state do not fit the memory, the devices have no 8-bit
      matmuls of the config's kind, or `training.gradient_reduction=step` is not possible.
  """
  resolved = resolve(config)
  if config.training.elastic:
    count = elastic.Elastic.of(config, resolved.batch).microbatches(devices.sizes)
    step = dataclasses.replace(resolved.step, gradient_accumulation_steps=count)
    resolved = dataclasses.replace(resolved, step=step)
  count = math.prod(devices.sizes.values())
  there = devices.described or jax.devices()[:count]
  check_matmul_dtype(resolved.step.matmul_dtype, chips.known(there[0]))
  mesh = make_mesh(devices.sizes, there, devices.slices)
  program = make_program(resolved)
  if devices.sizes["stage"] > 1:
    pipeline = microbatches.schedule_of(program.spec, devices.sizes)
    program = dataclasses.replace(program, pipeline=pipeline)
  state = program.abstract_state()
  layout = _check_layout(resolved, program, state, mesh)
  placements = layout.placements
  if resolved.step.state_memory == "host":
    trained, _ = program.split(state.params)
    moved = host_state.on_host(placements["optimizer"], program.stack, trained, state.optimizer)
    placements = {**placements, "optimizer": moved}
  if groups := resolved.step.outer:
    of_groups = outer.placed(placements["optimizer"], groups.groups)
    placements = {**placements, "optimizer": of_groups}
  if not devices.described:  # a plan says whether it fits devices that are not attached
    _check_memory(resolved.memory_limit_gib, placements, devices)
  return Job(
    *(config, devices, mesh, resolved.model.legend, resolved.batch),
    program=_sharded(program, placements["parameters"], state.params, mesh, devices),
    state=state,
    batch=resolved.batch.abstract(resolved.model.legend),
    placements=placements,
    activations=layout.activations,
    choices=tuple(choices),
  )


def _sharded(
  program: Program, parameters: dict[str, Placement], params: Any, mesh: Mesh, devices: Devices
) -> Program:
  """Returns a program with the shardings of its gradients, and what follows from these."""
  spec, sizes = program.spec, devices.sizes
  if spec.outer is not None:
    outer.check_groups(spec, sizes, parameters, program.variables)
    sizes = {**sizes, GROUPS: 1}  # no step sums anything over them
  placed = rules.shardings(params, parameters, mesh)
  specs = jax.tree.map(lambda sharding: sharding.spec, placed)
  spread = jax.tree.map(lambda leaf, spec: rules.spread(spec, leaf.shape, sizes), params, specs)
  program = dataclasses.replace(program, param_specs=specs, norm_specs=spread)
  several = spec.microbatches_on(sizes) > 1
  if not several and not program.pipeline:
    return program
  once = None
  if several:
    once = microbatches.reduced_once_over(spec, sizes, parameters, program.variables)
  memory = _memory_of_device(devices) if program.pipeline else None
  return dataclasses.replace(
    program,
    gathered=microbatches.gathered_once(spec, sizes, parameters, program.trained, memory),
    reduce_once_over=once,
  )


def check_matmul_dtype(dtype: str, chip: chips.Chip | None) -> None:
  """Refuses 8-bit matmuls that the chip does not compute faster; None, a CPU's, emulates them.

  Raises:
    ValueError: the chip is known, and it has none of this kind.
  """
  if chip is None or chip.name == "cpu" or dtype == "compute":
    return
  faster = {"int8": chip.int8_flops > chip.flops, "float8": chip.float8_flops > chip.flops}
  if not faster[dtype]:
    others = [one for one, is_so in faster.items() if is_so] or ["compute"]
    raise ValueError(
      f"training.matmul_dtype={dtype!r}: on {chip.name} its matmuls are not faster than those of "
      f"bfloat16, {chip.flops / 1e12:g} TFLOP/s; set training.matmul_dtype={others[0]}"
    )


def _check_layout(resolved: Resolved, program: Program, state: State, mesh: Mesh) -> Layout:
  """Returns the verdict on the layout of the run's last batches; all of the ramps are checked.

  Raises:
    LayoutError: with every failure of the last batches.
    ValueError: with those of the others.
  """
  last, layouts, wrong = resolved.batch.ramp.last, {}, []
  for text, shape in [("", last), *resolved.batch.stages()]:
    try:
      if shape not in layouts:
        layouts[shape] = None
        layouts[shape] = _verdict(resolved, program, state, mesh, shape)
    except ValueError as error:
      if shape == last:
        raise
      wrong.append(f"{text}: {error}")
  if wrong:
    raise ValueError("\n".join(wrong))
  return layouts[last]


def _verdict(
  resolved: Resolved, program: Program, state: State, mesh: Mesh, shape: Shape
) -> Layout:
  """Returns the verdict on batches of a shape, by a trace of one microbatch's forward pass."""
  batch = resolved.batch.abstract(resolved.model.legend, shape)
  count = resolved.step.gradient_accumulation_steps
  microbatch = {
    name: jax.ShapeDtypeStruct((array.shape[0] // count, *array.shape[1:]), array.dtype)
    for name, array in batch.items()
  }

  def trace() -> None:
    with jax.set_mesh(mesh):
      key = jax.eval_shape(jax.random.key, 0)
      jax.eval_shape(program.sums, state.params, microbatch, key, state.variables)

  optimizer, init = state.optimizer, program.optimizer.init
  if resolved.step.outer is not None:
    optimizer = jax.eval_shape(outer.of_one_group, optimizer)
    init = lambda params: outer.of_one_group(program.optimizer.init(params))  # noqa: E731
  teacher = resolved.teacher
  return check_layout(
    state.params,
    optimizer,
    batch,
    trace,
    optimizer_init=init,
    names=resolved.model.parameters,
    batch_letters=resolved.batch.letters,
    legend=resolved.model.legend,
    sizes=dict(mesh.shape),
    beside={TEACHER: (teacher.parameters, teacher.legend)} if teacher else None,
    **resolved.layout,
  )


def _memory_of_device(devices: Devices) -> float | None:
  """Returns the bytes of one device; None where it is not known."""
  if devices.described:
    chip = chips.known(devices.described[0])
    return None if chip is None else chip.hbm_bytes or None
  return memory_bytes(devices) / (math.prod(devices.sizes.values()) if devices.simulated else 1)


def _check_memory(
  limit_gib: float | None, placements: dict[str, dict[str, Placement]], devices: Devices
) -> None:
  """Refuses a state that is larger than the memory, before anything is allocated."""
  held = [*placements["parameters"].values(), *placements["optimizer"].values()]
  if not devices.simulated:  # else all memory is this machine's
    held = [p for p in held if p.memory == DEVICE]
  needed = sum(rules.bytes_per_device(p, devices.sizes) for p in held)
  where = "per device"
  if devices.simulated:
    needed *= math.prod(devices.sizes.values())
    where = "on all simulated devices together"
  available = memory_bytes(devices) if limit_gib is None else int(limit_gib * 2**30)
  if needed > available:
    whose = "this machine has" if limit_gib is None else f"memory_limit_gib={limit_gib:g} allows"
    raise ValueError(
      f"parameters and optimizer state need {rules.size_text(needed)} {where}, and {whose} "
      f"{rules.size_text(available)}; make the model smaller, or split it over more devices "
      f"(mesh.fsdp, mesh.tensor)"
    )
