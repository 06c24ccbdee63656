"""TFDS builders for data sets that need no download.

They write ArrayRecord files and avoid features whose encoding needs TensorFlow: an Image feature
does, a Tensor named image does not.
"""

import hashlib
import pathlib
import sysconfig

import numpy as np
import tensorflow_datasets as tfds

from input_pipeline.sources import catalog

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
  files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.py"))}
  return {
    name: path
    for name, path in files.items()
    if _LEFT_OUT.isdisjoint(name.split("/")) and not name.startswith(_WRITTEN_ON_BUILD)
  }


class _Info(tfds.core.DatasetInfo):
  """The metadata of a data set, without querying TFDS's bucket, which has none of these.

  For the query, TFDS would create a temporary folder and leave it behind.
  """

  def initialize_from_bucket(self) -> None:
    """Does nothing."""


def _no_tick(what, count):
  """Ignores progress."""


class PythonSource(tfds.core.GeneratorBasedBuilder):
  """The .py files of the running Python's standard library, without its tests."""

  VERSION = tfds.core.Version(catalog.EMBEDDED["python_source"].version)
  tick = staticmethod(_no_tick)  # called for each example with (what, how many)
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
    files = _library_files()
    return {
      "train": self._generate_examples({p: f for p, f in files.items() if not _in_test(p)}),
      "test": self._generate_examples({p: f for p, f in files.items() if _in_test(p)}),
    }

  def _generate_examples(self, files):
    for number, (relative_path, path) in enumerate(files.items(), start=1):
      self.tick("documents", number)
      yield relative_path, {"path": relative_path, "text": path.read_bytes()}


class Digits(tfds.core.GeneratorBasedBuilder):
  """scikit-learn's 1,797 handwritten digits of 8 by 8 pixels."""

  VERSION = tfds.core.Version(catalog.EMBEDDED["digits"].version)
  tick = staticmethod(_no_tick)
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
