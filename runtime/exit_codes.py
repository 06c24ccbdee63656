"""The exit codes of every command and of the launcher, and how a supervisor reacts to each."""

DONE = 0
FAILED = 1  # a retry may succeed: restart
REFUSED = 2  # before anything was started or changed; a retry would end the same
CHECK_FAILED = (
  3  # the command ran to its end: `compare`, `coordcheck` or `doctor` failed, a plan does not fit
)
STOPPED = 75  # asked to stop, and saved first (EX_TEMPFAIL): run the same command again
INTERRUPTED = 130  # 128 + SIGINT, as shells have it: by a second Ctrl-C, without saving

MEANINGS = {
  DONE: "done",
  FAILED: "failed",
  REFUSED: "refused before anything started",
  CHECK_FAILED: "done, and the check failed",
  STOPPED: "stopped, after saving",
  INTERRUPTED: "interrupted, without saving",
}
