r"""A Llama-style decoder on CPUs compared with a plain hand-written step: `ratio R` per mesh.

  python -m benchmarks.llama_cpu [--overhead_steps=3] [--rounds=8]

4 layers, width 256, feed-forward 1024, 8 heads and 4 key/value heads of 32, vocabulary 1024,
sequence 256, global batch 16, float32, no rematerialization, AdamW; on one device, fsdp=8, data=8
and data=4 x tensor=2. Method and reference are those of benchmarks/step_overhead.py.

Exits with 1 if a ratio is above 1.00 (rounded), or two losses differ.
"""

from absl import app, flags

from benchmarks import step_overhead

flags.set_default(step_overhead.STEPS, 3)
flags.set_default(step_overhead.ROUNDS, 8)

STRATEGIES = ("single", "fsdp8", "dp8", "dp4_tp2")
MODEL = {
  "model.layers": 4,
  "model.model_size": 256,
  "model.feedforward_size": 1024,
  "model.heads": 8,
  "model.kv_heads": 4,
  "model.head_size": 32,
  "model.vocabulary_size": 1024,
  "data.sequence_length": 256,
  "data.global_batch_size": 16,
  "training.rematerialization": "none",
  # At the recipe's, rounding grows a thousandfold in ten steps, and no two losses can be compared.
  "optimizer.learning_rate": 1e-4,
}
MOST_RATIO = 1.005


def main(argv: list[str]) -> int:
  """Measures every mesh; returns the exit code."""
  del argv
  configs = {name: step_overhead.get_config(f"lm:{name}", MODEL) for name in STRATEGIES}
  return step_overhead.measure_all(configs, MOST_RATIO)


if __name__ == "__main__":
  app.run(main)
