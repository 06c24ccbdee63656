"""Files that would take a machine's time, memory or disk: refused at once, by their numbers."""

import gzip
import os
import re
import struct
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from input_pipeline.text import documents, files, preparation
from tests.input_pipeline.text.corpora import section
from tests.input_pipeline.text.test_preparation import ROOT
from tests.input_pipeline.text.writing import PACKED, write

MEMORY = 2**21  # KiB of address space, of which the imports take the half

PREPARE = """
import resource, sys
from input_pipeline.text import preparation
from tests.input_pipeline.text.corpora import section
data = section(*sys.argv[1:])
preparation.prepare(data, data.files)
print(preparation.text_files.find(data.files)[0].size)
"""


def refusal(folder, tmp_path):
  """Returns what a process of little memory says last when it prepares a folder."""
  command = f'ulimit -v {MEMORY}; exec "$0" -c "$1" "$2" "$3"'
  words = [sys.executable, PREPARE, str(folder), str(tmp_path / "data")]
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  environment |= {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
  found = subprocess.run(
    ["bash", "-c", command, *words],
    env=environment,
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert found.returncode == 1, found.stdout
  assert not [*(tmp_path / "data").glob("prepared/text/*/*.tmp")]
  return found.stderr.strip().splitlines()[-1]


def repeated(path, block, count):
  """Writes a block many times, compressed; returns the size."""
  return write(path, gzip.compress(block) * count).stat().st_size


@pytest.mark.parametrize("between", [b"", b'{"text": "a"}\n'])
def test_many_newlines_in_a_small_file_are_refused(between, tmp_path, monkeypatch):
  monkeypatch.setattr(documents, "_FREE_BLANK", 2**12)
  path = tmp_path / "a.jsonl.gz"
  repeated(path, between + b"\n" * 2**13, 9)
  [unit] = documents.units(files.find(str(tmp_path)))
  line = 2**12 + 1 + (len(between) + 1 if between else 0)
  with pytest.raises(
    ValueError, match=f"{path}:{line}: up to here blank lines have 4,096 bytes mo"
  ):
    list(documents.read(unit, "text"))


def test_a_small_file_of_one_long_line_is_refused(tmp_path):
  folder = tmp_path / "files"
  size = repeated(folder / "a.jsonl.gz", b"a" * 2**22, 300)
  said = refusal(folder, tmp_path)
  pattern = r"a\.jsonl\.gz: ([\d,]+) of its ([\d,]+) bytes hold more than ([\d,]+) bytes of content"
  read, of, most = (int(n.replace(",", "")) for n in re.search(pattern, said).groups())
  assert of == size
  assert most == 2**26 + 128 * read
  assert 2**16 <= read < size / 2, "it is refused as soon as it can be"


def test_what_is_compressed_well_is_read(tmp_path, monkeypatch):
  """A hundredth of its size, and more than what is free."""
  monkeypatch.setattr(files, "_FREE_BYTES", 2**12)
  draw = np.random.default_rng(0)
  texts = [bytes(draw.integers(97, 123, 60, np.uint8)) * 60 for _ in range(500)]
  content = gzip.compress(b"".join(b'{"text": "%s"}\n' % text for text in texts))
  assert 30 < 500 * 3613 / len(content) < 128
  write(tmp_path / "a.jsonl.gz", content)
  [unit] = documents.units(files.find(str(tmp_path)))
  assert [item.value for item in documents.read(unit, "text")] == texts


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".txt.gz"])
def test_what_is_nearly_nothing_but_repetition_is_not(suffix, tmp_path, monkeypatch):
  monkeypatch.setattr(files, "_FREE_BYTES", 2**12)
  content = b'{"text": "a"}\n' * 2**16
  write(tmp_path / f"a{suffix}", PACKED["." + suffix.rpartition(".")[2]](content))
  [unit] = documents.units(files.find(str(tmp_path)))
  with pytest.raises(ValueError, match=r"bytes hold more than [\d,]+ bytes of content, over 128 t"):
    list(documents.read(unit, "text"))


# ------------------------------ long lines ------------------------------


def test_a_line_of_many_gigabytes_is_a_bad_record_of_its_first_part(tmp_path):
  """A sparse file of 10 GiB in 160 units, each of which would look for the line's end."""
  path = write(tmp_path / "files" / "a.jsonl", b'{"text": "')
  os.truncate(path, 10 * 2**30)
  said = refusal(tmp_path / "files", tmp_path)
  assert said.strip().startswith(f"{path}:1: it has more than 33,554,432 bytes")
  last = documents.units(files.find(str(path)))[1]
  assert list(documents.read(last, "text")) == []


@pytest.mark.parametrize("unit_bytes", [7, 100, 1000])
def test_lines_around_a_long_one_are_read_once(unit_bytes, tmp_path, monkeypatch):
  monkeypatch.setattr(documents, "MOST_BYTES", 40)
  monkeypatch.setattr(documents, "BLOCK", 16)
  long = b'{"text": "%s"}\n' % (b"x" * 300)
  write(tmp_path / "a.jsonl", b'{"text": "a"}\n' + long + b'{"text": "b"}\n' + long)
  units = documents.units(files.find(str(tmp_path)), unit_bytes)
  found = [item for unit in units for item in documents.read(unit, "text")]
  assert [item.value for item in found] == [b"a", None, b"b", None]
  assert [item.where.rpartition(":")[2] for item in found] == ["1", "2", "3", "4"]


# ------------------------------ Parquet ------------------------------


def varint(number):
  """Returns a positive number as Parquet's metadata has it."""
  number, out = 2 * number, b""
  while number > 127:
    number, out = number >> 7, out + bytes([number % 128 + 128])
  return out + bytes([number])


def forged(path, said):
  """Writes 12,345 rows into a file whose metadata says another number."""
  out = pyarrow.BufferOutputStream()
  table = pyarrow.table({"text": [f"text {number}" for number in range(12345)]})
  parquet.write_table(table, out, write_statistics=False, use_dictionary=False)
  raw = out.getvalue().to_pybytes()
  [size] = struct.unpack("<I", raw[-8:-4])
  footer = raw[-8 - size : -8].replace(varint(12345), varint(said))
  assert parquet.read_metadata(pyarrow.BufferReader(raw)).num_rows == 12345
  return write(path, raw[: -8 - size] + footer + struct.pack("<I", len(footer)) + b"PAR1")


def test_a_table_of_more_rows_than_its_bytes_can_have_is_refused(tmp_path):
  path = forged(tmp_path / "a.parquet", 10**10)
  [unit] = documents.units(files.find(str(tmp_path)))
  for read in (documents.read_records(unit), documents.read(unit, "text")):
    said = rf"{path} has 10,000,000,000 rows in [\d,]+ bytes, by its metadata"
    with pytest.raises(ValueError, match=said):
      next(read)


def test_rows_that_the_metadata_names_and_the_file_lacks_are_bad(tmp_path):
  forged(tmp_path / "a.parquet", 12400)
  [unit] = documents.units(files.find(str(tmp_path)))
  found = list(documents.read(unit, "text"))
  assert [item.value for item in found if not item.why] == [b"text %d" % n for n in range(12345)]
  assert [item.why for item in found[12345:]] == [
    "row group 0 is damaged (it has 12,345 rows, not 12,400)"
  ] * 55


def test_a_table_that_repeats_a_value_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(files, "_FREE_BYTES", 2**16)
  parquet.write_table(pyarrow.table({"text": ["x" * 1000] * 20_000}), tmp_path / "a.parquet")
  [unit] = documents.units(files.find(str(tmp_path)))
  for read in (documents.read_records(unit), documents.read(unit, "text")):
    with pytest.raises(ValueError, match=r"hold more than [\d,]+ bytes of content, over 128 times"):
      list(read)


def test_memory_that_is_lacking_is_no_damage(tmp_path, monkeypatch):
  parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "a.parquet")
  [unit] = documents.units(files.find(str(tmp_path)))

  def fail(*_):
    raise pyarrow.ArrowMemoryError("malloc of size 2147483648 failed")

  monkeypatch.setattr(documents, "_rows", fail)
  with pytest.raises(MemoryError):
    list(documents.read(unit, "text"))


# ------------------------------ nothing ------------------------------


def test_the_progress_of_what_is_compressed_ends_with_100_percent_alone(tmp_path):
  content = gzip.compress(b'{"text": "%s"}\n' % (b"a" * 500) * 3000)
  write(tmp_path / "files" / "a.jsonl.gz", content)
  data, said = section(tmp_path / "files", tmp_path / "data"), []
  preparation.prepare(data, data.files, tick=lambda what, count, text: said.append(text))
  assert max(int(text.partition(" ")[0]) for text in said[:-2]) == 99
  assert said[-1].startswith("100 % of ")
