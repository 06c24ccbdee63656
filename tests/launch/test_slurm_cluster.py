"""processes/launch/slurm.sh as shipped, by Slurm itself: `make test-slurm`.

Slurm's daemons run for these tests alone, with folders, ports and a key of their own. The two nodes
are two daemons of this machine; their names are addresses, so that each finds the other.
"""

import csv
import os
import pathlib
import secrets
import shlex
import shutil
import socket
import subprocess
import time

import psutil
import pytest

from processes.listening import free_port
from tests.faults import same
from tests.faults.harness import CLASSIFIER, story

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
TIMEOUT_SECONDS = 150  # for what takes 20, on a machine that is busy
NODES = ("127.0.0.1", "127.0.0.2")
# A job that is requeued starts again only when the credential of its first start has expired:
# after 120 s, unless cred_expire says otherwise.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
FirstJobId={first}
SchedulerParameters=sched_interval=1,bf_interval=1
GresTypes=gpu
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostName={host} NodeAddr=127.0.0.1 Port={port} CPUs=32 Gres=gpu:2\n"
STEPS = 400  # 4 s or more: Slurm takes up to 3 to preempt a job
FLAGS = (
  *CLASSIFIER,
  "--config.checkpoint.every_steps=100",
  "--config.checkpoint.keep=9",
  "--config.mesh.data=2",
  "--config.mesh.tensor=1",
  "--config.evaluation.every_steps=0",
  f"--config.training.steps={STEPS}",
)


class Cluster:
  """Slurm on this machine, and a folder to submit from, which leads to the repository."""

  def __init__(self, folder: pathlib.Path):
    """Writes what the daemons read."""
    self.folder, self.daemons = folder, []
    host = socket.gethostname()
    nodes = [NODE.format(name=name, host=host, port=free_port()) for name in NODES]
    # The coordinator's port follows from the job's number: another one for each use of these tests.
    first, port = secrets.randbelow(1_000_000) + 1, free_port()
    text = CONFIG.format(folder=folder, host=host, port=port, first=first) + "".join(nodes)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
    for name in ("gpu0", "gpu1"):
      (folder / name).touch()
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    self.submitted_from = folder / "repository"
    self.submitted_from.mkdir()
    for path in ROOT.iterdir():
      (self.submitted_from / path.name).symlink_to(path)

  def start(self) -> None:
    """Starts the daemons, and waits until the nodes take jobs."""
    names = {name: self.folder / f"munge.{name}" for name in ("key", "pid", "seed")}
    options = [f"--{name}-file={path}" for name, path in names.items()]
    socket_path = self.folder / "munge.sock"
    self._daemon("munged", "--foreground", "--force", f"--socket={socket_path}", *options)
    self.wait_for(socket_path.exists)
    self._daemon("slurmctld", "-D")
    for name in NODES:
      self._daemon("slurmd", "-D", "-N", name)
    idle = ("sinfo", "--noheader", "--states=idle", "--partition=low", "--format=%D")
    self.wait_for(lambda: self.run(*idle) == str(len(NODES)))

  def _environment(self) -> dict[str, str]:
    """Returns the variables of a shell in which nothing of another Slurm is set."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf")}

  def _daemon(self, *command: str) -> None:
    number = len(list(self.folder.glob("*.log")))
    with open(self.folder / f"{number}-{command[0]}.log", "wb") as output:
      self.daemons.append(
        subprocess.Popen(command, env=self._environment(), stdout=output, stderr=subprocess.STDOUT)
      )

  def run(self, *command: str, **variables: str) -> str:
    """Runs one of Slurm's programs where jobs are submitted; returns what it printed."""
    environment = self._environment() | variables
    done = subprocess.run(
      command, cwd=self.submitted_from, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.stdout.strip() or done.stderr.strip()

  def submit(self, *arguments: str, **variables: str) -> str:
    """Submits a job and returns its number."""
    printed = self.run("sbatch", "--parsable", *arguments, **variables)
    assert printed.isdigit(), printed
    return printed

  def output(self, job: str) -> str:
    """Returns what a job has written so far."""
    path = self.submitted_from / f"slurm-{job}.out"
    return path.read_text(errors="replace") if path.exists() else ""

  def wait_for(self, condition, job: str = "") -> None:
    """Waits until it holds; else fails with what the job, or the daemons, have written."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
      if time.monotonic() > deadline or any(one.poll() is not None for one in self.daemons):
        logs = {path.name: path.read_text()[-2000:] for path in self.folder.glob("*.log")}
        pytest.fail(f"waited in vain; {self.output(job)}\n{self.run('squeue')}\n{logs}")
      time.sleep(0.1)

  def wait_for_end(self, job: str) -> str:
    """Waits for the end of a job and returns its exit code."""

    def ended() -> bool:
      return "JobState=COMPLETED" in shown() or "JobState=FAILED" in shown()

    def shown() -> str:
      return self.run("scontrol", "-o", "show", "job", job)

    self.wait_for(ended, job)
    return shown().split(" ExitCode=")[1].split()[0]

  def stop(self) -> None:
    """Ends all jobs, and then the daemons."""
    self.run("scancel", "--full", "--signal=KILL", "--user=root")
    self.run("scancel", "--user=root")
    deadline = time.monotonic() + 20
    while self.run("squeue", "-h") and time.monotonic() < deadline:
      time.sleep(0.2)
    for daemon in reversed(self.daemons):
      daemon.terminate()
    for daemon in self.daemons:
      daemon.wait(20)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
  """Returns a cluster of two nodes."""
  missing = [
    name for name in PROGRAMS if shutil.which(name, path=os.defpath + ":/usr/sbin:/sbin") is None
  ]
  if missing or os.geteuid() != 0:
    pytest.fail(f"no {', '.join(missing) or 'root'}: `make test-slurm` as root installs Slurm")
  started = Cluster(tmp_path_factory.mktemp("slurm"))
  try:
    started.start()
    yield started
  finally:
    started.stop()


@pytest.mark.slurm
def test_slurm_preempts_a_run_of_two_nodes_and_replaces_a_task_which_resume_to_the_bit(cluster):
  workdir, array = cluster.folder / "preempted", cluster.folder / "sweep"
  run = (*FLAGS, f"--workdir={workdir}")
  node = ("--gpus-per-node=1", "--ntasks-per-node=1", "processes/launch/slurm.sh")
  job = cluster.submit("--partition=low", *node, *run)
  cluster.wait_for(lambda: "step 12/" in cluster.output(job), job)
  # What is more important needs the nodes: Slurm sends SIGTERM, and SIGKILL 60 s later.
  urgent = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
  assert cluster.wait_for_end(urgent) == "0:0"
  text = cluster.output(job)
  assert "stopped as requested, after saving" in text, text
  assert "slurm.sh: exit 75: stopped after saving; requeued" in text, text
  assert cluster.wait_for_end(job) == "0:0", cluster.output(job)
  assert "resumes from the checkpoint of step" in cluster.output(job)

  # A task whose process is killed starts it again; the other one stays, and meets the new one.
  replaced = cluster.folder / "replaced"
  job = cluster.submit(*node, *FLAGS, f"--workdir={replaced}", REPLACEMENTS="1")
  cluster.wait_for(lambda: "step 112/" in cluster.output(job), job)
  [victim] = [
    one
    for one in psutil.process_iter(["cmdline", "environ"])
    if {"main.py", f"--workdir={replaced}"} <= {*(one.info["cmdline"] or ())}
    and one.info["cmdline"][1] == "main.py"  # and neither srun nor again.sh
    and (one.info["environ"] or {}).get("SLURM_PROCID") == "1"
  ]
  victim.kill()
  assert cluster.wait_for_end(job) == "0:0", cluster.output(job)
  text = cluster.output(job)
  assert "process 1 ended by signal 9; run again, 0 more at most" in text, text
  assert "abandons the step in flight" in text, text
  assert "requeued" not in text

  # The array of a sweep. One of its runs is the same undisturbed, on one node; the other is stopped
  # for good, and is what the sweep says is left.
  axes = f"--axes=training.steps={STEPS},100000"
  sweep = (".venv/bin/python", "main.py", "sweep", *FLAGS, axes, "--slurm", f"--workdir={array}")
  variable, program, *words = shlex.split(cluster.run(*sweep).splitlines()[-1])
  assert (program, words[0]) == ("sbatch", "--array=1,2"), words
  sizes = ("--partition=low", "--nodes=1", "--gpus-per-node=2", "--ntasks-per-node=2")
  jobs = cluster.submit(*sizes, "--cpus-per-task=1", *words, RUNS=variable.removeprefix("RUNS="))
  cluster.wait_for(lambda: "step 12/" in cluster.output(f"{jobs}_2"), f"{jobs}_2")
  cluster.run("scancel", "--batch", "--signal=USR1", f"{jobs}_2")
  assert cluster.wait_for_end(f"{jobs}_2") == "75:0", cluster.output(f"{jobs}_2")
  assert "stopped for good, after saving" in cluster.output(f"{jobs}_2")
  assert cluster.wait_for_end(f"{jobs}_1") == "0:0", cluster.output(f"{jobs}_1")
  assert "--array=2 " in cluster.run(*sweep)
  with open(array / "sweep.csv", newline="") as file:
    assert [row["state"] for row in csv.DictReader(file)] == ["done", "left"]
  straight = array / f"steps-{STEPS}"
  assert story(straight)[-1][0] == STEPS
  same.check(workdir, same.record(straight))
  same.check(replaced, same.record(straight))
