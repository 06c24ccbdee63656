"""Transfers wait while a program runs for the first time."""

import threading
import types

import jax.numpy as jnp
import pytest

from runtime import transfers


def test_the_first_call_is_alone_and_later_ones_are_not():
  order, running, may_end = [], threading.Event(), threading.Event()

  def compiled(x):
    order.append("begins")
    running.set()
    may_end.wait(10)
    order.append("ends")
    return x

  alone = transfers.alone_at_first(compiled, "gpu")
  first = threading.Thread(target=alone, args=(jnp.ones(()),))
  first.start()
  assert running.wait(10)
  place = threading.Thread(target=transfers.placed, args=(lambda: order.append("placed"),))
  place.start()
  place.join(0.2)
  assert order == ["begins"], "a batch was placed while the program ran first"
  may_end.set()
  first.join(10)
  place.join(10)
  assert order == ["begins", "ends", "placed"]
  transfers.placed(lambda: alone(jnp.ones(())))  # would wait for itself
  assert order[3:] == ["begins", "ends"]


def test_a_failed_first_call_gives_the_devices_back():
  def compiled():
    raise RuntimeError("out of memory")

  alone = transfers.alone_at_first(compiled, "gpu")
  for _ in range(2):
    with pytest.raises(RuntimeError, match="out of memory"):
      alone()
  assert transfers.placed(lambda: 3) == 3


def test_other_platforms_call_the_program_itself():
  compiled = types.SimpleNamespace(as_text=lambda: "HloModule")
  assert transfers.alone_at_first(compiled, "tpu") is compiled
  assert transfers.alone_at_first(compiled, "gpu").as_text() == "HloModule"
