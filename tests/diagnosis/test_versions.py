"""Packages: each way in which an installation may not fit together, broken in its metadata."""

import pytest

from diagnosis import versions
from diagnosis.finding import OK, WARNING, WRONG

PINS = versions.pins(versions.ROOT / "requirements" / "locks" / "base.txt")
LIBTPU = versions.pins(versions.ROOT / "requirements" / "locks" / "tpu.txt")["libtpu"]


def found(changes=None, hardware=None):
  there = {**PINS, **(changes or {})}
  return [
    *versions.check(
      hardware, {name: version for name, version in there.items() if version is not None}
    )
  ]


def texts(status, *arguments):
  return [f"{one.what} | {one.fix}" for one in found(*arguments) if one.status == status]


def test_what_the_lock_files_install_is_well():
  assert {one.status for one in found({"libtpu": LIBTPU}, "tpu")} == {OK}


@pytest.mark.parametrize(
  ("changes", "hardware", "status", "said"),
  [
    ({"jaxlib": "0.9.0"}, None, WRONG, f"jax {PINS['jax']} and jaxlib 0.9.0 do not match"),
    ({"optax": None}, None, WRONG, "missing packages: optax | run `make setup`"),
    ({"optax": "0.2.0"}, None, WARNING, f"1 packages differ .*: optax 0.2.0 ({PINS['optax']})"),
    ({"libtpu": "0.0.1"}, None, WRONG, f"libtpu 0.0.1 does not match .* libtpu=={LIBTPU}"),
    ({"jax": "0.9", "jaxlib": "0.9", "libtpu": "0.0.1"}, None, WARNING, "jax[tpu]==0.9"),
    ({}, "tpu", WRONG, "has a TPU, and libtpu is not installed | .*ACCELERATOR=tpu"),
    ({}, "gpu", WRONG, "has a GPU, and JAX has no plugin .*ACCELERATOR=gpu"),
    (
      {"jax-cuda12-plugin": PINS["jaxlib"], "jax-cuda12-pjrt": "0.1"},
      "gpu",
      WRONG,
      f"jax-cuda12-pjrt 0.1 do not match jaxlib {PINS['jaxlib']}",
    ),
    (
      {"jax-cuda12-plugin": PINS["jaxlib"], "jax-cuda13-plugin": PINS["jaxlib"]},
      "gpu",
      WRONG,
      "several kinds of GPU software are installed: jax-cuda12-plugin, jax-cuda13-plugin",
    ),
  ],
)
def test_what_does_not_fit_is_named_with_its_fix(changes, hardware, status, said):
  lines = texts(status, changes, hardware)
  parts = said.split(".*")
  assert any(all(part in line for part in parts) for line in lines), lines
  assert all(one.fix for one in found(changes, hardware) if one.status != OK)


def test_the_package_that_is_imported_counts(tmp_path, monkeypatch):
  (tmp_path / "jaxlib-0.0.7.dist-info").mkdir()
  metadata = "Metadata-Version: 2.1\nName: jaxlib\nVersion: 0.0.7\n"
  (tmp_path / "jaxlib-0.0.7.dist-info" / "METADATA").write_text(metadata)
  monkeypatch.syspath_prepend(tmp_path)
  assert versions.installed()["jaxlib"] == "0.0.7"
  assert any("jaxlib 0.0.7 do not match" in one.what for one in versions.check(None))
