"""The section `optimizer`: its arguments, schedule and clipping."""

from configs.keys.row import MAY_CHANGE, REFUSED, Key, Rows, Unset
from runtime.forms import MOST_STEP

WSD = "optimizer.schedule=wsd"
OUTER = "optimizer.outer_every_steps"
MOST_NORMS = 64  # that are stored on every device

OPTIMIZER: Rows = {
  # On resume: the state is of another kind.
  "name": Key(
    "adamw",
    "adamw, adafactor, muon, schedule_free_adamw, sgd, soap, or any of optax by its name: lion, "
    "contrib.muon",
    resume=REFUSED,
  ),
  "arguments": Key("", 'further ones of the optimizer: "nesterov=True,mu_dtype=bfloat16"'),
  # On resume: the state is of another kind.
  "state_dtype": Key(
    Unset(str),
    "Dtype of moments between steps: float32, bfloat16 or int8 (8 bits, in blocks of 128 "
    "elements); by default as training.parameter_dtype. Arrays of fewer than 4096 elements stay "
    "float32 or wider",
    usual=("float32", "bfloat16", "int8"),
    resume=REFUSED,
  ),
  # On resume: the same numbers elsewhere.
  "state_memory": Key(
    "device",
    "Where the optimizer's state is between updates: device, or host, from which it is fetched "
    "layer by layer",
    choices=("device", "host"),
    resume=MAY_CHANGE,
  ),
  "learning_rate": Key(
    0.001,
    "Peak learning rate; AdamW's is 8e-3 for lm, 2e-3 for mlp, 3e-4 for presets, and other "
    "optimizers follow (docs/optimizers.md); mlp_tutorial: 1e-5",
  ),
  "schedule": Key(
    "cosine",
    "cosine, linear, constant, wsd (warm-up, stable, decay) or inverse_sqrt; by default cosine, "
    "and constant for schedule_free_adamw and mlp_tutorial",
    choices=("cosine", "linear", "constant", "wsd", "inverse_sqrt"),
  ),
  "final_fraction": Key(
    Unset(float), "Learning rate at the end over the peak; cosine: 0.1, linear and wsd: 0"
  ),
  # On resume: by default the run's own: training.restore.adopt_schedule.
  "warmup_steps": Key(Unset(int), "linear warm-up; by default steps / 20", unit="steps", least=0),
  # On resume: they become steps.
  "warmup_tokens": Key(
    0, "instead of warmup_steps; 0: warmup_steps", unit="tokens", most=MOST_STEP, resume=MAY_CHANGE
  ),
  # On resume: resumes where neither decay has begun: training.checkpointing.resume_policy.
  "decay_steps": Key(
    Unset(int), "of wsd, at the end; by default steps / 5", unit="steps", least=0, needs=WSD, off=0
  ),
  "decay_tokens": Key(
    0, "instead of decay_steps; 0: decay_steps", unit="tokens", most=MOST_STEP, resume=MAY_CHANGE
  ),
  "decay": Key("linear", "of wsd: linear or 1-sqrt", choices=("linear", "1-sqrt"), needs=WSD),
  "schedule_on_resume": Key(
    "stretch",
    "Where a run resumes with other training.steps: stretch the rest of its schedule over what is "
    "left of them, restart (warm up again and decay), or recompute it as from the first step",
    choices=("stretch", "restart", "recompute"),
    resume=MAY_CHANGE,
  ),
  # On resume: by default the run's own: training.restore.adopt_schedule.
  "schedule_changes": Key(
    (),
    "Filled in where a run resumes: (step, training.steps up to there, how the schedule continued)",
    resume=MAY_CHANGE,
  ),
  "beta_1": Key(0.9, "decay of AdamW's first moment", below=1, readers=("optimizer",), off=None),
  "beta_2": Key(0.95, "decay of AdamW's second moment", below=1, readers=("optimizer",), off=None),
  "epsilon": Key(1e-08, "AdamW only", readers=("optimizer",), off=None),
  "momentum": Key(0.0, "SGD only", readers=("optimizer",)),
  "weight_decay": Key(
    0.1,
    "Applied to kernels and embeddings, not to scales and biases; AdamW's is 0.1, for mlp 0.05, "
    "and other optimizers follow",
    readers=("optimizer",),
    off=0.0,
  ),
  "independent_weight_decay": Key(
    False,
    "A step at the peak takes weight_decay off a parameter, not learning_rate * weight_decay",
    readers=("optimizer",),
  ),
  # On resume: of the same parameters and optimizers, or the state differs.
  "groups": Key(
    (),
    "Parts of the parameters with an optimizer, learning rate or decay of their own, the first "
    'that matches: ({"parameters": "embed/*", "learning_rate": 1e-3, "weight_decay": 0.0},)',
  ),
  # On resume: the state is of another kind.
  "ema_decays": Key(
    (),
    "Exponential moving averages of the parameters, one for each decay: (0.999, 0.9999)",
    resume=REFUSED,
  ),
  # On resume: the state has the groups' parameters.
  "outer_every_steps": Key(
    0,
    "DiLoCo: the mesh_dcn.data groups train on their own, and after so many steps an outer "
    "optimizer moves the parameters by the mean of their changes; 0: off",
    unit="steps",
    excludes={
      "training.elastic": "a group that is missing takes its parameters with it",
      "training.check_memory": "it follows one copy of the parameters",
      "training.router_bias_rate": "the biases of routers move in each step, for all groups alike",
      "training.parameter_dtype=bfloat16": "changes of several steps are summed in float32",
      "optimizer.state_memory=host": "the host has no state of each group",
      "optimizer.ema_decays": "parameters change in one step of many",
      "mesh.stage": "a schedule of stages is for all rows of a batch",
      "task=grpo": "answers are drawn from the run's parameters, not from those of the groups",
    },
    resume=REFUSED,
  ),
  "outer_learning_rate": Key(0.7, "of the outer optimizer", above=0, needs=OUTER),
  # On resume: without it there is no such state.
  "outer_momentum": Key(
    0.9, "of the outer optimizer, Nesterov's", below=1, resume=REFUSED, needs=OUTER
  ),
  "clip_norm": Key(1.0, "of the global gradient norm; 0: off"),
  "clip_groups": Key(
    False, "each of groups by the norm of its own gradients", needs="optimizer.groups"
  ),
  # On resume: unless it is turned on or off: the state has the norms.
  "clip_quantile": Key(
    0.0,
    "Instead of clip_norm: clip to this quantile of the last clip_window norms; 0: off",
    below=1,
  ),
  "clip_window": Key(
    50,
    "steps",
    unit="steps",
    least=2,
    most=MOST_NORMS,
    resume=REFUSED,
    needs="optimizer.clip_quantile",
  ),
}
