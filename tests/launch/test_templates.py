"""The templates of processes/launch/ and docs/running.md: they parse, and what they name exists."""

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest
import yaml

from commands import config_flag
from configs import base

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "processes" / "launch"
DOCS = (ROOT / "docs" / "running.md").read_text()
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
KEYS = {
  key: section[name] for key, section, name in config_flag.keys(base.get_config("lm", mesh={}))
}


def jobset():
  """Returns the parsed JobSet."""
  return manifests()[0]


def manifests():
  """Returns what processes/launch/jobset.yaml holds: the JobSet and its NetworkPolicy."""
  return [*yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())]


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
  """Returns every shell command of the documents and of the comments in processes/launch/."""
  blocks = re.findall(r"```\n(.*?)```", DOCS, re.DOTALL)
  for path in (*SCRIPTS, LAUNCH / "jobset.yaml", LAUNCH / "Dockerfile"):
    blocks.append(re.sub(r"^# ?", "", path.read_text(), flags=re.MULTILINE))
  lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
  return [line for line in lines if line]


def arguments_of_main():
  """Returns the arguments of every call of main.py that the texts show, once each."""
  parts = [re.split(r"main\.py |slurm\.sh |tpu_vm\.sh run ", line)[-1] for line in commands()]
  words = r"--\S+|(?:configs/|[a-z_]+\.[a-z_.]+=)\S+"
  calls = [tuple(re.findall(words, part)) for part in parts if "configs/" in part]
  return sorted({*calls, tuple(container()["args"])})


def test_the_texts_show_calls_of_main_in_every_way():
  assert len(arguments_of_main()) >= 5
  for way in (
    "processes/launch/tpu_vm.sh run",
    "sbatch processes/launch/slurm.sh",
    "mpirun -n",
    "-m processes.launch",
  ):
    assert any(way in line and "configs/" in line for line in commands()), way


def test_main_takes_the_arguments_that_the_texts_give_it(main):
  # A verb that does not exist is refused after the flags are parsed and before anything starts.
  for call in arguments_of_main():
    code, _, err = main("no_verb", *call)
    assert code == 2
    assert err.startswith("refused: unknown verb 'no_verb'"), (call, err)


def test_every_key_that_the_document_names_exists_with_that_default():
  sections = "|".join({key.partition(".")[0] for key in KEYS if "." in key})
  named = set(re.findall(rf"`(?:--config\.)?((?:{sections}|processes)\.[a-z_]+)", DOCS))
  assert {f"processes.{key}" for key in ("heartbeat_seconds", "start_timeout_seconds")} < named
  assert named - {*KEYS} == set()
  rows = re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", DOCS, re.MULTILINE)
  assert {key: ast.literal_eval(value.strip()) for key, value in rows} == {
    key: KEYS[key] for key, _ in rows
  }
  assert len(rows) == 6


def test_make_targets_modules_and_files_exist():
  makefile = (ROOT / "Makefile").read_text()
  [targets] = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
  text = "\n".join([DOCS, *commands()])
  named = re.findall(r"\bmake (?:-C \S+ |[A-Z]+=\S+ )*([a-z]+)", "\n".join(commands()))
  assert named
  assert {*named} <= {*targets.split()}
  for module in {*re.findall(r"-m ([a-z_]+(?:\.[a-z_]+)+)", text)}:
    assert importlib.util.find_spec(module), module
  rooms = "processes|configs|docs|tests|benchmarks"
  paths = {*re.findall(rf"\b(?:{rooms})/[\w/]+\.\w+", text), "requirements.txt", "main.py"}
  assert {path for path in paths if not (ROOT / path).is_file()} == set()


@pytest.mark.parametrize("module", ["processes.launch", "processes.launch.ray"])
def test_the_launchers_have_the_flags_that_the_document_gives_them(module):
  options = [
    line.partition(f"-m {module} ")[2].partition(" -- ")[0]
    for line in commands()
    if f"-m {module} " in line
  ]
  given = {*re.findall(r"--([a-z_]+)", " ".join(options))}
  assert "processes" in given
  done = subprocess.run(
    [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True
  )
  assert {flag for flag in given if f"--{flag}" not in done.stdout + done.stderr} == set()


def test_the_document_keeps_its_order_and_its_length():
  wanted = ["TPU VM", "GPU box", "Slurm", "Kubernetes", "XPK", "SkyPilot", "Ray", "Laptop"]
  headings = re.findall(r"^## (.*)$", DOCS, re.MULTILINE)
  assert [heading for heading in headings if heading in wanted] == wanted
  assert len(DOCS.splitlines()) < 330
  for heading in ("TPU VM", "GPU box", "Slurm", "Kubernetes", "XPK", "SkyPilot", "Ray"):
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
    pytest.fail("no shellcheck; install it with: pip install -r requirements/dev.txt")
  assert done.returncode == 0, done.stdout


# ------------------------------ Kubernetes ------------------------------


def test_jobset_names_the_processes():
  assert (jobset()["apiVersion"], jobset()["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
  assert job()["completionMode"] == "Indexed"
  assert job()["completions"] == job()["parallelism"]
  environment = {each["name"]: each for each in container()["env"]}
  ranks = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
  assert {*environment} == {*ranks, "MESHWRIGHT_TOKEN", "REPLACEMENTS"}
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


def test_jobset_admits_only_its_own_pods():
  _, policy = manifests()
  assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
  own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": jobset()["metadata"]["name"]}}
  assert policy["spec"] == {
    "podSelector": own,
    "policyTypes": ["Ingress"],
    "ingress": [{"from": [{"podSelector": own}]}],
  }
  # A policy does not reach a pod on its host's network.
  assert "hostNetwork" not in job()["template"]["spec"]


def test_jobset_takes_its_token_from_a_secret_that_the_text_creates():
  [token] = (each for each in container()["env"] if each["name"] == "MESHWRIGHT_TOKEN")
  secret = token["valueFrom"]["secretKeyRef"]
  assert any(
    line.startswith(f"kubectl create secret generic {secret['name']} --from-literal=token=")
    for line in commands()
  )


def test_the_pods_have_no_more_rights_than_training_needs():
  pod = job()["template"]["spec"]
  assert pod["automountServiceAccountToken"] is False
  assert pod["securityContext"]["runAsNonRoot"] is True
  assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
  assert container()["securityContext"] == {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
  }
  # The volume is writable for the user that the image runs as.
  text = (LAUNCH / "Dockerfile").read_text()
  [(user, group)] = re.findall(r"^USER (\d+):(\d+)$", text, re.MULTILINE)
  ids = {pod["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")}
  assert ids == {int(user)} == {int(group)} != {0}


def test_the_pods_run_main_again_by_a_script_of_the_image():
  script, *command = container()["command"]
  assert os.access(ROOT / script, os.X_OK)
  assert command == [".venv/bin/python", "main.py"]
  [memory] = (each for each in job()["template"]["spec"]["volumes"] if "emptyDir" in each)
  assert memory["emptyDir"]["medium"] == "Memory"
  [mount] = (each for each in container()["volumeMounts"] if each["name"] == memory["name"])
  assert mount["mountPath"] == "/dev/shm"  # where checkpoint.local_dir is by default


def test_the_image_runs_main_without_a_shell():
  text = (LAUNCH / "Dockerfile").read_text()
  [entry] = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
  assert ast.literal_eval(entry) == [".venv/bin/python", "main.py"]
  assert text.rindex("USER ") > text.rindex("RUN ")  # the last user is the one that runs


def test_the_image_is_pinned_by_digest_and_installs_from_the_lock_files():
  text = (LAUNCH / "Dockerfile").read_text()
  [version] = re.findall(r"^FROM python:(\S+)-slim@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
  assert tuple(map(int, version.split("."))) >= (3, 11)
  assert "pip install" not in text
  copied = {
    name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()
  }
  assert {"requirements", "Makefile", "requirements.txt"} <= copied
