"""How tests compile: with little effort."""

import importlib.metadata

# Changes neither the partitioning nor the collectives.
OPTIONS = {
  "xla_backend_optimization_level": "0",
  # One LLVM module: several, for threads that compile at once, take a third more in total.
  "xla_cpu_parallel_codegen_split_count": "1",
}
# The XLA of JAX 0.10 needs a third of the time where it may emit fusions as it did before. The XLA
# of 0.12 has no such choice.
if tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) < (0, 12):
  OPTIONS["xla_cpu_use_fusion_emitters"] = "false"
# The value of the config key compiler_options.
FAST = ",".join(f"{name}={value}" for name, value in OPTIONS.items())
