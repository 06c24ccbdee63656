"""What of a mixture is refused, each by one line that names the source or the stage."""

import pytest
from ml_collections import ConfigDict

from configs.schema import mixture_checks

WEB = {"name": "web", "files": "web/", "weight": 0.7}
CODE = {"name": "code", "files": "src/", "weight": 0.3, "maximum_epochs": 0}


def wrong(sources=(WEB, CODE), stages=(), **keys):
  data = {"files": "", "evaluation_files": "", "text_feature": "", "sources": sources} | keys
  return list(mixture_checks.wrong(ConfigDict({**data, "stages": stages})))


def test_what_is_right():
  assert wrong() == wrong(sources=()) == []
  assert wrong(stages=((5, {"web": 1}), (9, {"code": 0.5, "web": 0.0}))) == []


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"sources": (1,)}, "data.sources=(1,): a tuple of sources"),
    ({"sources": (WEB, WEB)}, "data.sources: 2 sources have the name 'web'"),
    ({"sources": ({**WEB, "wieght": 1},)}, "source 'web': unknown key 'wieght'"),
    ({"sources": ({"name": "web", "weight": 1},)}, "source 'web': it has no files"),
    ({"sources": ({**WEB, "weight": -1},)}, "source 'web': weight=-1: a number of 0 or more"),
    ({"sources": ({**WEB, "weight": True},)}, "weight=True"),
    ({"sources": ({**WEB, "weight": float("nan")},)}, "weight=nan"),
    ({"sources": ({**WEB, "maximum_epochs": -1},)}, "maximum_epochs=-1: at least 1, or 0"),
    ({"sources": ({**WEB, "maximum_epochs": 1.5},)}, "maximum_epochs=1.5 is not an integer"),
    ({"sources": ({**WEB, "name": "a/b"},)}, "source 'a/b': the name is part of metrics' names"),
    ({"sources": ({**WEB, "files": ""},)}, "source 'web': files=''"),
    ({"sources": ({**WEB, "weight": 0}, {**CODE, "weight": 0.0})}, "all weights are 0"),
    ({"files": "a/"}, "data.files='a/': with data.sources, each source has its own files"),
    ({"sources": (), "stages": ((3, {}),)}, "data.stages: there is no mixture"),
    ({"stages": ((3, {"wb": 1.0}),)}, "from step 3: unknown source 'wb'; there are web, code"),
    ({"stages": ((3, {"web": 0.0}),)}, "from step 3: all weights are 0"),
    ({"stages": ((3, {"web": -2}),)}, "from step 3, source 'web': weight=-2"),
    ({"stages": ((0, {"web": 1}),)}, "from step 0: steps must ascend from 1"),
    ({"stages": ((5, {"web": 1}), (5, {"code": 1}))}, "from step 5: steps must ascend"),
    ({"stages": ({"web": 1},)}, "is not a step with its weights, such as ((1000,"),
  ],
)
def test_what_is_wrong(keys, said):
  [line] = wrong(**keys)
  assert said in line
