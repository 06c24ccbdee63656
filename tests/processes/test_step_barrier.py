"""The lockstep: all leave the loop before the same step."""

from processes.coordination import Group
from processes.preemption import StopRequest
from processes.step_barrier import Lockstep
from tests.processes.stores import groups_of, together


def test_all_stop_before_the_same_step():
  # Process 1 is asked to stop at its 8th step, when process 0 may be anywhere before it.
  def steps(member):
    stop, done = StopRequest(), 0
    lockstep = Lockstep(member, stop)
    while done < 100:
      if member.index == 1 and done == 7:
        stop.request("SIGTERM")
      if not lockstep.enter():
        break
      done += 1
    return done, lockstep.stopping

  results = together(*(lambda member=member: steps(member) for member in groups_of(3)))
  assert results == [(7, False), (7, True), (7, False)]


def test_alone_a_stop_ends_it():
  stop = StopRequest()
  lockstep = Lockstep(Group(), stop)
  assert lockstep.enter()
  stop.request("SIGINT")
  assert not lockstep.enter()
