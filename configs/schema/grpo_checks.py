"""What of a run with GRPO follows from other keys, and what does not go together with it."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from training.optimizer import optimizer_row

# By the dtype of the activations: rounding of logits in bfloat16 is some hundredths.
RATIO_BOUNDS = {"float64": 1e-12, "float32": 1e-3, "bfloat16": 0.5}


def finalize_grpo(grpo: ConfigDict, data: ConfigDict, training: ConfigDict) -> None:
  """Fills in what follows from other keys; the config is unlocked."""
  grpo.new_tokens = grpo.new_tokens or max(1, data.sequence_length // 2)
  grpo.ratio_bound = grpo.ratio_bound or RATIO_BOUNDS.get(training.compute_dtype, 0.5)


def grpo_errors(
  grpo: ConfigDict,
  data: ConfigDict,
  model: ConfigDict,
  training: ConfigDict,
  optimizer: ConfigDict,
  lora: ConfigDict,
  checkpoint: ConfigDict,
) -> Iterator[str]:
  """Yields what a run with GRPO cannot have."""
  if not grpo.rewards:
    yield (
      "grpo.rewards='': name what an answer is worth, such as --config.grpo.rewards=number or a "
      "Python file with reward(prompt, answer, row)"
    )
  yield from _rows(grpo, data)
  steps = {"training.steps": training.steps, "checkpoint.every_steps": checkpoint.every_steps}
  steps["checkpoint.memory_every_steps"] = checkpoint.memory_every_steps
  for key, value in steps.items():
    if grpo.updates > 1 and value % grpo.updates:
      yield (
        f"{key}={value} is not a multiple of grpo.updates={grpo.updates}: a run saves and ends "
        f"between answers; make it {-(-value // grpo.updates) * grpo.updates}"
      )
  # The sampler reads one token at a time, and has to give it the probability that whole rows give.
  what = "sampler and trainer would not give a token the same probability"
  for key, value, off in (
    ("model.dropout_rate", model.get("dropout_rate", 0.0), 0.0),
    ("lora.dropout", lora.dropout, 0.0),
    ("training.matmul_dtype", training.matmul_dtype, "compute"),
  ):
    if value != off:
      yield f"{key}={value} with the task grpo: {what}; leave it at {off}"
  if optimizer_row(optimizer.name).gradient_point:
    yield (
      f"optimizer.name={optimizer.name} with the task grpo: it takes gradients elsewhere than at "
      f"the parameters, which answers are drawn from; take another, such as adamw"
    )


def _rows(grpo: ConfigDict, data: ConfigDict) -> Iterator[str]:
  """Yields how answers do not fit the rows of a batch."""
  rows, answers = data.global_batch_size, grpo.answers
  if rows % answers:
    yield (
      f"data.global_batch_size={rows} is not a multiple of grpo.answers={answers}: a row is an "
      f"answer, and a group is in one batch; make it {-(-rows // answers) * answers}"
    )
  if grpo.new_tokens >= data.sequence_length:
    yield (
      f"grpo.new_tokens={grpo.new_tokens} leaves no place for a prompt in a row of "
      f"data.sequence_length={data.sequence_length}; raise that, or draw fewer tokens"
    )
  if data.batch_size_ramp:
    yield "data.batch_size_ramp: each step of grpo draws as many answers; leave it out"
  if torn := [rows for rows in data.skip_rows if any(end % answers for end in rows)]:
    yield (
      f"data.skip_rows: {torn[0]} begins or ends within a group of grpo.answers={answers}; take "
      f"multiples of that"
    )
