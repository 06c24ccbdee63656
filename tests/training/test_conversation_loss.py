"""The loss of conversations is the mean over the trained tokens of the global batch.

However they are packed into rows, over devices and into microbatches: as if each were a row of its
own on one device, whose logits NumPy turns into a loss.
"""

import functools
import json

import jax
import numpy as np
import pytest

from input_pipeline import row_source
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, make_job, place
from training import splits

T, ROWS = 48, 16
TEMPLATE = (
  "{% for m in messages %}{{ m.role[0] ~ ':' ~ m.content ~ '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
KEYS = {
  "training.compute_dtype": "float64",
  "training.parameter_dtype": "float64",
  "training.matmul_precision": "highest",
  "model.layers": 1,
  "model.vocabulary_size": 256,
  "model.vocabulary_multiple": 8,
  "optimizer.clip_norm": 0.0,
  "data.name": "conversations",
  "data.tokenizer": "bytes",
  "data.sequence_length": T,
  "data.global_batch_size": ROWS,
  "data.evaluation_fraction": 1e-9,
  "data.prepare_processes": 1,
}


def conversation(random):
  """Returns a conversation of 1 or 2 turns; questions are long where answers are short."""
  messages = []
  for _ in range(random.integers(1, 3)):
    size = int(random.integers(1, 8))
    messages.append({"role": "user", "content": "what is it? "[: 9 - size]})
    messages.append({"role": "assistant", "content": "".join(random.choice([*"abcdefg"], size))})
  return {"messages": messages}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """Returns a function from a strategy and overrides to a job."""
  folder = tmp_path_factory.mktemp("conversations")
  random = np.random.default_rng(5)
  lines = [json.dumps(conversation(random)) for _ in range(ROWS)]
  (folder / "chats.jsonl").write_text("\n".join(lines))
  (folder / "t.jinja").write_text(TEMPLATE)
  files = {
    "data.files": str(folder / "chats.jsonl"),
    "data.chat_template": str(folder / "t.jinja"),
    "data.data_dir": str(folder / "data"),
  }
  return functools.partial(make_job, **{**KEYS, **files})


def batch_of(job, packing):
  """Returns all rows of the training split, and then rows of weight 0; and how many there are."""
  data = splits.read_as(job.config.data, job.config.task)
  data.packing = packing
  source = row_source.open_source(data, "train", 0)
  found = source.read(np.arange(len(source)))
  padding = {"segments": 1, "weights": 0.0, "tokens": 0, "targets": 0}
  return {
    name: np.concatenate([rows, np.full((ROWS - len(rows), T), padding[name], rows.dtype)])
    for name, rows in found.items()
  }, len(source)


@pytest.fixture(scope="module")
def alone(made):
  """Returns loss and norm of the gradient, each conversation alone on one device."""
  with jax.enable_x64(True):
    job = made("single", "lm")
    batch, rows = batch_of(job, "none")
    params, program = jax.device_get(first_state(job).params), job.program

    @jax.jit
    def of_row(params, row):
      def loss(params):
        return program.sums(params, row)["loss"]

      model = program.module(params)
      return model(row["tokens"], None, row["segments"]), jax.grad(loss)(params)

    loss = weight = 0.0
    gradients = dict.fromkeys(named_leaves(params), 0.0)
    with job.tracing():
      for number in range(rows):
        row = {name: x[number : number + 1] for name, x in batch.items()}
        logits, gradient = jax.device_get(of_row(params, row))
        logits = logits[0].astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        loss -= (row["weights"][0] * log_p[np.arange(T), row["targets"][0]]).sum()
        weight += row["weights"].sum()
        gradients = {name: gradients[name] + x for name, x in named_leaves(gradient).items()}
  norm = np.sqrt(sum(np.square(x / weight).sum() for x in gradients.values()))
  assert 0 < weight < (batch["segments"] == 0).sum()
  return loss / weight, norm


def test_the_mean_over_trained_tokens_of_the_global_batch(made, alone):
  with jax.enable_x64(True):
    job = made("dp2_fsdp2_tp2", "lm", **{"training.gradient_accumulation_steps": 2})
    batch, rows = batch_of(job, "best_fit")
    assert rows < ROWS - 1, "one is held out, and others share a row"
    step = job.compile_train_step().function
    _, metrics = step(first_state(job), place(job, batch))
    metrics = jax.device_get(metrics)
  loss, norm = alone
  assert metrics["loss"] == pytest.approx(loss, rel=1e-12)
  assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-12)
