"""The records of a prepared store by number, and which of them cannot be read.

ArrayRecord verifies a checksum for every record, so a damaged one raises, without affecting others:
the store has each in its own chunk. Files with randomly flipped bits gave correct records and
errors, never a wrong record and never a crash.
"""

from collections.abc import Callable, Mapping, Sequence

from array_record.python import array_record_module

from input_pipeline import prepare

_BYTES_PER_READ = 2**24
_RECORDS_PER_READ = 1024


class UnreadableError(ValueError):
  """Rows that a step needs cannot be read.

  Attributes:
    rows: number -> why, of the rows in question.
  """

  def __init__(self, text: str, rows: Mapping[int, str]):
    """Takes the message and the rows."""
    super().__init__(text)
    self.rows = dict(rows)


class Records:
  """The records of a store, with random access; may be read by several threads.

  Attributes:
    store: the prepare.Store.
  """

  def __init__(self, store: prepare.Store, fits: Callable[[int, int], bool]):
    """Opens the file.

    Args:
      store: a prepared store.
      fits: (number of a record, its size in bytes) -> whether that size is possible.

    Raises:
      ValueError: the file cannot be opened, or its records are not those of store.json.
    """
    self.store, self._fits = store, fits
    path, rows = str(store.rows_path), store.manifest["rows"]
    try:
      # Without read-ahead: rows are read in random order.
      self._reader = array_record_module.ArrayRecordReader(
        path, options="readahead_buffer_size:0", file_reader_buffer_size=32768
      )
      there = self._reader.num_records()
    except RuntimeError as error:
      raise ValueError(
        f"{store.name}: {path} cannot be opened ({error}); {again(store)}"
      ) from error
    if there != rows:  # 0 if the index at the end of the file is damaged
      raise ValueError(
        f"{store.name}: {path} has {there} rows, store.json says {rows}; {again(store)}"
      )

  def __len__(self) -> int:
    """Returns the number of records."""
    return self.store.manifest["rows"]

  @property
  def per_read(self) -> int:
    """Returns how many records to read at once when all are read, to use little memory."""
    mean = -(-self.store.manifest["row_file_bytes"] // max(1, len(self)))
    return min(_RECORDS_PER_READ, max(1, _BYTES_PER_READ // mean))

  def read(self, numbers: Sequence[int]) -> list[bytes]:
    """Returns records.

    Args:
      numbers: of the records, in any order.

    Raises:
      UnreadableError: with all of these that cannot be read.
      IndexError: a number below 0 or too large.
    """
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(self):
      raise IndexError(
        f"{self.store.name}: row numbers {numbers} are not all in 0..{len(self) - 1}"
      )
    records, whys = self._try(numbers)
    if whys:
      first = min(whys)
      more = f", and {len(whys) - 1} more of this batch" if len(whys) > 1 else ""
      raise UnreadableError(
        f"{self.store.name}: row {first} of {self.store.rows_path} cannot be read"
        f" ({whys[first]}){more}",
        whys,
      )
    return records

  def unreadable(self, numbers: Sequence[int]) -> dict[int, str]:
    """Returns number -> why for those of the records that cannot be read."""
    return self._try(numbers)[1]

  def _try(self, numbers: Sequence[int]) -> tuple[list[bytes], dict[int, str]]:
    """Returns the records that can be read, and number -> why for the others."""
    try:
      records = self._reader.read(list(numbers)) if numbers else []
      if all(map(self._fits, numbers, map(len, records))):
        return records, {}
    except RuntimeError:
      pass
    records, whys = [], {}
    for number in numbers:  # one by one: which of them is it?
      try:
        [record] = self._reader.read([number])
      except RuntimeError as error:
        whys[number] = str(error).strip().partition("\n")[0]
        continue
      if self._fits(number, len(record)):
        records.append(record)
      else:
        whys[number] = f"it has {len(record)} bytes, which no row here has"
    return records, whys


def again(store: prepare.Store) -> str:
  """Returns the fix for a damaged store."""
  return f"delete {store.folder} and run again to prepare it from scratch"
