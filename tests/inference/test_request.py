"""Prompts as tokens, and what of a request is refused."""

import numpy as np
import pytest

from inference import request as requests
from inference.request import Request, check, first_words, text_spec
from input_pipeline.text.tokenizer import ByteTokenizer
from tests.helpers.jobs import make_job


class Upper(ByteTokenizer):
  """Takes text alone; ids are those of the letters, after a BOS where one is asked for."""

  name, size, end, start = "upper", 128, 1, 2

  def __init__(self, *, has_bos):
    self.has_bos = has_bos

  def encode(self, texts):
    return [np.frombuffer(text.decode().upper().encode(), np.uint8) for text in texts]


def config_of(monkeypatch, tokenizer=None, **data):
  """Returns a config whose data is read with a tokenizer."""
  config = make_job("single", "lm").config.copy_and_resolve_references()
  config.model.vocabulary_size = 256
  with config.unlocked():
    config.data.update(data)
  if tokenizer is not None:
    monkeypatch.setattr(requests, "_loaded", lambda spec: tokenizer)
  return config


def tokens(config, *prompts):
  return [ids.tolist() for ids in text_spec(config).encoded(prompts)]


def test_bytes_are_tokens_and_an_empty_prompt_begins_a_document(monkeypatch):
  config = config_of(monkeypatch)
  assert tokens(config, "ab", "", "\udcff") == [[97, 98], [0], [255]]


def test_a_model_of_packed_documents_has_the_start_before_each_prompt(monkeypatch):
  config = config_of(monkeypatch, Upper(has_bos=False), packing="best_fit")
  assert tokens(config, "ab", "") == [[2, 65, 66], [2]]
  config = config_of(monkeypatch, Upper(has_bos=False), packing="concatenate")
  assert tokens(config, "ab", "") == [[65, 66], [2]]
  config = config_of(monkeypatch, Upper(has_bos=True), packing="concatenate")
  assert tokens(config, "ab", "") == [[2, 65, 66], [2]]


def test_a_prompt_that_the_tokenizer_cannot_read_is_named(monkeypatch):
  config = config_of(monkeypatch, Upper(has_bos=False))
  with pytest.raises(ValueError, match=r"(?s)sampling is refused.*prompt 2: .*can't decode"):
    check(text_spec(config), Request(("ab", b"\xff"), max_new_tokens=1))


def test_only_tokens_that_stand_for_something_are_drawn(monkeypatch):
  assert text_spec(config_of(monkeypatch)).drawable == 256
  assert text_spec(config_of(monkeypatch, Upper(has_bos=False))).drawable == 128


def test_a_run_on_other_text_ends_with_a_document_from_its_beginning(monkeypatch):
  config = config_of(monkeypatch, Upper(has_bos=True), name="text", packing="best_fit")
  config.evaluation.sample_tokens = 100
  wanted = first_words(config)
  assert wanted.prompts == ("",)
  assert wanted.max_new_tokens == config.data.sequence_length - 1
  config.data.name = "python_source"
  assert first_words(config).prompts == ("def",)  # a space is the beginning of the next token
  monkeypatch.undo()
  config = config_of(monkeypatch, name="python_source")
  config.evaluation.sample_tokens = 100
  assert first_words(config).prompts == ("def ",)
