"""Using a checkpoint: evaluate it, start another run from it, trace a run; and bad input."""

import gzip
import json

import pytest

from tests.helpers.cli import TINY_LM, lines_of

SHORT = [*TINY_LM, "--config.training.steps=4", "--config.checkpoint.every_steps=2"]
SHORT += ["--config.evaluation.final_steps=0"]


@pytest.fixture(scope="module")
def training(main, tmp_path_factory):
  """Returns the workdir of that run, and what it has printed."""
  workdir = tmp_path_factory.mktemp("trained")
  more = ["--config.profile.start_step=1", "--config.profile.steps=2"]
  more += ["--config.evaluation.sample_tokens=6", f"--workdir={workdir}"]
  code, out, err = main("train", "--config=configs/dp4_tp2.py", *SHORT, *more)
  assert code == 0, (out, err)
  return workdir, out


@pytest.fixture(scope="module")
def trained(training):
  """Returns the workdir of a run of four steps, with checkpoints 2 and 4 and a trace."""
  workdir, _ = training
  return workdir


@pytest.mark.long
def test_a_trace_that_xprof_and_perfetto_open(trained):
  [xprof] = (trained / "profile").rglob("*.xplane.pb")
  assert xprof.stat().st_size > 1000
  [perfetto] = (trained / "profile").rglob("perfetto_trace.json.gz")
  events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
  assert len(events) > 100


def test_evaluate_gives_the_same_number_on_every_mesh_and_batch_size(main, trained):
  last = [line["eval_loss"] for line in lines_of(trained) if "eval_loss" in line][-1]
  batch = ["--config.data.global_batch_size=56", f"--workdir={trained}"]
  for step, command in (
    (4, ["--config=configs/fsdp8.py", *TINY_LM, *batch]),
    (2, [f"{trained}/checkpoints/2"]),
  ):
    code, out, err = main("evaluate", *command)
    assert (code, err) == (0, ""), (out, err)
    assert f"evaluation after step {step} (the whole split)" in out
    loss = float(out.split("eval_loss ")[1].split()[0])
    assert (loss == pytest.approx(last, abs=1e-4)) == (step == 4)


def test_another_run_starts_with_the_parameters_and_its_best_step_is_kept(main, trained, tmp_path):
  keep = [f"initialize_from={trained}/4", "keep=1", "keep_best=eval_loss", "every_steps=0"]
  code, out, err = main(
    "--config=configs/dp8.py",
    *SHORT,
    *(f"--config.checkpoint.{key}" for key in keep),
    "--config.seed=5",
    "--config.evaluation.every_steps=1",
    "--config.training.steps=5",
    "--config.optimizer.learning_rate=3.0",  # so that the first steps are the best
    "--config.optimizer.warmup_steps=3",
    f"--workdir={tmp_path}/new",
  )
  assert code == 0, (out, err)
  assert f"starts with the parameters of {trained}/4, step 4" in out
  lines = lines_of(tmp_path / "new")
  assert lines[0]["step"] == 1
  assert lines[0]["loss"] < lines_of(trained)[0]["loss"] - 0.3
  losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
  best = min(losses, key=losses.get)
  assert best < 5
  there = {path.name for path in (tmp_path / "new" / "checkpoints").iterdir()}
  assert there == {str(best), "5"}


def test_sample_continues_prompts_on_any_mesh(main, trained, tmp_path):
  (tmp_path / "prompts").write_text("import\ndef f\n")
  settings = ["--max_new_tokens=5", "--temperature=0"]
  read = ["--config=configs/tp8.py", *TINY_LM, f"--workdir={trained}"]
  texts = []
  for command in (
    [str(trained), "--prompt=import", "--prompt=def f"],
    [*read, f"--prompt_file={tmp_path}/prompts"],
  ):
    code, out, err = main("sample", *command, *settings)
    assert (code, err) == (0, ""), (out, err)
    texts.append(out)
  assert texts[0] == texts[1]
  assert "import" in texts[0]


def test_the_run_ends_with_a_continuation(training):
  _, out = training
  assert "sample from the trained model:\ndef " in out


REFUSALS = {
  "a prompt that is too long": (
    ["sample", "--checkpoint={trained}", "--prompt=0123456789abcdef", "--max_new_tokens=9"],
    ["prompt 1", "16", "25", "data.sequence_length=16"],
  ),
  "a missing step": (
    ["evaluate", "--checkpoint={trained}/3"],
    ["has no step 3; it has 2, 4"],
  ),
  "no checkpoint in the workdir": (["evaluate", "--workdir={empty}"], ["has no checkpoints"]),
  "parameters of another model": (
    [
      "train",
      "--config.checkpoint.initialize_from={trained}",
      "--config.model.layers=2",
      "--workdir={empty}/new",
    ],
    ["layers/mlp/up/kernel", "float32[1, 32, 48] in the checkpoint, float32[2, 32, 48] here"],
  ),
  "rows of another data set": (
    ["train", "--workdir={trained}", "--config.data.train_split=train[:50%]"],
    ["data.train_split", "dataset.rows"],
  ),
  "a metric that evaluation does not give": (
    ["train", "--workdir={empty}/new", "--config.checkpoint.keep_best=eval_los"],
    ["checkpoint.keep_best='eval_los'", "did you mean 'eval_loss'?"],
  ),
  "acceptance without a checkpoint": (
    ["train", "--accept-changes=seed", "--workdir={empty}/new"],
    ["has no checkpoints to resume from"],
  ),
  "a checkpoint for a verb that reads none": (
    ["train", "--checkpoint={trained}"],
    ["--checkpoint belongs to"],
  ),
}


def times_of_files(folder):
  """Returns when each file was changed, by path; of a folder only that it is there.

  A start that is refused withdraws its claim to the workdir, which touches the folder of claims.
  """
  return {path: None if path.is_dir() else path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(main, trained, case, tmp_path):
  arguments, messages = REFUSALS[case]
  (tmp_path / "empty").mkdir()
  places = {"trained": trained, "empty": tmp_path / "empty"}
  command = [argument.format(**places) for argument in arguments]
  before = times_of_files(trained)
  code, out, err = main(command[0], "--config=configs/dp8.py", *TINY_LM, *command[1:])
  assert code == 2, (out, err)
  assert err.startswith("refused: ")
  for message in messages:
    assert message in err, err
  assert before == times_of_files(trained)
  assert list((tmp_path / "empty").iterdir()) == []
