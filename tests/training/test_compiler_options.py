"""Compiler options by device: the table, the config over it, and options that are not known."""

import types

import jax
import jax.numpy as jnp
import pytest

from reports import layout_text
from runtime.chips import CHIPS
from tests.docs.pages import ROOT
from tests.helpers.jobs import make_job
from training import compiler_options


def device(kind, platform="tpu"):
  return types.SimpleNamespace(device_kind=kind, platform=platform)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
  monkeypatch.setattr(compiler_options, "_dropped", {})
  for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
    monkeypatch.delenv(variable, raising=False)


GATHER = "xla_tpu_enable_sparse_core_collective_offload_all_gather"


@pytest.mark.parametrize(
  ("kind", "platform", "count"),
  [
    ("TPU v5", "tpu", 7),
    ("TPU v6 lite", "tpu", 9),
    ("TPU v5 lite", "tpu", 7),
    ("TPU v4", "tpu", 0),
    ("TPU7x", "tpu", 0),  # the compiler has them on by itself
    ("TPU v99", "tpu", 0),
    ("NVIDIA H100 80GB HBM3", "gpu", 1),
    ("of tomorrow", "gpu", 1),
    ("cpu", "cpu", 0),
  ],
)
def test_each_kind_of_device_has_its_own(kind, platform, count):
  assert len(compiler_options.of_device(device(kind, platform))) == count


def test_the_rows_are_of_known_chips():
  for row in compiler_options.TABLE:
    assert {*row.devices} <= {*CHIPS, "gpu"}
  every = [name for row in compiler_options.TABLE for name in row.devices]
  assert len(every) == len({*every})


def test_what_an_environment_variable_sets_is_left_to_it(monkeypatch):
  monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{GATHER}=false")
  assert GATHER not in compiler_options.of_device(device("TPU v5"))
  assert len(compiler_options.of_device(device("TPU v5"))) == 6


def test_the_config_overrides_one_and_leaves_one_out():
  defaults = {"a": True, "b": True, "c": True}
  kept, given = compiler_options.resolved("a=false,b=,d=3", defaults)
  assert kept == {"c": True}
  assert given == {"a": False, "d": "3"}
  assert compiler_options.text({**kept, **given}) == "c=true,a=false,d=3"


def lowered():
  return jax.jit(lambda x: x + 1).lower(jnp.zeros(3))


def test_defaults_that_the_compiler_does_not_know_are_left_out_by_name():
  known = {"xla_llvm_disable_expensive_passes": True}
  unknown = {"xla_of_tomorrow": True, GATHER: True}
  compiled = compiler_options.compile_with(lowered(), {**unknown, **known}, {})
  assert compiled(jnp.zeros(3)).tolist() == [1, 1, 1]
  assert {*compiler_options.dropped()} == {*unknown}
  # Of later programs they are left out at once.
  assert compiler_options.resolved("", {**unknown, **known})[0] == known


def test_a_default_whose_value_is_refused_is_left_out():
  compiler_options.compile_with(lowered(), {"xla_cpu_enable_fast_math": "perhaps"}, {})
  assert compiler_options.dropped() == ("xla_cpu_enable_fast_math",)


@pytest.mark.parametrize("defaults", [{}, {"xla_of_tomorrow": True}])
def test_an_option_of_the_config_is_never_left_out(defaults):
  with pytest.raises(jax.errors.JaxRuntimeError, match="'xla_of_tomorrow'"):
    compiler_options.compile_with(lowered(), defaults, {"xla_of_tomorrow": True})
  assert compiler_options.dropped() == ()


def test_a_job_compiles_with_those_of_its_device_and_says_so(monkeypatch):
  table = {"xla_cpu_enable_fast_math": False, "xla_of_tomorrow": True}
  monkeypatch.setattr(compiler_options, "of_device", lambda *_: dict(table))
  job = make_job("single", "lm", compiler_options="xla_cpu_enable_fast_math=")
  [line] = layout_text.chosen_lines(job)
  assert line == "chosen: compiler_options=xla_of_tomorrow=true (for cpu)"
  job.compile(lambda x: x + 1, jnp.zeros(3))
  [line] = layout_text.chosen_lines(job)
  assert line == "left out, as this compiler does not know them: xla_of_tomorrow"


def test_the_page_has_the_table():
  page = (ROOT / "docs" / "performance.md").read_text()
  for row in compiler_options.TABLE:
    names = ", ".join(row.devices)
    [line] = [line for line in page.splitlines() if line.startswith(f"| {names} |")]
    cells = line.strip("| ").split(" | ")
    assert cells[1].split("<br>") == [
      f"`{compiler_options.text({k: v})}`" for k, v in row.options.items()
    ]
    assert cells[2] == row.reason
