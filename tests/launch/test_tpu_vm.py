"""tpu_vm.sh: sets hosts up, starts and stops runs on all of them, refuses a second one.

gcloud and the hosts are played; the script is the shipped one, run by the shell that would run it.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.launch.played import play

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "processes" / "launch"

# Each host has a home. gcloud runs the command on one or all and returns the first code but 0.
GCLOUD = """
echo "$*" >>"$HOSTS/calls"
for word; do
  case $word in
  --worker=*) worker=${word#*=} ;;
  --command=*) command=${word#*=} ;;
  esac
done
code=0
for home in "$HOSTS"/home*; do
  [[ $worker == all || $home == *home$worker ]] || continue
  if [[ $4 == scp ]]; then
    cp "$5" "$home"
  else
    (cd "$home" && HOME=$home bash -c "$command" >>"$home/log" 2>&1) || code=$?
  fi
done
exit "$code"
"""


@pytest.fixture
def hosts(tmp_path):
  """Returns (folder of two hosts, function from arguments to a finished tpu_vm.sh)."""
  play(tmp_path / "bin", "gcloud", GCLOUD)
  play(tmp_path / "bin", "make", 'echo "make $*"')
  for worker in range(2):
    play(tmp_path / f"home{worker}" / "meshwright" / ".venv" / "bin", "python", "exit ${CODE:-0}")

  def run(*arguments, **variables):
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
      [LAUNCH / "tpu_vm.sh", *arguments],
      env={**os.environ, "PATH": path, "HOSTS": str(tmp_path), **variables},
      cwd=tmp_path,
      capture_output=True,
      text=True,
      timeout=20,
    )

  return tmp_path, run


VM = ("my-tpu", "us-central2-b")


def test_tpu_setup_copies_the_tree_and_installs_on_every_host(hosts):
  folder, run = hosts
  (folder / "home0" / "meshwright" / "old.py").touch()
  done = run("setup", *VM, PYTHON="python3.12")
  assert done.returncode == 0, done.stderr
  for worker in range(2):
    copy = folder / f"home{worker}" / "meshwright"
    assert (copy / "main.py").read_bytes() == (ROOT / "main.py").read_bytes()
    assert (copy / ".venv" / "bin" / "python").exists()
    assert not (copy / "old.py").exists()
    log = (folder / f"home{worker}" / "log").read_text()
    assert log == "make -C meshwright PYTHON=python3.12 setup buckets ACCELERATOR=tpu\n"


@pytest.mark.parametrize("code", [0, 2, 75])
def test_tpu_run_starts_main_on_every_host_and_ends_with_its_code(hosts, code):
  folder, run = hosts
  for worker in range(2):
    venv = folder / f"home{worker}" / "meshwright" / ".venv" / "bin"
    play(venv, "python", 'printf "<%s>" "$PWD" "$@"; exit $CODE')
  done = run("run", *VM, "--config=configs/fsdp.py", "--workdir=a 'b'", CODE=str(code))
  assert done.returncode == code
  for worker in range(2):
    home = folder / f"home{worker}"
    wanted = f"<{home}/meshwright><main.py><--config=configs/fsdp.py><--workdir=a 'b'>"
    assert (home / "log").read_text() == wanted
  [call] = (folder / "calls").read_text().splitlines()
  assert call.startswith("compute tpus tpu-vm ssh my-tpu --zone=us-central2-b --worker=all ")


def test_tpu_run_refuses_a_second_one_and_stop_ends_the_first(hosts):
  folder, run = hosts
  home = folder / "home0"
  # Started as `run` starts it, so that its command line is the same.
  code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); "
  code += "print('ready', flush=True); signal.pause()"
  process = subprocess.Popen([sys.executable, "-c", code, "main.py"], stdout=subprocess.PIPE)
  try:
    assert process.stdout.readline() == b"ready\n"
    (home / "meshwright.pid").write_text(f"{process.pid}\n")
    assert run("run", *VM, "--config=configs/fsdp.py").returncode == 2
    assert f"refused: process {process.pid} runs main.py already" in (home / "log").read_text()
    assert run("stop", *VM).returncode == 0
    assert process.wait(timeout=10) == 75
  finally:
    process.kill()
    process.stdout.close()
  # The number alone is not enough: it may belong to another program by now.
  (home / "meshwright.pid").write_text(f"{os.getpid()}\n")
  assert run("stop", *VM).returncode == 0
  assert "nothing runs" in (home / "log").read_text()
  # Nor is a text with a number in it one; `kill -TERM -- -1` would end every process of the user.
  (home / "log").unlink()
  (home / "meshwright.pid").write_text(f"-1 {os.getpid()}\n")
  assert run("stop", *VM).returncode == 0
  assert "nothing runs" in (home / "log").read_text()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((), "usage: processes/launch/tpu_vm.sh setup NAME ZONE"),
    (("start", *VM), "'start' is none of setup, run, stop"),
    (("run", *VM), "run needs main.py's arguments"),
    (("run", "--zone=x", "us-central2-b", "x"), "'--zone=x' is not a valid name of a TPU VM"),
    (("run", "my-tpu", "--config=configs/fsdp.py", "x"), "is not a zone, such as us-central2-b"),
    (("stop", *VM, "now"), "stop takes no 'now'"),
  ],
)
def test_tpu_refuses(hosts, arguments, message):
  folder, run = hosts
  done = run(*arguments)
  assert done.returncode == 2
  assert message in done.stderr
  assert not (folder / "calls").exists()


def test_tpu_shows_its_commands():
  done = subprocess.run(
    [LAUNCH / "tpu_vm.sh", "run", *VM, "--config=configs/fsdp.py"],
    env={**os.environ, "GCLOUD": "echo"},
    capture_output=True,
    text=True,
  )
  assert done.stdout.startswith("compute tpus tpu-vm ssh my-tpu --zone=us-central2-b --worker=all")
  assert done.stdout.endswith("exec .venv/bin/python main.py --config=configs/fsdp.py\n")
