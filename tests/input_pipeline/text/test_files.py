"""input_pipeline/text/files.py: which files a user means."""

import pytest

from input_pipeline.text import files


def test_a_folder_is_read_below_without_what_is_hidden_or_of_another_format(tmp_path):
  for name in ("b.jsonl", "a/c.txt", "a/.hidden.txt", ".git/d.md", "e.pdf", "a/B.PARQUET"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
  found = [file.path.removeprefix(f"{tmp_path}/") for file in files.find(str(tmp_path))]
  assert found == ["a/B.PARQUET", "a/c.txt", "b.jsonl"]


def test_nothing_that_matches_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"data\.files: .*\*\.jsonl matches no file"):
    files.find(f"{tmp_path}/*.jsonl")
