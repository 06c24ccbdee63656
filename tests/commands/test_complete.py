"""What may follow on a command line: by what the application itself knows, and fast."""

import json
import os
import re
import resource
import subprocess
import sys

import pytest

from commands import complete, completion
from commands.verbs import VERBS
from configs.keys.optimizer import OPTIMIZER
from reports.tour.run import CHAPTERS
from tests.helpers.terminals import ROOT


@pytest.fixture(scope="module")
def known():
  return json.loads(json.dumps(completion.index()))


@pytest.fixture
def after(known, monkeypatch):
  """Returns a function from what is typed behind main.py to the candidates."""
  monkeypatch.chdir(ROOT)

  def found(line):
    words = complete.split(f"cd x; .venv/bin/python -u ./main.py {line}")
    return [word for word, _ in complete.candidates(words[:-1], words[-1], known)]

  return found


DP8 = "--config=configs/dp8.py"


@pytest.mark.parametrize(
  ("line", "wanted"),
  [
    ("samp", ["sample "]),
    ("comp", ["compare ", "completion ", "compilation_cache_dir=", "compiler_options="]),
    ("conf", ["config ", "configs/"]),
    ("configs/dp4", ["configs/dp4_tp2.py "]),
    ("layout configs/dp8:mlp_", ["configs/dp8:mlp_tutorial "]),
    ("train training.st", ["training.steps=", "training.stochastic_rounding="]),
    ("train model.norm=r", ["model.norm=rms "]),
    ("configs/dp8:mlp model.lay", []),
    ("sample tests/commands/exported_run/r", ["tests/commands/exported_run/run/"]),
    ("report tests/commands/exported_run/r", ["tests/commands/exported_run/run/"]),
    ("tour training.st", []),
    ("plan --top", ["--topology="]),
    ("train --top", []),
    ("layout --sim", ["--simulate "]),
    ("sample --prompt=a --prom", ["--prompt=", "--prompt_file="]),
    ("sample --seed=1 --see", []),
    ("--config=configs/dp4", ["--config=configs/dp4_tp2.py "]),
    ("--config configs/dp4", ["configs/dp4_tp2.py "]),
    ("--config=configs/exp", ["--config=configs/experiments/"]),
    (f"{DP8}:mlp_", [f"{DP8}:mlp_tutorial "]),
    (f"{DP8}:model=llama3_8", [f"{DP8}:model=llama3_8b"]),
    (f"{DP8}:model=lm,", [f"{DP8}:model=lm,data="]),
    (f"{DP8}:model=lm,data=te", [f"{DP8}:model=lm,data=text"]),
    (f"{DP8} --config.opt", ["--config.optimizer."]),
    (f"{DP8} --config.lora.r", ["--config.lora.rank=", "--config.lora.rs="]),
    (f"{DP8} --config.lora.rs=", ["--config.lora.rs=true ", "--config.lora.rs=false "]),
    (f"{DP8} --config.model.norm=", ["--config.model.norm=rms ", "--config.model.norm=layer "]),
    (f"{DP8}:mlp --config.model.lay", []),
    ("compare --set training.st", ["training.steps=", "training.stochastic_rounding="]),
    ("compare --set=model.norm=r", ["--set=model.norm=rms "]),
    ("train --accept-changes=optimizer.be", [f"--accept-changes=optimizer.beta_{n}" for n in "12"]),
    ("train --accept_changes seed,optimizer.mom", ["seed,optimizer.momentum"]),
    ("tour --chapter=coll", ["--chapter=collectives "]),
    ("plan --topology=v5", ["--topology=v5e:", "--topology=v5p:"]),
    ("export --dtype=b", ["--dtype=bfloat16 "]),
    ("help opt", ["optimizer."]),
    ("help optimizer.mom", ["optimizer.momentum "]),
    ("config training.att", ["training.attention_kernel "]),
    ("completion f", ["fish "]),
    ("evaluate --tasks=requirements/p", ["--tasks=requirements/plan.txt "]),
    ("--workdir='READ", ["--workdir=README.md "]),
    ("nothing --zzz", []),
  ],
)
def test_what_may_follow(after, line, wanted):
  assert after(line) == wanted


def test_nothing_typed(after, known):
  assert {word.strip() for word in after("")} >= {*VERBS, "help", "--config="}
  assert after("--config=") == [f"--config={path} " for path in known["strategies"]]
  assert "--chat " in after("sample ")
  sections = after(f"{DP8} --config.")
  assert "--config.training." in sections
  assert "--config.seed=" in sections
  assert len(sections) == len({*sections})


def test_the_index_has_what_the_application_has(known):
  assert completion.chapters() == [*CHAPTERS]
  assert {*known["verbs"]} == {*VERBS}
  keys = known["keys"]["lm"]
  assert keys["training.steps"] == [[], "optimizer steps"]
  assert keys["optimizer.schedule"][0] == [*OPTIMIZER["schedule"].choices]
  assert "llama3_8b" in known["recipes"]
  assert known["flags"]["workdir"]["path"]


def script(*arguments, home):
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  done = subprocess.run(
    [sys.executable, "-S", ROOT / "commands" / "complete.py", *arguments],
    env={**os.environ, "HOME": str(home)},
    cwd=home,
    capture_output=True,
    text=True,
    check=True,
  )
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  assert done.stderr == ""
  return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_script_answers_at_once_and_sees_changes(tmp_path):
  line = "python main.py plan --conf"
  first, _ = script("zsh", "", line, home=tmp_path)
  [kept] = (tmp_path / ".cache/meshwright/completion").iterdir()
  stamp = json.loads(kept.read_text())["stamp"]
  again, seconds = script("zsh", "", line, home=tmp_path)
  assert again == first
  assert re.fullmatch(r"--config=\tConfig file, .*\n", first)
  assert seconds < 0.3  # 0.04 where nothing else runs
  # bash has words of its own, and replaces what is behind the last separator.
  assert script("bash", "=:", "python main.py tour --chapter=coll", home=tmp_path)[0] == (
    "collectives \n"
  )
  kept.write_text(json.dumps({**json.loads(kept.read_text()), "stamp": "0", "flags": {}}))
  assert script("zsh", "", line, home=tmp_path)[0] == first  # what is out of date is not used
  assert json.loads(kept.read_text())["stamp"] == stamp
