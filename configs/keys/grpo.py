"""The section `grpo`: answers to prompts, their rewards, and the loss that is made of them."""

from configs.keys.row import MAY_CHANGE, Key, Rows, shared

# How answers are drawn.
_ANSWERS: Rows = {
  "answers": Key(8, "to each prompt: a group, whose rewards are compared", unit="answers", least=2),
  "new_tokens": Key(0, "the most of an answer; 0: half of data.sequence_length", unit="tokens"),
  "temperature": Key(
    1.0, "divides the logits, of the sampler and of the loss: they are of one policy", above=0
  ),
  "updates": Key(
    1, "optimizer steps on the same answers; a run saves and stops between answers", unit="steps"
  ),
  "ratio_bound": Key(
    0.0,
    "The most by which log p of a drawn token may differ between sampler and trainer before the "
    "first update on it; a step beyond is refused. 0: by training.compute_dtype 1e-12 (float64), "
    "1e-3 (float32) or 0.5 (bfloat16)",
    resume=MAY_CHANGE,
  ),
}

# What the loss is made of.
_LOSS: Rows = {
  "advantage": Key(
    "deviations",
    "Rewards above the mean of their group, in its standard deviations (deviations, GRPO) or as "
    "they are (centered, Dr. GRPO)",
    choices=("deviations", "centered"),
  ),
  "mean": Key(
    "tokens",
    "The loss is a mean over the tokens of all answers (tokens, DAPO), over answers of the means "
    "of their tokens (answers, GRPO), or over answers of the sums of their tokens divided by "
    "new_tokens (constant, Dr. GRPO)",
    choices=("tokens", "answers", "constant"),
  ),
  "ratio": Key(
    "token",
    "The importance ratio is each token's own (token), or the geometric mean of its answer's "
    "(answer, GSPO)",
    choices=("token", "answer"),
  ),
  "clip_low": Key(0.2, "ratios below 1 - clip_low have no gradient that lowers them", above=0),
  "clip_high": Key(
    0.28, "ratios above 1 + clip_high have none that raises them (clip-higher, DAPO)", above=0
  ),
  "kl": Key(
    0.0,
    "Coefficient of the divergence from the parameters that the run has started from (with "
    "adapters, from the model without them), by the k3 estimator; 0: off",
  ),
}

# Where rewards come from.
_REWARDS: Rows = {
  "rewards": Key("", "Verifiers and functions of Python files, with weights: number,style.py*0.2"),
  "reward_seconds": Key(10.0, "limit for the reward of an answer", unit="seconds", above=0),
  "reward_memory_mib": Key(1024, "limit for a worker process", unit="MiB", least=64),
  "reward_processes": Key(
    0, "that compute rewards; 0: one per core", unit="processes", resume=MAY_CHANGE
  ),
}

GRPO: Rows = shared({**_ANSWERS, **_LOSS, **_REWARDS}, readers=("grpo",))
