"""Finds a TFDS data set by name, on disk or by building it, and reads its examples in order.

Imports TensorFlow Datasets, so this file is imported only when necessary. The builders of data sets
that need no download write ArrayRecord files and avoid features whose encoding needs TensorFlow: an
Image feature does, a Tensor named image does not.
"""

import contextlib
import hashlib
import io
import pathlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from array_record.python import array_record_module
from etils import epath

from input_pipeline import catalog, shard_writer, store
from input_pipeline.shard_writer import locked
from input_pipeline.store import no_tick
from runtime import files
from runtime.suggest import nearest

# ------------------------------ data sets that need no download ------------------------------

# Folders below the standard library's that are tests, or do not belong to it.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Written when this Python was compiled: they would make the data set depend on the machine.
_WRITTEN_ON_BUILD = ("_sysconfigdata", "config-")
# Set, so that TFDS 4.9.10 does not look for a file of checksums: for that it imports
# importlib_resources, which it uses but does not require.
_NO_DOWNLOADS = None
_TEST_SHARE = 0.05  # of the files of python_source
_HELD_OUT_EVERY = 6  # of the images of digits


def _in_test(relative_path):
  """Returns whether a file is in the test split: by a hash of its path, independent of others."""
  digest = hashlib.sha256(relative_path.encode()).digest()
  return int.from_bytes(digest[:8], "big") < _TEST_SHARE * 2**64


def _library_files():
  """Returns relative path -> file of the standard library's sources, tests left out."""
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  every = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.py"))}
  return {
    name: path
    for name, path in every.items()
    if _LEFT_OUT.isdisjoint(name.split("/")) and not name.startswith(_WRITTEN_ON_BUILD)
  }


class _Info(tfds.core.DatasetInfo):
  """The metadata of a data set, without querying TFDS's bucket, which has none of these.

  For the query, TFDS would create a temporary folder and leave it behind.
  """

  def initialize_from_bucket(self) -> None:
    """Does nothing."""


class PythonSource(tfds.core.GeneratorBasedBuilder):
  """The .py files of the running Python's standard library, without its tests."""

  VERSION = tfds.core.Version(catalog.EMBEDDED["python_source"].version)
  tick = staticmethod(no_tick)  # called for each example with (what, how many)
  url_infos = _NO_DOWNLOADS
  BUILDER_CONFIGS = [  # noqa: RUF012 (the attribute is TFDS's)
    tfds.core.BuilderConfig(name=catalog.EMBEDDED["python_source"].config)
  ]

  def _info(self):
    return _Info(
      builder=self,
      description="The .py files of Python's standard library, without its tests.",
      features=tfds.features.FeaturesDict(
        {
          # Not a Text feature: so `text` is the only one, and needs no naming.
          "path": tfds.features.Tensor(shape=(), dtype=np.object_),
          "text": tfds.features.Text(),
        }
      ),
    )

  def _split_generators(self, dl_manager):
    del dl_manager  # nothing is downloaded
    sources = _library_files()
    return {
      "train": self._generate_examples({p: f for p, f in sources.items() if not _in_test(p)}),
      "test": self._generate_examples({p: f for p, f in sources.items() if _in_test(p)}),
    }

  def _generate_examples(self, sources):
    for number, (relative_path, path) in enumerate(sources.items(), start=1):
      self.tick("documents", number)
      yield relative_path, {"path": relative_path, "text": path.read_bytes()}


class Digits(tfds.core.GeneratorBasedBuilder):
  """scikit-learn's 1,797 handwritten digits of 8 by 8 pixels."""

  VERSION = tfds.core.Version(catalog.EMBEDDED["digits"].version)
  tick = staticmethod(no_tick)
  url_infos = _NO_DOWNLOADS

  def _info(self):
    return _Info(
      builder=self,
      description="scikit-learn's bundled handwritten digits, scaled from 0..16 to 0..255.",
      features=tfds.features.FeaturesDict(
        {
          "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
          "label": tfds.features.ClassLabel(num_classes=10),
        }
      ),
    )

  def _split_generators(self, dl_manager):
    del dl_manager  # nothing is downloaded
    # scikit-learn takes longer to import than everything else here, and is needed only now.
    from sklearn import datasets

    digits = datasets.load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    held_out = np.arange(len(images)) % _HELD_OUT_EVERY == 0
    return {
      "train": self._generate_examples(np.flatnonzero(~held_out), images, digits.target),
      "test": self._generate_examples(np.flatnonzero(held_out), images, digits.target),
    }

  def _generate_examples(self, indices, images, labels):
    for number, index in enumerate(indices.tolist(), start=1):
      self.tick("images", number)
      yield index, {"image": images[index], "label": int(labels[index])}


BUILDERS = {"python_source": PythonSource, "digits": Digits}


# ------------------------------ data sets by name ------------------------------

_EXAMPLES_PER_READ = 256


def load_builder(reference, root, tick=no_tick):
  """Returns a TFDS builder whose data is prepared below `root`; prepares it first if it is not.

  Data on disk takes precedence, even without a builder class, so that a prepared data_dir gives the
  same data on every machine. Of several versions, the newest is used.

  Args:
    reference: catalog.Reference to the data set.
    root: the data_dir.
    tick: as of `tfds_documents.prepare`, while a built-in data set is built.

  Raises:
    ValueError: an unknown data set, or one that is not prepared and cannot be.
  """
  known = catalog.embedded_reference(reference)
  if known is not None:
    return _build_embedded(known, root, tick)
  folder = _prepared_folder(reference, root)
  if folder is not None:
    return _from_folder(folder)
  if reference.name in catalog.EMBEDDED:
    raise ValueError(
      f"data set {reference} is not in {root}, and this Python builds only"
      f" {catalog.embedded_reference(catalog.Reference(reference.name, '', ''))}; name that one, or"
      " build the other with its own Python"
    )
  return _download(reference, root)


def _from_folder(folder):
  """Returns a builder of a data set that is prepared in a folder.

  Raises:
    ValueError: its metadata is damaged.
  """
  return _whole(folder, lambda: tfds.builder_from_directory(folder))


def _whole(folder, make):
  """Returns the result of `make`, which reads TFDS's metadata in a folder."""
  try:
    for path in folder.glob("*.json"):
      files.read_json(path, follow=True)  # plain files, of a size and a form that can be read
    return make()
  except Exception as error:  # damaged metadata raises nearly any kind of error
    if isinstance(error, MemoryError):
      raise
    raise ValueError(
      f"the metadata of the data set in {folder} cannot be read ({_first_line(error)}); copy it"
      " again, or delete it and run again to prepare it from scratch"
    ) from error


def _version_key(version):
  return tuple(int(part) if part.isdigit() else -1 for part in version.split("."))


def _folders_of(base):
  """Returns the folders of all prepared configs and versions of the data set in `base`."""
  return [p.parent for depth in ("*", "*/*") for p in base.glob(f"{depth}/dataset_info.json")]


def _prepared_folder(reference, root):
  """Returns the folder of a data set prepared below `root`, or None. Refuses to guess a config."""
  base = root / reference.name
  found = _folders_of(base)
  if reference.version:
    found = [folder for folder in found if folder.name == reference.version]
  configs = {"" if f.parent.name == reference.name else f.parent.name for f in found}
  if reference.config:
    configs &= {reference.config}
  if not configs:
    return None
  if len(configs) > 1:
    raise ValueError(
      f"data set {reference} is prepared in {root} with the configs {', '.join(sorted(configs))};"
      f" name one of them: data.name={reference.name}/CONFIG"
    )
  parent = base / configs.pop()
  versions = [folder for folder in found if folder.parent == parent]
  return max(versions, key=lambda folder: _version_key(folder.name))


@contextlib.contextmanager
def _quiet():
  """Keeps standard output for results: TFDS prints its notes there."""
  with contextlib.redirect_stdout(sys.stderr):
    yield


def _build_embedded(reference, root, tick):
  def make():  # a builder looks for its data only when it is made
    return BUILDERS[reference.name](data_dir=root, file_format="array_record")

  # TFDS renames a finished folder into place, so it is complete or does not exist.
  folder = epath.Path(root / reference.path)
  if folder.exists():
    return _whole(folder, make)
  with locked(root / ".locks" / reference.path.replace("/", "-")), _quiet():
    builder = make()
    builder.tick = tick
    folder = epath.Path(builder.data_dir)
    for left in folder.parent.glob(f"incomplete.*_{folder.name}"):
      left.rmtree()  # left by a killed process: only holders of this lock build these
    tfds.disable_progress_bar()  # a second's work, not worth pages of bars in a log
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare()  # returns at once if another process was first
    tfds.enable_progress_bar()
  return builder


def _download(reference, root):
  with locked(root / ".locks" / reference.path.replace("/", "-")), _quiet():
    folder = _prepared_folder(reference, root)  # another process may have been first
    if folder is not None:
      return _from_folder(folder)
    try:
      builder = tfds.builder(str(reference), data_dir=root, file_format="array_record")
    except tfds.core.DatasetNotFoundError as error:
      raise ValueError(_unknown(reference, root)) from error
    except (ValueError, AssertionError) as error:  # an unknown config or version of a known name
      raise ValueError(f"data set {reference}: {error}") from error
    logging.warning(
      "data set %s is not in %s: downloading it (without a network TFDS tries for some minutes)",
      reference,
      root,
    )
    try:
      builder.download_and_prepare()
    except Exception as error:  # whatever a download and a foreign builder can raise
      raise ValueError(
        f"data set {reference} is not prepared in {root}, and preparing it here failed with"
        f" {type(error).__name__}: {_first_line(error)}. Run it where there is a network, or"
        f" prepare it elsewhere with `tfds build {reference} --file_format=array_record` and set"
        " data.data_dir to the folder it wrote"
      ) from error
  return builder


def _first_line(error):
  return (str(error).strip() or "no message").splitlines()[0]


def _unknown(reference, root):
  on_disk = [path.name for path in root.iterdir() if path.is_dir()] if root.exists() else []
  here = [*catalog.EMBEDDED, catalog.RANDOM_NORMAL]
  here += [name for name in on_disk if _folders_of(root / name)]
  registered = tfds.list_builders(with_community_datasets=False)
  hint = nearest(reference.name, [*here, *registered]) or "."
  return (
    f"unknown data set {reference}{hint} Here without a download: {', '.join(sorted(set(here)))};"
    f" {len(registered)} more are registered with TensorFlow Datasets, and any prepared one loads"
    f" from data.data_dir ({root})"
  )


def full_reference(builder):
  """Returns the Reference of `builder` with its config and version."""
  config = builder.builder_config.name if builder.builder_config else ""
  return catalog.Reference(builder.name, config, str(builder.version))


def check_split(builder, split):
  """Raises ValueError, listing the splits, if `split` (or slice of one) is unknown or empty."""
  reference, splits = full_reference(builder), builder.info.splits
  sizes = ", ".join(f"{name} ({info.num_examples} examples)" for name, info in splits.items())
  try:
    examples = splits[split].num_examples
  except (KeyError, ValueError, AssertionError) as error:
    raise ValueError(f"data set {reference} has no split {split!r}; it has {sizes}") from error
  if not examples:
    raise ValueError(f"split {split!r} of data set {reference} is empty; its splits: {sizes}")


def _fits(role, feature, name):
  """Returns whether a feature fits a role by its type."""
  if role == "text":
    return isinstance(feature, tfds.features.Text)
  if role == "image":
    tensor = type(feature) is tfds.features.Tensor and len(feature.shape) >= 2
    return isinstance(feature, tfds.features.Image) or (tensor and name == "image")
  return isinstance(feature, tfds.features.ClassLabel)


def _may_be_named(role, feature, name):
  """Returns whether a feature can have a role when the config names it."""
  scalar = type(feature) is tfds.features.Tensor and feature.shape == ()
  whole = scalar and np.issubdtype(feature.np_dtype, np.integer)
  return _fits(role, feature, name or role) or (role == "label" and whole)


def choose_feature(builder, role, wanted):
  """Returns the name of the feature that is the "text", "image" or "label" of a data set.

  Args:
    builder: TFDS builder.
    role: "text", "image" or "label".
    wanted: the name from the config; "" for the only one that fits.

  Raises:
    ValueError: listing the features, if `wanted` is missing or of the wrong type, or if for ""
      none or several fit.
  """
  reference, features = full_reference(builder), builder.info.features
  named = dict(sorted(features.items())) if isinstance(features, tfds.features.FeaturesDict) else {}
  listing = ", ".join(f"{name} ({type(named[name]).__name__})" for name in named) or "none"
  if wanted:
    if wanted not in named:
      raise ValueError(
        f"data set {reference} has no feature {wanted!r} (data.{role}_feature); it has {listing}"
      )
    if not _may_be_named(role, named[wanted], ""):
      raise ValueError(
        f"data set {reference}: feature {wanted!r} cannot be the {role} (data.{role}_feature); the"
        f" features are {listing}"
      )
    return wanted
  fitting = [name for name in named if _fits(role, named[name], name)]
  # An integer is used as the label only if no feature is a label by its type.
  fitting = fitting or [name for name in named if _may_be_named(role, named[name], name)]
  if len(fitting) != 1:
    found = f"{len(fitting)} features fit" if fitting else "no feature fits"
    raise ValueError(
      f"data set {reference}: {found} as the {role}; it has {listing}. Set data.{role}_feature"
      f" to one of them{'' if fitting else ', or take a recipe whose task is on such data'}"
    )
  return fitting[0]


def examples(builder, split) -> Iterator[shard_writer.Item]:
  """Yields the examples of a split in its order; without a value, and why, what cannot be read.

  Args:
    builder: TFDS builder of a data set that is prepared.
    split: a split of it.

  Raises:
    ValueError: a file format without random access, or a missing or truncated file.
  """
  reference = full_reference(builder)
  try:
    source = builder.as_data_source(split=split)
  except NotImplementedError as error:
    raise ValueError(
      f"data set {reference} is stored in {builder.data_dir} as {builder.info.file_format.value},"
      f" which has no random access; prepare it again in another folder with `tfds build"
      f" {reference} --file_format=array_record --data_dir=FOLDER` and set data.data_dir=FOLDER"
    ) from error
  _check_files(builder, split)
  for start in range(0, len(source), _EXAMPLES_PER_READ):
    numbers = range(start, min(start + _EXAMPLES_PER_READ, len(source)))
    for number, (example, why) in zip(numbers, _read(source, numbers), strict=True):
      yield shard_writer.Item("record {}".format, number, example, why)


def _check_files(builder, split):
  """Raises ValueError for a damaged file, which does not count as one bad record per record."""
  if builder.info.file_format != tfds.core.file_adapters.FileFormat.ARRAY_RECORD:
    return
  for part in builder.info.splits[split].file_instructions:
    try:
      there = array_record_module.ArrayRecordReader(part.filename).num_records()
      wrong = "" if there == part.examples_in_shard else f"it has {there} records"
    except RuntimeError as error:
      wrong = _first_line(error)
    if wrong:
      raise ValueError(
        f"data set {full_reference(builder)}, split {split}: the file {part.filename} of"
        f" {part.examples_in_shard} records cannot be read as a whole ({wrong}); prepare the data"
        " set again, or copy it again"
      )


def _read(source, numbers):
  """Returns (example, "") of each number, or (None, why)."""
  try:
    return [(example, "") for example in source.__getitems__(list(numbers))]
  except Exception:  # decoders raise what they like; `_read_one` says which record it was
    return [_read_one(source, number) for number in numbers]


def _read_one(source, number):
  try:
    return source[number], ""
  except ImportError as error:  # nothing is wrong with the record
    raise ValueError(
      f"record {number} cannot be decoded ({_first_line(error)}); install what is missing; images"
      " need `pip install pillow`"
    ) from error
  except Exception as error:  # decoders raise what they like
    if isinstance(error, MemoryError) or getattr(error, "errno", None):
      raise  # the system's, not the record's: Pillow's own OSErrors have no number
    return None, f"{type(error).__name__}: {_first_line(error)}"


# ------------------------------ as documents of the store ------------------------------


def fill(folder, builder, split, features, encoder, data, tick, *, keep_empty: bool) -> None:
  """Writes the shard of a split, unless it is there.

  Args:
    folder: of the shard.
    builder: TFDS builder of a data set that is prepared.
    split: of it.
    features: role -> name of the feature that has it.
    encoder: the tokenizer; of images, bytes.
    data: the config's `data` section.
    tick: as of `tfds_documents.prepare`.
    keep_empty: as of `shard_writer.write_documents`.

  Raises:
    ValueError: more bad records than data.max_bad_records, or images that cannot be rows.
    OSError: it cannot be written.
  """
  name = f"data set {full_reference(builder)}, split {split}"
  total = builder.info.splits[split].num_examples
  what = "images" if data.kind == "image" else "documents"

  def count(documents: int, tokens: int, _: int) -> None:
    tick(what, documents, f"{documents:,} of {total:,} {what}, {tokens:,} tokens")

  with shard_writer.locked(folder):
    if store.is_there(folder):
      return
    folder.parent.mkdir(parents=True, exist_ok=True)
    shard_writer.remove_partial(folder.parent, folder.name)
    facts, limit = {"files": name, "features": features}, data.max_bad_records
    try:
      if data.kind == "image":
        _write_images(
          folder, examples(builder, split), features, encoder, {**facts, "name": name}, limit, count
        )
      else:
        found = _texts(builder, split, features["text"])
        shard_writer.write_documents(
          folder, found, encoder, facts, limit=limit, keep_empty=keep_empty, tick=count
        )
    except shard_writer.TooManyBadError as error:
      raise ValueError(store.too_many_bad(name, error.bad, error.count, limit)) from error


def _write_images(
  folder, read: Iterable[shard_writer.Item], features, encoder, facts, limit, tick
) -> None:
  """Writes images, all of one shape, as a shard that says which shape and labels they have."""
  name = facts["files"]

  def fill(shard: shard_writer.ShardWriter) -> Mapping[str, Any]:
    shape, labels = None, []
    for item in read:
      if item.value is None:
        shard.add_bad(item, item.why)
        continue
      image, label = (np.asarray(item.value[features[role]]) for role in ("image", "label"))
      if image.dtype != np.uint8:
        raise ValueError(f"{name}: the pixels are {image.dtype}, and only uint8 (0..255) is read")
      shape = shape or image.shape
      if image.shape != shape:
        shard.add_bad(
          item,
          f"it has shape {image.shape}, but the first image has {shape}; all images must have one"
          " shape; scale them in your own data set",
        )
        continue
      content = image.tobytes() + np.int32(label).astype("<i4").tobytes()
      shard.add(np.frombuffer(content, np.uint8), len(content), shard_writer.content_hash(content))
      labels.append(int(label))
    if not labels:
      raise ValueError(f"{name} is empty: {shard.bad_count} images, none of which can be read")
    return {"shape": [*shape], "labels": [min(labels), max(labels)]}

  shard_writer.write_shard(
    folder, encoder.size, {"tokenizer": encoder.digest, **facts}, fill, limit, tick
  )


def texts(
  data: Any, split: str, bad: Callable[[shard_writer.Item], None], tick: Callable = store.no_tick
) -> Iterator[bytes]:
  """Yields the texts of a split, which need not be prepared.

  Args:
    data: the config's `data` section.
    split: of the data set.
    bad: is called with each record that cannot be read; raises where that is too much.
    tick: as of `tfds_documents.prepare`, whose errors it raises too.
  """
  builder = load_builder(catalog.parse_name(data.name), catalog.data_folder(data), tick)
  check_split(builder, split)
  for item in _texts(builder, split, choose_feature(builder, "text", data.text_feature)):
    if item.value is None:
      bad(item)
    else:
      yield item.value


def _texts(builder, split: str, feature: str) -> Iterator[shard_writer.Item]:
  for item in examples(builder, split):
    if item.value is not None:
      text = item.value[feature]
      item.value = text.encode() if isinstance(text, str) else bytes(text)
    yield item
