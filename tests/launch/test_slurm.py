"""processes/launch/slurm.sh: what it asks for, when it requeues, how signals reach the step.

Slurm's programs are played; the batch file is the shipped one, run by the shell that would run it.
"""

import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

from tests.launch.played import play

LAUNCH = pathlib.Path(__file__).parents[2] / "processes" / "launch"

# As the real one: the highest code of all tasks is its own, and SIGTERM to srun itself kills the
# tasks by SIGKILL. The task stops as main.py does: on SIGTERM, with 75.
SRUN = """
echo "srun $*" >>calls
trap 'kill -KILL "$task"' TERM
bash -c 'trap "exit 75" TERM; echo $$ >task; [[ -z $1 ]] || exit $1; while :; do sleep 0.05; done' \
  task "$CODE" &
task=$!
wait "$task"; code=$?; wait "$task"; exit "$code"
"""


class Slurm:
  """A folder to submit from, and Slurm's programs, which note how they are called."""

  def __init__(self, folder):
    """Puts the programs, and what the batch file looks for, into a folder."""
    self.folder = folder
    play(folder / "bin", "srun", SRUN)
    play(folder / "bin", "scancel", 'echo "scancel $*" >>calls; kill -TERM "$(cat task)"')
    play(folder / "bin", "scontrol", 'echo "scontrol $*" >>calls; exit "${SCONTROL:-0}"')
    play(folder / ".venv" / "bin", "python", "")
    (folder / "main.py").touch()

  def start(self, code="", arguments=("--config=configs/fsdp.py", "--workdir=a b"), **variables):
    """Starts the batch file; the task exits with the code, or runs on where that is empty."""
    path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "41", "CODE": str(code)}
    return subprocess.Popen(
      [LAUNCH / "slurm.sh", *arguments],
      cwd=self.folder,
      env={**environment, **variables},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def run(self, *arguments, **variables):
    """Runs it to its end; returns (exit code, output, calls but for srun's)."""
    return self.finish(self.start(*arguments, **variables))

  def finish(self, process):
    """Waits for its end; returns the same."""
    out, _ = process.communicate(timeout=20)
    calls = [line for line in self.calls() if not line.startswith("srun ")]
    (self.folder / "calls").unlink(missing_ok=True)
    return process.returncode, out, calls

  def calls(self):
    """Returns the calls so far."""
    path = self.folder / "calls"
    return path.read_text().splitlines() if path.exists() else []

  def wait_for_the_task(self):
    """Returns when the task runs, its trap set."""
    deadline = time.monotonic() + 10
    while not (self.folder / "task").exists() or not (self.folder / "task").read_text():
      assert time.monotonic() < deadline, self.calls()
      time.sleep(0.02)


@pytest.fixture
def slurm(tmp_path):
  """Returns a played Slurm."""
  return Slurm(tmp_path)


REQUEUE = ["scontrol requeue 41"]


def test_slurm_flags():
  flags = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", (LAUNCH / "slurm.sh").read_text(), re.M))
  assert "requeue" in flags
  assert flags["open-mode"] == "append"
  # To the job step alone (no `B:`), and time enough for a save even where it comes late.
  name, seconds = flags["signal"].split("@")
  assert name == "TERM"
  assert int(seconds) >= 60
  assert flags["ntasks-per-node"] == flags["gpus-per-node"]


def test_slurm_passes_its_arguments_to_main_and_gives_other_tasks_time(slurm):
  process = slurm.start(0, SLURM_CPUS_PER_TASK="8")
  process.wait(timeout=20)
  assert slurm.calls() == [
    "srun --kill-on-bad-exit=0 --wait=60 .venv/bin/python main.py"
    " --config=configs/fsdp.py --workdir=a b"
  ]
  slurm.finish(process)


@pytest.mark.parametrize(
  ("codes", "requeues"),
  [
    ([0], 0),
    ([2], 0),
    ([3], 0),
    ([75, 75, 75], 3),  # without end
    ([1, 134, 137], 2),
    ([1, 75, 1, 134, 1], 4),  # counted from the last stop
  ],
)
def test_slurm_requeues_after_stops_and_after_two_failures_in_a_row(slurm, codes, requeues):
  results = [slurm.run(code, MAX_FAILURES="2") for code in codes]
  assert [calls for _, _, calls in results] == [
    *[REQUEUE] * requeues,
    *[[]] * (len(codes) - requeues),
  ]
  if requeues < len(codes):
    returned, out, _ = results[-1]
    assert returned == codes[-1]
    assert ("failed 3 times in a row; given up" in out) == (requeues > 0)
    assert not list(slurm.folder.glob("*.failures"))


@pytest.mark.parametrize("text", ["a[$(touch ran)]", "x" * 9000, "-5", "08", ""])
def test_slurm_never_evaluates_the_content_of_its_file(slurm, text):
  (slurm.folder / "slurm-41.failures").write_text(text + "\n")
  _, out, calls = slurm.run(1, MAX_FAILURES="20")
  assert not (slurm.folder / "ran").exists()
  assert calls == REQUEUE, out
  counted = "9" if text == "08" else "1"  # what is not a number counts as none
  assert (slurm.folder / "slurm-41.failures").read_text() == f"{counted}\n"


def test_slurm_replaces_a_link_instead_of_writing_through_it(slurm):
  precious = slurm.folder / "precious"
  precious.write_text("kept")
  (slurm.folder / "slurm-41.failures").symlink_to(precious)
  assert slurm.run(1)[2] == REQUEUE
  assert precious.read_text() == "kept"
  assert not (slurm.folder / "slurm-41.failures").is_symlink()


def test_slurm_refuses_a_limit_that_is_no_number(slurm):
  returned, out, calls = slurm.run(1, MAX_FAILURES="a[$(touch ran)]")
  assert (returned, calls) == (2, [])
  assert "MAX_FAILURES=a[$(touch ran)]" in out
  assert not (slurm.folder / "ran").exists()


def test_slurm_ends_with_the_code_where_it_cannot_requeue(slurm):
  returned, _, calls = slurm.run(75, SCONTROL="1")
  assert (returned, calls) == (75, REQUEUE)


@pytest.mark.parametrize(
  ("number", "expected"),
  [
    (signal.SIGTERM, (0, ["scancel --signal=TERM 41", *REQUEUE])),
    (signal.SIGUSR1, (75, ["scancel --signal=TERM 41"])),
  ],
)
def test_slurm_passes_signals_on_to_the_step_and_not_to_srun(slurm, number, expected):
  process = slurm.start()
  slurm.wait_for_the_task()
  process.send_signal(number)
  returned, out, calls = slurm.finish(process)
  assert (returned, calls) == expected, out
  assert "exit 75" in out  # and not 137, with which srun answers a SIGTERM of its own


def test_slurm_refuses_what_it_cannot_run(slurm):
  returned, out, calls = slurm.run(0, ())
  assert (returned, calls) == (2, [])
  assert "usage: sbatch" in out
  (slurm.folder / "main.py").unlink()
  returned, out, calls = slurm.run(0)
  assert (returned, calls) == (2, [])
  assert "submit from the root of the repository" in out


ARRAY = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "2"}  # the last one, so 41 would be all


def test_slurm_takes_the_arguments_of_an_arrays_task_from_its_line(slurm):
  (slurm.folder / "runs").write_text("--workdir=a\n--workdir=b  --config.seed=$(touch ran)\n")
  returned, _, calls = slurm.run(75, ["--config=x"], **ARRAY, RUNS="runs")
  assert (returned, calls) == (0, ["scontrol requeue 41_2"])
  process = slurm.start(0, ["--config=x"], **ARRAY, RUNS="runs")
  process.wait(timeout=20)
  assert slurm.calls()[0].endswith(" --config=x --workdir=b --config.seed=$(touch ran)")
  slurm.finish(process)
  assert not (slurm.folder / "ran").exists()


def test_slurm_signals_one_task_of_an_array_alone(slurm):
  (slurm.folder / "runs").write_text("--workdir=a\n--workdir=b\n")
  process = slurm.start("", ["--config=x"], **ARRAY, RUNS="runs")
  slurm.wait_for_the_task()
  process.send_signal(signal.SIGUSR1)
  assert slurm.finish(process)[2] == ["scancel --signal=TERM 41_2"]


@pytest.mark.parametrize("runs", [None, "absent", "runs", "short"])
def test_slurm_refuses_an_array_whose_tasks_have_no_line(slurm, runs):
  (slurm.folder / "runs").write_text("--workdir=a\n--config.seed=1\n")  # no workdir of its own
  (slurm.folder / "short").write_text("--workdir=a\n")
  returned, out, calls = slurm.run(0, **ARRAY, **({"RUNS": runs} if runs else {}))
  assert (returned, calls) == (2, [])
  assert "task 2 of an array needs RUNS=FILE, a file whose line 2 has" in out
  assert f"RUNS={runs or ''}" in out


# ------------------------------ again.sh ------------------------------

# The first starts are ended by a signal; the last exits with a code, or runs until it is stopped.
COMMAND = """
echo "start $MESHWRIGHT_REPLACEABLE" >>calls
if (( $(wc -l <calls) <= DEATHS )); then kill -"$SIGNAL" $$; fi
if [[ -n $CODE ]]; then exit "$CODE"; fi
trap 'exit 75' TERM
echo $$ >task
while :; do sleep 0.05; done
"""


def again(folder, deaths, code, number="KILL", replacements="2", **variables):
  """Starts again.sh with a command that dies so often."""
  play(folder / "bin", "scancel", 'echo "scancel $*" >>told')
  environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "REPLACEMENTS": replacements}
  played = {"DEATHS": str(deaths), "CODE": str(code), "SIGNAL": number}
  return subprocess.Popen(
    [LAUNCH / "again.sh", "bash", "-c", COMMAND],
    cwd=folder,
    env={**os.environ, **environment, **played, **variables},
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.parametrize(
  ("deaths", "number", "code", "starts", "returned"),
  [
    (0, "KILL", 0, 1, 0),
    (0, "KILL", 1, 1, 1),
    (2, "ABRT", 3, 3, 3),
    (1, "USR1", 0, 1, 0),  # ignored, as it is while a process begins
    (9, "KILL", 0, 3, 137),
  ],
)
def test_a_command_that_a_signal_ends_is_run_again(
  tmp_path, deaths, number, code, starts, returned
):
  process = again(tmp_path, deaths, code, number)
  _, error = process.communicate(timeout=20)
  assert process.returncode == returned, error
  assert (tmp_path / "calls").read_text().splitlines() == ["start "] * starts
  assert error.count("run again") == starts - 1
  assert not (tmp_path / "told").exists()


def test_under_slurm_the_other_tasks_are_told(tmp_path):
  process = again(tmp_path, 1, 0, SLURM_JOB_ID="41", SLURM_STEP_ID="0", SLURM_PROCID="3")
  _, error = process.communicate(timeout=20)
  assert "process 3 ended by signal 9; run again, 1 more at most" in error
  assert (tmp_path / "told").read_text() == "scancel --signal=USR1 41.0\n"
  assert (tmp_path / "calls").read_text() == "start 1\n" * 2


def test_a_stop_is_passed_on_and_is_no_death(tmp_path):
  process = again(tmp_path, 1, "")
  deadline = time.monotonic() + 10
  while not (tmp_path / "task").exists() or not (tmp_path / "task").read_text():
    assert time.monotonic() < deadline
    time.sleep(0.02)
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=20)
  assert process.returncode == 75
  assert len((tmp_path / "calls").read_text().splitlines()) == 2


@pytest.mark.parametrize("replacements", ["a[$(touch ran)]", "-1", "1000"])
def test_a_number_of_replacements_that_is_none_is_refused(tmp_path, replacements):
  process = again(tmp_path, 0, 0, replacements=replacements)
  _, error = process.communicate(timeout=20)
  assert process.returncode == 2
  assert f"REPLACEMENTS={replacements} must be a number below 1000" in error
  assert not (tmp_path / "ran").exists()
