"""Every command on a page of the documentation parses: flags, config files, override keys."""

import functools
import json
import os
import re

import pytest

from commands import config_flag
from configs import base
from tests.docs.pages import PAGES, ROOT, applications, commands, files, name


@functools.cache
def keys() -> frozenset[str]:
  """Returns every config key of any recipe."""
  recipes = ("lm", "mlp", "mlp_tutorial", "vit", "hf")
  return frozenset(
    key for recipe in recipes for key, *_ in config_flag.keys(base.get_config(recipe))
  )


@pytest.fixture(scope="module")
def refusals(forks, tmp_path_factory):
  """Returns a function from arguments of main.py to what a start would be refused for."""
  folder = tmp_path_factory.mktemp("parsing")
  asked, answers = (folder / name for name in ("asked", "answers"))
  for pipe in (asked, answers):
    os.mkfifo(pipe)
  command = ["-m", "tests.docs.parsing_process", str(asked), str(answers)]
  process = forks.start(command, out=folder / "out")
  with asked.open("w") as questions, answers.open() as lines:

    def ask(arguments: list[str]) -> str:
      questions.write(json.dumps(arguments) + "\n")
      questions.flush()
      return json.loads(lines.readline())

    yield ask
  assert process.wait() == 0, (folder / "out").read_text()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_parse(page, refusals, tmp_path):
  found = applications(page.read_text())
  # The files that the page shows are in a folder beside the clone.
  for file, content in files(page.read_text()).items():
    (tmp_path / file).write_text(content)
  found = [[word.replace("../mine/", f"{tmp_path}/") for word in words] for words in found]
  wrong = {" ".join(arguments): refusals(arguments) for arguments in found}
  assert {command: why for command, why in wrong.items() if why} == {}


def test_wrong_commands_are_seen(refusals):
  page = """
```
python main.py --config=configs/dp4_tp2.py --config.mesh.tenser=2
python main.py --config=configs/dp5.py
python main.py layout --config=configs/dp8.py --topology=v5e:4x2
X=1 python -m processes.launch --processes=2 -- \\
  python main.py --config=configs/dp8.py --config.data.global_batch_size=7
processes/launch/tpu_vm.sh run NAME ZONE --config=configs/fsdp.py --workdri=gs://BUCKET/first
python main.py --config=configs/dp8.py
```
"""
  found = applications(page)
  assert len(found) == 6
  said = [refusals(arguments) for arguments in found]
  for why, expected in zip(
    said,
    ("mesh.tenser", "configs/dp5.py", "--topology", "global_batch_size=7", "workdri", ""),
    strict=True,
  ):
    assert expected in why
  assert said[-1] == ""


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_config_keys_exist(page):
  sections = "|".join(sorted({key.partition(".")[0] for key in keys() if "." in key}))
  files = r"(?<!jsonl|s.csv)"
  key = rf"`(?:--config\.)?(?!model\.safetensors)((?:{sections})(?:\.[a-z_0-9]+)+){files}(?==|`)"
  named = re.findall(key, page.read_text())
  wrong = {key for key in named if not any((k + ".").startswith(key + ".") for k in keys())}
  assert wrong == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_and_modules_exist(page):
  [targets] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
  missing = []
  for words in commands(page.read_text()):
    if words[0] == "make":
      missing += [w for w in words[1:] if "=" not in w and w not in targets.split()]
    elif "-m" in words:
      module = ROOT.joinpath(*words[words.index("-m") + 1].split("."))
      ours = module.parent != ROOT and (ROOT / module.relative_to(ROOT).parts[0]).is_dir()
      found = module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
      missing += [str(module)] if ours and not found else []
  assert missing == []
