"""The default dense job imports neither tools nor optional parts before they are asked for."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent

# Runs the command line up to the loop, and prints what was imported by then.
PROGRAM = """
import json, sys
from absl import app
from commands import flags, session
from training import loop

def stop(*_, **__):
  print(json.dumps(sorted(sys.modules)), flush=True)
  raise SystemExit(0)

loop.train = stop
app.run(session.main, flags_parser=flags.parse_flags)
"""
COMMAND = ("--config=configs/dp4_tp2.py", "--config.metrics.report=False")
COMMAND += ("--config.evaluation.sample_tokens=0",)
OURS = {
  *("main", "commands", "configs", "models", "partitioning", "input_pipeline", "training"),
  *("processes", "runtime", "reports"),
}
# Of packages whose work is something else: package -> all that the start of a run takes of it.
SMALL = {
  # The layout that the start prints and writes to layout.txt.
  "reports": {"drawings", "grid", "layout_text"},
}
# What only some configs need.
OPTIONAL = {
  *("models.experts", "models.load_balance", "models.mlp", "models.preferences"),
  *("models.grpo", "configs.schema.grpo_checks", "input_pipeline.text.prompts"),
  *("models.adapters", "models.quantized", "training.quantized_base"),
  *("models.distillation", "configs.schema.teachers", "configs.schema.expert_checks"),
  "training.teacher_rows",
  *("partitioning.torus", "processes.bucket_claims"),
  "models.latent_attention",
  "partitioning.parallel.expert_exchange",
  *("partitioning.parallel.batch_region", "partitioning.parallel.chunked_vocabulary"),
  *("partitioning.parallel.pipeline", "partitioning.parallel.pipeline_schedule"),
  *("commands.run_report", "training.base_parameters", "training.microbatches", "training.parity"),
  *("input_pipeline.tfds", "input_pipeline.mixture", "input_pipeline.text.preparation"),
  *("input_pipeline.text.worker", "input_pipeline.text.documents"),
  *("input_pipeline.text.conversations", "input_pipeline.text.chat_documents"),
  "input_pipeline.text.chat_template",
  "input_pipeline.text.library_tokenizers",
  "input_pipeline.text.train_tokenizer",
  *("input_pipeline.text.files", "input_pipeline.text.tokenizer_files"),
  *("training.averages", "training.metrics.profiler", "training.optimizers.groups"),
  *("training.checkpointing.reading", "training.checkpointing.resume_policy"),
  *("training.metrics.sinks", "training.history", "training.run_record"),
  *("input_pipeline.bad_records", "input_pipeline.shard_writer", "input_pipeline.best_fit"),
  "training.optimizers.muon",
  "training.optimizers.soap",
  "training.metrics.built_in_sinks",
  "training.optimizers.first_order",
  "training.optimizers.low_precision",
  "training.optimizers.host_state",
  "partitioning.parallel.matrix_groups",
  "partitioning.parallel.whole_matrices",
  # What connects several processes.
  *("processes.crash_output", "processes.heartbeat", "processes.jax_internals"),
  *("processes.listening", "processes.preflight", "processes.rendezvous"),
  *("processes.stragglers", "processes.tokens"),
  "models.fused_attention",
  "models.vit",
  "partitioning.parallel.attention_blocks",
  "partitioning.parallel.collective_matmul",
  "partitioning.parallel.eight_bit",
  "partitioning.parallel.ring_attention",
  "partitioning.parallel.splash_kernel",
}


def imported(workdir):
  """Returns the names of all modules that the start of a run imports."""
  run = subprocess.run(
    [sys.executable, "-c", PROGRAM, *COMMAND, f"--workdir={workdir}"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert run.returncode == 0, run.stderr
  return json.loads(run.stdout.splitlines()[-1])


def test_the_default_job_imports_what_it_needs_alone(tmp_path):
  loaded = imported(tmp_path / "run")
  if "input_pipeline.tfds" in loaded:  # the first one of this machine has built the data set
    loaded = imported(tmp_path / "again")
  tops = {path.name for path in ROOT.iterdir() if any(path.glob("*.py"))} - {"tests"}
  ours = {name for name in loaded if name.split(".")[0] in tops}
  assert {"training.step", "models.transformer"} <= ours
  assert {name.split(".")[0] for name in ours} <= OURS
  for package, wanted in SMALL.items():
    found = {name.partition(".")[2] for name in ours if name.startswith(f"{package}.")}
    assert found <= wanted, f"{package}: {sorted(found - wanted)}"
  assert not ours & OPTIONAL
