"""The section `training`: the step, and what happens where one goes wrong."""

from configs.keys.row import MAY_CHANGE, REFUSED, Key, Rows, Unset, shared
from runtime.forms import MOST_STEP

EXPERTS = "model.experts"
_OF_ANSWERS = {
  "task=dpo": "its loss is of pairs of rows",
  "task=grpo": "its loss is of drawn answers",
}

# Of pipeline stages.
_STAGES: Rows = {
  "pipeline": Key(
    "1f1b",
    "Pipeline stages (mesh.stage): 1f1b, interleaved (1F1B with pipeline_chunks parts of the "
    "layers per stage: a smaller bubble, more transfers) or gpipe (memory grows with the "
    "microbatches)",
    choices=("1f1b", "interleaved", "gpipe"),
  ),
  "microbatches": Key(
    Unset(int),
    "microbatches of a pipeline per accumulation step. By default the most that divide the rows, "
    "up to 4 * mesh.stage",
    unit="microbatches",
    off=1,
  ),
  "pipeline_ends": Key(
    "masked",
    "Embeddings and losses: masked (all stages compute them, and discard what they do not need) "
    "or conditional (only the first and the last stage compute them)",
    choices=("masked", "conditional"),
  ),
  "pipeline_gather": Key(
    "auto",
    "All-gather the parameters of a stage over fsdp once per step, where they and their gradients"
    " take at most a quarter of the memory (auto, or step), or for each microbatch (tick)",
    choices=("auto", "step", "tick"),
  ),
}

# Of the routers of experts.
_EXPERT_LOSSES: Rows = {
  "balance_loss": Key(
    0.0, "coefficient of the balance loss of experts, taken per row; 0: off", needs=EXPERTS
  ),
  "router_z_loss": Key(
    0.0, "coefficient of the z-loss of the routers' logits; 0: off", needs=EXPERTS
  ),
  "router_bias_rate": Key(
    0.0,
    "How far a step moves the biases of model.router_correction towards balanced experts",
    needs="model.router_correction",
  ),
}

_FURTHER: Rows = {
  "mtp_weight": Key(
    0.3,
    "weight in the loss of the mean over the layers of model.mtp_layers",
    above=0,
    needs="model.mtp_layers",
  )
}

_BAD_STEPS: Rows = {
  "bad_step_deviations": Key(
    0.0,
    "Treat a loss spike as a bad step, like a loss that is not finite: this many standard "
    "deviations above the mean of the last bad_step_window losses; 0: off",
    unit="standard deviations",
  ),
  "bad_step_window": Key(100, "steps whose losses a spike is compared with", unit="steps", least=2),
  "on_bad_step": Key(
    "stop",
    "stop, or roll_back: to the last good checkpoint, skipping the batch",
    choices=("stop", "roll_back"),
  ),
  "bad_step_skips": Key(
    1, "batches that a rollback skips, the last of them the bad step's", unit="batches"
  ),
}

TRAINING: Rows = {
  # On resume: unless fewer than are done.
  "steps": Key(0, "optimizer steps", unit="steps", least=1, resume=MAY_CHANGE),
  # On resume: they become steps.
  "tokens": Key(
    0,
    "instead of steps: as many as have these tokens; 0: steps",
    unit="tokens",
    most=MOST_STEP,
    resume=MAY_CHANGE,
  ),
  "gradient_accumulation_steps": Key(1, "microbatches per step", unit="microbatches"),
  **shared(_STAGES, needs="mesh.stage", resume=MAY_CHANGE),
  "pipeline_chunks": Key(
    2,
    "chunks of layers per stage, of interleaved",
    unit="chunks of layers",
    least=2,
    resume=MAY_CHANGE,
    needs="training.pipeline=interleaved",
  ),
  # On resume: another order of the same sums.
  "gradient_reduction": Key(
    "auto",
    "Reduce gradients over data once per step or after each microbatch; auto: once where possible",
    choices=("auto", "step", "microbatch"),
    resume=MAY_CHANGE,
  ),
  "gradient_reduction_dtype": Key(
    "compute",
    "Dtype in which gradients of kernels and embeddings are reduced over devices: compute "
    "(compute_dtype) or float32",
    choices=("compute", "float32"),
    readers=("decoder",),
  ),
  # On resume: the optimizer state has only those parameters.
  "trainable": Key(
    Unset(tuple),
    "Names of the parameters that are trained, as patterns (* also matches /); the others stay as"
    ' they are, without optimizer state: ("layers/attention/*", "final_norm/*"). All, or with '
    "lora.rank the adapters, which are trained besides what is given",
    resume=REFUSED,
  ),
  "parameter_dtype": Key(
    "float32",
    "Dtype of parameters between steps: bfloat16, float32 or float64. Updates are computed in "
    "float32 or wider",
    choices=("bfloat16", "float32", "float64"),
    resume=REFUSED,
  ),
  "stochastic_rounding": Key(
    Unset(bool),
    "Round updated bfloat16 parameters up or down at random, not to the nearest; by default on "
    "for them",
    needs="training.parameter_dtype=bfloat16",
    off=False,
  ),
  # On resume: the frozen parameters would be others.
  "frozen_dtype": Key(
    Unset(str),
    "Dtype of parameters that are not trained: bfloat16, or as parameter_dtype; int8 or nf4: so for"
    " the kernels of a decoder's layers, in blocks, and bfloat16 for the others",
    resume=REFUSED,
  ),
  "compute_dtype": Key(
    Unset(str),
    "Dtype of activations and matmuls. By default bfloat16 on accelerators, else parameter_dtype,"
    " but at least float32",
    usual=("bfloat16", "float32", "float64"),
  ),
  "matmul_precision": Key(
    Unset(str), "default, high or highest", choices=("default", "high", "highest")
  ),
  "matmul_dtype": Key(
    "compute",
    "Dtype of the matmuls in a decoder's layers: compute (as compute_dtype), int8 (TPU v5e and "
    "later) or float8 (H100 and later, TPU7x)",
    choices=("compute", "int8", "float8"),
    readers=("decoder",),
    excludes={EXPERTS: "experts are not multiplied in 8 bits"},
  ),
  # On resume: delayed: the state has the magnitudes of earlier steps.
  "matmul_scaling": Key(
    "current",
    "Where scales of 8-bit numbers come from: current (the array itself) or delayed (float8; the "
    "largest magnitudes of the last 16 steps)",
    choices=("current", "delayed"),
    needs="training.matmul_dtype=float8",
    excludes={
      "task=dpo": "its reference model has no earlier steps",
      "mesh.stage": "stages do not exchange the numbers of each layer that it keeps",
    },
    resume=REFUSED,
  ),
  "rematerialization": Key(
    "none",
    "What a layer saves for its backward pass: none (everything), elementwise (all but results of "
    "elementwise operations), dots (results of matmuls), full (its input), or by name: "
    '"full,query=save,key=save,layer_input=offload" (docs/memory.md)',
    usual=("none", "elementwise", "dots", "full"),
    readers=("layers",),
  ),
  "scan_unroll": Key(
    Unset(int),
    "Layers in one iteration of the scan over layers: transfers overlap with more work, and more "
    "is in memory. By default what docs/performance.md says.",
    unit="layers",
    resume=MAY_CHANGE,
    readers=("layers",),
    off=1,
  ),
  # On resume: by default it follows the platform.
  "attention_kernel": Key(
    Unset(str),
    "xla (has all scores in memory), blockwise (a scan over blocks of keys, for any platform), "
    "splash (JAX's flash attention for TPUs) or cudnn (cuDNN's, for Hopper and later GPUs). By "
    "default what docs/performance.md says.",
    resume=MAY_CHANGE,
    readers=("logits",),
    off="xla",
  ),
  # On resume: by default it follows the platform.
  "grouped_matmul": Key(
    Unset(str),
    "Experts' matmuls: tiles (a loop over tiles of rows) or ragged (JAX's ragged_dot, on TPUs). "
    "By default what docs/performance.md says.",
    choices=("tiles", "ragged"),
    resume=MAY_CHANGE,
    needs=EXPERTS,
    off="tiles",
  ),
  **_FURTHER,
  **shared(_EXPERT_LOSSES, excludes=_OF_ANSWERS),
  "z_loss": Key(
    0.0,
    "Coefficient of the squared logarithm of the softmax's normalizer, added to each token's "
    "loss; 0: off",
    readers=("text", "plain", "logits"),
  ),
  "dpo_beta": Key(
    0.1,
    "DPO (data=preferences): how strongly the model is kept near the reference",
    above=0,
    readers=("dpo",),
  ),
  "dpo_label_smoothing": Key(
    0.0, "the assumed share of pairs that are the wrong way around", below=0.5, readers=("dpo",)
  ),
  # On resume: by default it follows the mesh.
  "loss_chunks": Key(
    Unset(int),
    "Chunked cross-entropy: logits of one part of the vocabulary at a time. As many chunks as "
    "keep those of a device under 256 MiB, on GPUs under 4 GiB",
    unit="chunks",
    resume=MAY_CHANGE,
    readers=("logits",),
    off=1,
  ),
  **shared(_BAD_STEPS, resume=MAY_CHANGE),
  "metrics": Key(
    (),
    'registered metrics of the tokens that each logged step has: ("top_1",)',
    resume=MAY_CHANGE,
    readers=("decoder", "tokens", "plain"),
  ),
  "callbacks": Key(
    (), 'registered functions that are called every n steps: ("norms",)', resume=MAY_CHANGE
  ),
  "max_rollbacks": Key(
    3,
    "rollbacks of a run, over all its starts; the next bad step stops it",
    unit="rollbacks",
    resume=MAY_CHANGE,
  ),
  "recompute_every_steps": Key(
    0,
    "Compute every so many steps twice, the second time on other devices, and stop where the bits "
    "differ; takes a second state's memory; 0: off.",
    unit="steps",
    resume=MAY_CHANGE,
  ),
  "check_memory": Key(
    False,
    "Compare what each update reads of parameters and optimizer state with what the one before has "
    "left, and stop where bits have changed in memory",
    excludes={"optimizer.state_memory=host": "it is about the memory of devices"},
    resume=MAY_CHANGE,
  ),
  "elastic": Key(
    False,
    "Go on with fewer data replicas where processes or devices are missing, with the same batches "
    "(docs/reliability.md)",
    resume=MAY_CHANGE,
  ),
  "replica_check_every_steps": Key(
    10,
    "Compare replicas of parameters and optimizer state, also before every save; 0: off.",
    unit="steps",
    least=0,
    resume=MAY_CHANGE,
  ),
}
