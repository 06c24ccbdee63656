"""The benchmark of the loop beside the plain step runs, and both end with the same loss."""

import jax
from absl import flags

from benchmarks import step_overhead
from configs.schema import finalize
from runtime.devices import Devices
from tests.helpers.compiling import FAST
from training import setup

# Sizes are distinct, so that a swapped dim cannot pass.
SMALL = {
  **{"model.layers": 1, "model.model_size": 32, "model.feedforward_size": 40, "model.heads": 8},
  **{"model.kv_heads": 2, "data.global_batch_size": 8, "data.sequence_length": 12},
  **{"evaluation.sample_tokens": 0, "metrics.report": False, "metrics.tensorboard": False},
}


def test_a_case_is_measured_from_start_to_end(capsys, monkeypatch):
  """The whole benchmark: the loop in turns with the reference, and the saved last step."""
  flags.FLAGS.mark_as_parsed()
  for name, value in {"overhead_steps": 2, "rounds": 1}.items():
    monkeypatch.setattr(flags.FLAGS[name], "value", value)  # absl's saver drops flags defined since
  with jax.numpy_dtype_promotion("standard"):  # which optax needs
    config = step_overhead.get_config("lm:single", SMALL)
    config.compiler_options = FAST
    config = finalize.finalize(config, "cpu")
    ready = setup.prepare(config, Devices("cpu", True, config.mesh.to_dict()))
    assert step_overhead.measure("lm:single", ready, most=1000.0)
  assert "ratio" in capsys.readouterr().out
