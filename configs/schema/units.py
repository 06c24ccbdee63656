"""The unit of every key that counts or measures something."""

import fnmatch

# Pattern -> unit; the first that matches decides. Numbers that no pattern matches have none.
UNITS = {
  "training.gradient_accumulation_steps": "microbatches",
  "training.microbatches": "microbatches",
  "training.pipeline_chunks": "chunks of layers",
  "evaluation.steps": "batches",
  "evaluation.final_steps": "batches",
  "optimizer.clip_window": "steps",
  "training.bad_step_window": "steps",
  "profile.start_step": "steps",
  "*.keep": "checkpoints",
  "*steps": "steps",
  "*_seconds": "seconds",
  "*_gib": "GiB",
  "*_bytes": "bytes",
  "*_tokens": "tokens",
  "training.tokens": "tokens",
  "planning.token_budget": "tokens",
  "planning.price_per_chip_hour": "currency per chip and hour",
  "data.sequence_length": "tokens",
  "model.max_positions": "tokens",
  "model.window": "tokens",
  "data.global_batch_size": "rows",
  "data.examples": "rows",
  "data.max_bad_records": "records",
  "data.prefetch_batches": "batches",
  "training.bad_step_skips": "batches",
  "data.prepare_processes": "processes",
  "data.train_tokenizer": "tokens",
  "data.evaluation_fraction": "of the documents",
  "data.input_size": "values",
  "data.target_size": "values",
  "model.input_size": "values",
  "model.output_size": "classes",
  "mesh.*": "devices",
  "mesh_dcn.*": "slices",
  "model.*layers": "layers",
  "model.sparse_every": "layers",
  "model.global_every": "layers",
  "model.heads": "heads",
  "model.kv_heads": "heads",
  "model.experts": "experts",
  "model.experts_per_token": "experts",
  "model.*groups": "groups of experts",
  "model.vocabulary_*": "tokens",
  "model.image_size": "pixels",
  "model.patch_size": "pixels",
  "model.channels": "channels",
  "model.*_size": "dims",
  "model.base_width": "dims",
  "lora.rank": "dims",
  "training.loss_chunks": "chunks",
  "training.max_rollbacks": "rollbacks",
  "training.scan_unroll": "layers",
  "training.bad_step_deviations": "standard deviations",
}
# Numbers without one.
PLAIN = ("seed",)


def of(key: str, kind: type) -> str:
  """Returns the unit of a key; "" where it has none.

  Args:
    key: dotted.
    kind: of its value: numbers alone have units.
  """
  if kind not in (int, float):
    return ""
  return next((unit for pattern, unit in UNITS.items() if fnmatch.fnmatchcase(key, pattern)), "")


def before(meaning: str, key: str, kind: type) -> str:
  """Returns the meaning of a key behind its unit, in brackets, where it does not name that."""
  unit = of(key, kind)
  return f"[{unit}] {meaning}".rstrip() if unit and unit not in meaning else meaning
