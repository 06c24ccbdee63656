"""What of a mixture or a ramp is refused, each by one line that names what is wrong."""

import pytest
from ml_collections import ConfigDict

from configs.schema import data_checks, finalize, validate
from configs.single import get_config
from input_pipeline.ramp import Ramp
from partitioning.mesh_sizes import AXES

# ------------------------------ data.sources and data.stages ------------------------------

WEB = {"name": "web", "files": "web/", "weight": 0.7}
CODE = {"name": "code", "files": "src/", "weight": 0.3, "maximum_epochs": 0}


def wrong(sources=(WEB, CODE), stages=(), **keys):
  data = {"files": "", "evaluation_files": "", "text_feature": "", "sources": sources} | keys
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


# ------------------------------ ramps ------------------------------

ONE = dict.fromkeys(AXES, 1)
LM = {"data.global_batch_size": 32, "data.sequence_length": 128}


def finalized(recipe="lm", **overrides):
  """Returns a finalized config of one device."""
  config = get_config(recipe)
  for key, value in {**(LM if recipe == "lm" else {}), **overrides}.items():
    config.update_from_flattened_dict({key: value})
  return finalize.finalize(config, "cpu")


def refusal(sizes=None, recipe="lm", **overrides):
  """Returns why a config is refused."""
  with pytest.raises(ValueError, match="the config is refused") as caught:
    validate.check(finalized(recipe, **overrides), {**ONE, **(sizes or {})})
  return str(caught.value)


B, T = "data.batch_size_ramp", "data.sequence_length_ramp"


def test_a_ramp_is_taken():
  config = finalized(**{B: ((0, 8), (10, 32)), T: ((0, 32), (20, 128))})
  validate.check(config, {**ONE, "data": 4})


@pytest.mark.parametrize(
  ("key", "ramp", "said"),
  [
    (B, ((0, 8.0), (10, 32)), "stages (step, value from there on), such as ((0, 8), (100, 16))"),
    (B, (8, 32), "stages (step, value from there on)"),
    (B, ((5, 8), (10, 32)), "the first stage begins at step 0"),
    (B, ((0, 8), (0, 32)), "each step is larger than the one before"),
    (B, ((0, 32), (10, 8), (20, 32)), "each value is larger than the one before"),
    (B, ((0, 0), (10, 32)), "each value is at least 1"),
    (B, ((0, 8), (10, 16)), "ends with 16, and data.global_batch_size=32: the last stage has that"),
    (T, ((0, 32), (10, 64)), "ends with 64, and data.sequence_length=128"),
    (T, ((0, 48), (10, 128)), "48 does not divide data.sequence_length=128 into equal rows"),
  ],
)
def test_a_ramp_of_another_form_is_refused(key, ramp, said):
  assert said in refusal(**{key: ramp})


def test_every_stage_is_divided_by_devices_and_microbatches():
  said = refusal(
    {"data": 4, "fsdp": 2},
    **{
      B: ((0, 8), (10, 24), (20, 32)),
      "training.gradient_accumulation_steps": 2,
      "partitioning.activations.batch": ("data", "fsdp"),
    },
  )
  assert (
    "8 rows from step 0 on are not divisible by the batch axes data=4 x fsdp=2 and 2 microbatches "
    "= 16; make it 16"
  ) in said
  assert "24 rows from step 10 on" in said


def test_chunks_of_the_loss_are_parts_of_the_vocabulary_and_cut_no_rows():
  validate.check(finalized(**{T: ((0, 2), (10, 128)), "training.loss_chunks": 16}), ONE)


def test_rows_of_images_and_pairs_are_not_cut_and_batches_not_skipped():
  assert "does not use it" in refusal(recipe="mlp", **{T: ((0, 4),)})
  said = refusal(**{B: ((0, 8), (10, 32)), "data.skip_batches": (3,)})
  assert "name rows with data.skip_rows" in said


@pytest.mark.parametrize("tokens", [1, 8 * 128, 81 * 128, 10**5])
def test_tokens_become_the_steps_that_have_them(tokens):
  keys = {B: ((0, 8), (10, 16), (15, 32)), T: ((0, 32), (12, 128))}
  config = finalized(**keys, **{"training.tokens": tokens, "optimizer.warmup_tokens": tokens // 2})
  ramp, steps = Ramp.of(config.data), config.training.steps
  assert ramp.taken(steps) * 128 >= tokens > ramp.taken(steps - 1) * 128
  warmup = config.optimizer.warmup_steps
  assert ramp.taken(warmup) * 128 >= tokens // 2
  assert warmup <= 1 or ramp.taken(warmup - 1) * 128 < tokens // 2


def test_the_tokens_of_a_decay_are_the_last_ones():
  keys = {B: ((0, 8), (10, 16), (15, 32)), "training.steps": 17, "optimizer.schedule": "wsd"}
  for rows, steps in ((1, 1), (32, 1), (33, 2), (64, 2), (65, 3), (80, 3), (144, 7), (145, 8)):
    config = finalized(**keys, **{"optimizer.decay_tokens": rows * 128})
    assert config.optimizer.decay_steps == steps, rows
