"""XLA_FLAGS that XLA does not accept are refused; those that it accepts are left alone."""

import subprocess

import pytest

from runtime import devices


@pytest.mark.parametrize(
  ("value", "said"),
  [
    ("--xla_nope=1", "Unknown flag in XLA_FLAGS: --xla_nope=1"),
    ("--xla_cpu_enable_fast_math=maybe", "maybe"),
    ("there_is_no_such_file", 'Could not open file "there_is_no_such_file"'),
  ],
)
def test_a_flag_that_xla_aborts_over_is_refused(monkeypatch, value, said):
  monkeypatch.setenv("XLA_FLAGS", value)
  with pytest.raises(ValueError, match="XLA does not start with it") as refusal:
    devices.check_xla_flags()
  assert str(refusal.value).startswith(f"XLA_FLAGS={value}: ")
  assert said in str(refusal.value)
  assert "\n" not in str(refusal.value)


def test_flags_that_xla_knows_pass(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
  devices.check_xla_flags()


@pytest.mark.parametrize("value", [None, "", " "])
def test_without_flags_no_process_is_started(monkeypatch, value):
  monkeypatch.setattr(subprocess, "run", None)
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  if value is not None:
    monkeypatch.setenv("XLA_FLAGS", value)
  devices.check_xla_flags()
