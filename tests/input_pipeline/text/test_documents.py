"""input_pipeline/text/documents.py: what of a user's files is a document, and what is not."""

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

from input_pipeline.text import documents, files

TEXTS = ["plain", "größer\n日本語 \U0001f600", "", "a" * 3000, '"quoted" \\ \u2028 \0', " x\r\n"]


def zstd(content):
  out = pyarrow.BufferOutputStream()
  with pyarrow.CompressedOutputStream(out, "zstd") as stream:
    stream.write(content)
  return out.getvalue().to_pybytes()


def lines(records, end="\n"):
  text = (json.dumps(record, ensure_ascii=number % 2 == 0) for number, record in enumerate(records))
  return end.join(text).encode()


def read(folder, feature="", unit_bytes=documents.UNIT_BYTES):
  """Returns the items of all files of a folder."""
  found = files.find(str(folder))
  feature = documents.choose_feature(found, feature)
  return [
    item for unit in documents.units(found, unit_bytes) for item in documents.read(unit, feature)
  ]


def texts(folder, **options):
  found = read(folder, **options)
  assert not [(item.where, item.why) for item in found if item.why]
  return [item.text.decode() for item in found]


# ------------------------------ formats ------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_of_json_is_a_document(suffix, tmp_path):
  pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd}[suffix]
  content = lines({"text": text, "id": number} for number, text in enumerate(TEXTS))
  (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(content))
  assert texts(tmp_path) == TEXTS


@pytest.mark.parametrize("suffix", [".txt", ".md", ".txt.gz", ".md.zst"])
def test_a_text_file_is_a_document(suffix, tmp_path):
  pack = gzip.compress if suffix.endswith("gz") else zstd if suffix.endswith("zst") else bytes
  for number, text in enumerate(TEXTS):
    (tmp_path / f"{number}{suffix}").write_bytes(pack(text.encode()))
  assert texts(tmp_path) == [text for text in TEXTS if text]  # an empty file is no document


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), "dictionary"])
def test_a_row_of_parquet_is_a_document(kind, tmp_path):
  column = pyarrow.array(TEXTS, pyarrow.string() if kind == "dictionary" else kind)
  column = column.dictionary_encode() if kind == "dictionary" else column
  table = pyarrow.table({"n": range(len(TEXTS)), "text": column})
  parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
  assert texts(tmp_path) == TEXTS


# ------------------------------ units ------------------------------


@pytest.mark.parametrize("unit_bytes", [1, 7, 100, 1000, 10**6])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_every_line_is_read_once_however_a_file_is_cut(unit_bytes, end, tmp_path):
  wanted = [*TEXTS, "last"]
  (tmp_path / "a.jsonl").write_bytes(lines(({"text": text} for text in wanted), end))
  (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "bom"}' + end.encode())
  assert texts(tmp_path, unit_bytes=unit_bytes) == [*wanted, "bom"]
  where = [item.where.rpartition("/")[2] for item in read(tmp_path, unit_bytes=unit_bytes)]
  step = end.count("\n")
  assert where == [*(f"a.jsonl:{1 + step * n}" for n in range(len(wanted))), "b.jsonl:1"]
