"""What a check has found."""

import dataclasses

OK, WARNING, WRONG = "ok", "warning", "wrong"


@dataclasses.dataclass(frozen=True)
class Finding:
  """One result of a check.

  Attributes:
    status: `OK`; `WARNING`: runs work, but not as they should; `WRONG`: runs fail, or some do.
    what: was found, with the numbers.
    fix: what to do about it; "" where all is well, or where `what` says it.
  """

  status: str
  what: str
  fix: str = ""


def ok(what: str) -> Finding:
  return Finding(OK, what)


def warning(what: str, fix: str) -> Finding:
  return Finding(WARNING, what, fix)


def wrong(what: str, fix: str = "") -> Finding:
  return Finding(WRONG, what, fix)
