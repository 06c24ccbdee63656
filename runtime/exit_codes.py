"""The exit codes of every command and of the launcher, with what a supervisor does about each."""

DONE = 0
FAILED = 1  # the same command again may succeed: restart
REFUSED = 2  # before anything was started or changed; the same again would end the same
ANSWER_IS_NO = 3  # the command ran to its end: `compare` found a difference, a plan does not fit
STOPPED = 75  # asked to stop, and saved first (EX_TEMPFAIL): run the same command again
INTERRUPTED = 130  # 128 + SIGINT, as shells have it: by a second Ctrl-C, without saving

MEANINGS = {
  DONE: "done",
  FAILED: "failed",
  REFUSED: "refused before anything started",
  ANSWER_IS_NO: "done, and the answer is no",
  STOPPED: "stopped, after saving",
  INTERRUPTED: "interrupted, without saving",
}
