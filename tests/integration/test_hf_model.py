"""A model folder from the command line: trained further, then used without the folder."""

import pytest

from tests.helpers.cli import QUICKLY, lines_of
from tests.interop.folders import write_folder
from tests.models.families import job_of

SHORT = [
  *("--config=configs/single.py:hf", "--config.data.sequence_length=8"),
  *("--config.data.global_batch_size=8", "--config.data.evaluation_split=test[:1]"),
  *("--config.evaluation.final_steps=1", "--config.checkpoint.every_steps=1"),
  *("--config.metrics.every_steps=1", "--config.metrics.report=False", QUICKLY),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Returns a folder of a model of bytes."""
  folder = tmp_path_factory.mktemp("models") / "Small"
  job = job_of("qwen3", **{"model.vocabulary_size": 256, "model.layers": 1})
  write_folder(folder, job, "qwen3")
  (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
  return folder


@pytest.mark.long
def test_a_folder_is_trained_and_its_run_needs_it_no_more(main, folder, tmp_path):
  given = [f"--config.model.folder={folder}", "--config.data.tokenizer=bytes"]
  work = [f"--workdir={tmp_path / 'run'}", *SHORT]
  code, out, err = main(*work, *given, "--config.training.steps=1")
  assert code == 0, (out, err)
  assert f"starts with the parameters of {folder}\n" in out
  moved = folder.rename(tmp_path / "moved")
  try:
    code, out, err = main(*work, *given, "--config.training.steps=2")
    assert code == 0, (out, err)
    assert "resumes from the checkpoint of step 1" in out
    code, out, err = main("evaluate", str(tmp_path / "run"))
    assert code == 0, (out, err)
  finally:
    moved.rename(folder)
  copies = {path.name for path in (tmp_path / "run" / "checkpoints" / "2" / "tokenizer").iterdir()}
  assert copies == {"config.json", "generation_config.json"}
  losses = [line["eval_loss"] for line in lines_of(tmp_path / "run") if "eval_loss" in line]
  assert f"eval_loss {losses[-1]:.4f}" in out


def test_a_folder_is_laid_out_by_its_config_alone(main, folder, tmp_path):
  bare = tmp_path / "Bare"
  bare.mkdir()
  (bare / "config.json").write_text((folder / "config.json").read_text())
  given = [*SHORT, f"--config.model.folder={bare}", "--config.data.tokenizer=bytes"]
  code, out, err = main("layout", *given)
  assert code == 0, (out, err)
  assert "layers/attention/query_norm/scale" in out
  # Its weights are read by training alone, which refuses before anything is written.
  code, out, err = main(*given, f"--workdir={tmp_path / 'run'}")
  assert code == 2, out
  assert err == (
    f"refused: checkpoint.initialize_from={bare}: it has no weights (model.safetensors), only "
    f"config.json\n"
  )
  assert not (tmp_path / "run").exists()


@pytest.mark.faults
def test_the_other_verbs(main, folder, tmp_path):
  given = [*SHORT, f"--config.model.folder={folder}", "--config.data.tokenizer=bytes"]
  workdir = f"--workdir={tmp_path / 'run'}"
  code, out, err = main("evaluate", *given, f"--checkpoint={folder}")
  assert code == 0, (out, err)
  assert "evaluation after step 0" in out
  code, out, err = main("sample", *given, f"--checkpoint={folder}", "--max-new-tokens=2")
  assert code == 0, (out, err)
  both = ["--against=configs/dp8.py:hf", f"--set=model.folder={folder}"]
  both += [f"--set={key}" for key in ("data.tokenizer=bytes", "data.sequence_length=8")]
  code, out, err = main("compare", *given, *both, "--set=data.global_batch_size=8", workdir)
  assert code == 0, (out, err)
  cache = f"--config.planning.cache_dir={tmp_path}"
  code, out, err = main("plan", *given, cache, workdir)
  assert code == 0, (out, err)
  code, out, err = main("plan", *given, cache, workdir)
  assert code == 0, (out, err)
