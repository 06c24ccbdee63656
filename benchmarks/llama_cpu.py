r"""A Llama-style decoder on CPUs compared with a plain hand-written step: `ratio R` per mesh.

  python -m benchmarks.llama_cpu [--overhead_steps=3] [--rounds=8] [--recompute=dots]

4 layers, width 256, feed-forward 1024, 8 heads and 4 key/value heads of 32, vocabulary 1024,
sequence 256, global batch 16, float32, AdamW; on one device, fsdp=8, data=8 and data=4 x tensor=2.
Method and reference are those of benchmarks/step_overhead.py. The reference saves what XLA decides;
--recompute is our `training.rematerialization`, of which `dots` is the fastest on CPUs.

Exits with 1 if a ratio is above 1.00 (rounded), or two losses differ.
"""

from absl import app, flags

from benchmarks import step_overhead

flags.set_default(step_overhead.STEPS, 3)
flags.set_default(step_overhead.ROUNDS, 8)

RECOMPUTE = flags.DEFINE_string("recompute", "none", "Our training.rematerialization.")
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
  # At the recipe's, rounding grows a thousandfold in ten steps, and no two losses can be compared.
  "optimizer.learning_rate": 1e-4,
}
MOST_RATIO = 1.005


def main(argv: list[str]) -> int:
  """Measures every mesh; returns the exit code."""
  del argv
  model = {**MODEL, "training.rematerialization": RECOMPUTE.value}
  configs = {name: step_overhead.get_config(f"lm:{name}", model) for name in STRATEGIES}
  return step_overhead.measure_all(configs, MOST_RATIO)


if __name__ == "__main__":
  app.run(main)
