"""Runs main.py with a working directory of its own: the same --workdir is another folder."""

import os

import main

if __name__ == "__main__":
  # The config files are named from the root of the tree.
  main.sys.argv = [
    argument.replace("--config=", f"--config={os.getcwd()}/") for argument in main.sys.argv
  ]
  os.chdir(os.environ["TEST_FOLDER"])
  main.app.run(main.main, flags_parser=main.parse_flags)
