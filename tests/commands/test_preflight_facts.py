"""What the processes tell one another before the first step."""

from processes.coordination import NotTogetherError
from tests.processes.stores import groups_of, together
from training.splits import sharing


def test_one_that_has_not_come_is_named():
  first, _, third = groups_of(3)
  for error in together(*(lambda g=g: sharing(1, g).gather({}) for g in (first, third))):
    assert isinstance(error, NotTogetherError)
    said = "process 1 of 3 has not reached 'reading all rows' within 1 s"
    assert str(error) == f"{said} (processes.start_timeout_seconds)"
