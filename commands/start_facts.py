"""What the processes compare before any backend starts; see processes/preflight.py.

It imports no JAX: what is refused before that should be refused soon.
"""

import os
from collections.abc import Mapping
from typing import Any

from etils import epy
from ml_collections import ConfigDict

from processes.coordination import current
from runtime import devices, forms
from runtime.provenance import everything

with epy.lazy_imports():  # which a single process does not need
  from processes import preflight

# Variables that change what XLA and JAX compile. JAX's others say where a process finds things.
_COMPILERS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_OWN = ("COORDINATOR", "PROCESS_ID", "NUM_PROCESSES", "LOCAL_DEVICE", "_DIR", "LOG", "DUMP")


def _shapes_programs(name: str) -> bool:
  return name in _COMPILERS or (name.startswith("JAX_") and not any(part in name for part in _OWN))


def about_to_start(configs: Mapping[str, ConfigDict], more: Mapping[str, Any]) -> None:
  """Compares the command lines of the processes, before any backend starts.

  Args:
    configs: name -> as parsed.
    more: name -> further values that must be the same, as JSON.

  Raises:
    DifferenceError: with what differs, and on which processes.
  """
  group = current()
  if group.alone:
    return
  facts: dict[str, Any] = {**more, "hardware": devices.hardware()}
  facts.update(everything())
  facts.update({name: value for name, value in os.environ.items() if _shapes_programs(name)})
  for name, config in configs.items():
    facts.update(forms.flat(forms.plain(config), f"{name}."))
  timeout = next(iter(configs.values())).processes.start_timeout_seconds
  preflight.agree(group, "start", facts, timeout_seconds=timeout)
