"""The network of four layers beside NumPy."""

import numpy as np

from tests.helpers.jobs import first_state, host_batch, make_job


def forward(params, inputs):
  x = inputs.astype(np.float64)
  for number in range(1, 5):
    layer = params[f"layer_{number}"]
    x = x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)
    x = np.maximum(x, 0) if number < 4 else x
  return x


def test_the_sums_of_both_tasks_are_numpys():
  for recipe in ("mlp", "mlp_tutorial"):
    job = make_job("dp4_tp2", recipe, **{"training.matmul_precision": "highest"})
    state, batch = first_state(job), host_batch(job)
    outputs = forward(state.params, batch["inputs"])
    weights = batch["weights"].astype(np.float64)
    if recipe == "mlp":
      largest = outputs.max(axis=1, keepdims=True)
      logs = outputs - largest - np.log(np.exp(outputs - largest).sum(axis=1, keepdims=True))
      rows = np.arange(len(outputs))
      wanted = {
        "loss": -(logs[rows, batch["targets"]] * weights).sum(),
        "correct": ((outputs.argmax(axis=1) == batch["targets"]) * weights).sum(),
      }
    else:
      wanted = {"loss": (((outputs - batch["targets"]) ** 2).sum(axis=1) * weights).sum()}
    found = job.compile(job.program.sums, state.params, batch).function(state.params, batch)
    for name, value in wanted.items():
      np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=f"{recipe} {name}")
