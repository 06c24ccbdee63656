"""The verb `prepare`, and a run on what it has prepared: from a folder of text to bits per byte."""

import json
import math
import re
import shutil

import pytest

from input_pipeline.text import train_tokenizer
from tests.helpers.cli import TINY_LM, lines_of
from tests.input_pipeline.text.corpora import texts, write_lines

TEXT = "--config=configs/single.py:model=lm,data=text"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """The flags of a folder of text that no test has prepared."""
  folder = tmp_path_factory.mktemp("corpus")
  write_lines(folder / "files" / "a.jsonl", texts(300, longest=60))
  (folder / "files" / "b.md").write_text("# A document\n" * 20)
  data = [f"--config.data.files={folder}/files", f"--config.data.data_dir={folder}/data"]
  return [TEXT, *TINY_LM, *data, "--config.data.evaluation_split=test"]


def report(out, split):
  """Returns the numbers of a split's line."""
  [line] = [line for line in out.splitlines() if line.startswith(f"text {split}: ")]
  return [float(number.replace(",", "")) for number in re.findall(r"[\d,]*\.?\d+", line)]


@pytest.mark.long
def test_text_is_prepared_once_and_trained_on(main, corpus, tmp_path):
  code, out, err = main("prepare", *corpus, "--train_tokenizer=300")
  assert (code, err) == (0, "")
  # Those that are held out for validation are left out.
  assert 250 < int(re.search(r"prepared a tokenizer: (\d+) documents in", out)[1]) < 301
  trained = re.search(r"tokenizer: (\S+)/tokenizer.json, 300 tokens", out)[1]
  tokens, documents, bytes_per_token, rows, length, padding, split, steps, _ = report(out, "train")
  assert 250 < documents < 301
  assert 1 < bytes_per_token < 3
  assert (length, steps) == (16, 200)
  assert rows * 16 == pytest.approx(tokens / (1 - padding / 100), rel=1e-2)
  assert split > 0
  again, out, err = main("prepare", *corpus)
  assert (again, err) == (0, "")
  assert "prepared text" not in out, "it is there already"

  workdir = tmp_path / "run"
  steps = ["--config.training.steps=6", "--config.checkpoint.every_steps=3"]
  code, out, err = main(*corpus, *steps, f"--workdir={workdir}")
  assert (code, err) == (0, "")
  assert "prepared text" not in out
  assert report(out, "train")[:6] == [tokens, documents, bytes_per_token, rows, length, padding]
  config = json.loads((workdir / "config.json").read_text())
  assert config["data"]["tokenizer"] == trained
  assert config["data"]["packing"] == "best_fit"
  assert config["model"]["vocabulary_size"] == 300
  assert config["model"]["separate_documents"] is True
  last = lines_of(workdir)[-1]
  per_token = last["eval_loss"] / math.log(2)
  assert last["eval_bits_per_byte"] == pytest.approx(per_token / report(out, "test")[2], rel=1e-3)
  record = json.loads((workdir / "checkpoints" / "6" / "record" / "metadata").read_text())
  assert record["data_report"]["tokens"] == tokens
  assert record["data_report"]["epochs"] == pytest.approx(6 * 32 / rows)
  assert len(record["data"]["tokenizer"]) == 64

  # As if it had been killed after step 3: what follows is the same to the bit.
  killed = tmp_path / "killed"
  shutil.copytree(workdir, killed, ignore=lambda path, names: {"6"} & {*names})
  code, out, err = main(*corpus, *steps, f"--workdir={killed}")
  assert (code, err) == (0, "")
  assert "resumes from the checkpoint of step 3" in out
  numbers = [
    {key: line[key] for key in ("step", "loss", "grad_norm", "eval_loss") if key in line}
    for line in (*lines_of(workdir), *lines_of(killed))
  ]
  half = len(numbers) // 2
  assert numbers[:half] == numbers[half:]
  assert numbers[-1]["step"] == 6


@pytest.mark.long
def test_a_run_resumes_with_its_files_elsewhere_and_not_with_others(main, corpus, tmp_path):
  files = tmp_path / "files"
  write_lines(files / "a.jsonl", texts(100))
  flags = [f"--config.data.files={files}", f"--workdir={tmp_path}/run", "--config.seed=1"]
  short = [*flags, "--config.data.tokenizer=bytes", "--config.training.steps=2"]
  code, _, err = main(*corpus, *short)
  assert (code, err) == (0, "")
  files.rename(tmp_path / "moved")
  moved = f"--config.data.files={tmp_path}/moved"
  code, out, err = main(*corpus, *short, moved, "--config.training.steps=3")
  assert (code, err) == (0, "")
  assert "resumes from the checkpoint of step 2" in out
  (tmp_path / "tokenizer").mkdir()
  content = train_tokenizer.train([text.encode() for text in texts(9)], 257)
  (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(content)
  (tmp_path / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
  other = [f"--config.data.tokenizer={tmp_path}/tokenizer", "--config.model.vocabulary_size=257"]
  code, _, err = main(*corpus, *short, moved, "--config.training.steps=4", *other)
  assert code == 2
  assert "dataset.tokenizer: " in err
  write_lines(tmp_path / "moved" / "b.jsonl", texts(3, seed=8))
  code, _, err = main(*corpus, *short, moved, "--config.training.steps=4")
  assert code == 2
  assert "dataset.rows: " in err


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--config.data.files=/no/such"], r"data.files: there is no file or folder /no/such"),
    (["--train_tokenizer=100"], r"--train_tokenizer=100: a tokenizer has 257"),
    (["--train_tokenizer=300", "--config.data.tokenizer=bytes"], r"names another one; leave one"),
  ],
  ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_prepared_is_one_message_and_exit_code_2(main, corpus, flags, said):
  code, out, err = main("prepare", *corpus, *flags)
  assert (code, out) == (2, "")
  assert re.search(said, err), err
  assert len(err.splitlines()) <= 2
  assert err.startswith("refused: ")


def test_a_tokenizer_is_trained_for_a_data_set_by_its_name_and_named_by_the_user(main):
  keys = ["--config=configs/single.py", *TINY_LM, "--config.data.train_split=train[:9]"]
  code, out, err = main("prepare", *keys, "--train_tokenizer=300")
  assert (code, err) == (0, "")
  folder = re.search(r"train with it: --config\.data\.tokenizer=(\S+)", out)[1]
  assert f"tokenizer: {folder}/tokenizer.json, 300 tokens" in out
  code, out, err = main("prepare", *keys)
  assert (code, err) == (0, "")
  assert "tokenizer:" not in out, "without the key, tokens stay bytes"
  code, out, err = main("prepare", "--config=configs/single.py:mlp", "--train_tokenizer=300")
  assert code == 2
  assert "data.name='digits' is no text" in err


@pytest.mark.long
def test_a_run_trains_its_tokenizer_first_and_resumes_with_it(main, tmp_path):
  command = ["--config=configs/dp8.py:lm_bpe", *TINY_LM, f"--workdir={tmp_path / 'run'}"]
  command += ["--config.data.train_tokenizer=300", "--config.model.vocabulary_size=300"]
  command += [f"--config.data.data_dir={tmp_path}", "--config.data.train_split=train[:3%]"]
  for steps, said in ((2, "prepared a tokenizer: "), (4, "resumes from the checkpoint of step 2")):
    code, out, err = main(*command, f"--config.training.steps={steps}")
    assert code == 0, (out, err)
    assert said in out
  assert "prepared a tokenizer" not in out
  [folder] = (tmp_path / "prepared" / "text" / "tokenizers").glob("*/bpe-*")
  trained = (folder / "tokenizer.json").read_bytes()
  assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").read_bytes() == trained
  assert len(json.loads(trained)["model"]["vocab"]) == 300
  code, out, err = main("sample", *command[:-1], "--prompt=def", "--max_new_tokens=4")
  assert code == 0, (out, err)
  assert out.startswith("def")


@pytest.mark.long
def test_a_teacher_is_stored_and_a_killed_student_goes_on_with_it(main, corpus, tmp_path):
  steps = [f"--config.{key}" for key in ("training.steps=4", "checkpoint.every_steps=2")]
  code, out, err = main(*corpus, *steps, f"--workdir={tmp_path}/teacher")
  assert (code, err) == (0, "")
  given = ["--config.distillation.temperature=1.5", "--config.data.packing=best_fit"]
  stored = f"--teacher={tmp_path}/teacher"
  code, out, err = main("prepare", *corpus, *given, stored, "--teacher_top=5")
  assert (code, err) == (0, "")
  assert re.search(r"teacher: .*/teacher, [\d,]+ rows, [\d.]+ MiB; train with it:", out)
  folder = re.search(r"distillation.teacher=(\S+) distillation.temperature=1.5", out)[1]
  keys = ("optimizer.schedule=constant", "metrics.every_steps=1", f"distillation.teacher={folder}")
  student = [*corpus, *given, *steps, *(f"--config.{key}" for key in keys)]
  divergences = {}
  for name, count in (("whole", 4), ("parts", 2), ("parts", 4)):
    code, out, err = main(
      *student, f"--config.training.steps={count}", f"--workdir={tmp_path}/{name}"
    )
    assert (code, err) == (0, "")
    lines = [line for line in lines_of(tmp_path / name) if "teacher_divergence" in line]
    divergences[name] = [(line["step"], line["teacher_divergence"]) for line in lines]
  assert "resumes from the checkpoint of step 2" in out
  assert divergences["parts"] == divergences["whole"]
  assert [step for step, _ in divergences["whole"]] == [1, 2, 3, 4]
  code, out, err = main("evaluate", f"{tmp_path}/parts")
  assert (code, err) == (0, "")
  shutil.rmtree(folder)
  code, out, err = main(*student, f"--workdir={tmp_path}/again")
  assert code == 2
  assert folder in err
