"""The table of chips: names that JAX reports, peaks of published data sheets, overrides."""

import types

import pytest

from runtime import chips


def device(kind):
  return types.SimpleNamespace(device_kind=kind)


@pytest.mark.parametrize(
  ("kind", "name", "tflops"),
  [  # dense bfloat16, of the vendors' data sheets
    ("TPU v4", "v4", 275),
    ("TPU v5 lite", "v5e", 197),
    ("TPU v5p", "v5p", 459),
    ("TPU v6 lite", "v6e", 918),
    ("NVIDIA A100-SXM4-80GB", "a100", 312),
    ("NVIDIA H100 80GB HBM3", "h100", 989.5),
    ("NVIDIA H100 PCIe", "h100-pcie", 756.5),
    ("NVIDIA H200", "h200", 989.5),
    ("NVIDIA GH200 480GB", "gh200", 989.5),
    ("NVIDIA B200", "b200", 2250),
    ("NVIDIA GeForce RTX 4090", "rtx4090", 165.2),
    ("NVIDIA RTX A6000", "a6000", 154.8),
    ("NVIDIA A10G", "a10g", 70),
    ("Tesla V100-SXM2-16GB", "v100", 15.7),
    ("AMD Instinct MI300X", "mi300x", 1307.4),
  ],
)
def test_a_device_is_known_by_the_exact_name_that_jax_reports(kind, name, tflops):
  assert chips.known(device(kind)).name == name
  assert chips.peak_flops(device(kind)) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
  ("name", "units", "multiplications", "clock"),
  [  # multiprocessors, of bfloat16 each clock with sums in float32, GHz of the boost clock
    ("rtx3080", 68, 256, 1.710),
    ("rtx3090", 82, 256, 1.695),
    ("rtx3090ti", 84, 256, 1.860),
    ("rtx4080", 76, 256, 2.505),
    ("rtx4090", 128, 256, 2.520),
    ("rtx5080", 84, 256, 2.617),
    ("rtx5090", 170, 256, 2.407),
    ("a10", 72, 512, 1.695),
    ("a10g", 80, 256, 1.710),
    ("a40", 84, 512, 1.740),
    ("a6000", 84, 512, 1.800),
    ("6000-ada", 142, 512, 2.505),
    ("l40s", 142, 512, 2.520),
    ("a100", 108, 1024, 1.410),
    ("t4", 40, 64, 1.590),  # of float32
    ("v100", 80, 64, 1.530),
    ("mi300x", 304, 1024, 2.100),
  ],
)
def test_peaks_are_the_units_times_what_each_multiplies_in_a_clock(
  name, units, multiplications, clock
):
  peak = 2 * units * multiplications * clock * 1e9
  assert chips.CHIPS[name].flops == pytest.approx(peak, rel=0.015)


def test_8_bit_matmuls_are_faster_where_the_data_sheets_say_so():
  faster = {
    name: (chip.int8_flops, chip.float8_flops)
    for name, chip in chips.CHIPS.items()
    if chip.eight_bit_flops > chip.flops
  }
  assert faster["v5e"] == (394e12, 0)
  assert faster["v5p"] == (918e12, 0)
  assert faster["v6e"] == (1836e12, 0)
  assert faster["tpu7x"] == (0, 2307e12)
  assert faster["h100"] == (0, 1979e12)
  assert faster["b200"] == (0, 4500e12)
  assert faster["l40s"] == (0, 724e12)
  assert faster["rtx5090"] == (0, 419e12)
  assert not {"v4", "cpu", "a10", "rtx3090", "v100", "a100", "a100-pcie", "a100-40gb"} & {*faster}


def test_of_other_names_no_peak_is_known():
  for kind in ("cpu", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "TPU v5 lite pod"):
    assert chips.known(device(kind)) is None
    assert chips.peak_flops(device(kind)) is None


def test_constants_are_replaced_by_name():
  table, rates = chips.overridden("matmul=0.7,v5p.hbm_bandwidth=2.6e12")
  assert rates.matmul == 0.7
  assert table["v5p"].hbm_bandwidth == 2.6e12
  assert table["v5e"] == chips.CHIPS["v5e"]
  assert chips.overridden("") == (chips.CHIPS, chips.Rates())


def test_each_chip_has_its_own_share_of_its_memory_s_bandwidth_unless_one_is_set_for_all():
  def share(name, text):
    table, rates = chips.overridden(text)
    return rates.bandwidth(table[name]) / chips.CHIPS[name].hbm_bandwidth

  assert share("h100", "") == pytest.approx(0.92)  # about 2.2 of 2.4 TB/s
  assert share("v6e", "") == pytest.approx(0.8)
  assert share("h100", "memory=0.5") == share("v6e", "memory=0.5") == pytest.approx(0.5)
  assert share("h100", "h100.memory=0.7") == pytest.approx(0.7)


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("matmull=0.7", "there is no 'matmull'; did you mean 'matmul'"),
    ("v5p.hbm_bandwith=1", "did you mean 'v5p.hbm_bandwidth'"),
    ("matmul=0", "matmul='0' is not a positive number"),
    ("matmul=-1", "matmul='-1' is not a positive number"),
    ("v5p.name=3", "there is no 'v5p.name'"),
  ],
)
def test_what_there_is_not_is_refused(text, said):
  with pytest.raises(ValueError, match=r"planning\.constants") as refusal:
    chips.overridden(text)
  assert said in str(refusal.value)


@pytest.mark.parametrize(
  ("name", "capability"),
  [
    *(("v100-32gb", 7.0), ("rtx3090ti", 8.6), ("rtx4090", 8.9), ("rtx5090", 12.0), ("mi300x", 0.0)),
    *(("a100-40gb", 8.0), ("a10", 8.6), ("l40s", 8.9), ("l4", 8.9), ("h100-pcie", 9.0)),
    *(("gh200", 9.0), ("gb200", 10.0), ("v5p", 0.0), ("cpu", 0.0)),
  ],
)
def test_gpus_have_a_compute_capability(name, capability):
  assert chips.CHIPS[name].compute_capability == capability
