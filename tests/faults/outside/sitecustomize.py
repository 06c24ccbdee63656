"""Makes reading slow in one process of a run: Python imports this file from PYTHONPATH by itself.

The application knows nothing of it. While the file that FAULTS_STALL names exists, whatever
process FAULTS_PROCESS reads of its data waits.
"""

import os
import time


def _slow_down(stall: str) -> None:
  from array_record.python import array_record_module as module

  fast = module.ArrayRecordReader

  class SlowReader:
    """The reader, but for the wait."""

    def __init__(self, *arguments, **options):
      self._reader = fast(*arguments, **options)

    def __getattr__(self, name):
      return getattr(self._reader, name)

    def read(self, *arguments):
      while os.path.exists(stall):
        time.sleep(0.05)
      return self._reader.read(*arguments)

  module.ArrayRecordReader = SlowReader


if os.environ.get("FAULTS_PROCESS", "none") == os.environ.get("JAX_PROCESS_ID"):
  _slow_down(os.environ["FAULTS_STALL"])
