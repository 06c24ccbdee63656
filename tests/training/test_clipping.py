"""Clipping by group and by a quantile of past norms, next to NumPy."""

import numpy as np
import pytest

from configs import base
from configs.schema import finalize, validate
from tests.helpers.jobs import SMALL, first_state, host_batch, make_job
from tests.training.test_optimizer import CONSTANT, drawn, updates_of
from training.optimizers.build import make_optimizer
from training.specs import resolve

SHAPES = {"kernel": (3, 4), "bias": (4,), "table": (5, 3)}
SGD = {"optimizer.name": "sgd", "optimizer.learning_rate": 1.0, **CONSTANT}


def config_of(**overrides):
  config = base.get_config("mlp")
  keys = {f"optimizer.{key}": value for key, value in overrides.items()}
  config.update_from_flattened_dict({**SMALL["mlp"], **SGD, **keys})
  config = finalize.finalize(config, "cpu")
  validate.check(config, dict(config.mesh))
  return config


def norm(*arrays):
  return np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in arrays))


def grads_of(steps):
  """Returns gradients whose norms differ."""
  return [
    {name: (1 + step % 3) * x for name, x in drawn(step, SHAPES).items()}
    for step in range(1, 1 + steps)
  ]


def test_each_group_is_clipped_by_its_own_norm():
  groups = (
    {"parameters": "table", "clip_norm": 0.5},
    {"parameters": "bias", "clip_norm": 0.0},
  )
  config = config_of(groups=groups, clip_groups=True, clip_norm=2.0)
  params, grads = drawn(0, SHAPES), grads_of(1)
  [found] = updates_of(make_optimizer(resolve(config).optimizer, params), params, grads)
  for name, limit in (("table", 0.5), ("kernel", 2.0)):
    assert norm(grads[0][name]) > limit
    wanted = -grads[0][name] * limit / norm(grads[0][name])
    np.testing.assert_allclose(found[name], wanted, rtol=1e-5)
  np.testing.assert_allclose(found["bias"], -grads[0]["bias"], rtol=1e-6)


@pytest.mark.parametrize("by_group", [False, True])
def test_the_limit_is_a_quantile_of_the_last_norms(by_group):
  groups = ({"parameters": "table", "learning_rate": 0.5},)
  config = config_of(
    groups=groups, clip_groups=by_group, clip_quantile=0.5, clip_window=3, clip_norm=0.0
  )
  params, grads = drawn(0, SHAPES), grads_of(6)
  found = updates_of(make_optimizer(resolve(config).optimizer, params), params, grads)
  parts = [("table",), ("kernel", "bias")] if by_group else [tuple(SHAPES)]
  below = 0
  for names in parts:
    norms = [norm(*(one[name] for name in names)) for one in grads]
    for step, one in enumerate(grads):
      limit = np.quantile(norms[max(0, step - 2) : step + 1], 0.5)
      below += norms[step] > limit
      for name in names:
        rate = 0.5 if name == "table" else 1.0
        wanted = -rate * one[name] * min(1, limit / norms[step])
        np.testing.assert_allclose(found[step][name], wanted, rtol=1e-5)
  assert below > 1


def test_a_step_is_clipped_once_and_its_norm_is_that_before_clipping():
  keys = {"optimizer.clip_norm": 0.0, "optimizer.clip_quantile": 0.2, "optimizer.clip_window": 4}
  job = make_job("dp8", "mlp", **SGD, **keys)
  step, state = job.compile_train_step().function, first_state(job)
  norms = []
  for number in range(3):
    state, metrics = step(state, host_batch(job, seed=number))
    norms.append(float(metrics["grad_norm"]))
  np.testing.assert_allclose(state.optimizer.norms[:3], norms, rtol=1e-5)
  assert np.isnan(state.optimizer.norms[3])


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"clip_groups": True}, "clip_groups=True is about optimizer.groups, which is (); set that"),
    (
      {
        "clip_groups": True,
        "clip_norm": 0.0,
        "groups": ({"parameters": "*", "weight_decay": 0.0},),
      },
      "optimizer.clip_groups: optimizer.clip_norm=0 clips no group; set that",
    ),
    ({"clip_window": 7}, "clip_window=7 is about optimizer.clip_quantile, which is 0.0; set that"),
    ({"clip_quantile": 0.5, "clip_norm": 1.0}, "set that to 0"),
    ({"clip_quantile": 1.5, "clip_norm": 0.0}, "clip_quantile=1.5: at least 0 and below 1"),
    ({"clip_quantile": 0.5, "clip_norm": 0.0, "clip_window": 65}, "clip_window=65: at most 64"),
    (
      {"groups": ({"parameters": "*", "clip_norm": 1.0},)},
      "clip_norm=1.0: at least 0, and with optimizer.clip_groups=true only",
    ),
  ],
)
def test_what_does_not_go_together_is_refused(keys, said):
  with pytest.raises(ValueError, match="the config is refused") as error:
    config_of(**keys)
  assert said in str(error.value)
