"""Every flag, and the verbs that take it."""

import pathlib
import re
import shlex
import sys

from absl import flags
from etils import epath
from ml_collections import config_flags

from commands import config_flag, words
from commands.refusal import refuse
from commands.verbs import VERBS
from runtime import exit_codes, files
from runtime.printable import printable

_MOST_PROMPTS = 2**24  # bytes of a file with prompts

# Flag -> the verbs that take it; of the other flags, all do.
OWNERS: list[tuple[flags.FlagHolder, tuple[str, ...]]] = []


def _of(verbs: str, flag: flags.FlagHolder) -> flags.FlagHolder:
  """Notes the verbs that take a flag, and returns it."""
  OWNERS.append((flag, tuple(verbs.split())))
  return flag


class _SwitchOrFile(flags.ArgumentParser):
  """Reads `--json` and `--json=FILE`: True, False or the file's name."""

  def parse(self, argument: str | bool) -> str | bool:
    return {"true": True, "false": False}.get(argument, argument)


_text, _texts, _list = flags.DEFINE_string, flags.DEFINE_multi_string, flags.DEFINE_list
_number, _bool, _config = flags.DEFINE_integer, flags.DEFINE_bool, config_flags.DEFINE_config_file
_OF_RUNS = "train evaluate sample export layout compare plan search doctor report replay"

CONFIG = _of(
  " ".join(name for name, verb in VERBS.items() if verb.config != "none"),
  _config("config", None, "Config file, optionally with a recipe: configs/dp8.py:mlp."),
)
WORKDIR = _of(_OF_RUNS, _text("workdir", None, "Where the run is kept; runs/CONFIG_RECIPE."))
SIMULATE = _bool("simulate", False, "Use simulated CPU devices even if there is a GPU or TPU.")
DEBUG = _bool("debug", False, "Show the traceback of a refusal.")
ACCEPT = _of(
  "train replay",
  _list("accept_changes", [], "Comma-separated config keys allowed to differ from the checkpoint."),
)
TRAIN_TOKENIZER = _of(
  "prepare",
  _number("train_tokenizer", None, "Train a byte-level BPE of so many tokens on data.files first."),
)
CHECKPOINT = _of("evaluate sample export", _text("checkpoint", None, "DIR[/STEP] to read."))
TASKS = _of(
  "evaluate",
  _text("tasks", None, "Comma-separated .jsonl files of tasks, instead of the validation split."),
)
TO = _of("export eject", _text("to", None, "The new folder to write; of eject, the file."))
MERGE = _of(
  "export",
  _bool("merge", False, "Add LoRA's adapters to the kernels, instead of writing them alone."),
)
DTYPE = _of(
  "export",
  _text("dtype", None, "Of the weights; that of the model they came from, or the parameters'."),
)
HTML = _of("layout report check", _text("html", None, "The file for the page."))
AGAINST = _of(
  "layout compare",
  _config("against", None, "The other config."),
)
SET = _of("compare", _texts("set", [], "key=value for both configs; repeatable."))
WIDTHS = _of(
  "coordcheck",
  _list("widths", [], "Of the model, 64,128,256; by default 1/4, 1/2, 1 and 2 times its own."),
)
STEPS = _of("coordcheck", _number("steps", 5, "Optimizer steps at each width."))
SVG = _of("coordcheck", _text("svg", None, "The file for a picture."))
STEP = _of("replay", _number("step", None, "The step to compute again, counted from 1."))
TOPOLOGY = _of(
  "plan search config",
  _text(
    "topology", None, "v5p:4x4x4, v5p-128, 2xv6e-256 or h100:8; by default the attached devices."
  ),
)
AXES = _of(
  "search",
  _list("axes", [], "Mesh axes whose size is searched; by default all that the model has use for."),
)
BATCH_SIZES = _of(
  "search",
  _list("global_batch_sizes", [], "Rows of a step to try: 64,128; by default the config's."),
)
COMPILATIONS = _of(
  "search",
  _number("compilations", 6, "The most settings that are compiled on each topology; 0: none."),
)
PRICE = _of("search", _texts("price", [], "CHIP=PRICE per chip-hour, such as v5p=4.2; repeatable."))
CHANGED = _of("config", _bool("changed", False, "Print only what is not the recipe's."))
JSON = _of(
  "config check",
  flags.DEFINE(_SwitchOrFile(), "json", False, "Print JSON; check: the file for it.", boolean=True),
)
MESH = _of(
  "check", _texts("mesh", [], "Sizes of axes, data=2,tensor=4; 1: one device; repeatable.")
)
ONLY = _of("check", _text("only", "", "Some of the checks, separated by commas."))
ATTACHED = _of("check", _bool("attached", False, "On the devices at hand, not on simulated ones."))
CHAPTER = _of("tour", _text("chapter", None, "One chapter instead of all."))
PROMPT = _of("sample", _texts("prompt", [], "A text to continue; repeatable."))
PROMPT_FILE = _of("sample", _text("prompt_file", None, "A file with a prompt per line."))
MAX_NEW_TOKENS = _of("sample", _number("max_new_tokens", 64, "Tokens to generate, at most."))
TEMPERATURE = _of("sample", flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token."))
TOP_K = _of("sample", _number("top_k", 50, "Draw among the k likeliest; 0 is off."))
TOP_P = _of("sample", flags.DEFINE_float("top_p", 1.0, "Among the likeliest of this probability."))
SEED = _of("sample", _number("seed", 0, "Seed of the draws."))
STOP = _of("sample", _texts("stop", [], "A text that ends a row; repeatable."))
CHAT = _of("sample", _bool("chat", False, "A conversation by the tokenizer's chat template."))
SYSTEM = _of("sample", _text("system", None, "With --chat: the system message."))
SYSTEM_FILE = _of("sample", _text("system_file", None, "With --chat: the file of that message."))

PATHS = (WORKDIR, CHECKPOINT, TASKS, TO, HTML, SVG, PROMPT_FILE, SYSTEM_FILE)
_AGAINST = ("--against", "-against")
# Which are the same on every process.
_COMPARED = (CHECKPOINT, TASKS, ACCEPT, SIMULATE, TO, MERGE, DTYPE, WIDTHS, STEPS, STEP)
_COMPARED += tuple(flag for flag, owners in OWNERS if owners == ("sample",))


_typed: list[str] = []  # the words of this process' command, as given


def command_line() -> str:
  """Returns the command of this process, for a page that says how it was made."""
  return printable(shlex.join(["python", pathlib.Path(sys.argv[0]).name, *_typed]))


def command_to_train() -> str:
  """Returns the command that trains this process' config: without the verb and its own flags."""
  own = {flag.name for flag, owners in OWNERS if "train" not in owners}
  own |= {WORKDIR.name, DEBUG.name}
  kept = [
    word
    for word, is_flag in words.joined(_typed, flags.FLAGS)
    if (word.lstrip("-").partition("=")[0] not in own if is_flag else word not in VERBS)
  ]
  return printable(shlex.join(["python", pathlib.Path(sys.argv[0]).name, *kept]))


def chosen_verb(words: list[str]) -> str:
  """Returns the verb; raises ValueError for flags that it does not take, and for empty ones."""
  verb = words[0] if words else "train"
  for flag, owners in OWNERS:
    if given(flag) and verb not in owners:
      *first, last = owners
      named = f"verbs {', '.join(first)} and {last}" if first else f"verb {last}"
      raise ValueError(f"--{flag.name} belongs to the {named}, not to {verb}")
  for flag in (*PATHS, DTYPE, TOPOLOGY, CHAPTER):
    if flag.value == "":  # of a shell's variable that is not set, as a rule
      raise ValueError(f"--{flag.name}= is empty; give a value, or leave the flag out")
  for flag in (AXES, BATCH_SIZES, WIDTHS):
    if given(flag) and not flag.value:
      raise ValueError(f"--{flag.name}= is empty; give a value, or leave the flag out")
  for flag in (SYSTEM, SYSTEM_FILE):
    if flag.value is not None and not CHAT.value:
      raise ValueError(f"--{flag.name} belongs to sample --chat; add --chat, or leave it out")
  return verb


def workdir() -> epath.Path:
  return epath.Path(WORKDIR.value or f"runs/{config_flag.name(CONFIG)}")


def content(flag: flags.FlagHolder) -> bytes:
  """Returns the content of the file that a flag names; raises ValueError if it cannot be read."""
  try:
    return files.read_bytes(flag.value, most_bytes=_MOST_PROMPTS, follow=True)
  except OSError as error:
    raise ValueError(f"--{flag.name}={flag.value} cannot be read ({error})") from error


def given(flag: flags.FlagHolder) -> bool:
  """Returns whether the command line has a flag."""
  return bool(flags.FLAGS[flag.name].present)


def facts(verb: str) -> dict[str, object]:
  """Returns what the command line says besides the config: the same on every process."""
  values = {flag.name: flag.value for flag in _COMPARED}
  return {"verb": verb, "workdir": str(workdir()), **values}


def parse_flags(argv: list[str]) -> list[str]:
  """Parses the flags; what absl and ml_collections raise is a refusal like any other."""
  owners = {flag.name: verbs for flag, verbs in OWNERS}
  try:
    if words.asks_for_help(argv):
      from commands import help  # which a run does not need

      help.show(help.text(words.as_flags(argv, owners, asks=True), owners))
      sys.exit(exit_codes.DONE)
    _typed[:] = argv[1:]
    sys.argv = rewritten(argv)  # ml_collections reads it
    return config_flag.parse(sys.argv, ("config", "against"))
  except ValueError as error:
    sys.exit(refuse(error, debug="--debug" in argv))


def rewritten(argv: list[str]) -> list[str]:
  """Returns a command line as it is parsed: words and `--set` as flags, and with a config.

  `--against` of `report` names no config: its value becomes a word.
  """
  if argv[1:2] == ["report"]:
    argv = [re.sub(r"^--?against=", "", word) for word in argv if word not in _AGAINST]
  argv = words.as_flags(argv, {flag.name: verbs for flag, verbs in OWNERS})
  verb = argv[1] if argv[1:] and argv[1] in VERBS else "train"
  return config_flag.with_settings(words.with_default(argv, verb), ("config", "against"))
