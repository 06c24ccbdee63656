"""How many processes fit on a machine: memory, cores, process ids, open files."""

import os
import pathlib
import resource

import psutil

from runtime.exit_codes import FAILED, REFUSED

# Of the smallest training run on simulated devices, as measured with jax 0.10.2: 158 MB that no
# other process shares, 117 threads. A start that needs more than the machine has of these fails in
# ways that are hard to read; one that needs less may still be too large.
PROCESS_MIB = 150
PROCESS_THREADS = 100
# With this many per core, a working process cannot be distinguished from a dead one.
PROCESSES_PER_CORE = 32
# Of the launcher: two pipes of each process, and its own.
PROCESS_FILES, OWN_FILES = 2, 64


def lacking(count: int) -> tuple[str, int]:
  """Returns what this machine lacks for this many processes, and the exit code that follows.

  The text has the numbers; it is "" for nothing. The code is FAILED where the machine would have
  enough if nothing else ran on it. The limit of open files is raised as far as allowed.
  """
  memory, cores, tasks, files = available_mib(), usable_cores(), free_tasks(), open_files()
  cores_fit = cores * PROCESSES_PER_CORE
  files_fit = (files - OWN_FILES) // PROCESS_FILES
  bounds = {  # text -> how many fit now, and how many if nothing else ran
    f"{memory} MiB of memory are available, about {PROCESS_MIB} are needed for each": (
      memory // PROCESS_MIB,
      total_mib() // PROCESS_MIB,
    ),
    f"{cores} cores, at most {PROCESSES_PER_CORE} processes for each": (cores_fit, cores_fit),
    f"{tasks} more process ids may be taken, about {PROCESS_THREADS} by each (RLIMIT_NPROC, "
    f"pids.max, pid_max)": (tasks // PROCESS_THREADS, most_tasks() // PROCESS_THREADS),
    f"{files} files may be open, {PROCESS_FILES} for each and {OWN_FILES} others (RLIMIT_NOFILE)": (
      files_fit,
      files_fit,
    ),
  }
  why = [text for text, (now, _) in bounds.items() if now < count]
  if not why:
    _raise_files(PROCESS_FILES * count + OWN_FILES)
    return "", 0
  most, ever = (max(1, min(numbers)) for numbers in zip(*bounds.values(), strict=True))
  text = (
    f"--processes={count}: this machine fits about {most}: {'; '.join(why)}; start fewer, or on "
    f"several machines"
  )
  return text, FAILED if count <= ever else REFUSED


def available_mib() -> int:
  """Returns the memory that could be used now, within the limit of the container."""
  return min(psutil.virtual_memory().available >> 20, total_mib())


def total_mib() -> int:
  """Returns the memory of the machine, within the limit of the container."""
  return min(psutil.virtual_memory().total, *_limits("memory.max", "memory.limit_in_bytes")) >> 20


def usable_cores() -> int:
  """Returns the cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def free_tasks() -> int:
  """Returns how many processes and threads may be started besides those that run."""
  return most_tasks() - len(psutil.pids())


def most_tasks() -> int:
  """Returns how many processes and threads may run."""
  most = [_number("/proc/sys/kernel/pid_max"), _number("/proc/sys/kernel/threads-max")]
  most += _limits("pids.max")
  soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
  if soft != resource.RLIM_INFINITY and os.geteuid():  # root has no such limit
    most.append(soft)
  return min(most)


def open_files() -> int:
  """Returns how many files the launcher may have open."""
  _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  return _MANY if hard == resource.RLIM_INFINITY else hard


_MANY = 2**62


def _limits(*names: str) -> list[int]:
  """Returns the limits of the control group, of either version."""
  root = pathlib.Path("/sys/fs/cgroup")
  paths = [root / folder / name for name in names for folder in ("", "memory", "pids")]
  return [_number(str(path)) for path in paths]


def _number(path: str) -> int:
  """Returns the number in a file; a large one where there is no file, or no limit."""
  try:
    return int(pathlib.Path(path).read_text())
  except (OSError, ValueError):
    return _MANY


def _raise_files(needed: int) -> None:
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft != resource.RLIM_INFINITY and soft < needed:
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
