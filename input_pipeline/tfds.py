"""Finds a TFDS data set by name, on disk or by building it, and reads its examples in order.

Imports TensorFlow Datasets, so this file is imported only when necessary.
"""

import contextlib
import sys
from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from array_record.python import array_record_module

from input_pipeline import catalog, shard_writer
from input_pipeline.shard_writer import locked
from runtime import files
from runtime.suggest import nearest

# ------------------------------ data sets by name ------------------------------

_EXAMPLES_PER_READ = 256


def open_split(reference, root, split, asked):
  """Opens a split of a data set below `root`; prepares the data set first if it is not there.

  Args:
    reference: catalog.Reference to the data set.
    root: the data_dir.
    split: of it, or a slice of one.
    asked: role -> name of its feature, as of `choose_feature`.

  Returns:
    The complete Reference, role -> feature, `examples`, and how many these are.

  Raises:
    ValueError: whatever makes the data set unusable, with the fix.
  """
  builder = load_builder(reference, root)
  check_split(builder, split)
  features = {role: choose_feature(builder, role, wanted) for role, wanted in asked.items()}
  count = builder.info.splits[split].num_examples
  return full_reference(builder), features, examples(builder, split), count


def load_builder(reference, root):
  """Returns a TFDS builder whose data is prepared below `root`; prepares it first if it is not.

  Data on disk takes precedence, even without a builder class, so that a prepared data_dir gives the
  same data on every machine. Of several versions, the newest is used.

  Args:
    reference: catalog.Reference to the data set.
    root: the data_dir.

  Raises:
    ValueError: an unknown data set, or one that is not prepared and cannot be.
  """
  folder = _prepared_folder(reference, root)
  if folder is not None:
    return _from_folder(folder)
  if (known := catalog.EMBEDDED.get(reference.name)) is not None:
    own = catalog.Reference(reference.name, known.config, known.version)
    raise ValueError(
      f"data set {reference} is not in {root}, and this Python makes only {own}; name that one, or"
      " prepare the other with its own Python"
    )
  return _download(reference, root)


def _from_folder(folder):
  """Returns a builder of a data set that is prepared in a folder.

  Raises:
    ValueError: its metadata is damaged.
  """
  try:
    for path in folder.glob("*.json"):
      files.read_json(path, follow=True)  # plain files, of a size and a form that can be read
    return tfds.builder_from_directory(folder)
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
  sizes = {name: info.num_examples for name, info in splits.items()}
  try:
    count = splits[split].num_examples
  except (KeyError, ValueError, AssertionError) as error:
    raise ValueError(catalog.unknown_split(reference, split, sizes)) from error
  if not count:
    raise ValueError(catalog.empty_split(reference, split, sizes))


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
