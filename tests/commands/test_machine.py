"""Limits of a machine, packages, folders and clocks: what is found, and what is said about it."""

import concurrent.futures
import os
import pathlib
import re
import resource
import socket
import time

import pytest
from etils import epath

from commands import machine
from commands.machine import OK, WARNING, WRONG
from processes.coordination import Group
from tests.processes.stores import SharedStore

# ------------------------------ limits ------------------------------

UNLIMITED = resource.RLIM_INFINITY
LIMITS = dict.fromkeys(
  (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_FSIZE),
  UNLIMITED,
)


@pytest.mark.parametrize(
  ("limit", "status", "said"),
  [
    (resource.RLIMIT_NOFILE, WRONG, "open files: at most 100"),
    (resource.RLIMIT_NPROC, WRONG, "threads and processes: at most 100"),
    (resource.RLIMIT_AS, WARNING, "address space: at most 100 Bytes"),
    (resource.RLIMIT_FSIZE, WRONG, "size of a file: at most 100 Bytes"),
  ],
)
def test_low_limits(limit, status, said):
  found = list(machine.check_limits(None, LIMITS | {limit: 100}))
  [one] = [one for one in found if one.status != OK]
  assert one.status == status
  assert said in one.what
  assert one.fix


def cluster(monkeypatch, address, index):
  names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
  for name, value in zip(names, (address, "2", str(index)), strict=True):
    monkeypatch.setenv(name, value)
  return next(machine.check_network())


def test_the_coordinator(monkeypatch):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    address = f"localhost:{taken.getsockname()[1]}"
    one = cluster(monkeypatch, address, 0)
    assert one.status == WRONG
    assert f"{address}: the port cannot be used: Address already in use" in one.what
    assert cluster(monkeypatch, address, 1).status == OK  # of another process it is none's concern
  one = cluster(monkeypatch, address, 0)
  assert (one.status, one.what.rpartition(": ")[2]) == (OK, "the port is free")
  one = cluster(monkeypatch, "nobody.invalid:8476", 1)
  assert one.status == WRONG
  assert "the name nobody.invalid cannot be resolved" in one.what
  one = cluster(monkeypatch, "nobody", 1)
  assert one.status == WRONG
  assert "expected a host:port and two numbers" in one.what


# ------------------------------ installed packages ------------------------------

PINS = machine.pins(machine.ROOT / "requirements" / "locks" / "base.txt")
LIBTPU = machine.pins(machine.ROOT / "requirements" / "locks" / "tpu.txt")["libtpu"]


def found(changes=None, hardware=None):
  there = {**PINS, **(changes or {})}
  return [
    *machine.check_versions(
      hardware, {name: version for name, version in there.items() if version is not None}
    )
  ]


def texts(status, *arguments):
  return [f"{one.what} | {one.fix}" for one in found(*arguments) if one.status == status]


def test_what_the_lock_files_install_is_well():
  assert {one.status for one in found({"libtpu": LIBTPU}, "tpu")} == {OK}


@pytest.mark.parametrize(
  ("changes", "hardware", "status", "said"),
  [
    ({"jaxlib": "0.9.0"}, None, WRONG, f"jax {PINS['jax']} and jaxlib 0.9.0 do not match"),
    ({"optax": None}, None, WRONG, "missing packages: optax | run `make setup`"),
    ({"optax": "0.2.0"}, None, WARNING, f"1 packages differ .*: optax 0.2.0 ({PINS['optax']})"),
    ({"libtpu": "0.0.1"}, None, WRONG, f"libtpu 0.0.1 does not match .* libtpu=={LIBTPU}"),
    ({"jax": "0.9", "jaxlib": "0.9", "libtpu": "0.0.1"}, None, WARNING, "jax[tpu]==0.9"),
    ({}, "tpu", WRONG, "has a TPU, and libtpu is not installed | .*ACCELERATOR=tpu"),
    ({}, "gpu", WRONG, "has a GPU, and JAX has no plugin .*ACCELERATOR=gpu"),
    (
      {"jax-cuda12-plugin": PINS["jaxlib"], "jax-cuda12-pjrt": "0.1"},
      "gpu",
      WRONG,
      f"jax-cuda12-pjrt 0.1 do not match jaxlib {PINS['jaxlib']}",
    ),
    (
      {"jax-cuda12-plugin": PINS["jaxlib"], "jax-cuda13-plugin": PINS["jaxlib"]},
      "gpu",
      WRONG,
      "several kinds of GPU software are installed: jax-cuda12-plugin, jax-cuda13-plugin",
    ),
  ],
)
def test_what_does_not_fit_is_named_with_its_fix(changes, hardware, status, said):
  lines = texts(status, changes, hardware)
  parts = said.split(".*")
  assert any(all(part in line for part in parts) for line in lines), lines
  assert all(one.fix for one in found(changes, hardware) if one.status != OK)


def test_the_package_that_is_imported_counts(tmp_path, monkeypatch):
  (tmp_path / "jaxlib-0.0.7.dist-info").mkdir()
  metadata = "Metadata-Version: 2.1\nName: jaxlib\nVersion: 0.0.7\n"
  (tmp_path / "jaxlib-0.0.7.dist-info" / "METADATA").write_text(metadata)
  monkeypatch.syspath_prepend(tmp_path)
  assert machine.installed()["jaxlib"] == "0.0.7"
  assert any("jaxlib 0.0.7 do not match" in one.what for one in machine.check_versions(None))


# ------------------------------ folders and buckets ------------------------------


def check(folder, needed=1):
  return list(machine.check_folder(epath.Path(folder), "workdir", needed))


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
  [one] = check(tmp_path / "runs" / "first")
  assert (one.status, one.what) == (
    OK,
    f"workdir {tmp_path}/runs/first: written, read, renamed, deleted",
  )
  assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_and_a_folder_that_takes_no_files(tmp_path):
  (tmp_path / "file").write_text("")
  [one] = check(tmp_path / "file" / "run")
  assert (one.status, one.what) == (
    WRONG,
    f"workdir {tmp_path}/file/run: {tmp_path}/file is a file, not a folder",
  )
  [one] = check("/proc/nothing")
  assert one.status == WRONG
  assert "workdir /proc/nothing: cannot be used (" in one.what
  assert one.fix


@pytest.mark.parametrize(("ahead", "status"), [(-20, WARNING), (3600, WRONG), (2, OK)])
def test_another_clock(tmp_path, monkeypatch, ahead, status):
  write = epath.Path(tmp_path / "file").__class__.write_bytes

  def later(path, content):
    write(path, content)
    now = pathlib.Path(path).stat().st_mtime
    os.utime(path, (now + ahead, now + ahead))

  monkeypatch.setattr(type(epath.Path(tmp_path)), "write_bytes", later)
  *_, last = check(tmp_path)
  assert last.status == status
  if status != OK:
    side = "ahead of" if ahead > 0 else "behind"
    found = re.search(rf"its clock is (\d+) s {side} this one", last.what)
    assert abs(int(found[1]) - abs(ahead)) <= 5  # that the check itself may take


@pytest.mark.parametrize("broken", ["content", "rename"])
def test_a_file_system_that_loses_data(tmp_path, monkeypatch, broken):
  kind = type(epath.Path(tmp_path))
  if broken == "content":
    monkeypatch.setattr(kind, "read_bytes", lambda path: b"another")
  else:
    monkeypatch.setattr(kind, "rename", lambda path, target: target.write_bytes(b""))
  [one] = check(tmp_path)
  assert one.status == WRONG
  assert ("another content" if broken == "content" else "is still there") in one.what
  assert list(tmp_path.iterdir()) == []


def test_a_bucket_without_its_library():
  [one] = check("gs://bucket/run")
  assert one.status == WRONG
  assert "gcsfs" in one.what
  assert one.fix.startswith("make buckets (or pip install -r requirements/buckets.txt)")


# ------------------------------ clocks ------------------------------


@pytest.mark.parametrize(
  ("ahead", "status", "said"),
  [
    (0.0, OK, "clocks of 3 processes: 0."),
    (30.0, WARNING, "process 1's clock is 30 s ahead of process "),
    (-4000.0, WRONG, " s ahead of process 1's"),
  ],
)
def test_clocks_that_differ(ahead, status, said):
  store = SharedStore(3)
  groups = [Group(index, 3, store=store, key=b"k") for index in range(3)]

  def read(group):
    away = ahead if group.index == 1 else 0.0
    return list(machine.check_clocks(group, timeout_seconds=20, clock=lambda: time.time() + away))

  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    found = list(pool.map(read, groups))
  for [one] in found:
    assert one.status == status
    assert said in one.what
