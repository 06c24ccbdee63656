"""The sections about a run: its mesh, evaluation, files, processes and plans."""

from configs.keys.row import ACCEPT, MAY_CHANGE, REFUSED, Key, Required, Rows, Unset, shared
from runtime.forms import MOST_STEP

GENERAL: Rows = {
  "seed": Key(0, "of parameters, data order and dropout", most=2**32 - 1, resume=REFUSED),
  # On resume: the recipe's name; what it sets is compared key by key.
  "argument": Key(
    Required(str), "the recipe, as given; part of the default workdir", resume=MAY_CHANGE
  ),
  # On resume: may allow less precision; those of the device are not in it.
  "compiler_options": Key(
    "",
    "Of XLA, for every compiled step, besides the defaults of docs/performance.md: "
    '"name=value,name="; a name without a value leaves that default out',
  ),
  "compilation_cache_dir": Key("~/.cache/meshwright/compilation", '"": off', resume=MAY_CHANGE),
  "memory_limit_gib": Key(
    Unset(float), "per device (CPU: all); unset: detected", unit="GiB", resume=MAY_CHANGE
  ),
  "task": Key(Required(str), "what is learned; the recipe fixes it", resume=REFUSED),
}

_AXES: Rows = {
  "data": Key(1, "splits the batch; -1 on one axis: all remaining devices", unit="devices"),
  "fsdp": Key(1, "splits the batch, and parameters and optimizer state", unit="devices"),
  "stage": Key(1, "pipeline stages: splits the layers (docs/strategies.md)", unit="devices"),
  "expert": Key(1, "splits the experts, and elsewhere the batch (docs/experts.md)", unit="devices"),
  "context": Key(1, "splits the sequence", unit="devices"),
  "tensor": Key(
    1, "splits attention heads, the MLP's hidden dim and the vocabulary", unit="devices"
  ),
}
MESH: Rows = shared(_AXES, least=-1)

MESH_DCN: Rows = {
  "data": Key(1, "copies of the mesh, each on its slices, that split the batch", unit="slices"),
  "fsdp": Key(1, "fsdp across slices, besides mesh.fsdp within one", unit="slices"),
  "stage": Key(1, "pipeline stages across slices, besides mesh.stage within one", unit="slices"),
}

PARTITIONING: Rows = {
  "sequence_parallel": Key(
    Unset(bool),
    "Sequence parallelism: between blocks, split the sequence over tensor as well. By default "
    "where mesh.tensor > 1 on TPUs and GPUs",
    readers=("regions",),
    off=False,
  ),
  "collective_matmul": Key(
    Unset(bool),
    "Matmuls of sequence-parallel regions as rings, which send one chunk while they multiply "
    "another. By default on TPUs, where chunks are large enough",
    readers=("regions",),
    off=False,
  ),
  "reshard_after_forward": Key(
    True,
    "All-gather kernels over fsdp again in the backward pass; False: once, and keep those of all "
    "layers for it, in the compute dtype",
    readers=("regions",),
  ),
  "overrides": Key(
    (),
    'PartitionSpecs of single parameters, applied after the tables: (("layers/mlp/up/kernel", '
    '(None, "fsdp", "tensor")), ...)',
  ),
  "max_replicated_bytes": Key(
    Unset(int),
    "Limit on the replicated bytes of parameters and optimizer state per device; unset: none.",
    unit="bytes",
    least=0,
    most=MOST_STEP,
  ),
}

_ADAPTERS: Rows = {
  "alpha": Key(16.0, "an adapter's output is scaled by alpha / rank", above=0, resume=ACCEPT),
  "targets": Key(
    ("*",),
    'Linear layers that get an adapter, by name or pattern: ("query", "value"), ("layers/mlp/*",)',
  ),
  "rs": Key(False, "rsLoRA: scaled by alpha / rank**0.5", resume=ACCEPT),
  "dropout": Key(0.0, "dropout of the adapters' inputs", below=1, resume=ACCEPT),
}

LORA: Rows = {
  "rank": Key(
    0,
    "rank of the adapters; 0: off",
    unit="dims",
    readers=("decoder",),
    excludes={
      "model.attention=latent": "its projections have no adapters; training.trainable chooses what "
      "is trained",
      "model.experts": "adapters are for dense models",
    },
  ),
  **shared(_ADAPTERS, needs="lora.rank"),
}

_OF_TEACHER: Rows = {
  "model": Key(
    (),
    "The teacher's model, as (key, value) of its section `model`: read from its folder",
    resume=MAY_CHANGE,
  ),
  "top": Key(
    0,
    "of a teacher that is stored, the tokens of each position: read from its folder; 0: in memory",
    unit="tokens",
    resume=MAY_CHANGE,
  ),
  "weight": Key(0.5, "w: the loss is (1 - w) data + w temperature**2 divergence", resume=ACCEPT),
  "temperature": Key(1.0, "divides the logits of both", above=0, resume=ACCEPT),
  "divergence": Key(
    "forward",
    "KL(teacher, model), or reverse: KL(model, teacher)",
    choices=("forward", "reverse"),
    resume=ACCEPT,
  ),
}

# On resume the teacher's parameters are compared themselves.
DISTILLATION: Rows = {
  "teacher": Key(
    "",
    "A frozen model that the run learns from too: DIR[/STEP] of a run, a model folder, or the "
    'folder of `prepare --teacher=`; "": none',
    resume=MAY_CHANGE,
    readers=("decoder", "tokens", "plain"),
    excludes={
      "mesh.stage": "a teacher has no pipeline",
      "model.mtp_layers": "further tokens have no teacher",
      "training.z_loss": "the loss is of two parts already",
      "training.elastic": "a teacher is not moved to fewer replicas",
      "training.frozen_dtype=int8|nf4": "a teacher's kernels are not quantized",
      "optimizer.outer_every_steps": "a teacher is in no group",
    },
  ),
  **shared(_OF_TEACHER, needs="distillation.teacher"),
}

EVALUATION: Rows = {
  "every_steps": Key(
    0, "periodic evaluation, besides the final one; 0: off", unit="steps", least=0
  ),
  "steps": Key(
    0,
    "of a periodic evaluation, drawn at random, the same rows each time; 0: the whole split",
    unit="batches",
  ),
  "final_steps": Key(
    Unset(int),
    "of the final evaluation and of `evaluate`, drawn at random; 0: the whole split. By default "
    "`evaluate` takes the whole split, and a run training.steps / 3, or all where there are no "
    "more",
    unit="batches",
    least=0,
  ),
  "ema_decay": Key(
    0.0,
    "evaluate, sample and export read the average with this decay, of optimizer.ema_decays; 0: "
    "the parameters themselves",
  ),
  "metrics": Key(
    (),
    'registered metrics of the tokens, besides the task\'s: ("top_1",)',
    readers=("decoder", "tokens", "plain"),
  ),
  "tasks": Key(
    "",
    "Files of records (docs/trained_models.md) on which each evaluation scores the model, as "
    "`evaluate --tasks` does",
    readers=("text", "tokens"),
  ),
  "sample_tokens": Key(
    0,
    "Tokens sampled at the end of training, and with metrics.report at each evaluation; 0: off. "
    "With data=conversations, preferences or prompts 120",
    unit="tokens",
    readers=("text", "tokens"),
  ),
}

METRICS: Rows = {
  "every_steps": Key(10, "", unit="steps"),
  "tensorboard": Key(True, ""),
  "report": Key(
    True,
    "Write WORKDIR/run.html at each evaluation and at the end, with samples of a language model",
  ),
  "sinks": Key(
    (), "Where else metrics go: csv, wandb, mlflow, trackio, aim, and what a file has registered"
  ),
  "project": Key("meshwright", "under which wandb, mlflow, trackio and aim compare runs"),
  "run_name": Key("", 'in wandb, mlflow, trackio and aim; "": the workdir\'s name'),
  "sinks_python": Key(
    "", 'The Python of another environment, which has their packages; "": this one'
  ),
  "sink_wait_seconds": Key(
    30.0,
    "At the end, for them to deliver the last lines; 5 where the run is asked to stop",
    unit="seconds",
  ),
}

CHECKPOINT: Rows = {
  "every_steps": Key(50, "and at the end; 0: only at the end", unit="steps", least=0),
  "keep": Key(2, "number of newest steps that are kept", unit="checkpoints"),
  "keep_every_steps": Key(0, "also keep steps that are a multiple of this; 0: off", unit="steps"),
  "keep_best": Key("", "also keep the best step by a metric, such as eval_loss"),
  "initialize_from": Key(
    "",
    "DIR[/STEP] of another run, or a model folder: where this run's parameters start from. By "
    "default model.folder, where the model is a folder's",
  ),
  "memory_every_steps": Key(
    0,
    "each process also keeps its part of the state in the memory of its host, and a peer a copy of "
    "what no other host has; 0: off",
    unit="steps",
  ),
  "local_dir": Key(
    "",
    'a folder on a disk of each host that has these instead of its memory; "": /dev/shm',
    needs="checkpoint.memory_every_steps",
  ),
  "verify": Key(
    "full",
    "checked before reading: full (every byte), size (of each file) or off",
    choices=("full", "size", "off"),
  ),
}

PROFILE: Rows = {
  "start_step": Key(0, "traced to WORKDIR/profile", unit="steps"),
  "steps": Key(0, "traced to WORKDIR/profile", unit="steps"),
}

PROCESSES: Rows = {
  "start_timeout_seconds": Key(
    300, "for all processes to arrive, and for a first step", unit="seconds"
  ),
  "heartbeat_seconds": Key(
    100, "a process without a heartbeat for this long counts as dead", unit="seconds", least=5
  ),
  "deadline_seconds": Key(
    0, "limit for a step, below heartbeat_seconds; 0: learned from the run", unit="seconds"
  ),
  "input_timeout_seconds": Key(1800, "limit for a batch, of a run of one process", unit="seconds"),
  "slow_ratio": Key(2.0, "a process this many times slower than the others is named; 0: off"),
  "lease_seconds": Key(
    30.0,
    "without a heartbeat for this long another run may take the workdir",
    unit="seconds",
    least=1,
  ),
  "owner_wait_seconds": Key(
    30.0, "how long a start waits for a live owner of the workdir", unit="seconds"
  ),
}

PLANNING: Rows = {
  "constants": Key("", 'override assumed speeds: "matmul=0.7,v5p.hbm_bytes=95e9"'),
  "price_per_chip_hour": Key(0.0, "in any currency; 0: unknown", unit="currency per chip and hour"),
  "token_budget": Key(0.0, "tokens to train on; 0: those of training.steps", unit="tokens"),
  "restart_seconds": Key(
    600.0, "of plan --nodes: from a failure to the next step of the run", unit="seconds"
  ),
  "save_seconds": Key(
    1.0,
    "of plan --nodes: that a save blocks training, beside copying the state to the host",
    unit="seconds",
  ),
  "memory_covers": Key(
    0.9,
    "of plan --nodes: share of failures after which checkpoints in memory are whole",
    below=1.000001,
  ),
  "storage_bandwidth": Key(
    1e9,
    "of plan --nodes: bytes per second that a node writes of a checkpoint",
    unit="bytes per second",
    above=0,
  ),
  "cache_dir": Key("~/.cache/meshwright/plans", 'finished plans; "": no cache'),
}
