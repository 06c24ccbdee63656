"""Writes files for the tests of text."""

import gzip
import json

import pyarrow


def write(path, content):
  """Writes a text or bytes into a file, and the folders above it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content.encode() if isinstance(content, str) else content)
  return path


def zstd(content):
  """Returns bytes, compressed."""
  out = pyarrow.BufferOutputStream()
  with pyarrow.CompressedOutputStream(out, "zstd") as stream:
    stream.write(content)
  return out.getvalue().to_pybytes()


PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def lines(records, end="\n"):
  """Returns records as lines of JSON; every second has its characters escaped."""
  text = (json.dumps(record, ensure_ascii=number % 2 == 0) for number, record in enumerate(records))
  return end.join(text).encode()
