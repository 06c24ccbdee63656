"""The models by the name that `config.model.name` gives them.

Each module holds, beside its NNX modules: `legend(config)` (letter -> Dim), `parameters(config)`
(name pattern -> letters), `build(config, rngs)`, and `train_flops_per_example(config)`.
"""

from models import mlp, transformer

MODELS = {"transformer": transformer, "mlp": mlp}
