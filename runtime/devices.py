"""Which devices a run uses, decided before JAX's backend starts.

Without an accelerator, the application simulates as many CPU devices as the mesh asks for. An
accelerator that does not start is a refusal, never a silent fallback to CPU.
"""

import ctypes
import dataclasses
import glob
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

import psutil
from etils import epy

from partitioning.mesh_sizes import product_text, resolve_sizes, with_fewer_replicas

with epy.lazy_imports():
  import jax

# Device files of GPUs, which exist whether or not a driver library is installed.
GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd")
# TPUs by their PCI vendor and device ids (v3 to 7x); the files of /dev/vfio may be anyone's.
TPU_VENDOR = "0x1ae0"
TPU_DEVICES = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")

# XLA's CPU client takes its thread count from NPROC. With fewer threads than collectives that
# wait for one another, simulated devices deadlock in the rendezvous of an all-reduce.
THREADS_PER_DEVICE = 4
# Devices that decompose matrices at the same time share one pool of LAPACK's threads, which wait by
# spinning: SOAP's first step under dp4_tp2 had not ended after 300 s on two busy cores, and took
# 6 s with a single thread. SciPy's OpenBLAS reads this when JAX loads it, with the first matrix.
LAPACK_THREADS = ("OPENBLAS_NUM_THREADS", "1")
# Parameters of glibc's mallopt by the numbers in malloc.h. XLA allocates a step's buffers in every
# step again. By default the large ones are mapped and unmapped each time, and others returned from
# the heaps of its threads, so that the kernel zeroes all of their pages again: a third of the
# processor time of `configs/dp4_tp2.py`. With these they stay in one heap (several would each grow
# to a peak of their own).
_ALLOCATOR = {
  -8: 1,  # M_ARENA_MAX
  -1: -1,  # M_TRIM_THRESHOLD: never
  -4: 0,  # M_MMAP_MAX: large blocks are in the heap, too
}
# The part of the heap for which Linux is asked for huge pages; it is address space, not memory.
_HUGE_PAGES_BYTES = 2**32
_HUGE_PAGE_BYTES = 2**21
_MADV_HUGEPAGE = 14
# JAX takes three quarters of a GPU's memory when it starts, and no more later. What it leaves here
# is for the libraries' own: contexts, NCCL's buffers, cuDNN's plans.
GPU_MEMORY_SHARE = 0.92
_GPU_MEMORY = "XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE)
_GPU_MEMORY_GIVEN = (_GPU_MEMORY[0], "XLA_PYTHON_CLIENT_MEM_FRACTION")
# The most that one process simulates. 2,048 start in 7 s, with 8,461 threads and 1.1 GB; at 4,096
# XLA fails to start its threads (2 cores, jax 0.10.2).
MOST_SIMULATED = 2048

XLA_FLAGS = "XLA_FLAGS"  # the variable
_TRY, _TRY_SECONDS = "from jaxlib import xla_client; xla_client.make_cpu_client()", 120


@dataclasses.dataclass(frozen=True)
class Devices:
  """The devices of a run.

  Attributes:
    platform: cpu, gpu or tpu.
    simulated: whether they are simulated CPU devices: then at most one step is in flight.
    sizes: mesh axis -> size, with -1 filled in, over all slices.
    slices: mesh axis -> number of slices that it spans; {}: a single slice.
    described: the devices of a topology that is not attached: nothing can run on them.
  """

  platform: str
  simulated: bool
  sizes: dict[str, int]
  slices: dict[str, int] = dataclasses.field(default_factory=dict)
  described: "tuple[jax.Device, ...]" = ()

  @property
  def lowered_for(self) -> tuple[str, ...] | None:
    """Returns the platforms to lower programs for; None: that of the devices, which JAX knows.

    JAX looks for a GPU to tell NVIDIA's from others.
    """
    return ("cuda",) if self.described and self.platform == "gpu" else None


def hardware(root: str = "/") -> str | None:
  """Returns `gpu` or `tpu` if such hardware is present, whether or not JAX can use it.

  Args:
    root: where `dev` and `sys` are.
  """
  if any(glob.glob(os.path.join(root, pattern.lstrip("/"))) for pattern in GPU_FILES):
    return "gpu"
  for vendor in glob.glob(os.path.join(root, "sys/bus/pci/devices/*/vendor")):
    ids = [_line(vendor), _line(os.path.join(os.path.dirname(vendor), "device"))]
    if ids[0] == TPU_VENDOR and ids[1] in TPU_DEVICES:
      return "tpu"
  return None


def simulates(simulate: bool = False) -> bool:
  """Returns whether a run uses simulated CPU devices: as asked, or where there is no accelerator.

  Args:
    simulate: use them even if there is an accelerator.
  """
  return simulate or os.environ.get("JAX_PLATFORMS") == "cpu" or hardware() is None


def _line(path: str) -> str:
  with open(path) as file:
    return file.read().strip()


def start(
  *meshes: Mapping[str, int],
  slices: Sequence[Mapping[str, int]] = (),
  simulate: bool = False,
  processes: int = 1,
  of_processes: int = 0,
) -> list[Devices]:
  """Starts JAX's backend with the devices that the meshes need; returns one entry per mesh.

  Simulated devices are divided evenly among the processes of the run.

  Args:
    *meshes: each axis name -> size within a slice, at most one of them -1.
    slices: for each mesh, axis name -> number of slices that it spans; by default one.
    simulate: use simulated CPU devices even if there is an accelerator.
    processes: of the run.
    of_processes: that an elastic run has when none is missing: with fewer, or fewer devices, its
      meshes have fewer data replicas. 0: the run is not elastic.

  Raises:
    ValueError: the sizes do not fit the devices.
    RuntimeError: the backend of accelerator hardware did not start.
  """
  found = None if simulates(simulate) else hardware()
  over = [{axis: n for axis, n in one.items() if n != 1} for one in slices] or [{}] * len(meshes)
  pairs = list(zip(meshes, over, strict=True))

  def fitted(there: int | None) -> list[tuple[Mapping[str, int], Mapping[str, int]]]:
    if not of_processes:
      return pairs
    wholes = [math.prod(resolve_sizes(mesh, None, over).values()) for mesh, over in pairs]
    counts = [there or whole * processes // of_processes for whole in wholes]
    given = zip(pairs, wholes, counts, strict=True)
    return [with_fewer_replicas(*pair, n) if n < whole else pair for pair, whole, n in given]

  if found is None:
    pairs = fitted(None)
    sizes = [resolve_sizes(mesh, None, over) for mesh, over in pairs]
    _simulate(_largest(sizes, processes), processes)
    return [Devices("cpu", True, s, over) for s, (_, over) in zip(sizes, pairs, strict=True)]
  if not any(name in os.environ for name in _GPU_MEMORY_GIVEN):
    os.environ.setdefault(*_GPU_MEMORY)
  try:
    platform = jax.default_backend()
  except RuntimeError as error:
    raise RuntimeError(f"{_not_started(found)} ({error})") from error
  if platform == "cpu":
    raise RuntimeError(_not_started(found))
  count = jax.device_count()
  pairs = fitted(count)
  return [Devices(platform, False, resolve_sizes(mesh, count, one), one) for mesh, one in pairs]


def _largest(sizes: list[dict[str, int]], processes: int) -> int:
  """Returns the number of simulated devices; several processes must all use all of theirs."""
  counts = [math.prod(size.values()) for size in sizes]
  for size, count in zip(sizes, counts, strict=True):
    if count % processes or (processes > 1 and count != max(counts)):
      raise ValueError(
        f"mesh: {product_text(size)} asks for {count} simulated devices, which cannot be divided "
        f"evenly among {processes} processes; start a number of processes that divides it"
      )
  most = max(counts)
  if most > MOST_SIMULATED * processes:
    size = sizes[counts.index(most)]
    raise ValueError(
      f"mesh: {product_text(size)} asks for {most} simulated devices, and a process makes at most "
      f"{MOST_SIMULATED}; make the mesh smaller, start at least {-(-most // MOST_SIMULATED)} "
      f"processes, or describe such devices with plan --topology"
    )
  return most


def _simulate(count: int, processes: int) -> None:
  """Simulates `count` CPU devices over all processes, with a thread for each that may wait."""
  _keep_freed_memory()
  own = count // processes
  waiting = THREADS_PER_DEVICE * own if count > 1 else 1  # a single device waits for no other
  os.environ["NPROC"] = str(max(waiting, os.cpu_count() or 1))
  os.environ.setdefault(*LAPACK_THREADS)
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", own)
  if jax.device_count() != count:
    raise RuntimeError(
      f"the mesh asks for {count} simulated devices and JAX has {jax.device_count()}; its "
      f"backend had started before, or XLA_FLAGS sets another count"
    )


def _keep_freed_memory() -> None:
  """Makes glibc's malloc reuse freed blocks; does nothing elsewhere, or where a variable tunes it.

  Before XLA starts its threads: one that has a heap of its own keeps it.
  """
  given = any(name.startswith("MALLOC_") for name in os.environ)
  if given or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
    return
  library = ctypes.CDLL(None)
  if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
    return  # musl, macOS
  for parameter, value in _ALLOCATOR.items():
    library.mallopt(parameter, value)
  library.malloc.restype = ctypes.c_void_p
  if block := library.malloc(ctypes.c_size_t(_HUGE_PAGES_BYTES)):  # where limits leave space for it
    first = -(-block // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    size = _HUGE_PAGES_BYTES - _HUGE_PAGE_BYTES
    library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    library.free(ctypes.c_void_p(block))


def _not_started(found: str) -> str:
  return (
    f"this machine has {found} hardware, but JAX did not start its {found} backend; install it "
    f"with `make setup ACCELERATOR={found}`, or use simulated CPU devices with --simulate"
  )


def compute_capability(devices: Devices) -> float:
  """Returns the compute capability of the attached GPUs, such as 9.0; 0 of other devices."""
  if devices.platform != "gpu" or devices.described:
    return 0.0
  found = getattr(jax.local_devices()[0], "compute_capability", "")
  # Of AMD's GPUs it is a name.
  return float(found) if re.fullmatch(r"[0-9]+[.][0-9]+", found) else 0.0


def memory_bytes(devices: Devices) -> int:
  """Returns the memory that one device has, in bytes; of simulated devices, of all together."""
  if devices.simulated:
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
      if os.path.exists(path):
        limit = _line(path)
        if limit.isdigit():
          total = min(total, int(limit))
    return total
  return jax.local_devices()[0].memory_stats()["bytes_limit"]


def check_xla_flags() -> None:
  """Finds flags in XLA_FLAGS that XLA does not accept; takes no time where it is not set.

  XLA aborts its process (SIGABRT, a core dump, pages of help) over a flag that it does not know, so
  another process tries them first. There is no list of the flags to compare with.

  Raises:
    ValueError: with XLA's own words.
  """
  value = os.environ.get(XLA_FLAGS, "")
  if not value.strip():
    return
  try:
    tried = subprocess.run(
      [sys.executable, "-c", _TRY],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      timeout=_TRY_SECONDS,
      check=False,
    )
  except subprocess.TimeoutExpired as error:
    raise ValueError(f"{XLA_FLAGS}={value}: XLA did not start within {_TRY_SECONDS} s") from error
  if tried.returncode:
    said = tried.stderr.decode(errors="replace")
    raise ValueError(f"{XLA_FLAGS}={value}: XLA does not start with it: {_reason(said)}")


def _reason(said: str) -> str:
  """Returns the line of XLA's output that says what is wrong, without its time and place."""
  fatal = re.search(r"^F\d+ .*?\] (.*)$", said, re.MULTILINE)
  lines = [line for line in said.splitlines() if line.strip()]
  return fatal[1] if fatal else lines[0][:300] if lines else "no message"
