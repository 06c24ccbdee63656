"""The verb `sample`: continues prompts with a checkpoint's model, or has a conversation with it."""

import hashlib
from collections.abc import Callable

from etils import epath

from commands import build, chat, flags, preflight_facts
from inference import sampler
from inference.request import Request, check
from processes.watchdog import STARTING, Watchdog
from runtime import exit_codes
from training import restore, run_tokenizer


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Continues prompts with a checkpoint's model."""
  if flags.PROMPT.value and flags.PROMPT_FILE.value:
    raise ValueError("--prompt and --prompt_file: give one of the two")
  prompts = flags.PROMPT.value
  if flags.CHAT.value:
    return chat.prepare(watch)
  if flags.PROMPT_FILE.value:
    prompts = epath.Path(flags.PROMPT_FILE.value).read_bytes().splitlines()
  location = flags.CHECKPOINT.value or str(flags.workdir())
  run_tokenizer.adopt(flags.CONFIG.value, location)
  [ready] = build.prepare(flags.CONFIG)
  request = Request(
    tuple(prompts or [""]),
    max_new_tokens=flags.MAX_NEW_TOKENS.value,
    temperature=flags.TEMPERATURE.value,
    top_k=flags.TOP_K.value,
    top_p=flags.TOP_P.value,
    seed=flags.SEED.value,
    stop=tuple(flags.STOP.value),
  )
  check(ready.config, request)
  digest = hashlib.sha256(repr(request.prompts).encode()).hexdigest()[:16]
  preflight_facts.about_to_run(ready, {}, flags.workdir(), writes=False, more={"prompts": digest})
  _, params, variables = restore.model_state(ready, location)

  def run() -> int:
    watch.at("sampling", STARTING)
    sampler.show(ready, params, request, variables)
    return exit_codes.DONE

  return run
