"""Writes TFDS data sets."""

import contextlib
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


def write(
  folder: pathlib.Path,
  data_set: str,
  features: Mapping[str, Any],
  splits: Mapping[str, Sequence[Mapping[str, Any]]],
  *,
  config: str = "",
  version: str = "1.2.0",
  keys: bool = False,
):
  """Prepares a TFDS data set on disk; its builder is not registered.

  Args:
    folder: the data_dir.
    data_set: its name.
    features: name -> feature.
    splits: name -> examples.
    config: its name, "" for none.
    version: of the data set.
    keys: whether examples are pairs of a key and an example.

  Returns:
    The builder.
  """
  import tensorflow_datasets as tfds

  class Written(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    name = data_set
    VERSION = tfds.core.Version(version)
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []
    url_infos = None

    def _info(self):
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
      return {split: self._generate_examples(examples) for split, examples in splits.items()}

    def _generate_examples(self, examples):
      yield from examples if keys else enumerate(examples)

  builder = Written(data_dir=folder, file_format="array_record")
  with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    builder.download_and_prepare()
  return builder
