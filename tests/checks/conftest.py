"""One decoder, trained once on one device, that all mutants are compared with."""

import pytest

from checks.case import Case
from tests.checks import decoder


@pytest.fixture(scope="session")
def one():
  return Case(decoder.program({}))


@pytest.fixture(scope="session")
def clean():
  """The decoder on a mesh, without a bug."""
  return Case(decoder.program(decoder.MESH))
