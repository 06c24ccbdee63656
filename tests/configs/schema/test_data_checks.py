"""What of a mixture or a ramp is refused, each by one line that names what is wrong."""

import pytest
from ml_collections import ConfigDict

from configs.schema import data_checks
from input_pipeline.ramp import Ramp
from tests.configs.loading import finalized, refusal

# ------------------------------ data.sources and data.stages ------------------------------

WEB = {"name": "web", "files": "web/", "weight": 0.7}
CODE = {"name": "code", "files": "src/", "weight": 0.3, "maximum_epochs": 0}


def wrong(sources=(WEB, CODE), stages=(), **keys):
  data = {
    "name": "text",
    "files": "",
    "evaluation_files": "",
    "text_feature": "",
    "sources": sources,
  } | keys
  return list(data_checks.mixture_errors(ConfigDict({**data, "stages": stages})))


def test_what_is_right():
  assert wrong() == wrong(sources=()) == []
  assert wrong(stages=((5, {"web": 1}), (9, {"code": 0.5, "web": 0.0}))) == []


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"sources": (1,)}, "data.sources=(1,): a tuple of sources"),
    ({"sources": (WEB, WEB)}, "data.sources: 2 sources have the name 'web'"),
    ({"sources": ({**WEB, "wieght": 1},)}, "source 'web': unknown key 'wieght'"),
    (
      {"sources": ({"name": "web", "weight": 1},)},
      "source 'web': files is missing; a source is such as",
    ),
    (
      {"sources": ({**WEB, "weight": -1},)},
      "weight: a number of at least 0 is expected, and -1 is th",
    ),
    ({"sources": ({**WEB, "weight": True},)}, "weight: a number of at least 0"),
    ({"sources": ({**WEB, "weight": float("nan")},)}, "and NaN is there"),
    (
      {"sources": ({**WEB, "maximum_epochs": -1},)},
      "maximum_epochs: an integer is expected, and -1 is there",
    ),
    ({"sources": ({**WEB, "maximum_epochs": 1.5},)}, "an integer is expected, and 1.5 is there"),
    ({"sources": ({**WEB, "name": "a/b"},)}, "source 'a/b': name: letters, digits, _ . and - is"),
    ({"sources": ({**WEB, "files": ""},)}, "source 'web': files: a path is expected, and"),
    ({"sources": ({**WEB, "weight": 0}, {**CODE, "weight": 0.0})}, "all weights are 0"),
    ({"stages": ((3, {"wb": 1.0}),)}, "from step 3: unknown source 'wb'; there are web, code"),
    ({"stages": ((3, {"web": 0.0}),)}, "from step 3: all weights are 0"),
    ({"stages": ((3, {"web": -2}),)}, "from step 3, source 'web': a number of at least 0"),
    ({"stages": ((0, {"web": 1}),)}, "from step 0: steps must ascend from 1"),
    ({"stages": ((5, {"web": 1}), (5, {"code": 1}))}, "from step 5: steps must ascend"),
    ({"stages": ({"web": 1},)}, "is not a step with its weights, such as ((1000,"),
  ],
)
def test_what_is_wrong(keys, said):
  [line] = wrong(**keys)
  assert said in line


# ------------------------------ ramps ------------------------------

B, T = "data.batch_size_ramp", "data.sequence_length_ramp"


def test_batches_of_a_ramp_are_not_skipped_by_their_number():
  [line] = refusal(f"{B}=((0,8),(10,32)) data.skip_batches=(3,)", "lm")
  assert "name rows with data.skip_rows" in line


@pytest.mark.parametrize("tokens", [1, 8 * 128, 81 * 128, 10**5])
def test_tokens_become_the_steps_that_have_them(tokens):
  keys = {B: ((0, 8), (10, 16), (15, 32)), T: ((0, 32), (12, 128))}
  config = finalized(
    "lm", **keys, **{"training.tokens": tokens, "optimizer.warmup_tokens": tokens // 2}
  )
  ramp, steps = Ramp.of(config.data), config.training.steps
  assert ramp.taken(steps) * 128 >= tokens > ramp.taken(steps - 1) * 128
  warmup = config.optimizer.warmup_steps
  assert ramp.taken(warmup) * 128 >= tokens // 2
  assert warmup <= 1 or ramp.taken(warmup - 1) * 128 < tokens // 2


def test_the_tokens_of_a_decay_are_the_last_ones():
  keys = {B: ((0, 8), (10, 16), (15, 32)), "training.steps": 17, "optimizer.schedule": "wsd"}
  for rows, steps in ((1, 1), (32, 1), (33, 2), (64, 2), (65, 3), (80, 3), (144, 7), (145, 8)):
    config = finalized("lm", **keys, **{"optimizer.decay_tokens": rows * 128})
    assert config.optimizer.decay_steps == steps, rows
