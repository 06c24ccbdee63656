"""What is checked: a train step with its state, its batch and its mesh; and the file that gives it.

A file defines `program(mesh)`, from the sizes of the mesh axes to a `Program`. The same sizes come
with every kind of check, and `{}` means one device. It may define `MESHES`, a list of such sizes;
the first one is what the others are compared with.
"""

import dataclasses
import importlib.util
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

# Compile with little effort, which changes neither the partitioning nor the collectives.
_QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"

Sizes = Mapping[str, int]
DEFAULT_MESHES: tuple[Sizes, ...] = ({}, {"data": 8})


class DescriptionError(ValueError):
  """A description that does not fit the program."""


@dataclasses.dataclass(frozen=True)
class Description:
  """What is known of a program beyond its step. A check that lacks what it needs is skipped.

  Leaves of the batch and of the state are named by their path: `inputs/tokens`.

  Attributes:
    loss: the key of the loss in the metrics.
    gradients: the key of the gradients in the metrics, a tree. "": they are derived from the change
      of the state in a step, which under plain SGD is the gradient times the learning rate.
    outputs: (state, batch) -> logits or losses of every position, [B, T] or [B, T, ...].
    tokens: the leaf of the batch with the tokens, [B, T], integers.
    segments: the leaf with the document that each position belongs to, [B, T]; 0: padding.
    weights: the leaf with the weights of the loss, [B, T] or [B]; 0: masked.
    targets: the leaf with the targets, [B, T], where the batch has them.
    causal: whether a position may depend on itself and earlier ones alone.
    window: how many positions attention sees, the own one included; 0: all.
    layers: of attention; with a window, what a position sees grows with each.
    looks_ahead: 1 where `outputs` are losses whose targets are cut from `tokens` itself; -1 where
      the program shifts the tokens, so that a position sees earlier ones alone.
    rows_in_any_order: whether the step is the same for rows in another order. False where
      randomness is drawn for each row, such as by dropout.
    replicated: regular expressions of the names of state leaves that are replicated on purpose.
    budget: `all-gather data` (kind and mesh axes, joined by `+`) or `data` (all kinds) -> the most
      payload bytes per device in a step.
    same: name -> another step that must give the same: microbatches, rematerialization, a kernel.
    donated: whether the state's buffers are to be reused for the new state.
    save_and_restore: state -> the same state, through a checkpoint; by default, through numpy.
  """

  loss: str = "loss"
  gradients: str = ""
  outputs: Callable[[Any, Any], jax.Array] | None = None
  tokens: str = ""
  segments: str = ""
  weights: str = ""
  targets: str = ""
  causal: bool = True
  window: int = 0
  layers: int = 1
  looks_ahead: int = 0
  rows_in_any_order: bool = True
  replicated: Sequence[str] = ()
  budget: Mapping[str, float] = dataclasses.field(default_factory=dict)
  same: Mapping[str, Callable[[Any, Any], Any]] = dataclasses.field(default_factory=dict)
  donated: bool = True
  save_and_restore: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Program:
  """A train step on one mesh.

  Attributes:
    step: (state, batch) -> (state, metrics); a function, or what `jax.jit` made of it.
    state: seed -> the initial state, a tree of arrays.
    batch: seed -> a batch, a tree of arrays with rows in the first dim.
    mesh: the devices.
    in_shardings: of (state, batch), as `jax.jit` takes them; a PartitionSpec is one on `mesh`.
    describe: what else is known.
  """

  step: Callable[[Any, Any], tuple[Any, Any]]
  state: Callable[[int], Any]
  batch: Callable[[int], Any]
  mesh: Mesh
  in_shardings: tuple[Any, Any]
  describe: Description = Description()


def text_of(sizes: Sizes) -> str:
  """Returns `data=2 x tensor=4`, or `one device`."""
  return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"


def parse_sizes(text: str) -> dict[str, int]:
  """Returns the sizes in `data=2,tensor=4`; "" or `1` is one device.

  Raises:
    ValueError: not such a text.
  """
  sizes = {}
  for part in text.split(",") if text not in ("", "1") else ():
    axis, _, size = part.partition("=")
    if not axis.strip() or not size.strip().isdigit() or int(size) < 1:
      raise ValueError(f"--mesh={text}: write axes with sizes, such as --mesh=data=2,tensor=4")
    sizes[axis.strip()] = int(size)
  return sizes


def simulate(count: int) -> None:
  """Asks for simulated CPU devices. Call it before JAX's backend starts.

  XLA's CPU client takes its threads from NPROC: with fewer of them than collectives that wait for
  one another, simulated devices deadlock.
  """
  os.environ["NPROC"] = str(max(4 * count, os.cpu_count() or 1))
  os.environ["XLA_FLAGS"] = f"{_QUICK} {os.environ.get('XLA_FLAGS', '')}"
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", count)


def load(file: str, meshes: Sequence[Sizes] = (), *, attached: bool = False) -> list[Program]:
  """Imports a file, and returns its program on each of the meshes to check it on.

  Args:
    file: a Python file. It is imported after the devices are chosen; its folder is the last on the
      path, and its module has a name of its own: a package of the file's name stays importable.
    meshes: instead of the file's own.
    attached: take the devices at hand, instead of simulating as many as the largest mesh has.

  Raises:
    ValueError: it does not give a program, or there are too few devices.
  """
  path = pathlib.Path(file)
  if not path.is_file() or path.suffix != ".py":
    raise ValueError(f"{file}: {'not a .py file' if path.exists() else 'no such file'}")
  if not attached:  # a file may start the backend, so this comes first
    simulate(max(8, *(math.prod(one.values()) for one in [*meshes, {}])))
  sys.path.append(str(path.parent.resolve()))
  spec = importlib.util.spec_from_file_location(f"checked_{path.stem}", path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  try:
    spec.loader.exec_module(module)
  except Exception as error:
    raise ValueError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
  if not callable(getattr(module, "program", None)):
    raise ValueError(
      f"{file} does not define program(mesh); it returns checks.Program(step, state, batch, mesh, "
      "in_shardings, describe) for the sizes of the mesh axes, such as {'data': 8}"
    )
  chosen = [dict(one) for one in meshes or getattr(module, "MESHES", DEFAULT_MESHES)]
  if len(chosen) < 2:
    raise ValueError("give two meshes or more, of which the first is compared with the others")
  largest = max(math.prod(one.values()) for one in chosen)
  if largest > jax.device_count():
    raise ValueError(
      f"the largest mesh has {largest} devices, and there are {jax.device_count()}; name it with "
      "--mesh, so that as many are simulated"
    )
  return [_given(module.program, one) for one in chosen]


def _given(program: Callable[[Sizes], Program], sizes: Sizes) -> Program:
  try:
    found = program(dict(sizes))
  except Exception as error:
    raise ValueError(f"program({dict(sizes)}): {type(error).__name__}: {error}") from error
  if not isinstance(found, Program):
    kind = type(found).__name__
    raise ValueError(f"program({dict(sizes)}) returns a {kind}, not a checks.Program")
  return found


def make_mesh(sizes: Sizes, axes: Sequence[str] = ()) -> Mesh:
  """Returns a mesh of the first devices, with axes that the compiler shards automatically.

  Args:
    sizes: of the axes.
    axes: all axes that the program knows, in their order; those without a size have 1.
  """
  names = (*axes, *(axis for axis in sizes if axis not in axes)) or ("data",)
  shape = [sizes.get(axis, 1) for axis in names]
  devices = np.asarray(jax.devices()[: math.prod(shape)]).reshape(shape)
  return Mesh(devices, names)
