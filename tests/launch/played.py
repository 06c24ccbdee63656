"""Programs that are not here, played by small scripts on PATH."""


def play(folder, name, script):
  """Puts a program of that name first on PATH, played by a bash script."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / name
  path.write_text(f"#!/usr/bin/env bash\n{script}\n")
  path.chmod(0o755)
