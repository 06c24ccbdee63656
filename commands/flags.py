"""Every flag, and the verbs that take it."""

import functools
import pathlib
import shlex
import sys
from typing import Any

from absl import flags
from etils import epath

from commands import config_flag, words
from commands.refusal import refuse
from commands.verbs import VERBS
from processes.coordination import current
from runtime import exit_codes, files, units
from runtime.printable import printable

_MOST_PROMPTS = 2**24  # bytes of a file with prompts

# Flag -> the verbs that take it; of the other flags, all do.
OWNERS: list[tuple[Any, tuple[str, ...]]] = []


def _of(verbs: str, flag: Any) -> Any:
  """Notes the verbs that take a flag, and returns it."""
  OWNERS.append((flag, tuple(verbs.split())))
  return flag


class _SwitchOrFile(flags.ArgumentParser):
  """Reads `--json` and `--json=FILE`: True, False or the file's name."""

  def parse(self, argument: str | bool) -> str | bool:
    return {"true": True, "false": False}.get(argument, argument)


class _Typed(flags.ArgumentParser):
  """Reads a value as that of a config key is read, with the same errors."""

  def __init__(self, kind: type):
    self._kind = kind

  def parse(self, argument: object) -> object:
    if not isinstance(argument, str):
      return argument
    try:
      return config_flag.parsed(self._kind, argument)
    except ValueError as error:
      raise ValueError(f"it is {error}, not {argument!r}") from error


def _typed_flag(kind: type, name: str, default: object, text: str) -> flags.FlagHolder:
  switch = {"boolean": True} if kind is bool else {}
  return flags.DEFINE(_Typed(kind), name, default, text, **switch)


_text, _texts, _list = flags.DEFINE_string, flags.DEFINE_multi_string, flags.DEFINE_list
_number, _float, _bool = (functools.partial(_typed_flag, kind) for kind in (int, float, bool))
_OF_RUNS = (
  "train evaluate sample export layout compare plan search doctor report replay sweep forecast"
)

CONFIG = _of(
  " ".join(name for name, verb in VERBS.items() if verb.config != "none"),
  config_flag.ConfigFlag(
    _text("config", None, "Config file, optionally with a recipe: configs/dp8.py:mlp.")
  ),
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
TEACHER = _of(
  "prepare",
  _text("teacher", None, "DIR[/STEP] or a model folder: store its likeliest tokens for the rows."),
)
TEACHER_TOP = _of("prepare", _number("teacher_top", 32, "Tokens of each position."))
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
  "export prepare",
  _text(
    "dtype",
    None,
    "Of the weights; that of the model they came from, or the parameters'. prepare: of a teacher's "
    "log-probabilities, float16 or float32.",
  ),
)
HTML = _of("layout report check", _text("html", None, "The file for the page."))
AGAINST = _of("layout compare", config_flag.ConfigFlag(_text("against", None, "The other config.")))
SET = _of("compare", _texts("set", [], "key=value for both configs; repeatable."))
WIDTHS = _of(
  "coordcheck forecast",
  _list(
    "widths",
    [],
    "Of the model, 64,128,256; by default 1/4, 1/2, 1 and 2 times its own. forecast: of the small "
    "runs; by default 1/4 to 1 times its own, of a budget of tokens half of these.",
  ),
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
NODES = _of(
  "plan",
  _number("nodes", None, "Also predict failures of so many nodes: goodput, saves, restarts."),
)
FAILURES = _of(
  "plan forecast",
  _float("failures_per_node_day", None, "Of a node and day; by default Llama 3's, docs/plan.md."),
)
MEMORY = _of(
  "plan",
  _bool("memory", False, "Also print the arrays at the peak of a device's memory."),
)
AXES = _of(
  "search sweep forecast",
  _text(
    "axes",
    None,
    "search: mesh axes whose size is searched, data,fsdp; by default all that the model has use "
    "for. sweep: what differs between the runs, KEY=A,B;KEY=C,D, or a file of lines KEY=A KEY=C, "
    "or of Python with runs(). forecast: what else differs between the small runs, seed=0,1.",
  ),
)
PARALLEL = _of(
  "sweep forecast", _number("parallel", 1, "Runs at a time, each in a process of its own.")
)
RANDOM = _of(
  "sweep",
  _number("random", 0, "Settings to draw by --seed, also of ranges LOW..HIGH; 0: all are taken."),
)
HALVING = _of(
  "sweep", _bool("halving", False, "Stop the worse half of the settings, again and again.")
)
HOURS = _of(
  "sweep forecast", _float("hours", 0.0, "How long it may take; the runs save. 0: as it takes.")
)
SLURM = _of("sweep", _bool("slurm", False, "Print the command of a Slurm array of what is left."))
LAUNCHER = _of(
  "sweep forecast", _text("launcher", "", "Words before each run's command, such as srun's.")
)
BATCH_SIZES = _of(
  "search forecast",
  _list("global_batch_sizes", [], "Rows of a step to try: 64,128; by default the config's."),
)
COMPILATIONS = _of(
  "search forecast",
  _number("compilations", 6, "The most settings that are compiled on each topology; 0: none."),
)
PRICE = _of(
  "search forecast", _texts("price", [], "CHIP=PRICE per chip-hour, such as v5p=4.2; repeatable.")
)
BUDGET = _of(
  "forecast",
  _text(
    "budget",
    None,
    "What is to be spent: '$2000 on v6e-64', '500 chip-hours on h100:8', or '2e9 tokens [on ...]' "
    "for the config's own model.",
  ),
)
FLOPS = _of(
  "forecast",
  _list(
    "flops",
    [],
    "Of training, that small runs of each width take: 1e11,4e11; by default those of 20 tokens per "
    "parameter of the widest, a quarter and a sixteenth of these.",
  ),
)
SERVED_TOKENS = _of(
  "forecast",
  _float("served_tokens", 0.0, "That the model will read and write; 0: as many as it trains on."),
)
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
TEMPERATURE = _of("sample", _float("temperature", 0.8, "0 takes the likeliest token."))
TOP_K = _of("sample", _number("top_k", 50, "Draw among the k likeliest; 0 is off."))
TOP_P = _of("sample", _float("top_p", 1.0, "Among the likeliest of this probability."))
SEED = _of("sample sweep", _number("seed", 0, "Seed of the draws."))
STOP = _of("sample", _texts("stop", [], "A text that ends a row; repeatable."))
CHAT = _of("sample", _bool("chat", False, "A conversation by the tokenizer's chat template."))
SYSTEM = _of("sample", _text("system", None, "With --chat: the system message."))
SYSTEM_FILE = _of("sample", _text("system_file", None, "With --chat: the file of that message."))

PATHS = (WORKDIR, CHECKPOINT, TASKS, TO, HTML, SVG, PROMPT_FILE, SYSTEM_FILE)
# Which are the same on every process.
_COMPARED = (CHECKPOINT, TASKS, ACCEPT, SIMULATE, TO, MERGE, DTYPE, WIDTHS, STEPS, STEP)
_COMPARED += tuple(flag for flag, owners in OWNERS if owners[0] == "sample")


_typed: list[str] = []  # the words of this process' command, as given


def command_line() -> str:
  """Returns the command of this process, for a page that says how it was made."""
  return printable(shlex.join(["python", pathlib.Path(sys.argv[0]).name, *_typed]))


def words_to_train() -> list[str]:
  """Returns the words of this process' command that `train` takes, without the workdir."""
  own = {flag.name for flag, owners in OWNERS if "train" not in owners}
  own |= {WORKDIR.name, DEBUG.name}
  return [
    word
    for word, is_flag in words.joined(_typed, flags.FLAGS)
    if (word.lstrip("-").partition("=")[0] not in own if is_flag else word not in VERBS)
  ]


def command_to_train() -> str:
  """Returns the command that trains this process' config: without the verb and its own flags."""
  name = pathlib.Path(sys.argv[0]).name
  return printable(shlex.join(["python", name, *words_to_train()]))


def chosen_verb(words: list[str]) -> str:
  """Returns the verb; raises ValueError for flags that it does not take, and for empty ones."""
  verb = words[0] if words else "train"
  for flag, owners in OWNERS:
    if given(flag) and verb not in owners:
      *first, last = owners
      named = f"verbs {', '.join(first)} and {last}" if first else f"verb {last}"
      raise ValueError(f"--{flag.name} belongs to the {named}, not to {verb}")
  for flag in (*PATHS, DTYPE, TOPOLOGY, CHAPTER, AXES, BATCH_SIZES, WIDTHS, BUDGET):
    if given(flag) and not flag.value:  # of a shell's variable that is not set, as a rule
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


def output_file(flag: flags.FlagHolder) -> epath.Path | None:
  """Returns the file that a flag names, if any; raises ValueError if there is no such folder."""
  file = flag.value and epath.Path(flag.value)
  if file and (file.is_dir() or not file.parent.is_dir()):
    raise ValueError(f"--{flag.name}={file}: give a file in a folder that exists")
  return file or None


def write_output(flag: flags.FlagHolder, text: str) -> bool:
  """Writes the file that a flag names, on process 0; returns False where that fails."""
  if current().first:
    try:
      files.replace(epath.Path(flag.value), text)
    except OSError as error:
      print(printable(f"error: --{flag.name}={flag.value}: {error}"), file=sys.stderr, flush=True)
      return False
    print(f"wrote {flag.value}, {units.size(len(text.encode()))}", flush=True)
  return True


def given(flag: flags.FlagHolder) -> bool:
  """Returns whether the command line has a flag."""
  return bool(flags.FLAGS[flag.name].present)


def facts(verb: str) -> dict[str, object]:
  """Returns what the command line says besides the config: the same on every process."""
  values = {flag.name: flag.value for flag in _COMPARED}
  return {"verb": verb, "workdir": str(workdir()), **values}


def parse_flags(argv: list[str]) -> list[str]:
  """Parses a command line; returns the program's name, the verb, if one is named, and its words.

  A command line that asks for help, or is refused, ends the process.
  """
  owners = {flag.name: verbs for flag, verbs in OWNERS}
  try:
    if words.asks_for_help(argv):
      from commands import help  # which a run does not need

      help.show(help.text(words.read(argv[1:], owners, asks=True), owners))
      sys.exit(exit_codes.DONE)
    _typed[:] = argv[1:]
    return [argv[0], *parse(argv[1:])]
  except ValueError as error:
    sys.exit(refuse(error, debug="--debug" in argv))


def parse(given: list[str]) -> list[str]:
  """Sets the flags by what follows the program's name; returns the verb and its words.

  Raises:
    ValueError: an unknown word, flag or config key, a value of the wrong type, or a config that
      cannot be loaded.
  """
  line = words.read(given, {flag.name: verbs for flag, verbs in OWNERS})
  words.add_default(line)
  locations = [f"--{name}={location}" for name, location in line.configs.items()]
  try:
    flags.FLAGS(["main.py", *locations, *line.flags])
  except flags.UnrecognizedFlagError as error:
    raise ValueError(config_flag.unknown_flag(error.flagname)) from error
  except flags.Error as error:
    raise ValueError(str(error).removeprefix("flag ")) from error
  config_flag.set_keys(SET.value)
  of_both = [setting.partition("=")[::2] for setting in SET.value]
  for flag in (CONFIG, AGAINST):
    own = [(key, text) for name, key, text in line.settings if name == flag.name]
    flag.read(line.configs.get(flag.name, ""), [*own, *of_both])
  return [*([line.verb] if line.verb else []), *line.words]
