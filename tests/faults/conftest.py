"""Runs that nothing disturbs, to compare with."""

import pytest

from tests.faults.harness import Run, story


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
  """Returns a function from a number of processes to the story of their run."""
  stories = {}

  def of(count: int) -> list[tuple[int, str]]:
    if count not in stories:
      workdir = tmp_path_factory.mktemp("undisturbed") / "run"
      with Run(workdir, count=count) as run:
        assert run.end() == [0] * count, run.text()
      stories[count] = story(workdir)
    return stories[count]

  return of
