"""The verb `eject`: a dense decoder's run as one file, which needs jax, optax and numpy alone.

The file is `examples/one_file.py`, with a config's values as the defaults of its flags.
"""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from etils import epath

from commands import flags
from commands.config import target
from commands.refusal import refuse
from configs.schema import finalize, validate
from configs.schema.one_file import file_flags
from runtime import exit_codes, files

FILE = pathlib.Path(__file__).parents[1] / "examples" / "one_file.py"


def run() -> int:
  """Writes the file that `--to` names, and returns the exit code."""
  try:
    config = flags.CONFIG.value
    platform, sizes, capability = target(config)
    config = finalize.finalize(config, platform, sizes, capability)
    validate.check(config, sizes)
    values = file_flags(config, platform, sizes)
    if not flags.TO.value:
      raise ValueError("eject: name the file to write with --to=FILE.py")
    file = epath.Path(flags.TO.value)
    if file.exists():
      raise ValueError(f"--to={file}: it exists, and may have been edited; name another file")
    values["workdir"] = f"runs/{file.stem}"
    files.replace(file, filled(FILE.read_text(), values, str(file), flags.command_line()))
  except (ValueError, OSError, RuntimeError) as error:
    return refuse(error)
  print(f"wrote {file}; it trains with: python {file}", flush=True)
  return exit_codes.DONE


def filled(text: str, values: Mapping[str, Any], name: str, command: str) -> str:
  """Returns the file's text with other defaults of its flags.

  Args:
    text: of `examples/one_file.py`.
    values: by flag.
    name: of the file that is written, for its docstring.
    command: that writes it, likewise.
  """
  for flag, value in values.items():
    shown = json.dumps(value) if isinstance(value, str) else repr(value)
    default = re.search(rf"^  {flag}: \w+ = (.*?)(?=  #|$)", text, re.MULTILINE)
    text = text[: default.start(1)] + shown + text[default.end(1) :]
  first, rest = text.split("\n", 1)
  text = f"{first}\n\nThe defaults of its flags are by `{command}`.\n{rest}"
  return text.replace("examples/one_file.py", name)
