"""Prompts that are continued one after another, with the programs compiled once: for a terminal."""

import dataclasses
from collections.abc import Callable
from typing import Any

from inference.cached_sampler import CachedSampler
from inference.request import Request, check, drawable, encoded
from inference.text_stream import Pace, Row, as_bytes
from training.setup import Job


class Continuation:
  """Continues prompts of any length that fits a row.

  Attributes:
    settings: of the draws; others need no compilation.
    pace: of the last prompt.
  """

  def __init__(self, job: Job, params: Any, settings: Request, variables: Any = None):
    """Compiles the programs.

    Args:
      job: whose model and mesh are used.
      params: the parameters, placed as the job's.
      settings: of the draws; its prompts are not used. A text ends after max_new_tokens, or where
        the row is full.
      variables: the model's other variables, where it has any.

    Raises:
      ValueError: the model does not generate, or a setting is wrong.
    """
    check(job.config, dataclasses.replace(settings, prompts=("",), max_new_tokens=1))
    self._sampler = CachedSampler(job)
    self._params, self._variables, self.settings = params, variables, settings
    self._count = 0
    self.pace = Pace()

  def tokens(self, prompt: str) -> list[int]:
    """Returns the tokens of a prompt.

    Raises:
      ValueError: it is no text of the tokenizer, or leaves no place in a row.
    """
    config = self._sampler.job.config
    [tokens] = encoded(config, Request((prompt,)))
    length = config.data.sequence_length
    if len(tokens) >= length:
      raise ValueError(
        f"the prompt is {len(tokens):,} tokens long, and with at least one more it is to fit "
        f"data.sequence_length={length:,}; shorten it"
      )
    if (largest := int(tokens.max())) >= (known := drawable(config)):
      raise ValueError(f"the prompt has token {largest}; the model knows those below {known}")
    return tokens.tolist()

  def __call__(
    self, prompt: str, write: Callable[[str], None], cut: Callable[[], bool] | None = None
  ) -> bytes:
    """Returns what the model generates behind a prompt.

    The first one is continued as `Sampler` does it with the same settings, each later one by the
    next seed: so the same prompt is continued in another way.

    Args:
      prompt: a text; "" begins a document.
      write: called with text as it is generated, in complete characters.
      cut: called after each token; True ends the text.

    Raises:
      ValueError: as `tokens`.
    """
    tokens, coder = self.tokens(prompt), self._sampler.tokenizer
    seed = (self.settings.seed + self._count) % 2**32
    request = dataclasses.replace(self.settings, seed=seed)
    self._count += 1
    row = Row(as_bytes(prompt), [as_bytes(stop) for stop in request.stop], coder)
    self.pace = Pace()
    drawing = self._sampler.draw(self._params, self._variables, tokens, request)
    for number, token in enumerate(drawing, 1):
      self.pace.tick()
      if text := row.add(token):
        write(text)
      if row.done or number >= request.max_new_tokens or (cut is not None and cut()):
        break
    if not row.done and (text := row.end()):
      write(text)
    return bytes(row.drawn)
