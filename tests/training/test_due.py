"""After which steps a run logs, evaluates and saves."""

from ml_collections import ConfigDict

from training.loop import Due

STEPS = 10


def due(**keys):
  config = {
    "training": {"steps": STEPS},
    "metrics": {"every_steps": 4},
    "evaluation": {"every_steps": 0, "steps": 2, "final_steps": 7},
    "checkpoint": {"every_steps": 0, "memory_every_steps": 0, "keep_best": ""},
  }
  for key, value in keys.items():
    section, name = key.split("__")
    config[section][name] = value
  return Due.of(ConfigDict(config))


def steps(is_due):
  return [step for step in range(1, STEPS + 1) if is_due(step)]


def test_the_first_and_the_last_step_are_logged_and_the_last_is_evaluated_and_saved():
  assert steps(due().metrics) == [1, 4, 8, 10]
  assert steps(due().evaluation) == steps(due().save) == [10]


def test_schedules_and_what_is_ranked():
  assert steps(due(evaluation__every_steps=3).evaluation) == [3, 6, 9, 10]
  assert steps(due(checkpoint__every_steps=5, evaluation__every_steps=3).save) == [5, 10]
  assert steps(due(checkpoint__memory_every_steps=4).memory) == [4, 8]
  ranked = due(checkpoint__keep_best="loss", evaluation__every_steps=3)
  assert steps(ranked.save) == [3, 6, 9, 10]
  assert ranked.evaluation_batches(3) == {"steps": 2, "ranking_steps": 2}
  assert due().evaluation_batches(STEPS) == {"steps": 7, "ranking_steps": 0}
