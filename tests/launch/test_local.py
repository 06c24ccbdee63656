"""The launcher with real processes and real signals."""

import errno
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from processes.launch import __main__ as launcher_code
from runtime import exit_codes
from tests.launch.launchers import PRELUDE, ROOT, runs, wait_until

SLEEP = "print('up', index); time.sleep(100)"
UP = ("[0] up 0", "[1] up 1")


# ---- What the processes see, and what is seen of them


def test_each_process_gets_its_index(launch):
  names = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
  launcher = launch(
    f"print(*(os.environ[name] for name in {names}), os.environ['JAX_COORDINATOR_ADDRESS'],"
    "os.getsid(0) == os.getpid(), repr(sys.stdin.read()))",
    "--processes=3",
  )
  assert launcher.end() == 0
  found = sorted(line.split() for line in launcher.out.splitlines())
  assert [line[:5] for line in found] == [[f"[{i}]", str(i), "3", "1", "1"] for i in range(3)]
  [address] = {line[5] for line in found}
  host, port = address.split(":")
  assert host == "localhost"
  assert 1024 < int(port) < 65536
  assert {tuple(line[6:]) for line in found} == {("True", "''")}


def test_the_report_has_pids_and_exit_codes(launch, tmp_path):
  launcher = launch("sys.exit(3 * index)", f"--report={tmp_path / 'report'}")
  assert launcher.end() == 3
  started, ended = map(json.loads, (tmp_path / "report").read_text().splitlines())
  assert f"(pid {', '.join(map(str, started['pids']))})" in launcher.err
  assert ended == {"codes": [0, 3], "killed": []}


def test_complete_lines_are_prefixed_with_their_process(launch):
  launcher = launch(
    """
for step in range(3000):
  print("out", index, step, "x" * (step % 700))
  print("err", index, step, file=sys.stderr)
print("y" * 300_000)
sys.stdout.buffer.write(b"\\xff\\xfe no text\\n[Gloo] Rank 0 is connected\\n\\nsaid\\n\\n")
sys.stdout.buffer.write(b"no end")
"""
  )
  assert launcher.end() == 0
  out, err = launcher.out.splitlines(), launcher.err.splitlines()
  for i in range(2):
    expected = [f"[{i}] out {i} {step} {'x' * (step % 700)}" for step in range(3000)]
    expected += [f"[{i}] {'y' * 300_000}", f"[{i}] \udcff\udcfe no text"]
    expected += [f"[{i}] said", f"[{i}] ", f"[{i}] no end"]
    assert [line for line in out if line.startswith(f"[{i}]")] == expected
    expected = [f"[{i}] err {i} {step}" for step in range(3000)]
    assert [line for line in err if line.startswith(f"[{i}]")] == expected
  assert len(out) == 2 * 3005
  assert launcher.out.endswith("] no end\n")
  [started] = [line for line in err if not line.startswith("[")]
  assert started.startswith("launch: started 2 processes (pid ")


def test_a_closed_output_stops_the_run(launch):
  launcher = launch(
    "on_sigterm(75)\nwhile True: print('line')",
    stdout=subprocess.PIPE,
  )
  seen = set()
  while len(seen) < 2:
    seen.add(launcher.popen.stdout.readline())
  family = launcher.family()
  launcher.popen.stdout.close()
  assert launcher.end() == 75
  assert "launch: cannot write to stdout: Broken pipe" in launcher.err
  assert not any(map(runs, family))


def test_a_reader_that_is_stuck_does_not_keep_the_run_from_saving(launch):
  launcher = launch(
    "on_sigterm(75)\nmark(f'up{index}')\nwhile True: print('x' * 10_000)",
    stdout=subprocess.PIPE,
  )
  for index in range(2):
    wait_until((launcher.folder / f"up{index}").exists, "processes that print")
  launcher.popen.terminate()
  assert launcher.end() == 75
  launcher.popen.stdout.close()


# ---- When one fails


ENDS = {
  1: ("sys.exit(1)", "exit code 1"),
  2: ("sys.exit(2)", "exit code 2"),
  3: ("sys.exit(3)", "exit code 3"),
  137: ("os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL (9)"),
  134: ("os.kill(os.getpid(), signal.SIGABRT)", "signal SIGABRT (6)"),
  168: ("os.kill(os.getpid(), 40)", "signal without a name (40)"),
}


def test_the_first_that_fails_is_named_with_its_last_lines(launch):
  script = """
if index == 0:
  print("peer")
  mark("peer")
  time.sleep(0.5)  # still there when the other one ends
  sys.exit(0)
wait_for("peer")
signal.signal(signal.SIGABRT, signal.SIG_DFL)  # no stack of faulthandler's
for line in range(20):
  print("line", line)
sys.stdout.write("no end")
sys.stdout.flush()
"""
  started = {code: launch(script + end) for code, (end, _) in ENDS.items()}
  for code, launcher in started.items():
    assert launcher.end() == code
    said = [line for line in launcher.err.splitlines() if line.startswith("launch: ")]
    if code == 137:  # it could not say why
      assert said[1] == "launch: process 1 failed first: signal SIGKILL (9)"
    else:
      assert said[1:17] == [
        f"launch: process 1 failed first: {ENDS[code][1]}; its last lines:",
        *(f"launch: [1] line {n}" for n in range(6, 20)),
        "launch: [1] no end",
      ]
    passes = code == 1 or code > 128
    again = ["launch: not started again (--restarts=0); the same command resumes"] * passes
    assert said[2 if code == 137 else 17 :] == again


@pytest.mark.long
def test_the_others_get_time_for_their_diagnosis_then_sigterm_then_sigkill(launch):
  launcher = launch(
    """
if index == 0:
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  mark("ready")
  time.sleep(100)
wait_for("ready")
if index == 1:
  time.sleep(100)
if index == 2:
  sys.exit(3)
time.sleep(1)
print("watchdog")
sys.exit(1)
""",
    "--processes=4",
    "--restarts=1",
  )
  assert launcher.end() == 3
  assert "[3] watchdog" in launcher.out
  said = [line.removeprefix("launch: ") for line in launcher.err.splitlines()]
  assert said[1:] == [
    "process 2 failed first: exit code 3; its last lines:",
    "process 3 ended: exit code 1",
    "process 0 still runs: SIGTERM",
    "process 1 still runs: SIGTERM",
    "process 0 has not ended; killed",
  ]


@pytest.mark.parametrize("seen_first", ["os.abort()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_abort_of_a_peer_does_not_hide_the_first_death(launch, seen_first):
  # The lock is as a peer's socket: the kernel opens it while its owner dies. So either of the two
  # deaths may be seen first.
  launcher = launch(
    f"""
import fcntl
file = open("lock", "w")
owner = index == {int("KILL" in seen_first)}
wait_for("locked") if not owner else fcntl.flock(file, fcntl.LOCK_EX)
mark("locked" if owner else "waiting")
wait_for("waiting") if owner else fcntl.flock(file, fcntl.LOCK_EX)
if index and not owner: time.sleep(0.15)
os.kill(os.getpid(), signal.SIGKILL if index else signal.SIGABRT)
"""
  )
  assert launcher.end() == 137
  assert "process 1 failed first: signal SIGKILL (9)" in launcher.err
  assert "process 0 ended: signal SIGABRT (6)" in launcher.err


def test_of_those_found_dead_at_once_the_likeliest_cause_is_the_first():
  codes = [-signal.SIGABRT, 0, exit_codes.STOPPED, 1, -signal.SIGKILL]
  ended = [launcher_code.Process(index, None, code) for index, code in enumerate(codes)]
  assert [p.code for p in sorted(ended, key=launcher_code._consequence)] == [-9, 0, 1, 75, -6]


def test_a_stopped_process_is_killed_and_named(launch):
  launcher = launch("mark(f'up{index}'); wait_for('up2')\nif index == 0: os.abort()\n" + SLEEP)
  for index in range(2):
    wait_until((launcher.folder / f"up{index}").exists, "both processes")
  stopped = launcher.process(1)
  stopped.suspend()
  wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "a stopped process")
  (launcher.folder / "up2").touch()
  assert launcher.end() == 134
  assert "process 0 failed first: signal SIGABRT (6)" in launcher.err
  assert "process 1 is stopped (SIGSTOP); killed" in launcher.err
  assert not runs(stopped)


def test_ends_may_be_apart_as_far_as_the_grace(launch):
  done = launch("if index: time.sleep(0.5)\nprint('done')", "--grace_seconds=0")
  first = "if index == 0: sys.exit(75)\n"
  saved = {code: launch(f"{first}time.sleep(0.5); sys.exit({code})") for code in (75, 1)}
  endless = launch(f"{first}time.sleep(100)", "--grace_seconds=0.5")
  assert done.end() == 0
  assert done.out == "[0] done\n[1] done\n"
  for code, launcher in saved.items():
    assert launcher.end() == code
    assert "process 0 ended: exit code 75" in launcher.err
  assert endless.end() == 75
  assert "process 1 still runs: SIGTERM" in endless.err


# ---- When it is asked to stop


@pytest.fixture
def heard():
  """Undoes what nohup does to these tests: what they start does not ignore SIGHUP."""
  before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
  yield
  signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard")
def test_a_signal_is_passed_on_as_sigterm_and_nothing_restarts(launch):
  numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
  started = {number: launch("on_sigterm(75)\n" + SLEEP, "--restarts=1") for number in numbers}
  for number, launcher in started.items():
    launcher.wait_for(*UP)
    launcher.popen.send_signal(number)
    assert launcher.end() == 75
    assert f"launch: {number.name}: SIGTERM to all processes, which have 30 s" in launcher.err
    assert "restart" not in launcher.err
    assert "failed" not in launcher.err


def test_processes_that_do_not_save_or_fail_meanwhile_give_the_code(launch):
  started = {143: launch(SLEEP), 1: launch("on_sigterm(75 if index else 1)\n" + SLEEP)}
  for code, launcher in started.items():
    launcher.wait_for(*UP)
    launcher.popen.send_signal(signal.SIGINT)
    assert launcher.end() == code
    assert ("failed" in launcher.err) == (code == 1)


def test_after_the_grace_it_kills(launch):
  script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
  numbers = (signal.SIGTERM, signal.SIGINT)
  started = {number: launch(script, "--grace_seconds=0.5") for number in numbers}
  for number, launcher in started.items():
    launcher.wait_for(*UP)
    launcher.popen.send_signal(number)
  for number, launcher in started.items():
    assert launcher.end() == 128 + number
    assert "process 0 has not ended; killed" in launcher.err


def test_a_second_ctrl_c_kills(launch):
  launcher = launch("signal.signal(signal.SIGTERM, lambda *_: print('saving'))\n" + SLEEP)
  launcher.wait_for(*UP)
  launcher.popen.send_signal(signal.SIGINT)
  launcher.wait_for("[0] saving", "[1] saving")
  launcher.popen.send_signal(signal.SIGINT)  # the same one, which a wrapper has passed on, too
  time.sleep(launcher_code.AGAIN_SECONDS)
  assert launcher.popen.poll() is None
  launcher.popen.send_signal(signal.SIGINT)
  assert launcher.end() == 130
  assert "Ctrl-C: no more waiting" in launcher.err


def test_nohup_is_respected(launch):
  launcher = launch("on_sigterm(75)\n" + SLEEP, before=["nohup"])
  launcher.wait_for(*UP)
  launcher.popen.send_signal(signal.SIGHUP)
  launcher.popen.terminate()
  assert launcher.end() == 75
  assert "SIGHUP" not in launcher.err


# ---- Restarts

COUNT = """
count = len([name for name in os.listdir() if name.startswith(f"start{index}.")])
mark(f"start{index}.{count}")
"""


def test_it_restarts_what_a_restart_may_help(launch):
  ends = {1: "sys.exit(1)", 75: "sys.exit(75)", 137: "os.kill(os.getpid(), signal.SIGKILL)"}
  script = f"{COUNT}print(count, os.environ['JAX_COORDINATOR_ADDRESS'])\n"
  started = {code: launch(script + end, "--restarts=1") for code, end in ends.items()}
  for code, launcher in started.items():
    assert launcher.end() == code
    found = {tuple(line.split()[1:]) for line in launcher.out.splitlines()}
    assert sorted(count for count, _ in found) == ["0", "1"]
    assert len({address for _, address in found}) == 2
    assert "launch: restart 1 of 1\n" in launcher.err


def test_it_does_not_restart_what_a_restart_cannot_help(launch):
  # Only the process that refuses ends with 2; the others, with 1, may be first.
  ends = {0: "sys.exit(0)", 2: "time.sleep(0.5 * index); sys.exit(1 + index)", 3: "sys.exit(3)"}
  started = {code: launch(end, "--restarts=3") for code, end in ends.items()}
  for code, launcher in started.items():
    assert launcher.end() == code
    assert "restart" not in launcher.err


def test_restarts_end_with_success(launch):
  launcher = launch(f"{COUNT}sys.exit([1, 0][count] if index else 0)", "--restarts=3")
  assert launcher.end() == 0
  assert "launch: restart 1 of 3\n" in launcher.err
  assert "restart 2" not in launcher.err


def test_asked_to_stop_between_two_starts_it_starts_no_more(launch):
  launcher = launch("sys.exit(1)", "--restarts=3", "--processes=1")
  launcher.wait_for("failed first")
  launcher.popen.terminate()
  assert launcher.end() == 1
  assert "restart" not in launcher.err


# ---- Usage


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--processes=2"], "no command; write it after the options: -- python main.py"),
    (["--processes=2", "--"], "no command"),
    (["--processes=2", "true"], "unrecognized arguments: true"),
    (["--", "true"], "the following arguments are required: --processes"),
    (["--processes=0", "--", "true"], "--processes=0: must be at least 1"),
    (["--processes=two", "--", "true"], "invalid int value: 'two'"),
    (["--processes=2", "--restarts=-1", "--", "true"], "--restarts=-1: must be at least 0"),
    (["--processes=2", "--grace_seconds=nan", "--", "true"], "--grace_seconds=nan: must be"),
    (["--processes=2", "--return_seconds=-1", "--", "true"], "--return_seconds=-1.0: must be"),
    (["--processes=2", "--", "no-such-command"], "no-such-command: no such command"),
  ],
)
def test_bad_usage_is_one_line_and_code_2(capsys, arguments, said):
  with pytest.raises(SystemExit) as end:
    launcher_code.main(arguments)
  assert end.value.code == 2
  [line] = capsys.readouterr().err.splitlines()
  assert said in line


def test_what_cannot_be_started_is_code_2(launch, tmp_path):
  script = tmp_path / "script"
  script.write_bytes(b"\x7fELF no program")
  script.chmod(0o755)
  launcher = launch(None, "--restarts=2", command=[str(script)])
  assert launcher.end() == 2
  assert launcher.err == f"launch: {script}: Exec format error\n"


def test_what_the_system_cannot_start_now_is_started_again():
  # No memory is left; the second start succeeds.
  code = f"""
from processes.launch import __main__ as launcher_code
real, failures = launcher_code.subprocess.Popen, [OSError({errno.ENOMEM}, "none is left")]
def popen(command, **options):
  if command == ["true"] and failures:
    raise failures.pop()
  return real(command, **options)
launcher_code.subprocess.Popen = popen
raise SystemExit(launcher_code.main(["--processes=1", "--restarts=1", "--", "true"]))
"""
  command = [sys.executable, "-c", code]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stderr.startswith("launch: true: none is left\nlaunch: restart 1 of 1\n")


def test_it_loads_nothing_that_starts_threads():
  # Between fork and exec it runs Python, which is safe in a process of one thread only.
  code = "import processes.launch.__main__, sys; print(*sys.modules)"
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
  assert not {b"jax", b"numpy", b"training"} & {*done.stdout.split()}


# ---- Replacements


DIES = """
mark(f"up-{index}-{os.getpid()}")
ignored = signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
if index == 1 and not os.path.exists("again"):
  wait_for("up")
  open("again" if os.path.exists("died") else "died", "w").close()
  os.kill(os.getpid(), signal.SIGKILL)
mark("up")
wait_for("again")
time.sleep(0.2)
print("stayed", ignored, sum(name.startswith(f"up-{index}-") for name in os.listdir()))
"""


def test_a_process_that_a_signal_has_ended_is_replaced_and_the_others_stay(launch):
  launcher, fewer = launch(DIES, "--replacements=2"), launch(DIES, "--replacements=1")
  failing = launch("sys.exit(index)", "--replacements=2")
  assert launcher.end() == 0
  assert sorted(launcher.out.splitlines()) == ["[0] stayed True 1", "[1] stayed True 3"]
  for number in (1, 2):
    text = f"process 1 ended: signal SIGKILL (9); replacement {number} of 2"
    assert text in launcher.err
  assert "restart" not in launcher.err
  assert fewer.end() == 128 + signal.SIGKILL
  assert "launch: not replaced (--replacements=1)" in fewer.err
  assert "process 1 failed first: signal SIGKILL (9)" in fewer.err
  assert failing.end() == 1, "a process that fails by itself is not replaced"
  assert "replacement" not in failing.err


# ---- Fewer processes


ELASTIC = """
count, told = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["MESHWRIGHT_FITTING_TO"])
if index == 0:
  os.write(told, b"1 3\\n")
print("of", count, os.environ["MESHWRIGHT_PROCESSES"])
on_sigterm(75)
if count == 4 and not os.path.exists("died"):
  mark(f"up{index}")
  [wait_for(f"up{one}") for one in range(4)]
  if index == 2:
    mark("died")
    os.kill(os.getpid(), signal.SIGKILL)
  if index == 3:  # as JAX ends a peer
    wait_for("died")
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    os.abort()
  time.sleep(100)
if count == 3:
  time.sleep(100)
"""


def test_an_elastic_run_goes_on_with_fewer_processes_and_grows_again(launch):
  """After some time; tests/processes/test_elastic.py asks for it by a signal."""
  launcher = launch(ELASTIC, "--return_seconds=1", "--processes=4")
  assert launcher.end() == 0
  said = [line.removeprefix("launch: ") for line in launcher.err.splitlines()]
  after = "after 1 s (--return_seconds) or on SIGUSR2"
  assert f"goes on with 3 of 4 processes; with all {after}" in said
  assert "failed first: signal SIGTERM" not in launcher.err
  assert "all 4 processes can run again: SIGTERM, to save" in said
  assert "starts again with all 4 processes" in said
  assert sum(line.endswith("of 4 4") for line in launcher.out.splitlines()) == 8
  assert "restart" not in launcher.err


def test_a_run_that_fits_no_smaller_number_is_restarted_or_ends(launch):
  dies = "os.kill(os.getpid(), signal.SIGKILL) if index else time.sleep(100)"
  told = ("", "os.write(int(os.environ['MESHWRIGHT_FITTING_TO']), b'\\n')\n")
  for launcher in [launch(f"{one}{COUNT}\nif not count: {dies}", "--restarts=1") for one in told]:
    assert launcher.end() == 0
    assert "launch: restart 1 of 1\n" in launcher.err
    assert "goes on with" not in launcher.err


# A process 1 that is no spare dies when it is told to, and may kill the spare before.
SPARES = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from processes import preemption
preemption.wait_for_place(lambda: [mark(f"spare-{{os.getpid()}}"), time.sleep(WARM_UP)])
spare = bool(preemption.joined)
"""
WITH_SPARE = """
index = int(os.environ["JAX_PROCESS_ID"])
spares = lambda: [int(name[6:]) for name in os.listdir() if name.startswith("spare-")]
if index == 0:
  preemption.ask_for_spare()
elif not os.path.exists("died"):
  wait_for("go")
  mark("died")
  if {kills}:
    os.kill(spares()[0], signal.SIGKILL)
    time.sleep(0.2)
  os.kill(os.getpid(), signal.SIGKILL)
else:
  print("instead", spare, os.getpid() in spares())
  mark("again")
wait_for("again")
"""


# On a busy machine what a spare does at low priority may never end.
@pytest.mark.parametrize(("kills", "warm_up"), [(False, 0), (True, 0), (False, 600)])
def test_a_spare_takes_the_place_of_a_process_that_dies(launch, kills, warm_up):
  rest = PRELUDE.replace('index = int(os.environ["JAX_PROCESS_ID"])', "")
  script = rest + SPARES.replace("WARM_UP", str(warm_up)) + WITH_SPARE.format(kills=kills)
  command = [sys.executable, "-S", "-c", script]
  launcher = launch("", "--replacements=2", command=command)
  taken, ready = not (kills or warm_up), "is ready to take the place of one that dies"
  if warm_up:
    wait_until(lambda: any(launcher.folder.glob("spare-*")), "a spare")
  else:
    launcher.wait_for(ready)
  (launcher.folder / "go").touch()
  assert launcher.end() == 0
  assert launcher.out == f"[1] instead {taken} {taken}\n"
  assert "launch: process 1 ended: signal SIGKILL (9); replacement 1 of 2" in launcher.err
  assert (ready in launcher.err) == (not warm_up)


def test_a_spare_that_nobody_needs_ends_with_the_run(launch):
  rest = PRELUDE.replace('index = int(os.environ["JAX_PROCESS_ID"])', "")
  script = rest + SPARES.replace("WARM_UP", "0") + "preemption.ask_for_spare(); wait_for('end')"
  launcher = launch("", "--replacements=1", command=[sys.executable, "-S", "-c", script])
  launcher.wait_for("is ready to take the place of one that dies")
  [spare] = [int(p.name[6:]) for p in launcher.folder.iterdir() if p.name.startswith("spare-")]
  (launcher.folder / "end").touch()
  assert launcher.end() == 0
  assert not psutil.pid_exists(spare)
