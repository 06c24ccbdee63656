"""The verb `sample`: continues prompts with a checkpoint's model, or has a conversation with it.

Without prompts, in a terminal, it asks for them: lines are answered as the answers are generated,
and Ctrl-C ends an answer.
"""

import contextlib
import dataclasses
import hashlib
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

from commands import build, flags, help, preflight_facts
from inference import chat as chats
from inference import sampler
from inference.chat import Chat, Continuation, Cut
from inference.request import Prompt, Request, TextSpec, check, text_spec
from inference.sampler import Printer, TrainedModel
from processes import preemption
from processes.coordination import current
from processes.preemption import AGAIN_SECONDS, StopRequest
from processes.watchdog import STARTING, Watchdog
from runtime import exit_codes
from runtime.printable import printable
from training import base_parameters
from training.metrics.console import say, say_wrapped
from training.setup import Job

_HELP = "type a text to continue; Ctrl-C ends a continuation, and then the program, as Ctrl-D does"
_CHAT_HELP = "Ctrl-C ends a reply, and then the conversation, as Ctrl-D does; /new begins another"
_NEW, _ASK = "/new", "> "


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Continues prompts with a checkpoint's model, or has a conversation with it."""
  _exclusive(flags.PROMPT, flags.PROMPT_FILE)
  return _prepare_chat(watch) if flags.CHAT.value else _prepare_prompts(watch)


def _prepare_prompts(watch: Watchdog) -> Callable[[], int]:
  prompts = flags.PROMPT.value
  if flags.PROMPT_FILE.value:
    prompts = flags.content(flags.PROMPT_FILE).splitlines()
  ready, location = build.of_checkpoint()
  asked = not prompts and current().alone and sys.stdin.isatty() and sys.stdout.isatty()
  spec = text_spec(ready.config)
  prompts, most = tuple(prompts or [""]), flags.MAX_NEW_TOKENS
  request = _request(spec, prompts, most.value if flags.given(most) else spec.fitting(prompts))
  # Of texts that are asked for in turn, each takes what is left of its row.
  check(spec, dataclasses.replace(request, max_new_tokens=1) if asked else request)
  model = _restored(ready, location, request.prompts)
  if unseen := spec.unseen(request.prompts):
    say_wrapped(unseen)

  def run() -> int:
    if asked:
      _ask(model, request, watch)
      return exit_codes.DONE
    watch.at("sampling", STARTING)
    sampler.show(model, request, pace=sys.stderr.isatty())
    return exit_codes.DONE

  return run


def _prepare_chat(watch: Watchdog) -> Callable[[], int]:
  turns = list(flags.PROMPT.value)
  if flags.PROMPT_FILE.value:
    turns = [line for line in _text(flags.PROMPT_FILE).splitlines() if line.strip()]
  _exclusive(flags.SYSTEM, flags.SYSTEM_FILE)
  system = _text(flags.SYSTEM_FILE) if flags.SYSTEM_FILE.value else flags.SYSTEM.value or ""
  ready, location = build.of_checkpoint()
  limit, spec = flags.MAX_NEW_TOKENS, text_spec(ready.config)
  settings = _request(spec, (), limit.value if flags.given(limit) else 0)
  chats.prepare(spec, settings, system)
  if not turns and not current().alone:
    raise ValueError(
      f"--chat reads a terminal, and this run has {current().count} processes; give --prompt "
      f"(repeatable: the turns of one conversation)"
    )
  model = _restored(ready, location, (turns, system))

  def run() -> int:
    watch.at("compiling", STARTING)
    chat = Chat(model, settings, system)
    watch.at("in a conversation", STARTING)
    if turns:
      for turn in turns:
        _show(chat, turn)
    else:
      _converse(chat, watch.stop)
    return exit_codes.DONE

  return run


# ------------------------------ what is given ------------------------------


def _exclusive(one: Any, file: Any) -> None:
  """Raises ValueError where a flag and that of its file are both given."""
  if one.value and file.value:
    raise ValueError(f"--{one.name} and --{file.name}: give one of the two")


def _text(flag: Any) -> str:
  try:
    return flags.content(flag).decode()
  except UnicodeDecodeError as error:
    raise ValueError(f"--{flag.name}={flag.value} is not valid UTF-8 ({error})") from error


def _request(spec: TextSpec, prompts: tuple[Prompt, ...], max_new_tokens: int) -> Request:
  """Returns what the flags ask for; the default of --top_k is at most the tokens there are."""
  top_k = flags.TOP_K.value
  return Request(
    prompts,
    max_new_tokens=max_new_tokens,
    temperature=flags.TEMPERATURE.value,
    top_k=top_k if flags.given(flags.TOP_K) else min(top_k, spec.drawable),
    top_p=flags.TOP_P.value,
    seed=flags.SEED.value,
    stop=tuple(flags.STOP.value),
  )


def _restored(ready: Job, location: str, prompts: object) -> TrainedModel:
  """Returns the checkpoint's model, once all processes are about to do the same with it."""
  digest = hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]
  preflight_facts.about_to_run(ready, {}, flags.workdir(), writes=False, more={"prompts": digest})
  _, params, variables = base_parameters.model_state(ready, location)
  return TrainedModel(ready, params, variables)


# ------------------------------ in a terminal ------------------------------


def _ask(model: TrainedModel, request: Request, watch: Watchdog) -> None:
  """Continues the lines that are typed in a terminal."""
  watch.at("compiling", STARTING)
  say(f"compiling for prompts of up to {model.spec.sequence_length:,} tokens")
  continued = Continuation(model, request)
  watch.at("continuing prompts", STARTING)

  def answer(prompt: str, cut: Cut) -> str:
    continued.tokens(prompt)  # what is refused is not printed
    if unseen := model.spec.unseen([prompt]):
      say_wrapped(unseen)
    printer = Printer([prompt])
    try:
      continued(prompt, lambda text: printer(0, text), cut)
    finally:
      printer.close()
    return continued.sampler.pace.text()

  _hold(watch.stop, _HELP, answer)


def _converse(chat: Chat, stop: StopRequest) -> None:
  """Reads turns from standard input, and replies, to its end."""
  first = len(chat.messages)

  def answer(turn: str, cut: Cut) -> str:
    if turn.strip() == _NEW:
      del chat.messages[first:]
      chat.dropped = 0
      return ""
    if not turn.strip():
      return ""
    _show(chat, turn, cut)
    return chat.sampler.pace.text()

  _hold(stop, _CHAT_HELP, answer)


def _show(chat: Chat, turn: str, cut: Cut | None = None) -> None:
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


class _Interrupts:
  """Ctrl-C: it ends the answer that is being generated; where none is, the dialogue.

  Attributes:
    cut: whether the answer is to end.
  """

  def __init__(self):
    self.cut, self._generating, self._ended = False, False, -AGAIN_SECONDS

  @contextlib.contextmanager
  def generating(self) -> Iterator[None]:
    """Inside it, Ctrl-C ends the answer."""
    self.cut, self._generating = False, True
    try:
      yield
    finally:
      self._generating = False

  def take(self) -> bool:
    """Returns whether a Ctrl-C has been dealt with; of one that arrives twice, the second, too."""
    now = time.monotonic()
    if not self._generating:
      return now - self._ended < AGAIN_SECONDS
    self.cut, self._ended = True, now
    return True


def _hold(stop: StopRequest, explanation: str, answer: Callable[[str, Cut], str]) -> None:
  """Reads lines from standard input, and answers them, to its end.

  Args:
    stop: of this process.
    explanation: printed at first, in a terminal.
    answer: takes a line, and a function that says whether the answer is to end; prints it, and
      returns what to say of it in a terminal: how fast it was. Its ValueErrors are printed.
  """
  terminal, interrupts = sys.stdin.isatty(), _Interrupts()
  if terminal:
    import readline  # noqa: F401 editing and history of lines, for `input`

    print(explanation, flush=True)
  with stop.interrupts(interrupts.take), _terminal_restored(terminal):
    for line in _lines(terminal):
      try:
        with interrupts.generating():
          said = answer(line, lambda: interrupts.cut)
      except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr, flush=True)
        continue
      if terminal and said:
        print(help.styles(sys.stdout).dim(f"[{said}]"), flush=True)


def _lines(terminal: bool) -> Iterator[str]:
  while True:
    try:
      yield input(_ASK if terminal else "")
    except EOFError:
      if terminal:
        print()
      return
    except UnicodeDecodeError as error:
      print(f"error: that is not valid UTF-8 ({error})", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _terminal_restored(terminal: bool) -> Iterator[None]:
  """Restores the terminal where the process is ended while a line is edited."""
  if not terminal:
    yield
    return
  number = sys.stdin.fileno()
  mode = termios.tcgetattr(number)
  with preemption.undone(lambda: termios.tcsetattr(number, termios.TCSANOW, mode)):
    yield
