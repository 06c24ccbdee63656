"""requirements/locks/: what `make setup` and `make test` install is pinned and hashed, wholly."""

import importlib.metadata
import pathlib
import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import upgrade

ROOT = pathlib.Path(__file__).parents[1]
LOCKS = ROOT / "requirements" / "locks"
ADVICE = "run `make lock`"


def entries(*files):
  """Returns (requirement, hashes) of each entry of lock files."""
  found = []
  for file in files:
    for entry in (LOCKS / f"{file}.txt").read_text().replace("\\\n", " ").splitlines():
      requirement, *hashes = entry.split(" --hash=")
      found.append((Requirement(requirement.strip()), [each.strip() for each in hashes]))
  return found


def pins(*files):
  """Returns name -> version of what lock files install with this Python, on this platform."""
  return {
    canonicalize_name(each.name): str(each.specifier).removeprefix("==")
    for each, _ in entries(*files)
    if each.marker is None or each.marker.evaluate()
  }


def wanted(name):
  """Returns the lines of a requirements file, without those of the files that it includes."""
  lines = (ROOT / name).read_text().splitlines()
  return [Requirement(line) for line in lines if line and not line.startswith(("#", "-r"))]


@pytest.mark.parametrize(
  "file",
  [
    *("base", "dev", "plan", "tpu", "gpu", "buckets", "sentencepiece", "fixtures"),
    *("deploy", "ray", "sinks", "transformers4", "transformers5"),
  ],
)
def test_every_entry_is_pinned_and_hashed(file):
  assert entries(file)
  for requirement, hashes in entries(file):
    assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), requirement
    assert requirement.url is None
    assert hashes, requirement
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), requirement


@pytest.mark.parametrize(
  ("requirements", "files"),
  [
    ("requirements.txt", ["base"]),
    ("requirements/dev.txt", ["base", "dev"]),
    ("requirements/plan.txt", ["base", "dev", "plan"]),
    ("requirements/buckets.txt", ["base", "buckets"]),
    ("requirements/sentencepiece.txt", ["base", "sentencepiece"]),
    ("requirements/fixtures.txt", ["fixtures"]),
    ("requirements/deploy.txt", ["deploy"]),
    ("requirements/ray.txt", ["ray"]),
    ("requirements/sinks.txt", ["sinks"]),
    ("requirements/transformers4.txt", ["transformers4"]),
    ("requirements/transformers5.txt", ["transformers5"]),
  ],
)
def test_the_lock_files_pin_what_the_requirements_pin_for_every_python(requirements, files):
  locked = {
    (str(each.specifier), canonicalize_name(each.name)): each for each, _ in entries(*files)
  }
  for each in wanted(requirements):
    entry = locked.get((str(each.specifier), canonicalize_name(each.name)))
    assert entry is not None, f"{each} is in no lock file; {ADVICE}"
    for python in ("3.11.7", "3.12.1", "3.13.0", "3.14.0"):
      environment = {"python_version": python[:4], "python_full_version": python}
      markers = [
        marker is None or marker.evaluate(environment) for marker in (each.marker, entry.marker)
      ]
      assert markers[0] <= markers[1], f"{each}: the lock says {entry.marker}; {ADVICE}"


def test_what_the_packages_require_is_locked_too():
  # pip refuses an installation with --require-hashes where one is missing; this names it, offline.
  locked = pins("base", "dev")
  files = ("requirements.txt", "requirements/sentencepiece.txt", "requirements/dev.txt")
  found, open_ones = {}, [each for file in files for each in wanted(file)]
  while open_ones:
    each = open_ones.pop()
    name = canonicalize_name(each.name)
    extras = ["", *each.extras]
    if each.marker and not any(each.marker.evaluate({"extra": extra}) for extra in extras):
      continue
    if found.get(name, set()) >= set(extras):
      continue
    found.setdefault(name, set()).update(extras)
    assert name in locked, f"{name} is required and in no lock file; {ADVICE}"
    for text in importlib.metadata.requires(name) or []:
      required = Requirement(text)
      if not required.marker or any(required.marker.evaluate({"extra": x}) for x in extras):
        required.marker = None
        open_ones.append(required)
  assert len(found) > 50
  assert {*locked} == {*found}, f"locked and required by nothing: {ADVICE}"


def test_what_is_installed_here_is_what_is_locked():
  locked = pins("base", "dev")
  installed = {name: importlib.metadata.version(name) for name in locked}
  assert installed == locked


def test_the_newest_releases_are_tried_beside_the_other_pinned_ones():
  kept = upgrade.unpinned((ROOT / "requirements.txt").read_text()).splitlines()
  found = [Requirement(line) for line in kept if not line.startswith("#")]
  assert {each.name for each in found if not each.specifier} == set(upgrade.NEWEST)
  assert len([each for each in found if each.name in upgrade.NEWEST]) == len(upgrade.NEWEST)
  assert {each.name for each in found} == {each.name for each in wanted("requirements.txt")}
