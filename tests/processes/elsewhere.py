"""Runs main.py with a working directory of its own: the same --workdir is another folder."""

import os
import sys

from absl import app

from commands.flags import parse_flags
from commands.session import main

if __name__ == "__main__":
  # The config files are named from the root of the tree.
  sys.argv = [argument.replace("--config=", f"--config={os.getcwd()}/") for argument in sys.argv]
  os.chdir(os.environ["TEST_FOLDER"])
  app.run(main, flags_parser=parse_flags)
