"""Disturbs reading in one process of a run: Python imports this file from PYTHONPATH by itself.

The application knows nothing of it. While the file that FAULTS_STALL names exists, whatever
process FAULTS_PROCESS reads of its data waits; where the file says `end`, there is no more of it.
"""

import contextlib
import os
import pathlib
import time


def _disturb(stall: pathlib.Path) -> None:
  from array_record.python import array_record_module as module

  undisturbed = module.ArrayRecordReader

  class Reader:
    """The reader, but for the wait and the end."""

    def __init__(self, *arguments, **options):
      self._reader = undisturbed(*arguments, **options)

    def __getattr__(self, name):
      return getattr(self._reader, name)

    def read(self, *arguments):
      with contextlib.suppress(FileNotFoundError):  # or as soon as it is gone
        while stall.exists():
          if stall.read_text() == "end":
            raise StopIteration("there are no more records")
          time.sleep(0.05)
      return self._reader.read(*arguments)

  module.ArrayRecordReader = Reader


if os.environ.get("FAULTS_PROCESS", "none") == os.environ.get("JAX_PROCESS_ID"):
  _disturb(pathlib.Path(os.environ["FAULTS_STALL"]))
