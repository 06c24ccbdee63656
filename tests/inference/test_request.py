"""Prompts as tokens, and what of a request is refused."""

import dataclasses
import functools

import numpy as np
import pytest

from commands import flags
from inference import request as requests
from inference.request import Request, check, first_words, text_spec
from input_pipeline.row_source import array_source
from input_pipeline.text.tokenizer import ByteTokenizer
from tests.helpers.jobs import make_job


class Upper(ByteTokenizer):
  """Takes text alone; ids are those of the letters, after a BOS where one is asked for."""

  name, size, end, start = "upper", 128, 1, 2

  def __init__(self, *, has_bos):
    self.has_bos = has_bos

  def encode(self, texts):
    return [np.frombuffer(text.decode().upper().encode(), np.uint8) for text in texts]


@functools.cache
def small():
  return make_job("single", "lm").config


def config_of(monkeypatch, tokenizer=None, **data):
  """Returns a config whose data is read with a tokenizer."""
  config = small().copy_and_resolve_references()
  config.model.vocabulary_size = 256
  config.data.sequence_length = 80
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


def rows_of(length, *rows):
  """Returns a source of rows of (tokens, which of them are trained on), filled up with zeros."""
  shape = (len(rows), length)
  arrays = {"tokens": np.zeros(shape, np.int32), "weights": np.zeros(shape, np.float32)}
  for place, (ids, weights) in enumerate(rows):
    arrays["tokens"][place, : len(ids)] = ids
    arrays["weights"][place, : len(weights)] = weights
  return array_source("rows", arrays)


def test_a_run_samples_behind_the_first_words_of_its_evaluation_split(monkeypatch):
  config = config_of(monkeypatch, Upper(has_bos=True), name="text", packing="best_fit")
  config.evaluation.sample_tokens = 100
  ids = [2, *b"\nFIRST CITIZEN:\nBEFORE WE PROCEED"]
  source = rows_of(config.data.sequence_length, (ids, [1] * len(ids)))
  wanted = first_words(config, source)
  assert wanted.prompts == ("FIRST CITIZEN:",)
  assert wanted.max_new_tokens == config.data.sequence_length - 15  # and the start
  assert (wanted.temperature, wanted.top_k, wanted.stop_tokens) == (0.8, 50, ())
  assert (flags.TEMPERATURE.default, flags.TOP_K.default) == (0.8, 50)
  long = [*b"ONE TWO THREE FOUR FIVE SIX SEVEN"]
  source = rows_of(config.data.sequence_length, (long, [1] * 9))
  assert first_words(config, source).prompts == ("ONE TWO THREE FOUR FIVE SIX",)
  assert first_words(config, rows_of(8, ([], []))).prompts == ("",)  # a document's beginning
  config.data.name = "python_source"
  assert first_words(config, source).prompts == ("def",)  # a space begins the next token
  monkeypatch.undo()
  config = config_of(monkeypatch, name="python_source")
  config.evaluation.sample_tokens = 100
  assert first_words(config, source).prompts == ("def ",)


def test_a_run_on_conversations_samples_the_first_reply(monkeypatch):
  config = config_of(monkeypatch, Upper(has_bos=False), name="conversations", packing="best_fit")
  config.evaluation.sample_tokens = 5
  length = config.data.sequence_length
  long = ([9] * length, [0] * (length - 1) + [1])  # leaves no room for a reply
  asked = [2, 65, 66, 67]  # the target at 67 is the first token of the reply
  wanted = first_words(config, rows_of(length, long, ([*asked, 68, 69], [0, 0, 0, 1, 1])))
  assert wanted.prompts == (tuple(asked),)
  pairs = rows_of(length, (asked, [0, 0, 1]))
  fields = {f"chosen_{key}": value for key, value in pairs.fields.items()}
  read = pairs.read
  pairs = dataclasses.replace(
    pairs, fields=fields, read=lambda ids: {f"chosen_{k}": v for k, v in read(ids).items()}
  )
  assert first_words(config, pairs).prompts == ((2, 65, 66),)
  spec = text_spec(config)
  monkeypatch.setattr(Upper, "special", {"<s>": 2})
  assert spec.shown(wanted.prompts[0]) == b"<s>ABC"
  assert spec.shown("as it is") == "as it is"
