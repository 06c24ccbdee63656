"""The adapter for lm-evaluation-harness, against a stand-in of its documented interface.

The harness itself is no requirement of the tests: `LM` here has the abstract methods and the
attributes of its `lm_eval.api.model.LM`, and requests have `args` as its Instances do.
"""

import abc
import dataclasses
import sys
import types

import pytest

from inference import harness
from inference.scoring import Scorer, pair
from input_pipeline.text.tokenizer import ByteTokenizer
from tests.helpers.jobs import first_state, make_job

VALUES = {"data.sequence_length": 32, "data.global_batch_size": 4, "model.layers": 1}


class LM(abc.ABC):
  """The base class, as lm_eval 0.4 documents it."""

  def __init__(self):
    self._rank, self._world_size, self.cache_hook = 0, 1, object()

  @abc.abstractmethod
  def loglikelihood(self, requests): ...

  @abc.abstractmethod
  def loglikelihood_rolling(self, requests): ...

  @abc.abstractmethod
  def generate_until(self, requests): ...

  def apply_chat_template(self, chat_history, add_generation_prompt=True):
    raise NotImplementedError

  @property
  def tokenizer_name(self):
    raise NotImplementedError

  def chat_template(self, chat_template=False):
    return ""


@dataclasses.dataclass
class Instance:
  """A request."""

  args: tuple


def requests(*args):
  return [Instance(one) for one in args]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """The job, its parameters, and the model of the harness."""
  template = tmp_path_factory.mktemp("template") / "t.jinja"
  template.write_text(
    "{% for m in messages %}{{ m.role|length }}:{{ m.content }}.{% endfor %}"
    "{% if add_generation_prompt %}9:{% endif %}"
  )
  job = make_job("dp4_tp2", "lm", **VALUES)
  with job.config.unlocked():
    job.config.data.chat_template = str(template)
  params = first_state(job).params
  with pytest.MonkeyPatch.context() as patch:
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
      patch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = LM
    model = harness.model(job, params)
  assert isinstance(model, LM)
  return job, params, model


def test_log_likelihoods(made):
  job, params, model = made
  pairs = [("1+1:", " 2"), ("", "17"), ("0" * 50, "123")]
  rows = [pair(ByteTokenizer(), *one, begin=False, length=32) for one in pairs]
  expected = Scorer(job)((params, {}), rows)
  found = model.loglikelihood(requests(*pairs), disable_tqdm=True)
  assert found == [(score.log_likelihood, score.greedy) for score in expected]
  assert all(type(value) is float and type(greedy) is bool for value, greedy in found)


def test_a_long_text_is_the_sum_of_its_windows(made):
  _, _, model = made
  text = "0123456789" * 4
  [whole] = model.loglikelihood_rolling(requests((text,)))
  # Its second window has as much context as fits: 31 tokens, of which the last 8 are scored.
  parts = model.loglikelihood(requests(("", text[:32]), (text[7:32], text[32:])))
  assert whole == pytest.approx(sum(value for value, _ in parts), rel=1e-5)


def test_generation_ends_before_the_first_of_until(made):
  _, _, model = made
  settings = {"until": [], "max_gen_toks": 4, "do_sample": False, "temperature": 0.0}
  [text] = model.generate_until(requests(("12", settings)))
  assert len(text) == 4
  [cut] = model.generate_until(requests(("12", {**settings, "until": [text[1]]})))
  assert cut == text.partition(text[1])[0]
  with pytest.raises(ValueError, match="num_beams=3, which this model has not"):
    model.generate_until(requests(("12", {"num_beams": 3})))


def test_the_chat_template_writes_contexts(made):
  _, _, model = made
  chat = [{"role": "user", "content": "11"}]
  assert model.apply_chat_template(chat) == "4:11.9:"
  chat.append({"role": "assistant", "content": "22"})
  assert model.apply_chat_template(chat, add_generation_prompt=False) == "4:11.9:22"
  assert model.chat_template(True) == model.chat_template("default") != model.chat_template(False)
  assert model.tokenizer_name == ByteTokenizer.digest


def test_without_the_harness_it_is_refused(made, monkeypatch):
  job, params, _ = made
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  with pytest.raises(ValueError, match="lm-evaluation-harness is not installed"):
    harness.model(job, params)
