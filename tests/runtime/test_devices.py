"""Which devices a run uses: simulated ones, real ones, and the refusal in between."""

import ctypes
import json
import os
import platform
import subprocess
import sys
import types

import jax
import pytest

from runtime import devices

MESH = {"data": 4, "tensor": 2}


def make(root, name, text=""):
  """Writes a file under a made-up root."""
  path = root / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)


def test_a_gpu_shows_by_its_device_file(tmp_path):
  assert devices.hardware(str(tmp_path)) is None
  make(tmp_path, "dev/nvidia0")
  assert devices.hardware(str(tmp_path)) == "gpu"


@pytest.mark.parametrize(("device", "found"), [("0x0063", "tpu"), ("0x0042", None)])
def test_a_tpu_shows_by_its_pci_ids(tmp_path, device, found):
  # 0x0042 is the same vendor's network card, which every machine of its cloud has.
  make(tmp_path, "sys/bus/pci/devices/0000:00:04.0/vendor", "0x1ae0\n")
  make(tmp_path, "sys/bus/pci/devices/0000:00:04.0/device", device + "\n")
  assert devices.hardware(str(tmp_path)) == found


def test_hardware_whose_backend_did_not_start_is_refused(monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.setattr(devices, "hardware", lambda: "gpu")
  with pytest.raises(RuntimeError) as refusal:
    devices.start(MESH)
  for text in ("gpu hardware", "did not start", "make setup ACCELERATOR=gpu", "--simulate"):
    assert text in str(refusal.value)
  [found] = devices.start(MESH, simulate=True)
  assert found.simulated
  assert found.sizes["tensor"] == 2


def test_accelerators_must_all_be_used(monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.setattr(devices, "hardware", lambda: "gpu")
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
  [found] = devices.start({"fsdp": -1})
  assert (found.platform, found.simulated, found.sizes["fsdp"]) == ("gpu", False, 8)
  assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.92"
  with pytest.raises(ValueError, match="asks for 4 devices and there are 8"):
    devices.start({"data": 4})
  # An elastic run has as many data replicas as there are devices for.
  [found] = devices.start({"data": 8, "tensor": 2}, of_processes=1)
  assert (found.sizes["data"], found.sizes["tensor"]) == (4, 2)
  with pytest.raises(ValueError, match="3 data replicas of 5 devices each, and the 8 devices"):
    devices.start({"data": 3, "tensor": 5}, of_processes=1)


@pytest.mark.parametrize("given", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_share_of_a_gpus_memory_is_as_given(monkeypatch, given):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
  monkeypatch.setattr(devices, "hardware", lambda: "gpu")
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setenv(given, "0.5")
  devices.start({"fsdp": -1})
  assert {name: os.environ[name] for name in os.environ if "MEM_FRACTION" in name} == {given: "0.5"}


@pytest.mark.parametrize("processes", [1, 4])
def test_more_simulated_devices_than_processes_can_make_are_refused(monkeypatch, processes):
  made, most = [], devices.MOST_SIMULATED * processes
  monkeypatch.setattr(devices, "_simulate", lambda count, _: made.append(count))
  devices.start({"data": most}, simulate=True, processes=processes)
  with pytest.raises(ValueError, match="asks for 1000000 simulated devices") as refusal:
    devices.start({"data": 1000, "tensor": 1000}, simulate=True, processes=processes)
  assert made == [most]
  for text in ("data=1000 x tensor=1000", "at most 2048", "at least 489 processes", "--topology"):
    assert text in str(refusal.value)


def test_memory_is_that_of_the_machine_or_of_a_device(monkeypatch):
  simulated = devices.Devices("cpu", True, MESH)
  assert 2**28 < devices.memory_bytes(simulated) < 2**50
  chip = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 123})
  monkeypatch.setattr(jax, "local_devices", lambda: [chip])
  assert devices.memory_bytes(devices.Devices("gpu", False, MESH)) == 123


@pytest.mark.parametrize(("named", "found"), [("9.0", 9.0), ("10.0", 10.0), ("gfx942", 0.0)])
def test_the_compute_capability_is_that_of_an_attached_gpu(named, found, monkeypatch):
  chip = types.SimpleNamespace(compute_capability=named)
  monkeypatch.setattr(jax, "local_devices", lambda: [chip])
  assert devices.compute_capability(devices.Devices("gpu", False, MESH)) == found
  assert devices.compute_capability(devices.Devices("gpu", False, MESH, described=(chip,))) == 0
  assert devices.compute_capability(devices.Devices("cpu", True, MESH)) == 0


PAGES_OF_A_BLOCK = """
import ctypes, json, resource, threading
from runtime import devices
devices.start({"data": 2}, simulate=True)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
def faults(size):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  block = ctypes.c_void_p(library.malloc(ctypes.c_size_t(size)))
  library.memset(block, 1, ctypes.c_size_t(size))
  library.free(block)
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
found = []
def measure():
  found.append([faults(2**26) for _ in range(3)])
threads = [threading.Thread(target=measure) for _ in range(2)]
for thread in threads:
  thread.start()
  thread.join()
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc that is tuned")
def test_freed_memory_is_reused_without_page_faults():
  # 2**26 bytes are 16,384 pages, which the kernel would have to zero again.
  ran = subprocess.run(
    [sys.executable, "-c", PAGES_OF_A_BLOCK],
    capture_output=True,
    text=True,
    check=True,
  )
  one, other = json.loads(ran.stdout.splitlines()[-1])
  assert max(*one[1:], *other) < 100  # also of what another thread has freed


@pytest.mark.parametrize("lacks", ["mallopt", "gnu_get_libc_version", ""])
def test_other_c_libraries_and_one_that_a_variable_tunes_are_left_as_they_are(monkeypatch, lacks):
  if not lacks:
    monkeypatch.setenv("MALLOC_TOP_PAD_", "0")

  class Library:
    """Of musl or macOS: some names of glibc's, which must not be called."""

    def __getattr__(self, name):
      if name == lacks:
        raise AttributeError(name)
      return lambda *_: pytest.fail(f"{name} was called")

  monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
  devices._keep_freed_memory()


@pytest.mark.parametrize(
  ("count", "processes", "threads"), [(1, 1, 2), (2, 1, 8), (2, 2, 4), (8, 2, 16)]
)
def test_devices_that_wait_for_others_have_threads_for_it(monkeypatch, count, processes, threads):
  monkeypatch.setenv("NPROC", "")
  monkeypatch.setattr(devices, "_keep_freed_memory", lambda: None)
  monkeypatch.setattr(os, "cpu_count", lambda: 2)
  monkeypatch.setattr(jax.config, "update", lambda *_: None)
  monkeypatch.setattr(jax, "device_count", lambda: count)
  devices.start({"data": count}, simulate=True, processes=processes)
  assert os.environ["NPROC"] == str(threads)


# ------------------------------ XLA_FLAGS ------------------------------


@pytest.mark.parametrize(
  ("value", "said"),
  [
    ("--xla_nope=1", "Unknown flag in XLA_FLAGS: --xla_nope=1"),
    ("--xla_cpu_enable_fast_math=maybe", "maybe"),
    ("there_is_no_such_file", 'Could not open file "there_is_no_such_file"'),
  ],
)
def test_a_flag_that_xla_aborts_over_is_refused(monkeypatch, value, said):
  monkeypatch.setenv("XLA_FLAGS", value)
  with pytest.raises(ValueError, match="XLA does not start with it") as refusal:
    devices.check_xla_flags()
  assert str(refusal.value).startswith(f"XLA_FLAGS={value}: ")
  assert said in str(refusal.value)
  assert "\n" not in str(refusal.value)


def test_flags_that_xla_knows_pass(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
  devices.check_xla_flags()


def test_without_flags_no_process_is_started(monkeypatch):
  monkeypatch.setattr(subprocess, "run", None)
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  devices.check_xla_flags()
  monkeypatch.setenv("XLA_FLAGS", " ")
  devices.check_xla_flags()
