"""Keys that do nothing for a config's optimizer, model or task are refused where they are set."""

import pathlib
import types

import jax
import pytest
from ml_collections import ConfigDict

from configs import base
from configs.keys import table
from configs.schema import finalize, recipes, validate
from configs.schema.axis_tables import AXIS_TABLES
from models import MODELS
from partitioning.mesh_sizes import resolve_sizes
from runtime.devices import Devices
from tests.helpers.jobs import SMALL
from training import optimizer
from training.optimizer import Optimizer
from training.setup import prepare
from training.tasks import TASKS

SIZES = resolve_sizes({}, None)


def finalized(recipe, **overrides):
  config = base.get_config(recipe)
  config.update_from_flattened_dict({**SMALL.get(recipe, {}), **overrides})
  return finalize.finalize(config, "cpu")


def lines(recipe, **overrides):
  return list(validate.unread_errors(finalized(recipe, **overrides), SIZES))


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_the_recipe_s_own_values_and_those_that_turn_a_key_off_are_accepted(recipe):
  assert lines(recipe) == []
  for name in ("sgd", "adamw", "lion"):
    assert lines(recipe, **{"optimizer.name": name}) == []
    assert lines(recipe, **{"optimizer.name": name, "optimizer.weight_decay": 0.0}) == []


def test_what_compare_exchanges_the_optimizer_of_is_not_refused():
  config = base.get_config("lm")
  config.optimizer.beta_1, config.optimizer.name = 0.7, "sgd"
  assert list(validate.unread_errors(finalize.finalize(config, "cpu"), SIZES)) != []
  validate.reset_optimizer(config)
  assert list(validate.unread_errors(finalize.finalize(config, "cpu"), SIZES)) == []


@pytest.fixture
def register(monkeypatch):
  """Returns a function that registers an entry as a config file does, for one test."""

  def add(registry, name, value):
    monkeypatch.setitem(registry, name, value)
    monkeypatch.setitem(registry.origins, name, pathlib.Path("mine.py"))

  return add


def test_a_registered_optimizer_uses_the_keys_that_it_names(register):
  register(optimizer.OPTIMIZERS, "mine", Optimizer(print, keys={"beta_2": "decay"}))
  mine = {"optimizer.name": "mine", "optimizer.beta_2": 0.5}
  assert lines("lm", **mine) == []
  [line] = lines("lm", **mine, **{"optimizer.beta_1": 0.5})
  assert line == (
    "optimizer.beta_1=0.5: mine does not use it; of those keys it uses beta_2, weight_decay; its "
    "own arguments are given by optimizer.arguments"
  )


def test_a_key_that_a_recipe_adds_for_its_optimizer_is_refused_under_another(register):
  def small():
    config = recipes.mlp()
    config.optimizer.rank = 3
    return config

  register(recipes.RECIPES, "small", small)
  register(optimizer.OPTIMIZERS, "mine", Optimizer(print, keys={"rank": "rank"}))
  assert lines("small") == []
  assert lines("small", **{"optimizer.name": "mine", "optimizer.rank": 4}) == []
  [line] = lines("small", **{"optimizer.rank": 4})
  assert line.startswith("optimizer.rank=4: adamw does not use it; of those keys it uses beta_1")


def test_a_registered_model_uses_the_keys_that_it_names(register):
  def small():
    config = recipes.mlp()
    config.model.name = "mine"
    return config

  register(recipes.RECIPES, "small", small)
  register(AXIS_TABLES, "mine", AXIS_TABLES["mlp"])
  model = types.SimpleNamespace()
  register(MODELS, "mine", model)
  keys = {"training.rematerialization": "full", "partitioning.sequence_parallel": True}
  assert lines("small", **keys) == [
    "training.rematerialization='full': the model mine does not use it; leave it at 'none', or "
    "name it in the model's READS",
    "partitioning.sequence_parallel=True: the model mine does not use it; leave it at False",
  ]
  model.READS = ("training.rematerialization",)
  assert [line.partition("=")[0] for line in lines("small", **keys)] == [
    "partitioning.sequence_parallel"
  ]


def test_an_optimizer_in_the_table_of_the_project_uses_the_keys_of_its_row(monkeypatch):
  monkeypatch.setitem(optimizer.OPTIMIZERS, "ours", Optimizer(print, keys={"beta_2": "decay"}))
  assert lines("lm", **{"optimizer.name": "ours", "optimizer.beta_2": 0.5}) == []


# ---- No other key of these sections does nothing ----


class Recording(ConfigDict):
  """A config that notes each key that is read."""

  def __init__(self, given, prefix, read):
    super().__init__()
    object.__setattr__(self, "_noted", None)
    for key, value in given.items():
      section = isinstance(value, ConfigDict)
      self[key] = Recording(value, f"{prefix}{key}.", read) if section else value
    object.__setattr__(self, "_noted", (prefix, read))

  def __getitem__(self, key):
    if self._noted:
      self._noted[1].add(self._noted[0] + key)
    return super().__getitem__(key)


SECTIONS = ("model", "training", "optimizer", "partitioning")
# Read by the loop, or before a job is prepared.
ELSEWHERE = {
  *table.needing("mesh.stage"),  # where that is set; refused where it is not
  "model.depth",  # becomes sizes
  "model.global_every",  # where model.window is set; refused where it is not
  *table.needing("model.experts"),  # where that is set; refused where it is not
  "model.expert_feedforward_size",
  "model.latent_norm_epsilon",  # where model.attention is latent; refused where it is not
  "model.base_head_size",  # where model.base_width is set; refused where it is not
  "model.vocabulary_size",  # by vocabulary_multiple's rounding; the sampler
  "partitioning.sequence_parallel",  # resolved into an axis table
  "training.steps",  # also by the cosine schedule
  "training.tokens",  # become steps, as do those below
  "optimizer.warmup_tokens",
  "optimizer.decay_tokens",
  "optimizer.decay_steps",  # by the schedule wsd; refused with others
  "optimizer.decay",
  "optimizer.schedule_on_resume",  # where a run resumes
  "optimizer.clip_window",  # with clip_quantile; refused without
  "training.matmul_scaling",  # with matmul_dtype; refused without
  "training.bad_step_deviations",
  "training.bad_step_skips",
  "training.bad_step_window",
  "training.callbacks",
  "training.check_memory",
  "training.max_rollbacks",
  "training.on_bad_step",
  "training.recompute_every_steps",
  "training.replica_check_every_steps",
}
# Which validate.py refuses for a task without tokens, by checks of their own.
OF_TOKENS = {"training.attention_kernel", "training.loss_chunks"}


@pytest.mark.parametrize("recipe", ["lm", "mlp", "vit"])
def test_every_key_is_read_or_listed(recipe):
  config, read = finalized(recipe), set()
  keys = {f"{section}.{key}" for section in SECTIONS for key in config[section]}
  job = prepare(Recording(config, "", read), Devices("cpu", True, SIZES))
  with job.tracing():
    jax.eval_shape(job.program.train_step, job.state, job.batch)
  listed = set(validate.unread(config)) | ELSEWHERE
  optimizer_keys = optimizer.optimizer_keys(config.optimizer.name)
  listed |= {f"optimizer.{key}" for key in ("beta_1", "beta_2", "epsilon", "momentum")}
  listed |= {"optimizer.weight_decay", "optimizer.independent_weight_decay"}
  listed |= set() if TASKS[config.task].of_tokens else OF_TOKENS
  listed -= {f"optimizer.{key}" for key in optimizer_keys}
  unread = {key for key in keys if key not in read} - listed
  assert unread == set(), (
    "put a key in ELSEWHERE if the loop reads it, else say in its row who does"
  )
