"""runtime/provenance.py: which code a checkpoint's record covers, and which it must not."""

import importlib.metadata
import pathlib
import re
import sys

import jax
import pytest

from runtime import provenance
from tests.helpers.jobs import make_job
from training import splits

ROOT = provenance.ROOT

# Files beside those of NUMERICS in the same folders, which do not determine what a run computes.
OTHERS = {
  "partitioning": "__init__ mesh_sizes",
  "training": "__init__ base_parameters callbacks compiler_options coordinate_check "
  "evaluation history instruments loop metrics/__init__ metrics/built_in_sinks metrics/console "
  "metrics/goodput metrics/log_lines metrics/profiler metrics/reader metrics/sinks "
  "metrics/throughput metrics/tracker named_activations "
  "parity kept_state quantized_base recomputed_steps replay replica_check restore reward_worker "
  "run_record run_tokenizer "
  "workdir_files checkpointing/__init__ "
  "checkpointing/async_writer checkpointing/checkpointer checkpointing/consensus "
  "checkpointing/integrity checkpointing/memory_copies checkpointing/memory_tier "
  "checkpointing/reading checkpointing/resume_policy",
}


def numerics():
  """Returns the listed files as text."""
  return {path.as_posix() for path in provenance.source_files(provenance.NUMERICS)}


def test_every_file_of_these_packages_is_on_one_of_the_two_lists():
  others = {f"{package}/{name}.py" for package, all_ in OTHERS.items() for name in all_.split()}
  listed = numerics()
  assert not listed & others
  there = {path.as_posix() for path in provenance.source_files(provenance.PACKAGES)}
  inside = {name for name in listed if name.split("/")[0] in provenance.PACKAGES}
  assert there == inside | others, "decide whether a new file determines numbers, and list it"


def test_a_file_in_a_subfolder_counts(monkeypatch, tmp_path):
  for name in ("models/deep/er/file.py", "training/step.py"):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("x = 1\n")
  monkeypatch.setattr(provenance, "ROOT", tmp_path)
  before = provenance.digest(("models", "training/step.py"))
  (tmp_path / "models/deep/er/file.py").write_text("x = 2\n")
  assert provenance.digest(("models", "training/step.py")) != before
  with pytest.raises(FileNotFoundError, match="listed as code of a run"):
    provenance.digest(("models", "training/steps.py"))


def test_a_page_or_a_message_does_not_change_the_record_and_a_model_does(monkeypatch):
  before, run_before = (
    provenance.digest(provenance.NUMERICS),
    provenance.digest(provenance.RUN, comments=True),
  )
  read = pathlib.Path.read_bytes

  def changed(name):
    def patched(path):
      content = read(path)
      return content + b"\nx = 1\n" if path == ROOT / name else content

    monkeypatch.setattr(pathlib.Path, "read_bytes", patched)
    return provenance.digest(provenance.NUMERICS), provenance.digest(provenance.RUN, comments=True)

  for name in (
    "reports/html.py",
    "training/metrics/log_lines.py",
    "reports/templates/base.html.j2",
  ):
    ours, run = changed(name)
    assert ours == before
    assert run != run_before  # the processes of one run agree on it all the same
  for name in ("models/attention.py", "training/step.py", "input_pipeline/batches.py"):
    assert changed(name)[0] != before


SOURCE = """
'''A module.'''
# A comment.
RATE = 0.5


class Layer:
  '''A layer.'''

  size: int = 3
  '''Of its output.'''

  def __call__(self, x, *, name="up"):
    '''Returns it scaled.'''
    # Twice.
    return {name: (x + 1) * RATE, "\u00e9": None}
"""
# What is changed -> (old, new).
SAME = {
  "module docstring": ("A module.", "Another text."),
  "comment": ("# A comment.", "# Another, and\n# a second."),
  "no docstring": ("    '''Returns it scaled.'''\n", ""),
  "docstring of an attribute": ("Of its output.", "In features."),
  "blank lines": ("\n\n\nclass", "\nclass"),
  "quotes": ('"up"', "'up'"),
  "formatting": ("(x + 1) * RATE, ", "(\n      x + 1\n    ) * (RATE),\n    "),
  "spelling of a number": ("0.5", "5e-1"),
}
OTHER = {
  "constant": ("0.5", "0.25"),
  "type of a constant": ("= 3", "= 3.0"),
  "string": ('"up"', '"down"'),
  "None": ("None", "0"),
  "statement": ("    return", "    x = x + 1\n    return"),
  "order of operations": ("(x + 1) * RATE", "x + 1 * RATE"),
  "base class": ("class Layer:", "class Layer(dict):"),
  "docstrings that are used": ("RATE = 0.5", "RATE = len(__doc__)"),
}


def test_comments_and_formatting_do_not_count_and_what_is_executed_does(tmp_path):
  (tmp_path / "model.py").write_text(SOURCE)
  before = provenance.digest((), [tmp_path / "model.py"])
  for what, (old, new) in {**SAME, **OTHER}.items():
    assert SOURCE.count(old) == 1, what
    (tmp_path / "model.py").write_text(SOURCE.replace(old, new))
    assert (provenance.digest((), [tmp_path / "model.py"]) == before) == (what in SAME), what


def test_the_digest_of_a_program_is_the_same_under_every_version_of_python():
  """`ast.dump` differs between 3.11, 3.12 (type parameters) and 3.13 (without empty lists)."""
  assert provenance.program(SOURCE.encode()).hex()[:16] == "ed861941226a6953"
  assert provenance.program(b"def f(:\n") == b"def f(:\n"
  used = SOURCE.replace("RATE = 0.5", "RATE = len(__doc__)").encode()
  assert provenance.program(used) != provenance.program(used.replace(b"A module", b"Modules"))


def test_digests_of_programs_are_kept_and_a_damaged_file_of_them_is_replaced(monkeypatch, tmp_path):
  parsed = []
  real = provenance.program
  monkeypatch.setattr(provenance, "program", lambda source: parsed.append(source) or real(source))
  monkeypatch.setattr(sys, "dont_write_bytecode", False)
  path, source = tmp_path / "cache" / "programs.json", SOURCE.encode()

  def fresh():
    programs = provenance._Programs()
    programs._path = path
    digest = programs.digest(source)
    programs.save()
    return digest

  assert fresh() == fresh() == real(source)
  assert len(parsed) == 1
  for damaged in ("", "[1]", '{"torn": '):
    path.write_text(damaged)
    assert fresh() == fresh() == real(source)
  assert len(parsed) == 4
  assert [*path.parent.iterdir()] == [path]
  path.unlink()
  monkeypatch.setattr(sys, "dont_write_bytecode", True)
  assert fresh() == real(source)
  assert [*path.parent.iterdir()] == []


def project_files(text):
  """Returns the project's files among the paths of a text."""
  paths = map(pathlib.Path, re.findall(r'"([^"]+\.py)"', text))
  ours = (path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT))
  return {path.as_posix() for path in ours if not path.parts[0].startswith(".")}  # .venv


STEPS = [
  pytest.param(
    *("dp2_fsdp2_tp2", "lm", {"partitioning.sequence_parallel": True}), marks=pytest.mark.long
  ),
  ("dp8", "lm", {"mesh.data": 4, "mesh.context": 2, "training.gradient_accumulation_steps": 2}),
  ("dp8", "mlp", {}),
]


@pytest.fixture(scope="module")
def nothing_traced() -> None:
  """Forgets what other tests have traced: an operation names the line that traced it first."""
  jax.clear_caches()


@pytest.mark.usefixtures("nothing_traced", "lines_of_python")
@pytest.mark.parametrize(("strategy", "recipe", "keys"), STEPS, ids=str)
def test_every_instruction_of_a_step_comes_from_a_listed_file(strategy, recipe, keys):
  job = make_job(strategy, recipe, **keys)
  with job.tracing():
    lowered = jax.jit(job.program.train_step).lower(job.state, job.batch)
    drawn = jax.jit(job.program.init).lower(jax.random.key(0))
  found = project_files(lowered.as_text(debug_info=True)) | project_files(
    drawn.as_text(debug_info=True)
  )
  assert {"training/step.py", "models/losses.py"} < found
  assert found - numerics() - {pathlib.Path(__file__).relative_to(ROOT).as_posix()} == set()


@pytest.mark.parametrize("recipe", ["lm", "mlp"])
def test_everything_that_runs_to_make_a_batch_is_listed(recipe):
  overrides = {"model.input_size": 64} if recipe == "mlp" else {"model.vocabulary_size": 256}
  job = make_job("dp8", recipe, **overrides)
  data, seen = splits.open_data(job), set()

  def note(frame, event, argument):
    path = pathlib.Path(frame.f_code.co_filename)
    if path.is_relative_to(ROOT / "input_pipeline"):
      seen.add(path.relative_to(ROOT).as_posix())

  sys.setprofile(note)
  try:
    data.train.batch(0, job.batch_shardings)
  finally:
    sys.setprofile(None)
  assert {"input_pipeline/batches.py", "input_pipeline/rows.py"} < seen
  assert seen - numerics() == set()


def test_a_library_that_is_not_installed_is_no_traceback(monkeypatch):
  real = importlib.metadata.version

  def version(name):
    if name == "pillow":
      raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

  monkeypatch.setattr(importlib.metadata, "version", version)
  assert provenance._everything.__wrapped__(())["versions.pillow"] == "missing"
