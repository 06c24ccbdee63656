"""One decoder, trained once on one device, that all mutants are compared with."""

import pytest

from checks import equality
from checks.case import Case
from tests.checks import decoder


@pytest.fixture(scope="session")
def one():
  return Case(decoder.program({}))


@pytest.fixture(scope="session")
def trained(one):
  """Returns what `equality` knows of one device: its three steps and the bounds."""
  reference, halves = equality.reference_of(one)
  return reference, equality.bounds_of(reference, halves)


@pytest.fixture(scope="session")
def clean():
  """The decoder on a mesh, without a bug."""
  return Case(decoder.program(decoder.MESH))
