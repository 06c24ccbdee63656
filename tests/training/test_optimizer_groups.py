"""Parameter groups: each parameter is updated as its group says, and what is wrong is refused."""

import numpy as np
import pytest

from configs import base
from configs.schema import finalize, validate
from tests.helpers.jobs import SMALL, make_job
from tests.training.test_optimizer import CONSTANT, drawn, updates_of
from training.optimizers.build import make_optimizer
from training.specs import resolve

SHAPES = {"kernel": (3, 4), "scale": (4,), "bias": (4,), "table": (5, 3)}
RATE = 8e-3
LION = {"optimizer.name": "lion", "optimizer.learning_rate": RATE}


def config_of(groups, /, recipe="lm", **overrides):
  config = base.get_config(recipe)
  config.update_from_flattened_dict(
    {**SMALL[recipe], **CONSTANT, "optimizer.groups": groups, **overrides}
  )
  config = finalize.finalize(config, "cpu")
  validate.check(config, dict(config.mesh))
  return config


def lion(grads, params, rate, decay, b1=0.9, b2=0.99):
  """Returns the updates of two steps of Lion (arXiv:2302.06675, algorithm 2)."""
  momentum, found = 0.0, []
  for gradient in grads:
    found.append(-rate * (np.sign(b1 * momentum + (1 - b1) * gradient) + decay * params))
    momentum = b2 * momentum + (1 - b2) * gradient
  return found


def test_each_parameter_is_updated_as_its_group_says():
  groups = (
    {"parameters": "tab*", "learning_rate": 0.5, "weight_decay": 0.0},
    {"parameters": ("scale", "table"), "weight_decay": 0.3},
    {"parameters": "bias", "name": "sgd", "learning_rate": 2.0},
  )
  config = config_of(groups, **LION, **{"optimizer.weight_decay": 0.1})
  params, steps = drawn(0, SHAPES), [drawn(1, SHAPES), drawn(2, SHAPES)]
  found = updates_of(make_optimizer(resolve(config).optimizer, params), params, steps)
  wanted = {
    "kernel": (RATE, 0.1),  # in no group
    "table": (0.5, 0.0),  # of the first of two groups
    "scale": (RATE, 0.3),  # a group's own decay is for all that it has
  }
  for name, (rate, decay) in wanted.items():
    for ours, theirs in zip(
      found, lion([grads[name] for grads in steps], params[name], rate, decay), strict=True
    ):
      np.testing.assert_allclose(ours[name], theirs, rtol=1e-5, err_msg=name)
  for ours, grads in zip(found, steps, strict=True):
    np.testing.assert_allclose(ours["bias"], -2.0 * grads["bias"], rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["muon", "soap", "contrib.muon"])
def test_a_group_without_matrices_has_the_adamw_of_an_optimizer_of_matrices(name):
  groups = ({"parameters": "embed/*", "learning_rate": 0.5},)
  job = make_job("dp4_tp2", "lm", **{"optimizer.name": name, "optimizer.groups": groups})
  placed = [n for n in job.placements["optimizer"] if n.endswith("/mu/embed/table")]
  assert len(placed) == 1
  job.compile_train_step()
  named = ({"parameters": "embed/*", "name": name},)
  with pytest.raises(ValueError, match=r"would update 0 of the 1 trained parameters"):
    make_job("single", "lm", **{"optimizer.groups": named})


def test_a_group_that_names_an_optimizer_has_none_of_the_others_arguments():
  others = {"optimizer.name": "muon", "optimizer.arguments": "per_head=True"}
  plain, same = (
    make_job("single", "lm", **others, **{"optimizer.groups": ({"parameters": "embed/*", **own},)})
    for own in ({"name": "adamw"}, {"name": "adamw", "arguments": ""})
  )
  assert plain.placements["optimizer"] == same.placements["optimizer"]
  with pytest.raises(ValueError, match="per_head: adamw has no such argument"):
    make_job(
      *("single", "lm"),
      **{"optimizer.groups": ({"parameters": "embed/*", "arguments": "per_head=True"},)},
    )


def test_state_is_placed_as_its_parameters_and_there_is_none_of_others():
  groups = (
    {"parameters": "*norm/*", "name": "sgd"},
    {"parameters": "embed/*", "name": "adafactor", "weight_decay": 0.0},
  )
  factored = {"optimizer.groups": groups, "mesh.fsdp": 2, "mesh.tensor": 2}
  job = make_job("single", "lm", **factored)
  placed = job.placements["optimizer"]
  moments = [name for name in placed if "/mu/" in name]
  assert moments
  for name in moments:
    parameter = name.partition("/mu/")[2]
    assert "norm" not in parameter
    assert not parameter.startswith("embed")
    assert placed[name].spec == job.placements["parameters"][parameter].spec
  assert any(name.endswith("v/embed/table") for name in placed)


@pytest.mark.parametrize(
  ("groups", "said"),
  [
    (
      ({"parameters": "embed", "learning_rate": 0.1},),
      "'embed' matches no trained parameter",
    ),
    (
      (
        {"parameters": "*", "learning_rate": 0.1},
        {"parameters": "embed/*", "learning_rate": 0.2},
      ),
      "group 2: its parameters are all in groups before it",
    ),
    (
      ({"parameters": "*", "name": "rmsprop"},),
      "group 1: optimizer.weight_decay=0.1: rmsprop takes none",
    ),
  ],
)
def test_groups_that_do_not_fit_the_parameters_are_refused(groups, said):
  with pytest.raises(ValueError, match=r"optimizer\.groups") as error:
    make_job("single", "lm", **{"optimizer.groups": groups})
  assert said in str(error.value)
