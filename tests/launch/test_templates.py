"""The templates of launch/ and docs/running.md: they parse, what they name exists, they behave.

Slurm, gcloud and the TPU hosts are played by small scripts on PATH; what is under test is the
shipped file, run by the shell that would run it.
"""

import ast
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
import time

import pytest
import yaml

from configs import base, command_line

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
DOCS = (ROOT / "docs" / "running.md").read_text()
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
KEYS = {
  key: section[name] for key, section, name in command_line.keys(base.get_config("lm", mesh={}))
}


def jobset():
  """Returns the parsed JobSet."""
  return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def job():
  """Returns the specification of its only replicated Job."""
  [replicated] = jobset()["spec"]["replicatedJobs"]
  assert replicated["replicas"] == 1
  return replicated["template"]["spec"]


def container():
  """Returns its only container."""
  [only] = job()["template"]["spec"]["containers"]
  return only


# ------------------------------ what the texts name ------------------------------


def commands():
  """Returns every shell command of the documents and of the comments in launch/."""
  blocks = re.findall(r"```\n(.*?)```", DOCS, re.DOTALL)
  for path in (*SCRIPTS, LAUNCH / "jobset.yaml", LAUNCH / "Dockerfile"):
    blocks.append(re.sub(r"^# ?", "", path.read_text(), flags=re.MULTILINE))
  lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
  return [line for line in lines if line]


def arguments_of_main():
  """Returns the flags of every call of main.py that the texts show, once each."""
  parts = [re.split(r"main\.py |slurm\.sh |tpu_vm\.sh run ", line)[-1] for line in commands()]
  calls = [tuple(re.findall(r"--\S+", part)) for part in parts if "--config=configs" in part]
  return sorted({*calls, tuple(container()["args"])})


def test_the_texts_show_calls_of_main_in_every_way():
  assert len(arguments_of_main()) >= 5
  for way in ("launch/tpu_vm.sh run", "sbatch launch/slurm.sh", "mpirun -n", "-m launch.local"):
    assert any(way in line and "--config=" in line for line in commands()), way


@pytest.mark.parametrize("call", arguments_of_main(), ids=" ".join)
def test_main_takes_the_arguments_that_the_texts_give_it(main, call):
  # A verb that does not exist is refused after the flags are parsed and before anything starts.
  code, _, err = main("no_verb", *call)
  assert code == 2
  assert err.startswith("refused: unknown verb 'no_verb'"), err


def test_every_key_that_the_document_names_exists_with_that_default():
  sections = "|".join({key.partition(".")[0] for key in KEYS if "." in key})
  named = set(re.findall(rf"`(?:--config\.)?((?:{sections}|processes)\.[a-z_]+)", DOCS))
  assert {f"processes.{key}" for key in ("heartbeat_seconds", "start_timeout_seconds")} < named
  assert named - {*KEYS} == set()
  rows = re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", DOCS, re.MULTILINE)
  assert {key: ast.literal_eval(value.strip()) for key, value in rows} == {
    key: KEYS[key] for key, _ in rows
  }
  assert len(rows) == 3


def test_make_targets_modules_and_files_exist():
  makefile = (ROOT / "Makefile").read_text()
  [targets] = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
  text = "\n".join([DOCS, *commands()])
  named = re.findall(r"\bmake (?:-C \S+ |[A-Z]+=\S+ )*([a-z]+)", "\n".join(commands()))
  assert named
  assert {*named} <= {*targets.split()}
  for module in {*re.findall(r"-m ([a-z_]+(?:\.[a-z_]+)+)", text)}:
    assert importlib.util.find_spec(module), module
  rooms = "launch|configs|docs|tests|benchmarks"
  paths = {*re.findall(rf"\b(?:{rooms})/[\w/]+\.\w+", text), "requirements.txt", "main.py"}
  assert {path for path in paths if not (ROOT / path).is_file()} == set()


def test_the_launcher_has_the_flags_that_the_document_gives_it():
  given = {
    flag
    for line in commands()
    if "-m launch.local" in line
    for flag in re.findall(r"--([a-z_]+)", line.partition("launch.local")[2].partition(" -- ")[0])
  }
  assert "processes" in given
  done = subprocess.run(
    [sys.executable, "-m", "launch.local", "--help"], cwd=ROOT, capture_output=True, text=True
  )
  assert {flag for flag in given if f"--{flag}" not in done.stdout + done.stderr} == set()


def test_the_document_keeps_its_order_and_its_length():
  wanted = ["TPU VM", "GPU box", "Slurm", "Kubernetes", "Laptop"]
  headings = re.findall(r"^## (.*)$", DOCS, re.MULTILINE)
  assert [heading for heading in headings if heading in wanted] == wanted
  assert len(DOCS.splitlines()) < 250
  for heading in ("TPU VM", "GPU box", "Slurm", "Kubernetes"):
    section = DOCS.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    assert "Not tried on such a machine" in section, heading


# ------------------------------ shell scripts ------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
  beside = pathlib.Path(sysconfig.get_path("scripts")) / "shellcheck"
  shellcheck = beside if beside.exists() else "shellcheck"
  try:
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
  except FileNotFoundError:
    pytest.fail("no shellcheck; install it with: pip install -r requirements-dev.txt")
  assert done.returncode == 0, done.stdout


def play(folder, name, script):
  """Puts a program of that name first on PATH, played by a bash script."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / name
  path.write_text(f"#!/usr/bin/env bash\n{script}\n")
  path.chmod(0o755)


# ------------------------------ Slurm ------------------------------

# As the real one: the highest code of all tasks is its own, and SIGTERM to srun itself kills the
# tasks by SIGKILL. The task stops as main.py does: on SIGTERM, with 75.
SRUN = """
echo "srun $*" >>calls
trap 'kill -KILL "$task"' TERM
bash -c 'trap "exit 75" TERM; echo $$ >task; [[ -z $1 ]] || exit $1; while :; do sleep 0.05; done' \
  task "$CODE" &
task=$!
wait "$task"; code=$?; wait "$task"; exit "$code"
"""


class Slurm:
  """A folder to submit from, and Slurm's programs, which note how they are called."""

  def __init__(self, folder):
    """Puts the programs, and what the batch file looks for, into a folder."""
    self.folder = folder
    play(folder / "bin", "srun", SRUN)
    play(folder / "bin", "scancel", 'echo "scancel $*" >>calls; kill -TERM "$(cat task)"')
    play(folder / "bin", "scontrol", 'echo "scontrol $*" >>calls; exit "${SCONTROL:-0}"')
    play(folder / ".venv" / "bin", "python", "")
    (folder / "main.py").touch()

  def start(self, code="", arguments=("--config=configs/fsdp.py", "--workdir=a b"), **variables):
    """Starts the batch file; the task exits with the code, or runs on where that is empty."""
    path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "41", "CODE": str(code)}
    return subprocess.Popen(
      [LAUNCH / "slurm.sh", *arguments],
      cwd=self.folder,
      env={**environment, **variables},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def run(self, *arguments, **variables):
    """Runs it to its end; returns (exit code, output, calls but for srun's)."""
    return self.finish(self.start(*arguments, **variables))

  def finish(self, process):
    """Waits for its end; returns the same."""
    out, _ = process.communicate(timeout=20)
    calls = [line for line in self.calls() if not line.startswith("srun ")]
    (self.folder / "calls").unlink(missing_ok=True)
    return process.returncode, out, calls

  def calls(self):
    """Returns the calls so far."""
    path = self.folder / "calls"
    return path.read_text().splitlines() if path.exists() else []

  def wait_for_the_task(self):
    """Returns when the task runs, its trap set."""
    deadline = time.monotonic() + 10
    while not (self.folder / "task").exists() or not (self.folder / "task").read_text():
      assert time.monotonic() < deadline, self.calls()
      time.sleep(0.02)


@pytest.fixture
def slurm(tmp_path):
  """Returns a played Slurm."""
  return Slurm(tmp_path)


REQUEUE = ["scontrol requeue 41"]


def test_slurm_flags():
  flags = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", (LAUNCH / "slurm.sh").read_text(), re.M))
  assert "requeue" in flags
  assert flags["open-mode"] == "append"
  # To the job step alone (no `B:`), and time enough for a save even where it comes late.
  name, seconds = flags["signal"].split("@")
  assert name == "TERM"
  assert int(seconds) >= 60
  assert flags["ntasks-per-node"] == flags["gpus-per-node"]


def test_slurm_passes_its_arguments_to_main_and_gives_other_tasks_time(slurm):
  process = slurm.start(0, SLURM_CPUS_PER_TASK="8")
  process.wait(timeout=20)
  assert slurm.calls() == [
    "srun --kill-on-bad-exit=0 --wait=60 .venv/bin/python main.py"
    " --config=configs/fsdp.py --workdir=a b"
  ]
  slurm.finish(process)


@pytest.mark.parametrize("code", [0, 2, 3])
def test_slurm_is_done_after_0_2_and_3(slurm, code):
  returned, _, calls = slurm.run(code)
  assert (returned, calls) == (code, [])


def test_slurm_requeues_after_75_without_end(slurm):
  for _ in range(5):
    assert slurm.run(75, MAX_FAILURES="1")[2] == REQUEUE


@pytest.mark.parametrize("code", [1, 134, 137])
def test_slurm_requeues_after_a_few_failures(slurm, code):
  assert slurm.run(code, MAX_FAILURES="2")[2] == REQUEUE
  assert slurm.run(code, MAX_FAILURES="2")[2] == REQUEUE
  returned, out, calls = slurm.run(code, MAX_FAILURES="2")
  assert (returned, calls) == (code, [])
  assert "failed 3 times in a row; given up" in out


def test_slurm_counts_failures_from_the_last_stop(slurm):
  for code in (1, 75, 1):
    assert slurm.run(code, MAX_FAILURES="1")[2] == REQUEUE
  assert slurm.run(1, MAX_FAILURES="1")[2] == []
  assert not list(slurm.folder.glob("*.failures"))


def test_slurm_ends_with_the_code_where_it_cannot_requeue(slurm):
  returned, _, calls = slurm.run(75, SCONTROL="1")
  assert (returned, calls) == (75, REQUEUE)


@pytest.mark.parametrize(
  ("number", "expected"),
  [
    (signal.SIGTERM, (0, ["scancel --signal=TERM 41", *REQUEUE])),
    (signal.SIGUSR1, (75, ["scancel --signal=TERM 41"])),
  ],
)
def test_slurm_passes_signals_on_to_the_step_and_not_to_srun(slurm, number, expected):
  process = slurm.start()
  slurm.wait_for_the_task()
  process.send_signal(number)
  returned, out, calls = slurm.finish(process)
  assert (returned, calls) == expected, out
  assert "exit 75" in out  # and not 137, with which srun answers a SIGTERM of its own


def test_slurm_refuses_what_it_cannot_run(slurm):
  returned, out, calls = slurm.run(0, ())
  assert (returned, calls) == (2, [])
  assert "usage: sbatch" in out
  (slurm.folder / "main.py").unlink()
  returned, out, calls = slurm.run(0)
  assert (returned, calls) == (2, [])
  assert "submit from the root of the repository" in out


# ------------------------------ TPU VM ------------------------------

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
  """Returns (folder of two hosts, function from arguments to a finished launch/tpu_vm.sh)."""
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
    assert log == "make -C meshwright PYTHON=python3.12 setup ACCELERATOR=tpu\n"


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


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((), "usage: launch/tpu_vm.sh setup NAME ZONE"),
    (("start", *VM), "'start' is none of setup, run, stop"),
    (("run", *VM), "run needs main.py's arguments"),
    (("run", "--zone=x", "us-central2-b", "x"), "'--zone=x' is no name of a TPU VM"),
    (("run", "my-tpu", "--config=configs/fsdp.py", "x"), "is no zone, such as us-central2-b"),
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


# ------------------------------ Kubernetes ------------------------------


def test_jobset_is_one():
  assert jobset()["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
  assert jobset()["kind"] == "JobSet"
  assert job()["completionMode"] == "Indexed"
  assert job()["completions"] == job()["parallelism"]


def test_jobset_names_the_processes():
  environment = {each["name"]: each for each in container()["env"]}
  assert {*environment} == {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
  name, [replicated] = jobset()["metadata"]["name"], jobset()["spec"]["replicatedJobs"]
  [port] = (each["containerPort"] for each in container()["ports"])
  assert environment["JAX_COORDINATOR_ADDRESS"]["value"] == (
    f"{name}-{replicated['name']}-0-0.{name}:{port}"
  )
  assert environment["JAX_NUM_PROCESSES"]["value"] == str(job()["completions"])
  assert environment["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == (
    "metadata.annotations['batch.kubernetes.io/job-completion-index']"
  )
  assert jobset()["spec"]["network"] == {
    "enableDNSHostnames": True,
    "publishNotReadyAddresses": True,
  }


def test_jobset_restarts_as_the_exit_codes_say():
  actions = {
    code: rule["action"]
    for rule in job()["podFailurePolicy"]["rules"]
    for code in rule["onExitCodes"]["values"]
  }
  assert actions == {2: "FailJob", 3: "FailJob", 75: "Ignore"}
  for rule in job()["podFailurePolicy"]["rules"]:
    assert rule["onExitCodes"]["containerName"] == container()["name"]
    assert rule["onExitCodes"]["operator"] == "In"
  # All else fails the Job by its backoffLimit, for another reason than the rule's.
  policy = jobset()["spec"]["failurePolicy"]
  [rule] = policy["rules"]
  assert rule["action"] == "FailJobSet"
  assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
  assert policy["maxRestarts"] > 0
  assert job()["backoffLimit"] == 0
  pod = job()["template"]["spec"]
  assert pod["restartPolicy"] == "Never"  # what a podFailurePolicy asks for
  assert pod["terminationGracePeriodSeconds"] == 60


def test_jobset_keeps_the_run_on_a_volume_that_is_mounted():
  pod = job()["template"]["spec"]
  mounts = {each["name"]: each["mountPath"] for each in container()["volumeMounts"]}
  assert {*mounts} == {each["name"] for each in pod["volumes"]}
  folders = [re.sub(r".*_?dir=", "", word) for word in container()["args"] if "dir=" in word]
  assert len(folders) == 2
  assert all(folder.startswith(mounts["runs"] + "/") for folder in folders)


def test_the_image_runs_main_without_a_shell():
  text = (LAUNCH / "Dockerfile").read_text()
  [entry] = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
  assert ast.literal_eval(entry) == [".venv/bin/python", "main.py"]
  [version] = re.findall(r"^FROM python:(\S+)-slim$", text, re.MULTILINE)
  assert tuple(map(int, version.split("."))) >= (3, 11)
