"""The benchmark beside PyTorch on a CPU, without PyTorch: batches of a text."""

import numpy as np

from benchmarks import gpu_protocol, nanogpt_cpu


def test_batches_of_a_text_are_a_function_of_the_step(tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("to be, or not to be: that is the question. " * 10)
  assert nanogpt_cpu.write_text(tmp_path, str(text)) == len(set(text.read_text()))
  ids = np.load(tmp_path / "train.npy")
  told = {"text": str(tmp_path), "seed": 3, "rows": 5}
  told["sizes"] = {"length": 8}
  batch = gpu_protocol.train_batch(told)
  tokens, targets = batch(7)
  np.testing.assert_array_equal(tokens, batch(7)[0])
  assert (tokens != batch(8)[0]).any()
  np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
  found = {row.tobytes() for row in np.lib.stride_tricks.sliding_window_view(ids, 8)}
  assert {row.astype(ids.dtype).tobytes() for row in targets} <= found
  validation = gpu_protocol.validation_batches(told)
  assert len(validation) == gpu_protocol.VALIDATION_BATCHES
  assert len(np.load(tmp_path / "validation.npy")) + len(ids) == len(text.read_text())
