"""Prepares a split of a data set once, as rows with random access.

A store is a folder `DATA_DIR/prepared/NAME[/CONFIG]/VERSION/SPLIT-KIND-...` with two files:
  rows.array_record   the rows, each in its own chunk with its own checksum
  store.json          what they are, how many, and the SHA-256 over them
It is written under another name and renamed, so that a store is complete or does not exist.

A text row is T+1 tokens (one byte each), of which the last is the first of the next row: row r
is stream[r*T : r*T + T + 1], where the stream is every document in the order of the split, each
followed by one 0 byte. So each token except the very first is predicted exactly once; only the last
row may be shorter. An image row is the pixels (uint8) and then the label (int32, little-endian).

An unreadable record of the data set is refused, or with data.max_bad_records above 0 listed in
store.json: an image is replaced by an empty row, so that the numbers of the others do not change; a
document, whose length is unknown, is left out of the stream.
"""

import dataclasses
import hashlib
import json
import re
import tempfile
import uuid

import numpy as np
from array_record.python import array_record_module
from etils import epath

from input_pipeline.file_lock import locked
from input_pipeline.sources import catalog
from input_pipeline.text.shard_writer import write_error
from runtime import files

FORMAT = 1  # of the rows and of store.json; raise it when either changes
ROWS_FILE = "rows.array_record"
MANIFEST_FILE = "store.json"
END_OF_DOCUMENT = b"\0"
NO_IMAGE = b""
# One row per chunk: a damaged byte costs one row, and a row is read without its neighbours.
_WRITER_OPTIONS = "group_size:1,uncompressed"


@dataclasses.dataclass(frozen=True)
class Store:
  """A prepared split: its folder, and the content of store.json."""

  folder: epath.Path
  manifest: dict

  @property
  def rows_path(self):
    """The ArrayRecord file of the rows."""
    return self.folder / ROWS_FILE

  @property
  def name(self):
    """The data set and its split, for messages."""
    parts = (self.manifest["name"], self.manifest["config"], self.manifest["version"])
    return f"{catalog.Reference(*parts)} {self.manifest['split']}"

  @property
  def bad_records(self):
    """The numbers of the data set's records that could not be read when it was prepared."""
    return tuple(self.manifest["bad_records"]) if "bad_records" in self.manifest else ()

  @property
  def why(self):
    """What was wrong with the first of them; "" if all could be read."""
    return self.manifest["bad_record_why"] if self.bad_records else ""


def no_tick(what, count, text=""):
  """Takes no note of what was done."""


def prepare(data, split, tick=no_tick):
  """Returns the Store of a split; writes it first if it is not there.

  Args:
    data: the config's `data` section, with `kind`, how its rows are read: text or image.
    split: a split of the data set, or a slice of one in TFDS's notation.
    tick: called often during preparation, with (what is counted, how many so far). If it raises,
      the preparation ends and leaves nothing behind.

  Raises:
    ValueError: the data set is unusable, with the fix; or the files of the store disagree. Such a
      store is not repaired silently: since it was renamed when complete, someone has changed it or
      the disk is failing, and the user should know.
  """
  if data.kind not in ("text", "image"):
    raise ValueError(f"a task on {data.kind!r} rows: they are one of text, image, random")
  reference, root = catalog.parse_name(data.name), catalog.data_folder(data)
  known = catalog.embedded_reference(reference)
  if known is not None:
    wanted = _wanted(data, known, split, catalog.EMBEDDED[known.name].features)
    if wanted is not None and (_folder(root, wanted) / MANIFEST_FILE).exists():
      return _open(_folder(root, wanted), wanted)
  try:
    return _prepare(data, split, reference, root, tick)
  except OSError as error:
    raise ValueError(
      f"data set {reference} cannot be prepared in {root} ({error}); free some space or get the"
      " right to write there, or set data.data_dir to another folder"
    ) from error


def _prepare(data, split, reference, root, tick):
  # Importing TFDS takes longer than everything else here, and is only needed for a data set that is
  # not prepared, or whose version only its builder knows.
  from input_pipeline.sources import tfds

  builder = tfds.load_builder(reference, root, tick)
  tfds.check_split(builder, split)
  roles = ("text",) if data.kind == "text" else ("image", "label")
  chosen = {
    role: tfds.choose_feature(builder, role, getattr(data, f"{role}_feature")) for role in roles
  }
  wanted = _wanted(data, tfds.full_reference(builder), split, chosen)
  folder = _folder(root, wanted)
  with locked(folder):
    if not (folder / MANIFEST_FILE).exists():
      where = f"data set {tfds.full_reference(builder)}, split {split}"
      bad = _BadRecords(where, data.max_bad_records)
      _write(folder, wanted, tfds.examples(builder, split, bad.add), bad, tick)
  store, stored = _open(folder, wanted), builder.info.splits[split].num_examples
  if store.manifest["examples"] != stored:
    raise ValueError(
      f"{store.name} has {stored} examples, but its rows were made from"
      f" {store.manifest['examples']}: the data set changed under its version; delete {folder} and"
      " run again to prepare it from scratch"
    )
  return store


def _wanted(data, reference, split, features):
  """Returns what identifies a store, or None if the config's feature is not known yet."""
  wanted = {
    "format": FORMAT,
    "name": reference.name,
    "config": reference.config,
    "version": reference.version,
    "split": split,
    "kind": data.kind,
  }
  for role in ("text",) if data.kind == "text" else ("image", "label"):
    if features.get(role) is None or getattr(data, f"{role}_feature") not in ("", features[role]):
      return None
    wanted[f"{role}_feature"] = features[role]
  if data.kind == "text":
    if data.sequence_length < 1:
      raise ValueError(f"data.sequence_length={data.sequence_length}; it must be at least 1 token")
    wanted |= {"tokenizer": "bytes", "sequence_length": data.sequence_length}
  return wanted


def _folder(root, wanted):
  """Returns the folder of a store: everything that identifies it is in the path."""
  reference = catalog.Reference(wanted["name"], wanted["config"], wanted["version"])
  split = wanted["split"]
  plain = re.sub(r"[^\w.-]", "_", split)
  if plain != split:  # a slice such as train[:90%]; two slices must not share a folder
    plain += "-" + hashlib.sha256(split.encode()).hexdigest()[:8]
  if wanted["kind"] == "text":
    what = f"{wanted['text_feature']}-{wanted['tokenizer']}-{wanted['sequence_length']}"
  else:
    what = f"{wanted['image_feature']}-{wanted['label_feature']}"
  return root / "prepared" / reference.path / f"{plain}-{wanted['kind']}-{what}"


def _open(folder, wanted):
  """Returns the Store in `folder` after comparing store.json with the request and the rows."""
  again = f"delete {folder} and run again to prepare it from scratch"
  try:
    manifest = files.read_json(folder / MANIFEST_FILE, follow=True)
    if wrong := _malformed(manifest, wanted):
      raise ValueError(wrong)
  except (OSError, ValueError) as error:
    raise ValueError(f"{folder / MANIFEST_FILE} cannot be read ({error}); {again}") from error
  differing = [key for key in wanted if manifest[key] != wanted[key]]
  rows, size = manifest["rows"], manifest["row_file_bytes"]
  if differing:
    listing = ", ".join(f"{key} is {manifest[key]!r}, not {wanted[key]!r}" for key in differing)
    raise ValueError(f"{folder / MANIFEST_FILE} describes another store: {listing}; {again}")
  path = folder / ROWS_FILE
  there = path.stat().length if path.exists() else 0
  if there != size:
    raise ValueError(
      f"{path} has {there} bytes, but {MANIFEST_FILE} says {size} ({rows} rows); {again}"
    )
  return Store(folder, manifest)


# The keys of store.json that do not follow from the request, and checks of their values.
_COUNTS = ("rows", "row_file_bytes", "examples")
_OF_KIND = {"text": ("tokens",), "image": ("smallest_label", "largest_label")}


def _malformed(manifest, wanted):
  """Returns what is wrong with the format of store.json; "" if nothing is."""
  if not isinstance(manifest, dict):
    return "it is not a JSON object"
  kind = wanted["kind"]
  keys = [*wanted, *_COUNTS, *_OF_KIND[kind], "digest", *(("shape",) if kind == "image" else ())]
  if missing := [key for key in keys if key not in manifest]:
    return f"it lacks {', '.join(missing)}"
  wrong = [key for key in _OF_KIND[kind] if type(manifest[key]) is not int]
  wrong += [key for key in _COUNTS if not _is_count(manifest[key])]
  lists = ("shape", "bad_records")
  wrong += [key for key in lists if key in manifest and not _are_counts(manifest[key])]
  texts = ("digest", "bad_record_why")
  wrong += [key for key in texts if key in manifest and not isinstance(manifest[key], str)]
  return ", ".join(f"{key} is {json.dumps(manifest[key])[:60]}" for key in wrong)


def _is_count(value):
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_counts(values):
  return isinstance(values, list) and all(map(_is_count, values))


class _BadRecords:
  """The records of a data set that cannot be read, up to data.max_bad_records."""

  def __init__(self, where, limit):
    self.where, self._limit = where, limit
    self._whys = {}

  def add(self, number, why):
    """Records a bad record; raises ValueError if there are too many."""
    self._whys[number] = why
    first = min(self._whys)
    if not self._limit:
      raise ValueError(
        f"{self.where}: record {number} cannot be read ({why}); prepare the data set again, or copy"
        " it again, or set data.max_bad_records to continue without such records"
      )
    if len(self._whys) > self._limit:
      raise ValueError(
        f"{self.where}: more than data.max_bad_records={self._limit} records cannot be read: record"
        f" {number} is number {len(self._whys)} of them, and the first is {first}"
        f" ({self._whys[first]}); prepare the data set again, or copy it again, or allow for more"
      )

  def facts(self):
    """Returns their entries in store.json; none if there are no bad records."""
    if not self._whys:
      return {}
    return {"bad_records": sorted(self._whys), "bad_record_why": self._whys[min(self._whys)]}


class _RowWriter:
  """Writes rows to a local ArrayRecord file, counting and digesting them."""

  def __init__(self, path, tick):
    self._tick, self._path = tick, path
    self._writer = array_record_module.ArrayRecordWriter(str(path), _WRITER_OPTIONS)
    self._digest = hashlib.sha256()
    self.rows = 0

  def write(self, row):
    try:
      self._writer.write(row)
    except RuntimeError as error:
      raise write_error(self._path, error) from error
    # With its length, so that the digest depends on the row boundaries.
    self._digest.update(len(row).to_bytes(4, "little") + row)
    self.rows += 1
    self._tick("rows", self.rows)

  def finish(self):
    """Closes the file and returns the entries of store.json about its rows."""
    try:
      self._writer.close()
    except RuntimeError as error:
      raise write_error(self._path, error) from error
    return {"rows": self.rows, "digest": self._digest.hexdigest()}


def _write(folder, wanted, examples, bad, tick):
  """Writes a store: in a local folder, then next to `folder`, then renamed to it."""
  partial = folder.parent / f"{folder.name}.{uuid.uuid4().hex}.tmp"
  remote = "://" in str(folder)  # ArrayRecord reads object storage, but writes local files only
  if not remote:
    for left in folder.parent.glob(f"{folder.name}.*.tmp"):
      left.rmtree()  # a killed process's: this process has the lock, so no other is writing it
  partial.mkdir(parents=True)
  local = epath.Path(tempfile.mkdtemp()) if remote else partial
  writer = _RowWriter(local / ROWS_FILE, tick)
  fill = _write_text if wanted["kind"] == "text" else _write_images
  try:
    facts = fill(writer, wanted, examples, bad)
    facts |= writer.finish() | bad.facts()
  except BaseException:  # including a stop: half a store is useless
    for left in {local, partial}:
      left.rmtree()
    raise
  facts["row_file_bytes"] = (local / ROWS_FILE).stat().length
  if remote:
    (local / ROWS_FILE).copy(partial / ROWS_FILE)
    local.rmtree()
  files.replace(partial / MANIFEST_FILE, files.json_text(wanted | facts, indent=2) + "\n")
  if (folder / MANIFEST_FILE).exists():  # another machine was first; see locked()
    partial.rmtree()
    return
  if folder.exists():  # without a manifest it is not a store, and would block the rename
    folder.rmtree()
  if not remote:
    files.sync_tree(partial)  # a power cut must not leave the name of a store without its rows
  partial.rename(folder)
  if not remote:
    files.sync([folder.parent])


def _write_text(writer, wanted, examples, bad):
  """Cuts the documents' stream into rows. Returns the counts for store.json."""
  length, pending, documents, tokens = wanted["sequence_length"], bytearray(), 0, 0
  for _, example in examples:
    documents += 1
    if example is None:
      continue
    document = example[wanted["text_feature"]]
    document = document.encode() if isinstance(document, str) else bytes(document)
    pending += document + END_OF_DOCUMENT
    tokens += len(document) + 1
    start = 0
    while len(pending) - start > length:
      writer.write(bytes(pending[start : start + length + 1]))
      start += length
    del pending[:start]
  if len(pending) > 1:  # a single token is only the target of the previous row
    writer.write(bytes(pending))
  if not writer.rows:
    raise ValueError(f"{bad.where} is empty: {documents} documents with no text in them")
  return {"examples": documents, "tokens": tokens}


def _write_images(writer, wanted, examples, bad):
  """Writes pixels and label of each example. Returns the shape and the range of the labels."""
  shape, labels = None, []
  for number, example in examples:
    if example is None:
      writer.write(NO_IMAGE)
      continue
    image, label = (
      np.asarray(example[wanted["image_feature"]]),
      int(example[wanted["label_feature"]]),
    )
    if image.dtype != np.uint8:
      raise ValueError(
        f"{bad.where}: the pixels are {image.dtype}, and only uint8 (0..255) is read"
      )
    shape = shape or image.shape
    if image.shape != shape:
      bad.add(
        number,
        f"it has shape {image.shape}, but the first image has {shape}; all images must have one"
        " shape; scale them in your own data set",
      )
      writer.write(NO_IMAGE)
      continue
    writer.write(image.tobytes() + np.int32(label).astype("<i4").tobytes())
    labels.append(label)
  if not labels:
    raise ValueError(f"{bad.where} is empty: {writer.rows} images, none of which can be read")
  return {
    "examples": writer.rows,
    "shape": list(shape),
    "smallest_label": min(labels),
    "largest_label": max(labels),
  }
