"""The templates by their own tools: `make test-deploy`; those of bash in `make test`."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.launch.played import play

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "processes" / "launch"
BIN = ROOT / ".venv-deploy" / "bin"
SKY = LAUNCH / "skypilot.yaml"
RESTARTED = {1, 75, 137, 143}  # failed, stopped after saving, killed, terminated
FINAL = {2, 3}


def tool(name, *arguments, home, **environment):
  """Runs a program of the environment of `make test-deploy`, with a home folder of its own."""
  if not (BIN / name).exists():
    pytest.fail(f"no {BIN / name}; make test-deploy installs it")
  settings = {**os.environ, "HOME": str(home), **environment}
  return subprocess.run(
    [BIN / name, *arguments], cwd=home, env=settings, capture_output=True, text=True, timeout=300
  )


# ------------------------------ SkyPilot ------------------------------

PARSE = """
import json, sys, yaml, sky
config = yaml.safe_load(open(sys.argv[1]))
task = sky.Task.from_yaml_config(config, [("BUCKET", "gs://b")], [("MESHWRIGHT_TOKEN", "x")])
[resources] = task.resources
print(json.dumps([task.num_nodes, resources.accelerators, resources.job_recovery]))
"""


@pytest.mark.deploy
def test_skypilot_takes_its_task_and_refuses_a_wrong_key(tmp_path):
  done = tool("python", "-c", PARSE, str(SKY), home=tmp_path)
  assert done.returncode == 0, done.stderr
  nodes, accelerators, recovery = json.loads(done.stdout.splitlines()[-1])
  assert (nodes, accelerators) == (2, {"H100": 8})
  assert recovery["recover_on_exit_codes"] == [75]
  wrong = tmp_path / "wrong.yaml"
  wrong.write_text(SKY.read_text().replace("num_nodes:", "nodes:"))
  done = tool("python", "-c", PARSE, str(wrong), home=tmp_path)
  assert done.returncode != 0
  assert "nodes" in done.stderr


@pytest.mark.parametrize(("code", "ends_with"), [(0, 0), (1, 1), (2, 0), (3, 0), (75, 75)])
def test_skypilots_commands_name_the_processes_and_end_as_the_exit_codes_ask(
  tmp_path, code, ends_with
):
  script = f'echo "$JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID $*"; exit {code}'
  play(tmp_path / ".venv" / "bin", "python", script)
  ranks = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
  done = subprocess.run(
    ["bash", "-e", "-c", yaml.safe_load(SKY.read_text())["run"]],
    cwd=tmp_path,
    env={**os.environ, **ranks, "SKYPILOT_NODE_RANK": "1", "BUCKET": "gs://b"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == ends_with, done.stderr
  assert done.stdout.startswith("10.0.0.1:8476 2 1 main.py --config=configs/fsdp.py"), done.stdout
  assert "--workdir=gs://b/meshwright" in done.stdout


# ------------------------------ XPK ------------------------------

XPK = ("first", "c", "us-central2-b", "v5p-128", "IMAGE")
OURS = ("--config=configs/fsdp.py", "--workdir=gs://b/first", "--config.data.name=it's")


@pytest.mark.deploy
def test_xpk_writes_a_jobset_that_restarts_as_the_exit_codes_say(tmp_path):
  (tmp_path / "dry").write_text(f'{BIN}/xpk "$@" --dry-run --skip-validation --project=p')
  done = subprocess.run(
    [LAUNCH / "xpk.sh", *XPK, *OURS],
    env={**os.environ, "HOME": str(tmp_path), "XPK": f"bash {tmp_path}/dry"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  text = done.stdout[done.stdout.index("apiVersion: jobset.x-k8s.io") :]
  jobset = yaml.safe_load(text[: text.index("[XPK]")])
  [replicated] = jobset["spec"]["replicatedJobs"]
  job = replicated["template"]["spec"]
  assert (replicated["replicas"], job["completions"]) == (1, 16)  # hosts of 64 chips
  [rule] = job["podFailurePolicy"]["rules"]
  assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
  assert {*rule["onExitCodes"]["values"]} >= RESTARTED
  assert not FINAL & {*rule["onExitCodes"]["values"]}
  assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 10
  pod = job["template"]["spec"]
  assert pod["terminationGracePeriodSeconds"] == 60
  [container] = pod["containers"]
  wanted = r"(exec .venv/bin/python main.py --config=configs/fsdp.py --workdir=gs://b/first"
  assert rf"{wanted} --config.data.name=it\'s)" in container["command"][-1]


@pytest.mark.parametrize(
  ("arguments", "why"),
  [
    (("First", *XPK[1:], *OURS), "'First' is not a valid name"),
    ((*XPK[:2], "central", *XPK[3:], *OURS), "'central' is not a zone"),
    ((*XPK, OURS[0]), "give --workdir=gs://..."),
    (XPK, "usage: processes/launch/xpk.sh"),
  ],
)
def test_what_xpk_would_not_understand_is_refused(arguments, why):
  done = subprocess.run([LAUNCH / "xpk.sh", *arguments], capture_output=True, text=True)
  assert done.returncode == 2
  assert why in done.stderr


# ------------------------------ Kubernetes, the image ------------------------------

VALIDATE = """
import sys, yaml, kubernetes_validate
from kubeflow_trainer_api import models

def unread(given, read, path=""):
  if isinstance(given, dict):
    for key, value in given.items():
      there = isinstance(read, dict) and key in read
      yield from unread(value, read[key], f"{path}/{key}") if there else [f"{path}/{key}"]
  elif isinstance(given, list):
    for one, other in zip(given, read, strict=True):
      yield from unread(one, other, path)

READ = {
  "JobSet": models.JobsetV1alpha2JobSet,
  "TrainJob": models.TrainerV1alpha1TrainJob,
  "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
for given in yaml.safe_load_all(open(sys.argv[1])):
  if given["kind"] not in READ:
    kubernetes_validate.validate(given, "1.34", strict=True)
    continue
  wrong = list(unread(given, READ[given["kind"]].from_dict(given).to_dict()))
  assert not wrong, f"no fields of a {given['kind']}: {wrong}"
  of_jobset = given["spec"].get("template", given)["spec"] if given["kind"] != "TrainJob" else {}
  for replicated in of_jobset.get("replicatedJobs", ()):
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    job["spec"] = replicated["template"]["spec"]
    kubernetes_validate.validate(job, "1.34", strict=True)
"""


@pytest.mark.deploy
@pytest.mark.parametrize(
  ("name", "keys"),
  [
    ("jobset.yaml", ("maxRestarts", "backoffLimit", "podSelector", "medium")),
    ("trainjob.yaml", ("numNodes", "onExitCodes", "resourcesPerNode", "medium")),
  ],
)
def test_kubernetes_knows_every_field_of_the_templates(tmp_path, name, keys):
  done = tool("python", "-c", VALIDATE, str(LAUNCH / name), home=tmp_path)
  assert done.returncode == 0, done.stderr
  wrong = tmp_path / "wrong.yaml"
  for key in keys:
    wrong.write_text((LAUNCH / name).read_text().replace(f"{key}:", f"{key}x:"))
    done = tool("python", "-c", VALIDATE, str(wrong), home=tmp_path)
    assert done.returncode != 0, key
    assert f"{key}x" in done.stderr


@pytest.mark.deploy
def test_hadolint_finds_nothing_in_the_dockerfile(tmp_path):
  done = tool("hadolint", "--no-color", str(LAUNCH / "Dockerfile"), home=tmp_path)
  assert done.returncode == 0, done.stdout
  wrong = tmp_path / "Dockerfile"
  wrong.write_text("FROM python\nRUN cd /x && sudo make\n")
  assert tool("hadolint", "--no-color", str(wrong), home=tmp_path).returncode == 1


def copied():
  """Returns the files that the Dockerfile copies before it installs, and the command for that."""
  text = (LAUNCH / "Dockerfile").read_text()
  before, _, after = text.partition("RUN make setup")
  lines = [line.split() for line in before.splitlines() if line.startswith("COPY ")]
  return [(words[1:-1], words[-1]) for words in lines], "make setup" + after.partition("\n")[0]


def image(folder):
  """Makes a folder as the image has it when the packages are installed; returns the command."""
  copies, command = copied()
  for files, place in copies:
    for name in files:
      source, target = ROOT / name, folder / place
      if source.is_dir():
        shutil.copytree(source, target)
      else:
        target.mkdir(exist_ok=True)
        shutil.copy(source, target)
  return command


@pytest.mark.parametrize("accelerator", ["cpu", "tpu", "gpu"])
def test_the_image_has_what_the_installation_reads(tmp_path, accelerator):
  command = image(tmp_path)
  environment = {**os.environ, "ACCELERATOR": accelerator, "MAKEFLAGS": "-n"}
  done = subprocess.run(
    ["bash", "-ec", command], cwd=tmp_path, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  read = re.findall(r"-r (\S+)", done.stdout)
  assert "requirements/locks/base.txt" in read
  assert (f"requirements/locks/{accelerator}.txt" in read) == (accelerator != "cpu")
  assert [name for name in read if not (tmp_path / name).is_file()] == []


@pytest.mark.deploy
def test_the_commands_of_the_image_install_and_start_the_application(tmp_path):
  # Without a container: the commands are run in an empty folder, by this machine's Python.
  environment = {**os.environ, "ACCELERATOR": "cpu", "PYTHON": sys.executable}
  done = subprocess.run(["bash", "-ec", image(tmp_path)], cwd=tmp_path, env=environment)
  assert done.returncode == 0
  archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
  subprocess.run(["tar", "-x"], cwd=tmp_path, input=archive.stdout, check=True)
  [entry] = re.findall(r"^ENTRYPOINT (.*)$", (LAUNCH / "Dockerfile").read_text(), re.MULTILINE)
  done = subprocess.run(
    [*json.loads(entry), "layout", "--config=configs/dp8.py:mlp"],
    cwd=tmp_path,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert "layer_2/kernel" in done.stdout
