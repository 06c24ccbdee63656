"""Every flag, and the verbs that take it."""

import pathlib
import re
import shlex
import sys

from absl import flags
from etils import epath
from ml_collections import config_flags

from commands import config_flag, help
from commands.refusal import refuse
from commands.verbs import VERBS
from runtime import exit_codes, files
from runtime.printable import printable
from runtime.suggest import nearest

_MOST_PROMPTS = 2**24  # bytes of a file with prompts

CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Config file, optionally with a recipe: configs/dp8.py:mlp."
)
AGAINST = config_flags.DEFINE_config_file(
  "against", None, "layout, compare: the other config; report: another run's workdir, repeatable."
)
AGAINST_RUN = flags.DEFINE_multi_string(
  "against_run", [], "report: what --against becomes there, since it names no config."
)
SET = flags.DEFINE_multi_string("set", [], "compare: key=value for both configs; repeatable.")
WIDTHS = flags.DEFINE_list(
  "widths", [], "coordcheck: of the model, 64,128,256; by default 1/4, 1/2, 1 and 2 times its own."
)
STEPS = flags.DEFINE_integer("steps", 5, "coordcheck: optimizer steps at each width.")
STEP = flags.DEFINE_integer("step", None, "replay: the step to compute again, counted from 1.")
SVG = flags.DEFINE_string("svg", None, "coordcheck: the file for a picture.")
HTML = flags.DEFINE_string("html", None, "layout, report: the file for the page.")
TOPOLOGY = flags.DEFINE_string(
  "topology", None, "v5p:4x4x4, v5p-128, 2xv6e-256 or h100:8; by default the attached devices."
)
AXES = flags.DEFINE_list(
  "axes", [], "search: mesh axes whose size is searched; by default all that the model has use for."
)
BATCH_SIZES = flags.DEFINE_list(
  "global_batch_sizes", [], "search: rows of a step to try: 64,128; by default the config's."
)
COMPILATIONS = flags.DEFINE_integer(
  "compilations", 6, "search: the most settings that are compiled on each topology; 0: none."
)
PRICE = flags.DEFINE_multi_string(
  "price", [], "search: CHIP=PRICE per chip-hour, such as v5p=4.2; repeatable."
)
JSON = flags.DEFINE_bool("json", False, "config: print JSON.")
CHAPTER = flags.DEFINE_string("chapter", None, "tour: one chapter instead of all.")
TRAIN_TOKENIZER = flags.DEFINE_integer(
  "train_tokenizer", None, "prepare: train a byte-level BPE of so many tokens on data.files first."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept; runs/CONFIG_RECIPE.")
TASKS = flags.DEFINE_string(
  "tasks", None, "evaluate: comma-separated .jsonl files of tasks, instead of the validation split."
)
CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "evaluate, sample, export: DIR[/STEP] to read."
)
TO = flags.DEFINE_string("to", None, "export: the folder to write; new, or empty.")
MERGE = flags.DEFINE_bool(
  "merge", False, "export: add LoRA's adapters to the kernels, instead of writing them alone."
)
DTYPE = flags.DEFINE_string(
  "dtype", None, "export: of the weights; that of the model they came from, or the parameters'."
)
ACCEPT = flags.DEFINE_list(
  "accept_changes",
  [],
  "train, replay: comma-separated config keys allowed to differ from the checkpoint.",
)
SIMULATE = flags.DEFINE_bool(
  "simulate", False, "Use simulated CPU devices even if there is a GPU or TPU."
)
DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of a refusal.")

PROMPT = flags.DEFINE_multi_string("prompt", [], "sample: a text to continue; repeatable.")
PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "sample: a file with a prompt per line.")
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "sample: the most tokens per prompt.")
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "sample: 0 takes the likeliest token.")
TOP_K = flags.DEFINE_integer("top_k", 0, "sample: draw among the k likeliest; 0 is off.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "sample: among the likeliest of this probability.")
SEED = flags.DEFINE_integer("seed", 0, "sample: seed of the draws.")
STOP = flags.DEFINE_multi_string("stop", [], "sample: a text that ends a row; repeatable.")

CHAT = flags.DEFINE_bool("chat", False, "sample: a conversation by the tokenizer's chat template.")
SYSTEM = flags.DEFINE_string("system", None, "sample --chat: the system message.")
SYSTEM_FILE = flags.DEFINE_string("system_file", None, "sample --chat: the file of that message.")

SAMPLE_FLAGS = (PROMPT, PROMPT_FILE, MAX_NEW_TOKENS, TEMPERATURE, TOP_K, TOP_P, SEED, STOP)
SAMPLE_FLAGS += (CHAT, SYSTEM, SYSTEM_FILE)
PATHS = (WORKDIR, CHECKPOINT, TASKS, TO, HTML, SVG, PROMPT_FILE, SYSTEM_FILE)
# The flags that not every verb takes.
OWNERS = [
  (TRAIN_TOKENIZER, ("prepare",)),
  (CONFIG, tuple(name for name, verb in VERBS.items() if verb.config != "none")),
  (
    WORKDIR,
    (
      *("train", "evaluate", "sample", "export", "layout", "compare", "plan", "search", "doctor"),
      *("report", "replay"),
    ),
  ),
  *((flag, ("coordcheck",)) for flag in (WIDTHS, STEPS, SVG)),
  (TOPOLOGY, ("plan", "search", "config")),
  *((flag, ("search",)) for flag in (AXES, BATCH_SIZES, COMPILATIONS, PRICE)),
  (JSON, ("config",)),
  (CHAPTER, ("tour",)),
  (AGAINST, ("layout", "compare", "report")),
  (AGAINST_RUN, ("report",)),
  (SET, ("compare",)),
  (HTML, ("layout", "report")),
  (ACCEPT, ("train", "replay")),
  (STEP, ("replay",)),
  (CHECKPOINT, ("evaluate", "sample", "export")),
  (TASKS, ("evaluate",)),
  *((flag, ("export",)) for flag in (TO, MERGE, DTYPE)),
  *((flag, ("sample",)) for flag in SAMPLE_FLAGS),
]


def command_line() -> str:
  """Returns the command of this process, for a page that says how it was made."""
  words = [re.sub(r"^--against_run(?==|$)", "--against", word) for word in sys.argv[1:]]
  return printable(shlex.join(["python", pathlib.Path(sys.argv[0]).name, *words]))


def command_to_train() -> str:
  """Returns the command that trains this process' config: without the verb and its own flags."""
  own = {flag.name for flag, owners in OWNERS if "train" not in owners}
  own |= {WORKDIR.name, DEBUG.name}
  words, rest = [], iter(sys.argv[1:])
  for word in rest:
    name, equals, _ = word.lstrip("-").partition("=")
    if word.startswith("-") and name in own:
      if not equals and not isinstance(flags.FLAGS[name].value, bool):
        next(rest, None)
    elif word.startswith("-") or (words and words[-1] in ("--config", "-config")):
      words.append(word)
  return printable(shlex.join(["python", pathlib.Path(sys.argv[0]).name, *words]))


def chosen_verb(words: list[str]) -> str:
  verb = words[0] if words else "train"
  if verb not in VERBS:
    near = nearest(verb, VERBS)
    raise ValueError(f"unknown verb {verb!r}; there are {', '.join(VERBS)}{near}")
  if len(words) > 1 and not VERBS[verb].words:
    raise ValueError(f"unexpected {words[1]!r} after the verb; options begin with --")
  if CONFIG.value is None and VERBS[verb].config == "required":
    raise ValueError("no config; for example: python main.py --config=configs/dp4_tp2.py")
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
  values = {flag.name: flag.value for flag in SAMPLE_FLAGS}
  shown = (CHECKPOINT, TASKS, ACCEPT, SIMULATE, TO, MERGE, DTYPE, WIDTHS, STEPS, STEP)
  values |= {flag.name: flag.value for flag in shown}
  return {"verb": verb, "workdir": str(workdir()), **values}


def parse_flags(argv: list[str]) -> list[str]:
  """Parses the flags; what absl and ml_collections raise is a refusal like any other."""
  try:
    if help.asked(argv):
      help.show(help.text(argv, {flag.name: owners for flag, owners in OWNERS}))
      sys.exit(exit_codes.DONE)
    sys.argv = rewritten(argv)  # ml_collections reads it
    return config_flag.parse(sys.argv, ("config", "against"))
  except ValueError as error:
    sys.exit(refuse(error, debug="--debug" in argv))


def rewritten(argv: list[str]) -> list[str]:
  """Returns a command line as it is parsed.

  `--set` becomes overrides, and `--against` of `report`, which names no config, `--against_run`.
  """
  if argv[1:2] == ["report"]:
    argv = [re.sub(r"^--?against(?==|$)", "--against_run", word) for word in argv]
  return config_flag.with_settings(argv, ("config", "against"))
