"""A checkpoint as a model of lm-evaluation-harness, where that is installed.

  job, params, variables = interactive.load(config, "RUN")
  lm = harness.model(job, params, variables)
  lm_eval.simple_evaluate(model=lm, tasks=["arc_easy", "gsm8k"])

with `from commands import interactive` and `from inference import harness`. Written against the
interface `lm_eval.api.model.LM` of its version 0.4; it is no requirement of this
project. Work is spread over the mesh, and the harness sees one process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from inference import scoring
from inference.request import Request
from inference.sampler import BatchGenerator, TrainedModel, fitted
from inference.scoring import Scorer
from input_pipeline.text import chat_template as templates
from input_pipeline.text.conversations import Conversation
from training.setup import Job

NEW_TOKENS = 256  # where a task does not say how many, as in the harness


def model(job: Job, params: Any, variables: Any = None) -> Any:
  """Returns a model for `lm_eval.simple_evaluate`.

  Args:
    job: whose model, mesh, batch size and sequence length are used.
    params: the parameters, placed as the job's.
    variables: the model's other variables, where it has any.

  Raises:
    ValueError: lm-evaluation-harness is not installed, or the model cannot score texts.
  """
  try:
    from lm_eval.api.model import LM  # optional
  except ImportError as error:
    raise ValueError(
      "lm-evaluation-harness is not installed: `pip install lm-eval`; `evaluate --tasks=FILE.jsonl`"
      " does without it"
    ) from error

  class Model(Harness, LM):
    """The harness's interface, with our methods."""

    def __init__(self):
      LM.__init__(self)
      Harness.__init__(self, TrainedModel(job, params, variables))

  return Model()


class Harness:
  """The methods that the harness calls; `requests` are its Instances, whose `args` are read."""

  def __init__(self, model: TrainedModel):
    """Takes the model."""
    self._scorer, self._generator = Scorer(model.job), BatchGenerator(model.job)
    self._given = model.given
    self._spec, self._coder = model.spec, model.spec.tokenizer
    self._length = model.spec.sequence_length
    self._chat = False  # whether contexts are what the chat template has written

  @property
  def tokenizer_name(self) -> str:
    """The digest of the tokenizer: the harness caches requests under it."""
    return self._coder.digest

  def chat_template(self, chat_template: bool | str = False) -> str:
    """Returns what identifies the chat template; "" where none is asked for."""
    return self._template().digest if chat_template else ""

  def apply_chat_template(
    self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
  ) -> str:
    """Returns messages as a text; contexts are then read with the names of special tokens.

    Raises:
      ValueError: there is no chat template, or it refuses the messages.
    """
    self._chat = True
    template = self._template()
    if add_generation_prompt:
      return template.render(Conversation(chat_history), prompt=True)
    # The last message is the beginning of the answer: without what the template writes after it.
    before = template.render(Conversation(chat_history[:-1]), prompt=True)
    return before + chat_history[-1]["content"]

  def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
    """Returns (log-likelihood, greedy) of each (context, continuation)."""
    rows = [
      scoring.pair(
        self._coder, *one.args, begin=self._spec.begins, length=self._length, written=self._chat
      )
      for one in requests
    ]
    return [(score.log_likelihood, score.greedy) for score in self._scorer(self._given, rows)]

  def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
    """Returns the log-likelihood of each (text,), however long."""
    parts = [list(scoring.windows(self._coder, one.args[0], self._length)) for one in requests]
    scores = iter(self._scorer(self._given, [row for rows in parts for row in rows]))
    return [sum(next(scores).log_likelihood for _ in rows) for rows in parts]

  def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
    """Returns the continuation of each (context, settings), without the text that ends it."""
    return self._generator(self._given, [self._request(*one.args) for one in requests])

  def _request(self, context: str, settings: Mapping[str, Any]) -> Request:
    settings = dict(settings)
    until = settings.pop("until", None) or ()
    until = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    new = settings.pop("max_gen_toks", None) or settings.pop("max_new_tokens", None) or NEW_TOKENS
    drawn = settings.pop("do_sample", None)
    temperature = float(settings.pop("temperature", None) or 0)
    if drawn is False:
      temperature = 0.0
    elif drawn and not temperature:
      temperature = 1.0
    sampling = {
      "temperature": temperature,
      "top_k": int(settings.pop("top_k", None) or 0),
      "top_p": float(settings.pop("top_p", None) or 1),
    }
    if settings:
      named = ", ".join(f"{key}={value!r}" for key, value in settings.items())
      raise ValueError(f"the task generates with {named}, which this model has not")
    if self._chat:
      ids = self._coder.encode_template(context)[0]
    else:
      [ids] = self._spec.encoded([context])
    return fitted(ids, self._length, int(new), stop=until, **sampling)

  def _template(self) -> templates.ChatTemplate:
    return templates.load(self._spec.chat_template, self._coder)
