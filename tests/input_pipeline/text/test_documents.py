"""input_pipeline/text/documents.py: what of a user's files is a document, and what is not."""

import gzip
import io
import os
import pathlib

import pyarrow
import pytest
from pyarrow import parquet

from input_pipeline.text import documents, files
from tests.input_pipeline.text.writing import PACKED, lines, write

TEXTS = ["plain", "größer\n日本語 \U0001f600", "", "a" * 3000, '"quoted" \\ \u2028 \0', " x\r\n"]


def read(folder, feature="", unit_bytes=documents.UNIT_BYTES, choose=True):
  """Returns the items of all files of a folder."""
  found = files.find(str(folder))
  feature = documents.choose_feature(found, feature) if choose else feature
  return [
    item for unit in documents.units(found, unit_bytes) for item in documents.read(unit, feature)
  ]


def texts(folder, **options):
  found = read(folder, **options)
  assert not [(item.where, item.why) for item in found if item.why]
  return [item.value.decode() for item in found]


# ------------------------------ formats ------------------------------


@pytest.mark.parametrize("suffix", [*PACKED])
def test_a_line_of_json_is_a_document(suffix, tmp_path):
  content = lines({"text": text, "id": number} for number, text in enumerate(TEXTS))
  (tmp_path / f"a.jsonl{suffix}").write_bytes(PACKED[suffix](content))
  assert texts(tmp_path) == TEXTS


@pytest.mark.parametrize("suffix", [".txt", ".md", ".txt.gz", ".md.zst"])
def test_a_text_file_is_a_document(suffix, tmp_path):
  pack = PACKED[pathlib.Path(suffix).suffix if suffix.count(".") > 1 else ""]
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


@pytest.mark.parametrize(
  ("unit_bytes", "end"), [(1, "\n"), (7, "\r\n"), (100, "\n\n"), (1000, "\r\n"), (10**6, "\n")]
)
def test_every_line_is_read_once_however_a_file_is_cut(unit_bytes, end, tmp_path):
  wanted = [*TEXTS, "last"]
  (tmp_path / "a.jsonl").write_bytes(lines(({"text": text} for text in wanted), end))
  (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "bom"}' + end.encode())
  assert texts(tmp_path, unit_bytes=unit_bytes) == [*wanted, "bom"]
  where = [item.where.rpartition("/")[2] for item in read(tmp_path, unit_bytes=unit_bytes)]
  step = end.count("\n")
  assert where == [*(f"a.jsonl:{1 + step * n}" for n in range(len(wanted))), "b.jsonl:1"]


def test_a_last_line_without_end_and_blank_lines(tmp_path):
  write(tmp_path / "a.jsonl", '\n{"text": "a"}\n\n \t\r\n{"text": "b"}')
  assert texts(tmp_path) == ["a", "b"]
  assert [item.where[-2:] for item in read(tmp_path)] == [":2", ":5"]


def test_files_without_content_are_no_documents(tmp_path):
  for name in ("a.jsonl", "b.txt", "c.jsonl.gz", "d.md.zst"):
    write(tmp_path / name, "")
  write(tmp_path / "e.jsonl", "\n\n")
  write(tmp_path / "f.txt", b"\xef\xbb\xbf")
  write(tmp_path / "g.jsonl.gz", gzip.compress(b""))
  assert read(tmp_path) == []


def test_a_text_file_keeps_its_bytes_but_for_the_byte_order_mark(tmp_path):
  write(tmp_path / "a.txt", b"\xef\xbb\xbfx\r\n\xef\xbb\xbf\n")
  assert [item.value for item in read(tmp_path)] == [b"x\r\n\xef\xbb\xbf\n"]


def test_small_text_files_share_units_and_large_files_are_cut(tmp_path):
  for number in range(10):
    write(tmp_path / f"{number}.txt", "x" * 300)
  write(tmp_path / "5.jsonl", lines([{"text": "y" * 20}] * 50))
  write(tmp_path / "6.jsonl.gz", gzip.compress(lines([{"text": "z"}] * 500)))
  table = pyarrow.table({"text": [f"{n:05}" + "w" * 40 for n in range(200)]})
  parquet.write_table(table, tmp_path / "7.parquet", row_group_size=10, use_dictionary=False)
  found = files.find(str(tmp_path))
  made = documents.units(found, 1000)
  assert [len(unit.files) for unit in made if unit.files[0].suffix == ".txt"] == [3, 2, 1, 1, 3]
  assert [unit.range for unit in made if ".jsonl" in unit.files[0].path] == [
    *((start, min(start + 1000, 1649)) for start in range(0, 1649, 1000)),
    None,
  ]
  groups = [unit.range for unit in made if unit.files[0].suffix == ".parquet"]
  assert len(groups) > 2
  assert [n for start, stop in groups for n in range(start, stop)] == [*range(20)]
  assert abs(sum(unit.size for unit in made) - sum(file.size for file in found)) < 20
  rows = [i for u in made if u.range in groups for i in documents.read(u, "text")]
  assert [int(item.value[:5]) for item in rows] == [*range(200)]
  assert rows[77].where == f"{tmp_path}/7.parquet, row 77"


def test_a_unit_s_id_is_of_what_it_reads(tmp_path):
  write(tmp_path / "a.jsonl", lines([{"text": "y" * 20}] * 50))
  first = documents.units(files.find(str(tmp_path)), 1000)
  assert len({unit.id for unit in first}) == len(first) == 2
  again = documents.units(files.find(f"{tmp_path}/*.jsonl"), 1000)
  assert [unit.id for unit in again] == [unit.id for unit in first]
  assert first[1].name == f"{tmp_path}/a.jsonl, bytes 1,000 to 1,648"
  os.utime(tmp_path / "a.jsonl", ns=(0, 1))
  assert not {u.id for u in documents.units(files.find(str(tmp_path)), 1000)} & {
    u.id for u in first
  }


# ------------------------------ bad records ------------------------------


@pytest.mark.parametrize(
  ("line", "why"),
  [
    (b'{"text": "a', "invalid JSON: Unterminated string starting at, at column 10"),
    (b"text", "invalid JSON: Expecting value, at column 1"),
    (b'{"text": "\xff"}', "byte 10 of the line is 0xff, invalid UTF-8"),
    (b'{"body": "a", "n": 1}', "it has no key 'text', only 'body', 'n'"),
    (b"{}", "it has no key 'text', only none"),
    (b'{"text": null}', "its 'text' is null, not a string"),
    (b'{"text": 5}', "its 'text' is a number, not a string"),
    (b'{"text": true}', "its 'text' is a boolean, not a string"),
    (b'{"text": ["a"]}', "its 'text' is a list, not a string"),
    (b'{"text": {"a": 1}}', "its 'text' is an object, not a string"),
    (b'{"text": "a\\ud800b"}', "its 'text' has half a surrogate pair (\\ud800)"),
    (b'\xef\xbb\xbf{"text": "a"}', "invalid JSON: Unexpected UTF-8 BOM"),
    (b'["a"]', "it is a list, not a JSON object; a .jsonl file has an object in each line"),
    (b'"a"', "it is a string, not a JSON object"),
    (b"[" * 10**5, "invalid JSON: maximum recursion depth"),
    (b'{"text": ' + b"9" * 5000 + b"}", "invalid JSON: Exceeds the limit"),
    (b'{"text": "' + b"a" * 200 + b'"}', "it has more than 100 bytes"),
  ],
)
def test_a_line_that_is_no_document_is_a_bad_record_with_its_place(
  line, why, tmp_path, monkeypatch
):
  if "more than" in why:
    monkeypatch.setattr(documents, "MOST_BYTES", 100)
  good = b'{"text": "good"}'
  write(tmp_path / "a.jsonl", b"\n".join([good, b"", line, good]))
  for unit_bytes in (10**6, 18):
    found = read(tmp_path, feature="text", unit_bytes=unit_bytes, choose=False)
    assert [item.value for item in found] == [b"good", None, b"good"]
    assert found[1].where == f"{tmp_path}/a.jsonl:3"
    assert found[1].why.startswith(why)
    assert found[2].where == f"{tmp_path}/a.jsonl:4"


def test_a_text_file_that_is_not_utf8_is_a_bad_record_with_its_line(tmp_path):
  write(tmp_path / "a.txt", b"one\ntwo \xe9\n")
  write(tmp_path / "b.txt", "x".encode("utf-16"))
  first, second = read(tmp_path)
  assert (first.where, first.value) == (f"{tmp_path}/a.txt:2", None)
  assert first.why == "byte 8 of the file is 0xe9, invalid UTF-8"
  assert second.why.endswith("(it looks like UTF-16: convert it, for example with iconv)")


def test_a_text_file_that_is_too_long_is_a_bad_record(tmp_path, monkeypatch):
  monkeypatch.setattr(documents, "MOST_BYTES", 100)
  for name, count in (("a", 100), ("b", 101)):
    write(tmp_path / f"{name}.txt", "x" * count)
  first, second = read(tmp_path)
  assert (len(first.value), second.value) == (100, None)
  assert second.why.startswith("it has more than 100 bytes, the most of a document; split it into")


def test_rows_that_are_no_documents_are_bad_records(tmp_path, monkeypatch):
  monkeypatch.setattr(documents, "MOST_BYTES", 100)
  column = pyarrow.array([b"a", None, b"\xff\xfe", b"b" * 101, b"c"], pyarrow.binary())
  column = pyarrow.Array.from_buffers(pyarrow.string(), len(column), column.buffers())  # as it is
  parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
  found = read(tmp_path)
  assert [item.value for item in found] == [b"a", None, None, None, b"c"]
  assert [item.where for item in found] == [f"{tmp_path}/a.parquet, row {n}" for n in range(5)]
  whys = ["its 'text' is null, not a string", "byte 0 of the text is 0xff", "it has more than 100"]
  assert all(item.why.startswith(why) for item, why in zip(found[1:4], whys, strict=True))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_ends_early_loses_its_rest_and_says_so(suffix, tmp_path):
  content = PACKED[suffix](lines({"text": f"{n} {hash(str(n))}"} for n in range(12000)))
  write(tmp_path / f"a.jsonl{suffix}", content[: len(content) * 3 // 4])
  *good, bad = read(tmp_path)
  assert 2000 < len(good) < 12000
  assert all(item.value for item in good)
  assert bad.where == f"{tmp_path}/a.jsonl{suffix}:{len(good) + 1}"
  assert bad.why.startswith("the rest of the file cannot be read (Truncated compressed stream")
  write(tmp_path / f"a.jsonl{suffix}", b"no compressed file")
  [bad] = read(tmp_path, feature="text")
  assert bad.where == f"{tmp_path}/a.jsonl{suffix}:1"
  (tmp_path / f"a.jsonl{suffix}").rename(tmp_path / f"a.txt{suffix}")
  [bad] = read(tmp_path)
  assert (bad.where, bad.value) == (f"{tmp_path}/a.txt{suffix}", None)
  assert bad.why.startswith("its compression is damaged")


def test_a_damaged_row_group_loses_its_rows_alone(tmp_path, monkeypatch):
  table = pyarrow.table({"text": [f"{n:06}" * 50 for n in range(300)]})
  options = dict(row_group_size=100, use_dictionary=False, compression="snappy")
  parquet.write_table(table, tmp_path / "a.parquet", **options)
  content = bytearray((tmp_path / "a.parquet").read_bytes())
  chunk = parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(0)
  for place in range(chunk.data_page_offset, chunk.data_page_offset + 200):
    content[place] ^= 0xFF
  write(tmp_path / "a.parquet", bytes(content))
  found = read(tmp_path)
  assert [bool(item.why) for item in found] == [100 <= n < 200 for n in range(300)]
  assert found[150].where.endswith("a.parquet, row 150")
  assert found[150].why.startswith("row group 1 is damaged")

  # Damage behind the first page of a group: what was read before it stays.
  monkeypatch.setattr(documents, "_ROWS", 10)
  pages = dict(data_page_size=2000, write_batch_size=10)
  parquet.write_table(table, tmp_path / "a.parquet", **options, **pages)
  content = bytearray((tmp_path / "a.parquet").read_bytes())
  chunk = parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(0)
  start = chunk.data_page_offset + chunk.total_compressed_size // 2
  for place in range(start, start + 200):
    content[place] ^= 0xFF
  write(tmp_path / "a.parquet", bytes(content))
  found = read(tmp_path)
  assert [int(item.where.rpartition(" ")[2]) for item in found] == [*range(300)]
  first = next(number for number, item in enumerate(found) if item.why)
  assert 110 <= first < 200
  assert [bool(item.why) for item in found] == [first <= n < 200 for n in range(300)]


def test_an_error_of_the_disk_is_no_bad_record(tmp_path, monkeypatch):
  write(tmp_path / "a.jsonl", lines([{"text": "a"}]))
  [unit] = documents.units(files.find(str(tmp_path)))

  class Failing(io.RawIOBase):
    def readable(self):
      return True

    def readinto(self, buffer):
      raise OSError(5, "Input/output error")

  monkeypatch.setattr(documents.files, "open_content", lambda file: Failing())
  with pytest.raises(ValueError, match=r"a\.jsonl cannot be read \(Input/output error\)"):
    [*documents.read(unit, "text")]


@pytest.mark.parametrize("content", [b"", b"no table", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_what_is_no_parquet_file_is_refused(content, tmp_path):
  write(tmp_path / "a.parquet", content)
  with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file, or it is damaged"):
    read(tmp_path, feature="text")


# ------------------------------ which key or column has the text ------------------------------


@pytest.mark.parametrize(
  ("records", "feature", "said"),
  [
    ([{"text": "a", "n": 1}], "", "text"),
    ([{"n": 1, "body": "a"}, {"body": None}], "", "body"),
    ([{"text": "a", "url": "b"}], "url", "url"),
    ([{"text": "a", "url": "b"}], "", r"several hold texts: 'text', 'url'; name .*_feature=text"),
    ([{"t": 1, "u": None}], "", r"holds no texts; present are 't' \(a number\), 'u' \(null\)"),
    ([{"text": "a", "n": 1}], "body", r"'body' is not there; present are 'text' \(a string\), 'n'"),
    ([{"text": "a", "n": 1}], "n", r"_feature='n' is no text; present are 'text' \(a string\)"),
    ([{"text": "a"}, {"text": 1}], "", r"'text' has mixed types: a number in line 2 and a string"),
    ([{"text": "a"}, {"text": []}], "text", r"'text' has mixed types: a list in line 2"),
    ([{"text": None}] * 3, "text", "text"),
    ([{"text": 1, "url": "b"}, {"text": "a"}], "", r"several hold texts: 'text', 'url'; name"),
  ],
)
def test_the_key_of_the_text(records, feature, said, tmp_path):
  suffix = ".gz" * (len(records) > 1)
  path = write(tmp_path / f"a.jsonl{suffix}", PACKED[suffix](lines(records)))
  found = files.find(str(tmp_path))
  if " " not in said:
    assert documents.choose_feature(found, feature) == said
    return
  with pytest.raises(ValueError, match=said) as error:
    documents.choose_feature(found, feature)
  assert str(path) in str(error.value)


@pytest.mark.parametrize(
  ("feature", "said"),
  [
    ("", "text"),
    ("text", "text"),
    ("body", r"_feature='body' is not there; present are 'n' \(int64\), 'text' \(a string\)"),
    ("n", r"_feature='n' is no text; present are"),
  ],
)
def test_the_column_of_the_text(feature, said, tmp_path):
  parquet.write_table(pyarrow.table({"n": [1], "text": ["a"]}), tmp_path / "a.parquet")
  found = files.find(str(tmp_path))
  if " " not in said:
    assert documents.choose_feature(found, feature) == said
    return
  with pytest.raises(ValueError, match=said):
    documents.choose_feature(found, feature)


def test_text_files_have_no_column(tmp_path):
  write(tmp_path / "a.txt", "x")
  found = files.find(str(tmp_path))
  assert documents.choose_feature(found) == ""
  with pytest.raises(
    ValueError, match=r"text_feature=text: the files are text files, which have no"
  ):
    documents.choose_feature(found, "text")


def test_a_column_that_a_later_file_lacks_is_named_with_those_present(tmp_path):
  for name, column in (("a", "text"), ("b", "body"), ("c", "text")):
    parquet.write_table(pyarrow.table({column: ["x"]}), tmp_path / f"{name}.parquet")
  with pytest.raises(
    ValueError, match=r"b\.parquet: data.text_feature='text' is not there; .* 'body'"
  ):
    read(tmp_path)


def test_files_that_have_their_texts_in_different_places_are_refused(tmp_path):
  write(tmp_path / "a.jsonl", lines([{"text": "a"}]))
  write(tmp_path / "b.jsonl", lines([{"body": "a"}]))
  with pytest.raises(
    ValueError, match=r"'text' in .*a\.jsonl, 'body' in .*b\.jsonl; name one with"
  ):
    read(tmp_path)


def test_bad_first_records_do_not_hide_the_key(tmp_path):
  write(tmp_path / "a.jsonl", b'{\n\xff\n{"text": "a"}\n')
  assert [item.value for item in read(tmp_path)] == [None, None, b"a"]


# ------------------------------ records ------------------------------


def test_records_are_complete_objects(tmp_path):
  turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
  records = [{"messages": turns, "n": 1}, {"messages": [], "n": 2}]
  write(tmp_path / "a.jsonl", lines(records) + b"\n[]")
  parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "b.parquet")
  units = documents.units(files.find(str(tmp_path)))
  found = [item for unit in units for item in documents.read_records(unit)]
  assert [item.value for item in found] == [*records, None, *records]
  assert found[2].where.endswith("a.jsonl:3")
  write(tmp_path / "c.txt", "x")
  [unit] = documents.units(files.find(f"{tmp_path}/c.txt"))
  with pytest.raises(
    ValueError, match=r"c\.txt: records are read from \.jsonl and \.parquet files"
  ):
    [*documents.read_records(unit)]
