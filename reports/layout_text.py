"""The layout as text: a row per array, its bytes per device, two strategies compared."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epy
from jax.sharding import Mesh, NamedSharding
from rich import box
from rich.table import Table

from partitioning import rules
from partitioning.constraints import ActivationLayout
from partitioning.rules import (
  HOST,
  Legend,
  Placement,
  bytes_per_device,
  copies,
  shape_text,
  shard_shape,
  size_text,
  spec_entries,
  spec_text,
)
from reports import drawings
from runtime.rematerialization import OFFLOAD, RECOMPUTE, SAVE
from training import compiler_options, named_activations
from training.named_activations import Named
from training.optimizers.build import matrix_groups
from training.optimizers.spec import OptimizerSpec
from training.setup import Job
from training.specs import resolve
from training.step import Program

if TYPE_CHECKING:
  from partitioning.parallel.pipeline_schedule import Schedule

with epy.lazy_imports():  # of steps with several microbatches
  from training import microbatches

# What becomes of an activation's bytes, by its choice.
CHOICES = {
  SAVE: "saved on the device",
  OFFLOAD: "offloaded to the host's memory",
  RECOMPUTE: "not saved, recomputed",
}


def legend_text(legend: Legend) -> str:
  """Returns the legend, a line per letter."""
  lines = ["legend: letter, dim, size"]
  for letter, dim in legend.items():
    if dim.size == 0:  # the rank of adapters that the model does not have
      continue
    size = "differs" if dim.size is None else str(dim.size)
    exception = "  (may replicate where its axes do not divide it)" if dim.may_replicate else ""
    lines.append(f"  {letter}  {dim.name:<14} {size:>8}{exception}")
  return "\n".join(lines)


def table_text(sections: Mapping[str, Sequence[Placement]], sizes: Mapping[str, int]) -> str:
  """Returns the layout table: a row per array, the bytes per device, and what is replicated.

  Args:
    sections: title (`parameters`, `optimizer`, `batch`) -> placements.
    sizes: mesh axis -> size.
  """
  table = plain_table("array", "shape", "dtype", "dims", "rule", "spec", "shard")
  table.add_column("bytes/device", justify="right")
  table.add_column("replicas", justify="right")
  for title, placements in sections.items():
    total = sum(bytes_per_device(p, sizes) for p in placements)
    table.add_row(title, *[""] * 6, size_text(total), "", style="bold")
    for p in placements:
      table.add_row(
        f"  {p.name}",
        shape_text(p.shape),
        str(np.dtype(p.dtype)),
        p.letters or "-",
        p.rule,
        *sharding_texts(p, sizes),
      )
    table.add_section()
  notes = [f"note: {p.name}: {note}" for ps in sections.values() for p in ps for note in p.notes]
  return "\n".join([drawings.plain(table), *notes])


def sharding_texts(placement: Placement, sizes: Mapping[str, int]) -> list[str]:
  """Returns spec, shard, bytes per device, replicas."""
  return [
    spec_text(placement.spec, len(placement.shape)),
    shape_text(shard_shape(placement.shape, placement.spec, sizes)),
    size_text(bytes_per_device(placement, sizes)),
    str(copies(placement, sizes)),
  ]


def against_text(
  ours: Mapping[str, Placement],
  theirs: Mapping[str, Placement],
  sizes: tuple[Mapping[str, int], Mapping[str, int]],
  titles: tuple[str, str],
) -> str:
  """Returns two layouts side by side; `*` marks an array that differs."""
  table = plain_table("", "array", "shape")
  for title in titles:
    table.add_column(title)
    table.add_column("bytes/device", justify="right")
  for name in [*ours, *(name for name in theirs if name not in ours)]:
    pair = (ours.get(name), theirs.get(name))
    cells = []
    for placement, size in zip(pair, sizes, strict=True):
      if placement is None:
        cells.append(("not there", "0 Bytes"))
      else:
        spec = spec_text(placement.spec, len(placement.shape))
        cells.append((spec, size_text(bytes_per_device(placement, size))))
    shapes = list(dict.fromkeys(shape_text(p.shape) for p in pair if p))
    differs = "*" if cells[0] != cells[1] else ""
    table.add_row(differs, name, " | ".join(shapes), *cells[0], *cells[1])
  totals = [
    size_text(sum(bytes_per_device(p, size) for p in placements.values()))
    for placements, size in zip((ours, theirs), sizes, strict=True)
  ]
  table.add_row("", "all", "", "", totals[0], "", totals[1], style="bold")
  return drawings.plain(table)


def plain_table(*columns: str) -> Table:
  """Returns an empty table of these columns, none of which is truncated."""
  table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
  for column in columns:
    table.add_column(column, no_wrap=True)
  return table


def job_text(job: Job, *, whole: bool = True) -> str:
  """Returns the legend, the layout table, and the sums below it.

  Args:
    job: the job.
    whole: also the tables, which `layout` prints and `layout.txt` holds; without them, a line
      each for what the start of a run says.
  """
  sizes = job.devices.sizes
  sections = {title: list(rows.values()) for title, rows in job.placements.items()}
  parameters = sections["parameters"]
  held = [*parameters, *sections["optimizer"]]
  per_device, on_host = (
    sum(rules.bytes_per_device(p, sizes) for p in held if (p.memory == HOST) == host)
    for host in (False, True)
  )
  replicated = rules.replicated_bytes(held, sizes)
  lines = [legend_text(job.legend)] if whole else []
  if whole:
    lines.append(table_text(sections, sizes))
    every = [p for placements in sections.values() for p in placements]
    if ways := ways_text(every, job.mesh):
      lines += ["the devices that hold each block, a drawing per sharding:", "", ways, ""]
    lines.append("activations, in the order of the forward pass:")
    for letters, shape, spec, notes in activation_rows(job.activations):
      lines.append(f"  {letters:<5} {shape:<20} {spec}{notes and '  note: '}{notes}")
    lines.append("")
    if named := named_activations.of_job(job):
      choice, layers = job.config.training.rematerialization, of_layers(job.program.pipeline)
      lines += [named_text(named, choice, layers), ""]
    if matrices := matrix_lines(resolve(job.config).optimizer, job.program, sizes):
      matrices = [f"  {line}" for line in matrices]
      lines += ["matrices that the optimizer brings whole to devices, and back:", *matrices, ""]
  stages = [text for text, _ in job.batches.stages()]
  lines += stages if len(stages) > 1 else []
  if schedule := job.program.pipeline:
    from reports import pipeline_picture  # where there are stages

    lines.append(pipeline_picture.text(schedule, job.config.model.layers, picture=whole))
  if reduced := reduction_text(job.program, sizes):
    lines.append(reduced)
  if job.program.pipeline:
    given = job.program.spec, sizes, job.placements["parameters"], job.program.trained
    lines += filter(None, [microbatches.gathering_text(*given, job.program.gathered)])
  lines.append(
    f"{counts_text(*job.parameter_counts())}; with optimizer state "
    f"{rules.size_text(per_device)} per device, "
    f"of which {rules.size_text(replicated)} are replicated"
    + (" on every device" if whole else "")
    + (f"; {rules.size_text(on_host)} of it in the host's memory" if on_host else "")
  )
  if whole:
    return "\n".join([*lines, *chosen_lines(job)])
  lines += derived_lines(job.choices)
  matter = [one for one in job.choices if one.of_devices and not one.plain]
  chosen = [f"{one.key}={one.value}" for one in matter]  # without the reasons
  if job.compiler_defaults:
    chosen.append(f"{len(job.compiler_defaults)} compiler_options")
  chosen += [f"left out {name}, unknown here" for name in compiler_options.dropped()]
  return "\n".join([*lines, *([f"chosen: {', '.join(chosen)}"] if chosen else [])])


def reduction_text(program: Program, sizes: Mapping[str, int]) -> str:
  """Returns how the gradients of several microbatches are reduced; "" of one microbatch."""
  if (count := program.spec.microbatches_on(sizes)) == 1:
    return ""
  gathered = program.gathered is not None
  return microbatches.reduction_text(count, program.reduce_once_over, gathered=gathered)


def counts_text(total: int, active: int) -> str:
  """Returns how many parameters there are, and of a mixture of experts how many a token uses."""
  return f"{total:,} parameters" + (f", {active:,} of them active" if active != total else "")


def chosen_lines(job: Job, *, compiled: bool = True) -> list[str]:
  """Returns a line for each default that follows from platform and mesh: docs/performance.md.

  Args:
    job: whose defaults.
    compiled: whether it is compiled for its devices; a plan by formula has others in their place.
  """
  lines = [
    *derived_lines(job.choices),
    *(f"chosen: {one.key}={one.value} ({one.why})" for one in job.choices if one.of_devices),
  ]
  if (options := job.compiler_defaults) and compiled:
    kind = job.mesh.devices.flat[0].device_kind
    lines.append(f"chosen: compiler_options={compiler_options.text(options)} (for {kind})")
  if refused := compiler_options.dropped():
    lines.append(f"left out, as this compiler does not know them: {', '.join(refused)}")
  return lines


def derived_lines(choices: Iterable[Any]) -> list[str]:
  """Returns a line about the sizes that follow from the model's width or depth, or none."""
  derived = [one for one in choices if not one.of_devices]
  values = [f"{one.value:.4g}" if isinstance(one.value, float) else one.value for one in derived]
  shown = [f"{one.key}={value} ({one.why})" for one, value in zip(derived, values, strict=True)]
  return [f"derived: {', '.join(shown)}"] if shown else []


def activation_rows(traced: ActivationLayout) -> list[list[str]]:
  """Returns letters, shape, spec and notes of the constrained activations, in order."""
  return [
    [c.letters, shape_text(c.shape), spec_text(c.spec, len(c.shape)), "; ".join(c.notes)]
    for c in traced.seen
  ]


def named_rows(named: Sequence[Named]) -> tuple[list[list[str]], list[tuple[str, str]]]:
  """Returns the named activations of a layer, and the bytes of what is saved or not."""
  rows = [
    [
      *(one.name, one.letters, shape_text(one.shape), spec_text(one.spec, len(one.shape))),
      *(size_text(one.bytes), one.choice),
    ]
    for one in named
  ]
  sums = named_activations.sums(named).items()
  return rows, [(CHOICES[choice], size_text(size)) for choice, size in sums]


def named_text(named: Sequence[Named], rematerialization: str, layers: str) -> str:
  """Returns the table of named activations: bytes of `layers`, and what happens to them."""
  table = plain_table("activation of a layer", "dims", "shape", "spec")
  table.add_column(f"bytes/device, {layers}", justify="right")
  table.add_column(f"rematerialization={rematerialization}", no_wrap=True)
  rows, sums = named_rows(named)
  for row in rows:
    table.add_row(*row)
  table.add_section()
  for text, size in sums:
    table.add_row(text, "", "", "", size, "", style="bold")
  return drawings.plain(table)


def of_layers(schedule: "Schedule | None") -> str:
  """Returns of which layers a device has activations at a time."""
  return "layers of a chunk" if schedule else "all layers"


def matrix_lines(optimizer: OptimizerSpec, program: Program, sizes: Mapping[str, int]) -> list[str]:
  """Returns a line for each group of matrices that an update brings whole to devices.

  Args:
    optimizer: of the job.
    program: its functions.
    sizes: mesh axis -> size.
  """
  lines = []
  for _, group in matrix_groups(optimizer, program.split(program.params)[0], sizes):
    rows, columns = group.shape
    moves = [
      f"{how} along {'+'.join(axes)}"
      for how, axes in (("exchanged", group.exchanged), ("shared", group.shared))
      if axes
    ]
    lines.append(
      f"{group.count} of {rows} x {columns}, {group.each} per device"
      f"{''.join(f', {move}' for move in moves)}: {', '.join(group.names)}"
    )
  return lines


def ways_text(placements: Iterable[Placement], mesh: Mesh, *, width: int = 120) -> str:
  """Returns a drawing per distinct sharding, with the names of all arrays that are sharded so.

  Args:
    placements: of parameters, optimizer state, batch.
    mesh: of their specs.
    width: in characters.
  """
  ways: dict[frozenset, list[Placement]] = {}
  for p in placements:
    cut = [
      ((p.letters[d] if p.letters else d), p.shape[d], axes)
      for d, entry in enumerate(spec_entries(p.spec))
      if (axes := tuple(axis for axis in entry if mesh.shape[axis] > 1))
    ]
    ways.setdefault(frozenset(cut), []).append(p)
  texts = []
  for members in (members for cut, members in ways.items() if cut):
    p = members[0]
    sharding = NamedSharding(mesh, p.spec)
    drawn = drawings.picture(p.shape, sharding, title=p.name, dims=p.letters)
    text = drawings.plain(drawings.terminal(drawn, width=width))
    also = _names_text([p.name for p in members])
    also = textwrap.wrap(f"sharded alike: {also}", width) if len(members) > 1 else []
    texts.append("\n".join([text, *also]))
  if (whole := ways.get(frozenset())) and mesh.size > 1:
    names = _names_text([p.name for p in whole])
    texts.append("\n".join(textwrap.wrap(f"replicated on all {mesh.size} devices: {names}", width)))
  return "\n\n".join(texts)


def _names_text(names: Sequence[str]) -> str:
  """Returns the names; an optimizer's leaf that is sharded like its parameter is not named."""
  kept = [name for name in names if not any(name.endswith(f"/{other}") for other in names)]
  more = " and their optimizer state" if len(kept) < len(names) else ""
  return ", ".join(kept) + more
