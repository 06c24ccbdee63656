"""The verb `sample`: continues prompts with a checkpoint's model, or has a conversation with it.

Without prompts, in a terminal, it asks for them.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Callable
from typing import Any

from commands import build, chat, dialogue, flags, preflight_facts
from inference import sampler
from inference.cached_sampler import Continuation
from inference.request import Request, check
from inference.text_stream import Printer
from processes.coordination import current
from processes.watchdog import STARTING, Watchdog
from runtime import exit_codes
from training import restore, run_tokenizer
from training.metrics.console import say
from training.setup import Job

_HELP = "type a text to continue; Ctrl-C ends a continuation, and then the program, as Ctrl-D does"


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Continues prompts with a checkpoint's model."""
  if flags.PROMPT.value and flags.PROMPT_FILE.value:
    raise ValueError("--prompt and --prompt_file: give one of the two")
  prompts = flags.PROMPT.value
  if flags.CHAT.value:
    return chat.prepare(watch)
  if flags.PROMPT_FILE.value:
    prompts = flags.content(flags.PROMPT_FILE).splitlines()
  location = flags.CHECKPOINT.value or str(flags.workdir())
  run_tokenizer.adopt(flags.CONFIG.value, location)
  [ready] = build.prepare(flags.CONFIG)
  asked = not prompts and current().alone and sys.stdin.isatty() and sys.stdout.isatty()
  request = Request(
    tuple(prompts or [""]),
    max_new_tokens=flags.MAX_NEW_TOKENS.value,
    temperature=flags.TEMPERATURE.value,
    top_k=flags.TOP_K.value,
    top_p=flags.TOP_P.value,
    seed=flags.SEED.value,
    stop=tuple(flags.STOP.value),
  )
  # Of texts that are asked for in turn, each takes what is left of its row.
  check(ready.config, dataclasses.replace(request, max_new_tokens=1) if asked else request)
  digest = hashlib.sha256(repr(request.prompts).encode()).hexdigest()[:16]
  preflight_facts.about_to_run(ready, {}, flags.workdir(), writes=False, more={"prompts": digest})
  _, params, variables = restore.model_state(ready, location)

  def run() -> int:
    if asked:
      _ask(ready, params, request, variables, watch)
      return exit_codes.DONE
    watch.at("sampling", STARTING)
    sampler.show(ready, params, request, variables, pace=sys.stderr.isatty())
    return exit_codes.DONE

  return run


def _ask(ready: Job, params: Any, request: Request, variables: Any, watch: Watchdog) -> None:
  """Continues the lines that are typed in a terminal."""
  watch.at("compiling", STARTING)
  say(f"compiling for prompts of up to {ready.config.data.sequence_length:,} tokens")
  continued = Continuation(ready, params, request, variables)
  watch.at("continuing prompts", STARTING)

  def answer(prompt: str, cut: Callable[[], bool]) -> str:
    continued.tokens(prompt)  # what is refused is not printed
    printer = Printer([prompt])
    try:
      continued(prompt, lambda text: printer(0, text), cut)
    finally:
      printer.close()
    return continued.pace.text()

  dialogue.hold(watch.stop, _HELP, answer)
