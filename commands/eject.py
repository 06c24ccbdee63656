"""The verb `eject`: a dense decoder's run as one file, which needs jax, optax and numpy alone.

The file is `examples/one_file.py`, with a config's values as the defaults of its flags.
"""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from commands import config_flag, flags
from commands.config import target
from configs import base
from configs.schema import finalize, validate
from runtime import exit_codes, files

FILE = pathlib.Path(__file__).parents[1] / "examples" / "one_file.py"


def run() -> int:
  """Writes the file that `--to` names, and returns the exit code."""
  config = flags.CONFIG.value
  platform, sizes, capability = target(config)
  config = finalize.finalize(config, platform, sizes, capability)
  validate.check(config, sizes)
  values = file_flags(config, platform, sizes)
  if not flags.TO.value:
    raise ValueError("eject: name the file to write with --to=FILE.py")
  file = epath.Path(flags.TO.value)
  if file.exists():
    raise ValueError(f"--to={file}: it exists, and may have been edited; name another file")
  values["workdir"] = f"runs/{file.stem}"
  files.replace(file, filled(FILE.read_text(), values, str(file), flags.command_line()))
  print(f"wrote {file}; it trains with: python {file}", flush=True)
  return exit_codes.DONE


def filled(text: str, values: Mapping[str, Any], name: str, command: str) -> str:
  """Returns the file's text with other defaults of its flags.

  Args:
    text: of `examples/one_file.py`.
    values: by flag.
    name: of the file that is written, for its docstring.
    command: that writes it, likewise.
  """
  for flag, value in values.items():
    shown = json.dumps(value) if isinstance(value, str) else repr(value)
    default = re.search(rf"^  {flag}: \w+ = (.*?)(?=  #|$)", text, re.MULTILINE)
    text = text[: default.start(1)] + shown + text[default.end(1) :]
  first, rest = text.split("\n", 1)
  text = f"{first}\n\nThe defaults of its flags are by `{command}`.\n{rest}"
  return text.replace("examples/one_file.py", name)


# ------------------------------ the flags of the file ------------------------------

AXES = ("data", "fsdp", "tensor")
# Section -> its keys that are flags of the file under the same name.
SAME = {
  "model": (
    *("layers", "model_size", "feedforward_size", "heads", "kv_heads", "head_size"),
    *("vocabulary_size", "norm_epsilon", "rotary_base", "tied_embeddings"),
    *("embedding_standard_deviation", "separate_documents"),
  ),
  "data": ("sequence_length", "global_batch_size"),
  "optimizer": (
    *("learning_rate", "warmup_steps", "final_fraction", "beta_1", "beta_2", "epsilon"),
    *("weight_decay", "clip_norm"),
  ),
  "training": ("steps", "parameter_dtype", "compute_dtype"),
}
# Dotted key -> the flag that has it.
FLAGS = {
  "seed": "seed",
  **{f"{section}.{key}": key for section, keys in SAME.items() for key in keys},
  "metrics.every_steps": "log_every",
  "evaluation.every_steps": "evaluate_every",
  "evaluation.steps": "evaluation_batches",
  "evaluation.sample_tokens": "sample_tokens",
  "checkpoint.every_steps": "save_every",
  "checkpoint.keep": "keep",
}
# Beginnings of keys that change no number of the steps but for rounding.
FREE = (
  *("argument", "compilation_cache_dir", "compiler_options", "memory_limit_gib", "model.depth"),
  "model.vocabulary_multiple",
  *("metrics.", "evaluation.", "processes.", "planning.", "profile.", "checkpoint.keep"),
  *("checkpoint.verify", "data.data_dir", "data.prefetch_batches", "data.prepare_processes"),
  *("training.attention_kernel", "training.rematerialization", "training.loss_chunks"),
  *("training.scan_unroll", "training.replica_check_every_steps", "training.gradient_reduction"),
  *("training.recompute_every_steps", "training.check_memory", "training.elastic"),
  *("partitioning.max_replicated_bytes", "partitioning.sequence_parallel"),
  *("partitioning.collective_matmul", "partitioning.reshard_after_forward"),
)


def file_flags(config: ConfigDict, platform: str, sizes: Mapping[str, int]) -> dict[str, Any]:
  """Returns the values of the file's flags with which it trains as a config does.

  Args:
    config: finalized.
    platform: cpu, gpu or tpu.
    sizes: mesh axis -> size.

  Raises:
    ValueError: the file cannot do all of it; a line for each key.
  """
  if config.model.name != "transformer":
    raise ValueError(f"examples/one_file.py is a decoder, and model.name={config.model.name!r}")
  wanted = dict(config_flag.leaves(config))
  wanted |= {f"mesh.{axis}": size for axis, size in sizes.items()}
  lm = base.get_config("lm", mesh={axis: sizes[axis] for axis in AXES})
  lm.update_from_flattened_dict({key: wanted[key] for key in FLAGS if key in wanted})
  has = dict(config_flag.leaves(finalize.finalize(lm, platform, sizes)))
  differ = [key for key in wanted if key not in has or wanted[key] != has[key]]
  wrong = [
    f"{key}={wanted[key]}; it has {has.get(key, 'no such key')}"
    for key in differ
    if not key.startswith(FREE) or key.startswith("checkpoint.initialize_from")
  ]
  if config.model.vocabulary_size % (multiple := config.model.vocabulary_multiple):
    wrong.append(f"model.vocabulary_size is no multiple of {multiple}; it pads no table")
  if wrong:
    lines = "\n".join(f"  {line}" for line in wrong)
    raise ValueError(f"examples/one_file.py cannot train this config:\n{lines}")
  mesh = ",".join(f"{axis}={sizes[axis]}" for axis in AXES if sizes[axis] > 1) or "data=1"
  values = {flag: wanted[key] for key, flag in FLAGS.items()}
  usual = values["parameter_dtype"] if platform == "cpu" else "bfloat16"
  if values["compute_dtype"] == usual:
    values["compute_dtype"] = ""  # on other devices it is theirs
  return {**values, "mesh": mesh, "rematerialize": config.training.rematerialization != "none"}
