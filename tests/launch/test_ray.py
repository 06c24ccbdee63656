"""processes/launch/ray.py: refusals, and (`make test-ray`) a run on a cluster that loses a node."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.faults import same
from tests.faults.harness import CLASSIFIER, Run

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
TIMEOUT_SECONDS = 300  # for what takes 30, on a machine that is busy
STEPS = 400
FLAGS = (
  "--config.mesh.data=2",
  "--config.mesh.tensor=1",
  "--config.evaluation.every_steps=0",
  "--config.checkpoint.every_steps=50",
  "--config.checkpoint.keep=9",
)


class Output:
  """What a process that was started has printed."""

  def __init__(self, file: pathlib.Path, *command: object, stdin: int | None = None):
    """Starts it in a session of its own, so that all that it starts can be killed."""
    self._file = file
    with file.open("wb") as output:
      self.popen = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, "RAY_raylet_start_wait_time_s": str(TIMEOUT_SECONDS)},
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
      )

  @property
  def text(self) -> str:
    """Returns what it has printed so far."""
    return self._file.read_text(errors="replace")

  def wait_for(self, pattern: str) -> re.Match:
    """Returns the first match of a pattern in it, once there is one."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (found := re.search(pattern, self.text)):
      assert time.monotonic() < deadline, self.text
      assert self.popen.poll() is None, self.text
      time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
  """Returns the cluster of ray_cluster.py."""
  if not PYTHON.exists():
    pytest.fail(f"no {PYTHON}; make test-ray installs Ray")
  script = pathlib.Path(__file__).with_name("ray_cluster.py")
  folder = tmp_path_factory.mktemp("cluster")
  started = Output(folder / "output", PYTHON, script, stdin=subprocess.PIPE)
  try:
    yield started
  finally:
    started.popen.stdin.close()  # its end
    try:
      started.popen.wait(60)
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(started.popen.pid, signal.SIGKILL)


@pytest.mark.ray
def test_each_run_of_a_sweep_is_a_task_of_the_cluster_which_stops_and_resumes(cluster, tmp_path):
  address = cluster.wait_for(r"address (\S+)")[1]
  folder, rate = tmp_path / "sweep", "optimizer.learning_rate"
  launcher = f"{PYTHON} -m processes.launch.ray --processes=1 --cpus=2 --address={address} --"
  flags = [*CLASSIFIER, "--config.evaluation.every_steps=0", f"--config.training.steps={STEPS}"]
  sweep = (ROOT / ".venv" / "bin" / "python", "main.py", "sweep", *flags, f"--workdir={folder}")
  sweep = (*sweep, f"--axes={rate}=0.001,0.01,-1", "--parallel=3", f"--launcher={launcher}")

  first = Output(tmp_path / "first", *sweep)
  first.wait_for("learning_rate--1: failed")  # two run meanwhile, on a node each
  logs = [folder / "logs" / f"learning_rate-{rate}.txt" for rate in ("0.001", "0.01")]
  deadline = time.monotonic() + TIMEOUT_SECONDS
  while not all("[0] step 10/" in log.read_text() for log in logs):
    assert time.monotonic() < deadline, first.text
    time.sleep(0.05)
  first.popen.send_signal(signal.SIGINT)
  assert first.popen.wait(TIMEOUT_SECONDS) == 75, first.text
  assert "2 left" in first.text

  second = Output(tmp_path / "second", *sweep)
  assert second.popen.wait(TIMEOUT_SECONDS) == 3, second.text
  assert "exit code 2: refused: the config is refused: optimizer.learning_rate=-1.0" in second.text
  assert "launch: " not in second.text
  hosts = {line for log in logs for line in log.read_text().splitlines() if "started 1" in line}
  assert len(hosts) == 2, hosts
  words = (*flags, f"--config.{rate}=0.01", f"--workdir={tmp_path / 'straight'}")
  straight = Output(tmp_path / "third", ROOT / ".venv" / "bin" / "python", "main.py", *words)
  assert straight.popen.wait(TIMEOUT_SECONDS) == 0, straight.text
  same.check(folder / "learning_rate-0.01", same.record(tmp_path / "straight"))


@pytest.mark.ray
def test_ray_loses_a_node_and_the_run_resumes_to_the_bit_elsewhere(cluster, tmp_path):
  address = cluster.wait_for(r"address (\S+)")[1]
  launcher = (PYTHON, "-m", "processes.launch.ray", "--processes=2", "--cpus=2")
  workdir = tmp_path / "run"
  flags = [*CLASSIFIER, *FLAGS, f"--config.training.steps={STEPS}", f"--workdir={workdir}"]
  command = (f"--address={address}", "--", ROOT / ".venv" / "bin" / "python", "main.py", *flags)

  first = Output(tmp_path / "first", *launcher, "--restarts=1", *command)
  first.wait_for(r"\[0\] step 60/")
  cluster.popen.stdin.write("lost\n")
  cluster.popen.stdin.flush()
  first.wait_for(r"process \d is lost: ")
  first.wait_for(r"\[0\] resumes from the checkpoint of step (?:50|1\d\d)\b")
  first.wait_for(r"\[0\] step 2\d0/")
  first.popen.send_signal(signal.SIGTERM)
  assert first.popen.wait(TIMEOUT_SECONDS) == 75, first.text

  second = Output(tmp_path / "second", *launcher, *command)
  assert second.popen.wait(TIMEOUT_SECONDS) == 0, second.text
  assert f"step {STEPS}/{STEPS}" in second.text  # the last lines are not lost
  with Run(tmp_path / "straight", steps=STEPS, common=CLASSIFIER, flags=FLAGS) as run:
    assert set(run.end()) == {0}, run.text()
  same.check(workdir, same.record(tmp_path / "straight"))

  third = Output(tmp_path / "third", *launcher, "--wait_seconds=1", "--gpus=3", *command)
  assert third.popen.wait(TIMEOUT_SECONDS) == 1
  text = "no room for 2 processes of 2 CPU, 3 GPU within --wait_seconds=1; the cluster has 4 CPU"
  assert text in third.text


@pytest.mark.parametrize(
  ("options", "says"),
  [
    (["--processes=0", "--", "true"], "--processes=0: must be at least 1"),
    (["--processes=2", "--cpus=0", "--", "true"], "a process needs some of either"),
    (["--processes=2"], "no command"),
    (["--processes=2", "--", "true"], "has no ray; `make ray` installs it"),
  ],
)
def test_ray_refuses_in_one_message(options, says):
  done = subprocess.run(
    [sys.executable, "-m", "processes.launch.ray", *options],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2, done
  assert says in done.stderr
  assert "Traceback" not in done.stderr
