"""Row 29: wrong command lines, overrides, variables, and damaged small files, drawn by a seed.

A case is what a person, a script or a broken disk could give. What must come out of each is the
same: it ends in time, with an exit code that its kind may have, at most one message, no traceback
and no control character; and if it is refused, the workdir is as it was.
"""

import dataclasses
import hashlib
import pathlib
import random
import re
import shutil
from collections.abc import Callable

from commands import config_flag
from configs import base
from tests.faults.damages import HARMS
from tests.faults.frame import Attempt, row
from tests.faults.harness import Commands

QUICK = ("evaluate", "sample", "layout", "help")  # of a config without a checkpoint
# Without --html and --workdir, of which a value would be written to.
FLAGS = ("seed", "top_p", "against", "set", "topology", "checkpoint", "prompt", "temperature")
FLAGS += ("max_new_tokens", "accept_changes", "simulate", "chapter", "zzz")
CONFIG = "--config=configs/single.py:mlp"
# A run of this takes some seconds, and its workdir is the one that is damaged.
TINY = (
  CONFIG,
  "--config.model.model_size=8",
  "--config.data.global_batch_size=8",
  "--config.evaluation.every_steps=0",
  "--config.evaluation.steps=1",
  "--config.data.evaluation_split=test[:1%]",
  "--config.checkpoint.every_steps=2",
  "--config.compilation_cache_dir=",
)
NASTY = (
  *("", " ", "x", "-1", "0", "1", "-0", "1e999", "nan", "-inf", "True", "None", "()", "(((", "{}"),
  *(
    "9" * 30,
    "0x10",
    "1_000",
    "٣",
    "1.5",
    "a" * 5000,
    "\x1b[31mred\x07",
    "a\nrefused: b",
    "é",
    "%s%n",
  ),
  *(
    "../..",
    "/dev/null",
    "/dev/full",
    "/proc/self/mem",
    "[::1:8",
    "--",
    "=",
    "'",
    "$(id)",
    "gs://",
  ),
  *("\udcff", "\u202e", "tensor", "('a',)", "(1,2)", "[1]", "lambda: 0", "__import__('os')", "mlp"),
)
FILES = (
  *(
    "README.md",
    "/etc/passwd",
    "configs",
    "configs/base.py",
    "configs/schema/recipes.py",
    "configs/dp9.py",
  ),
  *("configs/__init__.py", "configs/dp8.py", "/dev/null", "main.py", "", ":", "configs/dp8.py:mpl"),
  *("configs/dp8.py:model=,data=", "configs/dp8.py:model=llama", "configs/dp8.py::", "tests"),
)
VARIABLES = (
  *("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "XLA_FLAGS", "JAX_PLATFORMS"),
  *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
  *("PMI_SIZE", "PMI_RANK", "NPROC", "TFDS_DATA_DIR", "HOME", "COLUMNS", "TERM", "NO_COLOR"),
)
# Of these most values are no mistake: they are waited for, or name a folder that is made.
NO_MISTAKES = ("training.steps", "processes.start_timeout_seconds", "compilation_cache_dir")


@dataclasses.dataclass(frozen=True)
class Case:
  """One input.

  Attributes:
    kind: of it; a key of KINDS.
    arguments: the command line, without --workdir.
    codes: with which it may end.
    environment: variables to set.
    damage: what is done to a copy of the workdir before; None: there is no workdir yet.
    does: what that is, for people.
  """

  kind: str
  arguments: tuple[str, ...]
  codes: tuple[int, ...]
  environment: dict[str, str] = dataclasses.field(default_factory=dict)
  damage: Callable[[pathlib.Path], None] | None = None
  does: str = ""

  def __str__(self) -> str:
    """Returns what is done, in one line."""
    parts = [self.kind, *(f"{k}={v!r}" for k, v in self.environment.items()), self.does]
    return " ".join(filter(None, [*parts, *(repr(a)[:120] for a in self.arguments)]))


def case(seed: int) -> Case:
  """Returns the case of a seed: the kinds in turn, the rest drawn."""
  kinds = (*KINDS,)
  return KINDS[kinds[seed % len(kinds)]](random.Random(f"inputs {seed}"))


def command_line(chance: random.Random) -> Case:
  """Returns words that are nearly a command line."""
  verb = chance.choice((*QUICK, "trian", "-", "--", *NASTY))
  words = [f"--config={chance.choice(FILES)}"] * chance.randint(0, 2)
  for flag in chance.sample(FLAGS, chance.randint(1, 3)):
    words.append(f"--{flag}={chance.choice((*NASTY, *FILES))}")
  if verb not in QUICK:  # what it may be is known before it is started
    words.append("--no_such_flag")
  if chance.random() < 0.3:
    chance.shuffle(words)
  return Case("command line", (verb, *words), (0, 2) if verb in QUICK else (2,))


def override(chance: random.Random) -> Case:
  """Returns a key of the config with a value that is rarely right."""
  keys = [key for key, _, _ in config_flag.keys(base.get_config("mlp")) if key not in NO_MISTAKES]
  given = tuple(
    f"--config.{chance.choice(keys)}={chance.choice(NASTY)}" for _ in range(chance.randint(1, 2))
  )
  return Case("override", ("layout", *TINY, *given), (0, 2))


def environment(chance: random.Random) -> Case:
  """Returns variables with values that are rarely right; other processes never come."""
  names = chance.sample(VARIABLES, chance.randint(1, 3))
  values = {name: chance.choice(NASTY).encode("utf-8", "replace").decode() for name in names}
  arguments = ("layout", *TINY, "--config.processes.start_timeout_seconds=2")
  return Case("environment", arguments, (0, 1, 2), environment=values)


def file(chance: random.Random) -> Case:
  """Returns a small file of a workdir that is damaged before the run is resumed or read."""
  name, harm = chance.choice(SMALL_FILES), chance.choice([*HARMS])
  seed = chance.random()

  def damage(workdir: pathlib.Path) -> None:
    HARMS[harm](workdir / name, random.Random(seed))

  verb = chance.choice(("train", "train", "evaluate"))
  steps = () if verb == "evaluate" else ("--config.training.steps=3",)
  arguments = (verb, *TINY, "--config.training.steps=2", *steps)
  return Case("file", arguments, (0, 2), damage=damage, does=f"{name}: {harm};")


SMALL_FILES = (
  *("config.json", "metrics.jsonl", "layout.txt", "owner/000001.json", "owner/000001.beat"),
  *(f"checkpoints/2/{name}" for name in ("digests", "config/metadata", "record/metadata")),
  *(f"checkpoints/2/state/{name}" for name in ("_METADATA", "_sharding", "manifest.ocdbt")),
  *("checkpoints/2/_CHECKPOINT_METADATA", "checkpoints/2/commit_success.txt"),
)
KINDS = {
  "command line": command_line,
  "override": override,
  "environment": environment,
  "file": file,
}

# ------------------------------ the row ------------------------------

MESSAGE = re.compile(r"^(refused|error): ", re.MULTILINE)
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@row(
  29,
  fault="wrong command lines, override values, variables; damaged small files of a workdir",
  passes="ends in time with an exit code that this input allows, one message, no traceback and no "
  "control character; a refusal leaves the workdir unchanged",
  trials=500,
  seconds=2,
  note="Seeded. The four kinds in turn, each in a fork of a process that has imported everything; "
  "JAX has read its own variables before.",
)
def wrong_input(attempt: Attempt) -> None:
  """Runs one case, in a fork of a process that has imported everything."""
  commands, chosen = attempt.once(Commands), case(attempt.number)
  attempt.does = str(chosen)
  judge(attempt, commands, chosen, attempt.once(_whole, commands))


def _whole(folder: pathlib.Path, commands: Commands) -> pathlib.Path:
  """Returns the workdir of a run of two steps."""
  answer = commands.run(*TINY, "--config.training.steps=2", f"--workdir={folder / 'run'}")
  assert answer.code == 0, answer
  return folder / "run"


def judge(attempt: Attempt, commands: Commands, chosen: Case, whole: pathlib.Path) -> None:
  """Runs a case in the trial's folder, and checks how it ends."""
  if chosen.damage:
    shutil.copytree(whole, attempt.workdir)
    chosen.damage(attempt.workdir)
  before = digest(attempt.folder)
  ours = any(word.startswith("--workdir=") for word in chosen.arguments)
  arguments = [*chosen.arguments, *([] if ours else [f"--workdir={attempt.workdir}"])]
  answer = commands.run(*arguments, **chosen.environment)
  attempt.seen.append(f"exit code {answer.code}: {answer.err[:300]!r}")
  said = answer.out + answer.err
  assert answer.code in chosen.codes, f"exit code {answer.code}, not one of {chosen.codes}"
  assert "Traceback" not in said, "a traceback"
  messages = len(MESSAGE.findall(answer.err))
  assert answer.code == 0 or messages == 1, f"{messages} messages"
  found = CONTROLS.findall(said)
  assert not found, f"control characters {sorted(set(found))}"
  assert answer.code != 2 or digest(attempt.folder) == before, (
    "refused, and the workdir has changed"
  )


def digest(folder: pathlib.Path) -> str:
  """Returns a digest of the names and contents of all that is in a folder."""
  found = hashlib.sha256()
  for path in sorted(folder.rglob("*")):
    content = path.read_bytes() if path.is_file() else b"a folder"
    found.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
  return found.hexdigest()
