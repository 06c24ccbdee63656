"""Records in rows of Parquet files, of which parts are row groups."""

import functools
from collections.abc import Iterator

import pyarrow
from pyarrow import parquet, types

from input_pipeline.text import files, items

_ROWS = 256  # read at a time
_FREE_ROWS, _MOST_ROWS_PER_BYTE = 2**24, 256  # of a file


def open_file(file: files.InputFile) -> parquet.ParquetFile:
  """Opens a Parquet file. Raises ValueError, which names it, if that is not possible."""
  try:
    return parquet.ParquetFile(files.open_file(file.path))
  except (pyarrow.ArrowException, OSError) as error:
    if isinstance(error, MemoryError):
      raise
    if isinstance(error, OSError) and not items.is_damage(file, error):
      raise items.unreadable(file, error) from error
    raise ValueError(f"{file.path} is not a Parquet file, or it is damaged ({error})") from error


def row_group_sizes(file: files.InputFile) -> list[int]:
  """Returns the bytes of each row group before compression."""
  with open_file(file) as table:
    return [table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups)]


def column(
  file: files.InputFile, part: tuple[int, int] | None, feature: str
) -> Iterator[items.Item]:
  """Yields the texts of a column, of all rows or of those of a range of row groups."""
  for row in rows(file, part, feature):
    if row.why:
      yield row
      continue
    text, row.value = row.value, None
    if text is None:
      row.why = f"its {feature!r} is null, not a string"
    elif len(text) > items.MOST_BYTES:
      row.why = items.too_long()
    else:
      try:
        text.decode()
        row.value = text
      except UnicodeDecodeError as error:
        row.why = items.not_utf8(error, "text")
    yield row


def rows(
  file: files.InputFile, part: tuple[int, int] | None, feature: str | None
) -> Iterator[items.Item]:
  """Yields rows as objects; with a feature, the bytes of that column alone."""
  with open_file(file) as table:
    if feature is not None:
      check_column(file, table.schema_arrow, feature)
    sizes = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
    most = _FREE_ROWS + _MOST_ROWS_PER_BYTE * file.size
    if sum(sizes) > most:
      raise ValueError(
        f"{file.path} has {sum(sizes):,} rows in {file.size:,} bytes, by its metadata, and at most"
        f" {most:,} are read: it is damaged, or repeats a few values; write it again"
      )
    content = 0
    start, stop = part or (0, len(sizes))
    columns = None if feature is None else [feature]
    for group in range(start, stop):
      first, done = sum(sizes[:group]), 0
      place = functools.partial("{}, row {}".format, file.path)
      try:
        for batch in table.iter_batches(_ROWS, [group], columns, use_threads=False):
          content += batch.nbytes
          files.check_expansion(file, content, file.size)
          for value in _values(batch, feature):
            yield items.Item(place, first + done, value)
            done += 1
        if done < sizes[group]:
          raise pyarrow.ArrowInvalid(f"it has {done:,} rows, not {sizes[group]:,}")
      except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, MemoryError):
          raise
        if isinstance(error, OSError) and not items.is_damage(file, error):
          raise
        why = f"row group {group} is damaged ({error})"
        yield from (items.Item(place, first + row, None, why) for row in range(done, sizes[group]))


def _values(batch, feature):
  if feature is None:
    return batch.to_pylist()
  return (
    batch.column(0).cast(pyarrow.large_binary()).to_pylist()
  )  # its UTF-8 is not checked by pyarrow


def check_column(file: files.InputFile, schema: pyarrow.Schema, feature: str) -> None:
  """Raises ValueError where a Parquet file has no column of texts of that name."""
  known = {field.name: _type_name(field.type) for field in schema}
  if known.get(feature) != "a string":
    what = f"is {schema.field(feature).type}, not text" if feature in known else "is not there"
    listing = ", ".join(f"{field.name} ({field.type})" for field in schema)
    raise ValueError(f"{file.path}: column {feature!r} {what}; present are {listing}")


def types_of(file: files.InputFile) -> dict[str, dict[str, str]]:
  """Returns column -> {the type of its values, as `items.type_name` calls it for texts: ""}."""
  with open_file(file) as table:
    return {field.name: {_type_name(field.type): ""} for field in table.schema_arrow}


def _type_name(kind: pyarrow.DataType) -> str:
  values = kind.value_type if types.is_dictionary(kind) else kind
  if types.is_string(values) or types.is_large_string(values) or types.is_string_view(values):
    return items.type_name("")
  return str(kind)
