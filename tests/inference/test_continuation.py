"""Prompts in turn: as a sampler continues them, on a mesh, with the programs compiled once."""

import dataclasses

import pytest

from inference import chat
from inference.chat import Continuation
from inference.request import Request
from inference.sampler import Sampler, TrainedModel
from tests.helpers.jobs import first_state, make_job

VALUES = {"data.sequence_length": 40, "data.global_batch_size": 4, "model.layers": 1}
SETTINGS = Request((), max_new_tokens=9, temperature=1.0, seed=5)
PROMPT = "0123456"


@pytest.fixture(scope="module")
def made():
  job = make_job("dp4_tp2", "lm", **VALUES)
  return job, first_state(job).params


@pytest.fixture(scope="module")
def continued(made):
  piece, chat.PIECE = chat.PIECE, 4  # a prompt is read in several pieces
  yield Continuation(TrainedModel(*made), SETTINGS)
  chat.PIECE = piece


def test_the_first_is_what_a_sampler_draws_and_the_next_by_the_next_seed(made, continued):
  job, params = made
  written = []
  found = [continued(PROMPT, written.append), continued(PROMPT[:3], written.append)]
  sampler = Sampler(job, dataclasses.replace(SETTINGS, prompts=(PROMPT,)))
  for drawn, prompt, seed in zip(found, (PROMPT, PROMPT[:3]), (5, 6), strict=True):
    request = dataclasses.replace(SETTINGS, prompts=(prompt,), seed=seed)
    assert sampler(params, request) == [drawn]
  assert found[0] != found[1]
  assert "".join(written) == "".join(one.decode(errors="replace") for one in found)
  assert continued.pace.tokens == sampler.pace.tokens == 9


def test_a_text_ends_by_a_cut_at_a_stop_text_and_where_the_row_is_full(continued):
  assert len(continued(PROMPT, lambda text: None, lambda: True)) == 1
  assert continued.pace.tokens == 1
  continued.settings = dataclasses.replace(SETTINGS, max_new_tokens=1000, temperature=0.0)
  drawn = continued(PROMPT, lambda text: None)
  assert len(drawn) == 40 - len(PROMPT) + 1
  stop = drawn[3:5].decode(errors="replace")
  continued.settings = dataclasses.replace(continued.settings, stop=(stop,))
  assert continued(PROMPT, lambda text: None) == drawn[: drawn.find(stop.encode()) + 2]


def test_what_does_not_fit_is_refused(made, continued):
  with pytest.raises(ValueError, match=r"40 tokens long.*data.sequence_length=40; shorten"):
    continued("0" * 40, print)
  with pytest.raises(ValueError, match="the prompt has token 122; the model knows those below 61"):
    continued("z", print)
  with pytest.raises(ValueError, match="top_k=-1"):
    Continuation(TrainedModel(*made), dataclasses.replace(SETTINGS, top_k=-1))
