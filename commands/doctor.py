"""The verb `doctor`: checks an installation, alone or as several processes, and says what to do."""

import collections
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

import humanize
from etils import epath

from commands import flags, help, machine, session, start_facts
from commands.machine import OK, WARNING, WRONG, Finding, ok, wrong
from configs import base
from processes import coordination, preflight
from processes.coordination import Group
from processes.watchdog import STARTING, Watchdog
from runtime import devices, exit_codes
from runtime.printable import printable

_INDENT = 9  # where what was found begins
_ERRORS = (ValueError, OSError, RuntimeError)


def run() -> Callable[[], int]:
  """Returns what checks the installation, and returns 0, or 3 where something is wrong."""
  return _Checkup().run


class _Checkup:
  """The checks of an installation, for the config and the workdir of the command line, if any."""

  def __init__(self):
    self._config = flags.CONFIG.value or base.get_config(mesh={"data": -1})
    given = flags.CONFIG.value or flags.WORKDIR.value
    self._workdir = flags.workdir() if given else epath.Path("runs")
    self._report = _Report(self._config.processes.start_timeout_seconds)

  def run(self) -> int:
    """Makes the checks that need no other process, then joins the others; returns the exit code."""
    hardware = None if devices.simulates(flags.SIMULATE.value) else devices.hardware()
    report, network = self._report, list(machine.check_network())
    report.add("packages", machine.check_versions(hardware))
    report.add("this machine", machine.check_limits(hardware))
    report.add("folders", self._folders())
    report.add("network", network)
    if bad := [one for one in network if one.status == WRONG]:
      coordination.refuse(bad[0].what, self._workdir)  # the others need not wait
      return report.end()
    return session.with_others(self._config.processes, self._workdir, self._together)

  def _folders(self) -> Iterator[Finding]:
    yield from machine.check_folder(self._workdir, "workdir")
    folders = {
      "compilation_cache_dir": self._config.compilation_cache_dir,
      "planning.cache_dir": self._config.planning.cache_dir,
      "data.data_dir": self._config.data.data_dir,
    }
    for key, folder in folders.items():
      if folder:
        yield from machine.check_folder(epath.Path(folder), key)

  def _together(self, watch: Watchdog) -> int:
    """Checks what needs JAX and, where there are some, the other processes."""
    group, report = watch.group, self._report
    report.joined(group)
    if not group.alone:
      report.add("processes", self._processes(group))
    watch.at("looking for devices", STARTING)
    found, error = self._start()
    started = group.all_true("devices", error is None, timeout_seconds=report.seconds)
    if error is not None:
      report.add("devices", [wrong(str(error))])
      return report.end()
    from commands import attached  # which import JAX

    report.add("devices", attached.check_devices(found))
    if not started:
      return report.end()
    watch.at("measuring collectives", STARTING)
    links = list(attached.check_interconnect(_mesh(found), simulated=found.simulated))
    # Times differ from process to process: of the others, what is wrong is of interest.
    report.add("links", [one for one in links if group.first or one.status != OK])
    if flags.CONFIG.value is not None:
      watch.at("checking the config", STARTING)
      report.add("config", self._layout(found))
    return report.end()

  def _processes(self, group: Group) -> Iterator[Finding]:
    yield from machine.check_clocks(group, timeout_seconds=self._report.seconds)
    try:
      facts = {"verb": "doctor", "workdir": str(self._workdir)}
      start_facts.about_to_start({"config": self._config}, facts)
      yield ok(f"{group.count} processes with the same command, code and packages")
    except preflight.DifferenceError as error:
      yield wrong(str(error))
    try:
      folder = machine.existing(self._workdir)
      preflight.same_folder(group, folder, timeout_seconds=self._report.seconds)
      yield ok(f"all processes see workdir {self._workdir}")
    except (preflight.DifferenceError, OSError) as error:
      yield wrong(str(error))

  def _start(self) -> tuple[devices.Devices | None, Exception | None]:
    """Returns the devices, or why they did not start."""
    try:
      from commands import build  # which imports JAX

      [found] = build.start_devices(self._config)
    except Exception as error:  # whatever JAX raises that is not installed as it should be
      return None, error
    return found, None

  def _layout(self, found: devices.Devices) -> Iterator[Finding]:
    """Yields whether the config, its layout and the space for checkpoints are as they should."""
    import jax

    from commands import build

    try:
      job = build.job(self._config, found)
    except _ERRORS as error:
      yield wrong(str(error))
      return
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(vars(job.state)))
    size = humanize.naturalsize(state, binary=True)
    yield ok(f"the layout is complete; a checkpoint has {size}")
    kept = self._config.checkpoint.keep + 1  # while one more is written
    folder = machine.existing(self._workdir)
    yield from machine.space(folder, f"workdir {self._workdir}", kept * state)


def _mesh(found: devices.Devices):
  """Returns the mesh of the config; without a config, `data` goes over all slices."""
  import jax

  from partitioning.mesh import make_mesh

  count = len({getattr(device, "slice_index", 0) for device in jax.devices()})
  slices = found.slices or ({"data": count} if count > 1 else {})
  return make_mesh(found.sizes, slices=slices)


# ------------------------------ what is printed ------------------------------


class _Report:
  """Prints findings as they are made; of several processes, process 0 prints them together.

  Attributes:
    seconds: how long the processes wait for one another.
  """

  def __init__(self, seconds: float):
    self.seconds = seconds
    self._counts: collections.Counter[str] = collections.Counter()
    self._group: Group | None = None  # until the others are there
    self._kept: list[tuple[str, list[Finding]]] = []
    try:
      self._several = (coordination.who() or ("", 1, 0))[1] > 1
    except ValueError:
      self._several = False  # which is a finding

  def add(self, title: str, findings: Iterable[Finding]) -> None:
    """Takes findings, which are made while they are printed."""
    if self._several:
      self._kept.append((title, list(findings)))
      if self._group is not None:
        self.joined(self._group)
      return
    help.show(title)
    for one in findings:
      self._count(one, shown=True)

  def joined(self, group: Group) -> None:
    """Prints what was kept, beside what the other processes have found."""
    self._group, self._several = group, not group.alone
    for title, findings in self._kept:
      texts = {"findings": [[one.status, one.what, one.fix] for one in findings]}
      every = group.gather(f"findings {title}", texts, timeout_seconds=self.seconds)
      holders: dict[Finding, list[int]] = {}
      for index, each in enumerate(every):
        for found in each["findings"]:
          holders.setdefault(Finding(*found), []).append(index)
      if group.first:
        help.show(title)
      for one, indices in holders.items():
        self._count(one, _whose(indices, group.count), shown=group.first)
    self._kept.clear()

  def _count(self, one: Finding, whose: str = "", *, shown: bool) -> None:
    self._counts[one.status] += 1
    if shown:
      help.show("\n".join(_lines(one, whose)))

  def end(self) -> int:
    """Prints how many findings there are, and returns the exit code."""
    for title, findings in self._kept:  # the others did not come
      help.show(title)
      for one in findings:
        self._count(one, coordination.label(), shown=True)
    if coordination.current().first:
      counts = (f"{self._counts[one]} {one}" for one in (WRONG, WARNING, OK) if self._counts[one])
      help.show(", ".join(counts))
    return exit_codes.CHECK_FAILED if self._counts[WRONG] else exit_codes.DONE


def _lines(one: Finding, whose: str) -> list[str]:
  width = min(shutil.get_terminal_size().columns, help.WIDEST) - _INDENT
  style = help.styles(sys.stdout)
  texts = [whose + one.what, f"fix: {one.fix}" if one.fix else ""]
  lines = [
    line
    for text in texts
    for part in printable(text).splitlines()
    for line in textwrap.wrap(part, width, break_on_hyphens=False, break_long_words=False)
  ]
  label = f"{one.status:<{_INDENT}}"
  first = label if one.status == OK else style.bold(label)
  return [first + lines[0], *(" " * _INDENT + line for line in lines[1:])]


def _whose(indices: Sequence[int], count: int) -> str:
  if len(indices) == count:
    return ""
  return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}: "
