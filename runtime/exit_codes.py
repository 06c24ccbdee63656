"""The exit codes of every command and of the launcher, and how a supervisor reacts to each."""

import errno
import re
import socket

DONE = 0
FAILED = 1  # a retry may succeed: restart
REFUSED = 2  # before anything was started or changed; a retry would end the same
CHECK_FAILED = (
  3  # the command ran to its end: `compare`, `coordcheck` or `doctor` failed, a plan does not fit,
  # or `replay` has found a bad number
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

# Of the operating system, conditions that pass without a change of the command: something else has
# the resource now, or the network or a disk does not answer.
_PASSING = frozenset(
  number
  for name in (
    *(
      "EADDRINUSE",
      "EMFILE",
      "ENFILE",
      "ENOMEM",
      "ENOBUFS",
      "ENOSPC",
      "EDQUOT",
      "EIO",
      "EREMOTEIO",
    ),
    *("EAGAIN", "EBUSY", "EINTR", "ENOLCK", "ESTALE", "ETXTBSY", "ENETDOWN", "ENETUNREACH"),
    *("ENETRESET", "EHOSTDOWN", "EHOSTUNREACH"),
  )
  if (number := getattr(errno, name, None))
)
_PASSING_KINDS = (TimeoutError, ConnectionError, MemoryError, socket.gaierror)
# The status of such conditions in errors of JAX, TensorStore and pyarrow.
_PASSING_STATUS = re.compile(
  r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED): |\bAWS Error (NETWORK_CONNECTION|REQUEST_TIMEOUT|"
  r"SERVICE_UNAVAILABLE|SLOW_DOWN|THROTTLING|INTERNAL_FAILURE)\b"
)


class RetryableError(RuntimeError):
  """A failure before the run began, after which the same command may succeed."""


class ExportError(Exception):
  """An export that had begun has failed; the message says why."""


def retryable(error: BaseException | None) -> bool:
  """Returns whether the same command may succeed later: FAILED, and not REFUSED.

  It looks at what an error was raised from, too: a refusal may name a disk that is full.
  """
  seen = set()
  while isinstance(error, BaseException) and id(error) not in seen:
    seen.add(id(error))
    if isinstance(error, (RetryableError, *_PASSING_KINDS)):
      return True
    if isinstance(error, OSError) and error.errno in _PASSING:
      return True
    if isinstance(error, (RuntimeError, OSError)) and _PASSING_STATUS.search(str(error)):
      return True
    context = None if error.__suppress_context__ else error.__context__
    error = error.__cause__ or context or getattr(error, "reason", None)  # urllib's
  return False
