"""Parses command lines of main.py without running them, each in a fork of one process.

  python -m tests.docs.parsing_process QUESTIONS ANSWERS

Reads a line of JSON per command line from the first file: a list of arguments. Answers with a line
of JSON in the second: what is wrong with it, or "". Flags, config files, override keys and their
types are checked as at a real start, and so are the config's values, for the devices that its mesh
asks for.
"""

import contextlib
import io
import json
import os
import pathlib
import re
import sys

from absl import flags as absl_flags

from commands import flags, words
from configs import base
from configs.keys import table
from configs.schema import finalize, validate
from runtime import forms
from training import workdir_files

MODEL = pathlib.Path(__file__).parents[1] / "interop" / "fixtures" / "qwen3"


def wrong(arguments: list[str], run: str) -> str:
  """Returns what a start with these arguments would be refused for, or "".

  Args:
    arguments: of main.py.
    run: a workdir, which stands for those of the pages, `runs/NAME`, that are not there.
  """
  arguments = [re.sub(r"(^|=)runs/[\w.-]+", rf"\1{run}", word) for word in arguments]
  if words.asks_for_help(["main.py", *arguments]):
    return ""
  try:
    verb = flags.chosen_verb(flags.parse(arguments))
    for flag in (flags.CONFIG, flags.AGAINST):
      # The mesh of a plan belongs to its topology, of which nothing is here.
      if flag.value is not None and verb != "plan":
        sizes = {axis: abs(size) for axis, size in flag.value.mesh.items()}
        # A run that is evaluated or sampled from has a copy of what it needs of its folder.
        kept = verb in ("evaluate", "sample") and flags.CHECKPOINT.value
        # One that is here.
        if "folder" in flag.value.model and (flag.value.model.folder or kept):
          flag.value.model.folder = str(MODEL)
          flag.value.data.tokenizer = flag.value.data.tokenizer or "bytes"
        flag.value.distillation.update(table.section("distillation"))  # no teacher is here
        validate.check(finalize.finalize(flag.value, "cpu"), sizes)
  except (ValueError, absl_flags.Error) as error:
    return str(error) or type(error).__name__
  return ""


def in_a_fork(arguments: list[str], run: str) -> str:
  reading, writing = os.pipe()
  if not os.fork():
    answer = "it has not been parsed"
    try:
      with contextlib.redirect_stdout(io.StringIO()):
        answer = wrong(arguments, run)
    finally:  # an error must not take the parent's way
      os.write(writing, answer.encode()[:60_000])
      os._exit(0)
  os.close(writing)
  with os.fdopen(reading, "rb") as answer:
    text = answer.read().decode(errors="replace")
  os.wait()
  return text


def write_run(folder: pathlib.Path) -> None:
  """Writes what a workdir keeps of the config of the recipe `lm`."""
  config = forms.plain(base.get_config("lm", mesh={}))
  content = json.dumps({"config_files": [], "config": config})
  (folder / workdir_files.GIVEN).write_text(content)


if __name__ == "__main__":
  with open(sys.argv[1]) as questions, open(sys.argv[2], "w") as answers:
    run = pathlib.Path(sys.argv[2]).parent
    write_run(run)
    for line in questions:
      print(json.dumps(in_a_fork(json.loads(line), str(run))), file=answers, flush=True)
