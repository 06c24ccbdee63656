"""The verb `doctor`: findings, exit codes, and what several things broken at once look like."""

import os
import re
import shlex
import socket
import subprocess
import sys

from tests.helpers.terminals import ROOT

DP4_TP2 = "--config=configs/dp4_tp2.py"


def broken(command, **variables):
  """Runs main.py by a shell, which may lower its limits first; returns (exit code, output)."""
  done = subprocess.run(
    ["bash", "-c", command.replace("main.py", f"{shlex.quote(sys.executable)} main.py")],
    cwd=ROOT,
    env={**os.environ, "COLUMNS": "200", **variables},
    capture_output=True,
    text=True,
    check=False,
  )
  return done.returncode, done.stdout + done.stderr


def test_an_installation_that_is_well(main, tmp_path):
  code, out, err = main("doctor", DP4_TP2, f"--workdir={tmp_path}/run")
  assert (code, err) == (0, "")
  assert re.search(
    r"^ok +77 packages|^ok +\d+ packages as in requirements/locks", out, re.MULTILINE
  )
  for what in (
    "ok       8 simulated CPU devices\n",
    "ok       one process\n",
    "all-gather over data (4 devices): ",
    "all-gather over tensor (2 devices): ",
    "ok       the layout is complete; a checkpoint has 7.5 MiB\n",
    "written, read,",
  ):
    assert what in out
  assert list(tmp_path.iterdir()) == []
  # Paths are not broken, since they are to be copied.
  assert all(len(line) <= 80 for line in out.splitlines() if len(line.split()) > 1)


def test_what_is_broken_is_named_with_its_fix_before_jax_starts(tmp_path):
  site = tmp_path / "jaxlib-0.0.7.dist-info"
  site.mkdir()
  (site / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxlib\nVersion: 0.0.7\n")
  (tmp_path / "file").write_text("")
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    code, out = broken(
      f"ulimit -n 200; ulimit -v 90000000; main.py doctor --workdir={tmp_path}/file/run",
      PYTHONPATH=str(tmp_path),
      JAX_COORDINATOR_ADDRESS=f"localhost:{taken.getsockname()[1]}",
      JAX_NUM_PROCESSES="2",
      JAX_PROCESS_ID="0",
    )
  assert code == 3, out
  for what in (
    r"wrong +jax \S+ and jaxlib 0.0.7 do not match",
    r"fix: install the same version of both",
    r"wrong +open files: at most 200",
    r"warning +address space: at most 8\d\.\d GiB",
    r"wrong +workdir .*/file is a file, not a folder",
    r"wrong +JAX_COORDINATOR_ADDRESS=localhost:\d+: the port cannot be used",
    r"^4 wrong, 2 warning, \d+ ok$",
  ):
    plain = re.sub(r"\s*\n {9,}", " ", out)
    assert re.search(what, plain, re.MULTILINE), out
  assert "devices" not in out.partition("network\n")[2]


def test_a_config_that_is_refused_is_a_finding(main, tmp_path):
  code, out, err = main("doctor", DP4_TP2, f"--workdir={tmp_path}", "--config.seed=-1")
  assert (code, err) == (3, "")
  assert "config\nwrong    " in out
  assert "seed=-1: at least 0" in out
  code, out, err = main("doctor", DP4_TP2, f"--workdir={tmp_path}", "--config.mesh.data=0")
  assert (code, err) == (3, "")
  assert "devices\nwrong    " in out
  assert "mesh.data=0" in out
