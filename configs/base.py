"""Every key of a config, its unit and its default.

`get_config` is what a strategy file calls; `finalize` fills in, after all overrides, what is
derived; `check` finds keys that do not go together. The keys that a recipe fixes (model, data,
training) are in `schema/recipes.py`, the defaults of all in `schema/defaults.py`. An unset key
(None) is derived in `schema/finalize.py`.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict, config_dict

from configs.schema import axis_tables, optimizer_defaults, recipes

MESH = {
  "data": 1,  # splits the batch; -1 on one axis: all remaining devices
  "fsdp": 1,  # splits the batch, and parameters and optimizer state
  "stage": 1,  # pipeline stages: splits the layers (docs/pipeline.md)
  "expert": 1,  # splits the experts, and elsewhere the batch (docs/experts.md)
  "context": 1,  # splits the sequence
  "tensor": 1,  # splits attention heads, the MLP's hidden dim and the vocabulary
}
MESH_DCN = {  # the axes that may span slices
  "data": 1,  # copies of the mesh, each on its slices, that split the batch
  "fsdp": 1,  # fsdp across slices, besides mesh.fsdp within one
  "stage": 1,  # pipeline stages across slices, besides mesh.stage within one
}

# Keys of earlier versions -> what has come in their place.
REPLACED = {
  "data.kind": "the recipe's task says how rows are read; choose it with --config=FILE:RECIPE",
  "training.loss": "the recipe's task says what is minimised; choose it with --config=FILE:RECIPE",
}


def get_config(argument: str | None = None, *, mesh: Mapping[str, int] | None = None) -> ConfigDict:
  """Returns a locked config for a strategy (the mesh) and a recipe (the argument).

  Args:
    argument: what follows the colon in `--config=FILE:ARGUMENT`: a recipe's name (default
      `lm`), or `model=NAME,data=NAME` to pick the two apart.
    mesh: axis name -> size, for the axes larger than 1.

  Raises:
    ValueError: an unknown recipe, model or data set, with the nearest known name.
  """
  config = recipes.base(argument or "lm")
  optimizer_defaults.unset(config)
  config.seed = 0  # of parameters, data order and dropout
  config.argument = argument or "lm"  # the recipe, as given; part of the default workdir
  config.mesh = ConfigDict({**MESH, **(mesh or {})})
  config.mesh_dcn = ConfigDict(MESH_DCN)  # over slices; the size of an axis is the product
  config.partitioning = _partitioning(config.model.name)
  config.lora = ConfigDict(
    {
      "rank": 0,  # of the adapters; 0: off
      "alpha": 16.0,  # an adapter's output is scaled by alpha / rank
      # Linear layers that get an adapter, by name or pattern: ("query", "value"), ("layers/mlp/*",)
      "targets": ("*",),
      "rs": False,  # rsLoRA: scaled by alpha / rank**0.5
      "dropout": 0.0,  # of the adapters' inputs
    }
  )
  config.metrics = ConfigDict(
    {
      "every_steps": 10,
      "tensorboard": True,
      # Write WORKDIR/run.html at each evaluation and at the end, with samples of a language model
      "report": True,
      # Where else metrics go: csv, wandb, mlflow, trackio, aim, and what a file has registered
      "sinks": (),
      "project": "meshwright",  # under which wandb, mlflow, trackio and aim compare runs
      "run_name": "",  # in wandb, mlflow, trackio and aim; "": the workdir's name
      # The Python of another environment, which has their packages; "": this one
      "sinks_python": "",
      # At the end, for them to deliver the last lines; 5 where the run is asked to stop
      "sink_wait_seconds": 30.0,
    }
  )
  config.checkpoint = ConfigDict(
    {
      "every_steps": 50,  # and at the end; 0: only at the end
      "keep": 2,  # number of newest steps that are kept
      "keep_every_steps": 0,  # also keep steps that are a multiple of this; 0: off
      "keep_best": "",  # also keep the best step by a metric, such as eval_loss
      # DIR[/STEP] of another run, or a model folder: where this run's parameters start from. By
      # default model.folder, where the model is a folder's
      "initialize_from": "",
      "verify": "full",  # checked before reading: full (every byte), size (of each file) or off
    }
  )
  config.profile = ConfigDict({"start_step": 0, "steps": 0})  # traced to WORKDIR/profile
  config.processes = ConfigDict(
    {
      "start_timeout_seconds": 300,  # for all processes to arrive, and for a first step
      "heartbeat_seconds": 100,  # a process without a heartbeat for this long counts as dead
      "deadline_seconds": 0,  # limit for a step, below heartbeat_seconds; 0: learned from the run
      "input_timeout_seconds": 1800,  # limit for a batch, of a run of one process
      "slow_ratio": 2.0,  # a process this many times slower than the others is named; 0: off
      "lease_seconds": 30.0,  # without a heartbeat for this long another run may take the workdir
      "owner_wait_seconds": 30.0,  # how long a start waits for a live owner of the workdir
    }
  )
  config.planning = ConfigDict(
    {
      "constants": "",  # override assumed speeds: "matmul=0.7,v5p.hbm_bytes=95e9"
      "price_per_chip_hour": 0.0,  # in any currency; 0: unknown
      "token_budget": 0.0,  # tokens to train on; 0: those of training.steps
      "cache_dir": "~/.cache/meshwright/plans",  # finished plans; "": no cache
    }
  )
  # Of XLA, for every compiled step, besides the defaults of docs/defaults.md: "name=value,name="; a
  # name without a value leaves that default out
  config.compiler_options = ""
  config.compilation_cache_dir = "~/.cache/meshwright/compilation"  # "": off
  config.memory_limit_gib = config_dict.placeholder(float)  # per device (CPU: all); unset: detected
  config.lock()
  return config


def _partitioning(model: str) -> ConfigDict:
  """Returns the axis tables of a model: dim name -> mesh axes, outermost first."""
  tables = axis_tables.AXIS_TABLES[model]
  unset = {name: config_dict.placeholder(tuple) for name in tables["parameters"]}
  return ConfigDict(
    {
      "parameters": dict(tables["parameters"]),
      "activations": dict(tables["activations"]),
      "optimizer": unset,  # unset: as parameters. Another table than theirs is ZeRO-1
      # Sequence parallelism: between blocks, split the sequence over tensor as well. By default
      # where mesh.tensor > 1 on TPUs and GPUs
      "sequence_parallel": config_dict.placeholder(bool),
      # Its matmuls as rings, which send one chunk while they multiply another. By default on TPUs,
      # where chunks are large enough
      "collective_matmul": config_dict.placeholder(bool),
      # All-gather kernels over fsdp again in the backward pass; False: once, and keep those of all
      # layers for it, in the compute dtype
      "reshard_after_forward": True,
      "overrides": (),  # (("layers/mlp/up/kernel", (None, "fsdp", "tensor")), ...)
      # Limit on the replicated bytes of parameters and optimizer state per device; unset: none.
      "max_replicated_bytes": config_dict.placeholder(int),
    }
  )
