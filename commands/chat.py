"""`sample --chat`: a conversation with a checkpoint's model, in a terminal or by --prompt."""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

from commands import build, dialogue, flags, preflight_facts
from inference.chat import Chat
from inference.chat import prepare as check
from inference.request import Request
from inference.text_stream import Printer
from processes.coordination import current
from processes.preemption import StopRequest
from processes.watchdog import STARTING, Watchdog
from runtime import exit_codes
from training import restore, run_tokenizer

_HELP = "Ctrl-C ends a reply, and then the conversation, as Ctrl-D does; /new begins another"
_NEW = "/new"


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Has a conversation with a checkpoint's model."""
  turns = _turns_given()
  system = _system()
  location = flags.CHECKPOINT.value or str(flags.workdir())
  run_tokenizer.adopt(flags.CONFIG.value, location)
  [ready] = build.prepare(flags.CONFIG)
  limit = flags.MAX_NEW_TOKENS
  settings = Request(
    (),
    max_new_tokens=limit.value if flags.given(limit) else 0,
    temperature=flags.TEMPERATURE.value,
    top_k=flags.TOP_K.value,
    top_p=flags.TOP_P.value,
    seed=flags.SEED.value,
    stop=tuple(flags.STOP.value),
  )
  check(ready.config, settings, system)
  if not turns and not current().alone:
    raise ValueError(
      f"--chat reads a terminal, and this run has {current().count} processes; give --prompt "
      f"(repeatable: the turns of one conversation)"
    )
  digest = hashlib.sha256(repr((turns, system)).encode()).hexdigest()[:16]
  preflight_facts.about_to_run(ready, {}, flags.workdir(), writes=False, more={"prompts": digest})
  _, params, variables = restore.model_state(ready, location)

  def run() -> int:
    watch.at("compiling", STARTING)
    chat = Chat(ready, params, settings, variables, system)
    watch.at("in a conversation", STARTING)
    if turns:
      for turn in turns:
        _show(chat, turn)
      return exit_codes.DONE
    _converse(chat, watch.stop)
    return exit_codes.DONE

  return run


def _turns_given() -> list[str]:
  """Returns the turns of the user that the command line gives; none: a terminal is read."""
  if flags.PROMPT.value and flags.PROMPT_FILE.value:
    raise ValueError("--prompt and --prompt_file: give one of the two")
  if not flags.PROMPT_FILE.value:
    return list(flags.PROMPT.value)
  return [line for line in _text(flags.PROMPT_FILE).splitlines() if line.strip()]


def _system() -> str:
  if flags.SYSTEM.value and flags.SYSTEM_FILE.value:
    raise ValueError("--system and --system_file: give one of the two")
  return _text(flags.SYSTEM_FILE) if flags.SYSTEM_FILE.value else flags.SYSTEM.value or ""


def _text(flag: Any) -> str:
  try:
    return flags.content(flag).decode()
  except UnicodeDecodeError as error:
    raise ValueError(f"--{flag.name}={flag.value} is not valid UTF-8 ({error})") from error


def _show(chat: Chat, turn: str, cut: Callable[[], bool] | None = None) -> None:
  """Prints the reply to a turn, as it is generated."""
  if not current().first:  # all compute, process 0 prints
    chat.reply(turn, lambda text: None, cut)
    return
  before, printer = chat.dropped, Printer([""])
  try:
    chat.reply(turn, lambda text: printer(0, text), cut)
  finally:
    printer.close()
  if chat.dropped > before:
    print(
      f"note: the first {chat.dropped} messages no longer fit data.sequence_length, and the model "
      f"does not see them",
      file=sys.stderr,
    )


# ------------------------------ in a terminal ------------------------------


def _converse(chat: Chat, stop: StopRequest) -> None:
  """Reads turns from standard input, and replies, to its end."""
  first = len(chat.messages)

  def answer(turn: str, cut: Callable[[], bool]) -> str:
    if turn.strip() == _NEW:
      del chat.messages[first:]
      chat.dropped = 0
      return ""
    if not turn.strip():
      return ""
    _show(chat, turn, cut)
    return chat.pace.text()

  dialogue.hold(stop, _HELP, answer)
