"""Operations of instructions, against what is computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planning.roofline import Costs, Work, matmul_seconds, seconds_alone
from runtime import hlo
from runtime.chips import CHIPS, Rates
from tests.runtime.instructions import entry, work_of


def convolved(left: str, right: str, line: str) -> float:
  """Returns the operations of a convolution."""
  text = entry(f"%a = {left} parameter(0)", f"%b = {right} parameter(1)", f"ROOT %c = {line}")
  return work_of(text, "c").flops


def test_a_matmul():
  text = entry(
    "%a = f32[3,5,7]{2,1,0} parameter(0)",
    "%b = f32[3,7,11]{2,1,0} parameter(1)",
    "ROOT %c = f32[3,5,11]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, rhs_batch_dims={0}, "
    "lhs_contracting_dims={2}, rhs_contracting_dims={1}",
  )
  found = work_of(text, "c")
  assert found.flops == 2 * 3 * 5 * 7 * 11
  assert found.bytes == 4 * (3 * 5 * 7 + 3 * 7 * 11 + 3 * 5 * 11)


@pytest.mark.parametrize(
  ("left", "right", "result", "narrow"),
  [
    ("s8", "s8", "s32", True),
    ("f8e4m3fn", "f8e5m2", "f32", True),
    ("s8", "bf16", "f32", False),
    ("bf16", "bf16", "bf16", False),
  ],
)
def test_a_matmul_of_8_bit_operands_runs_at_its_own_rate(left, right, result, narrow):
  inside = (
    f"%inner (a: {left}[3,5], b: {right}[5,7]) -> {result}[3,7] {{\n"
    f"  %a = {left}[3,5] parameter(0)\n  %b = {right}[5,7] parameter(1)\n"
    f"  ROOT %d = {result}[3,7] dot(%a, %b), lhs_contracting_dims={{1}}, "
    f"rhs_contracting_dims={{0}}\n}}\n\n"
  )
  text = entry(
    f"%a = {left}[3,5] parameter(0)",
    f"%b = {right}[5,7] parameter(1)",
    f"ROOT %c = {result}[3,7] fusion(%a, %b), kind=kOutput, calls=%inner",
  ).replace("ENTRY", inside + "ENTRY")
  found, flops = work_of(text, "c"), 2 * 3 * 5 * 7
  assert (found.flops, found.eight_bit) == (flops, flops if narrow else 0)
  assert (found * 2).eight_bit == (found + found).eight_bit == 2 * found.eight_bit
  peak = 1836e12 if narrow else 918e12
  seconds = matmul_seconds(found, CHIPS["v6e"], Rates(matmul=0.5))
  assert seconds == pytest.approx(flops / (0.5 * peak))
  seconds = matmul_seconds(found, CHIPS["v6e"], Rates())  # measured: 727.7 of 918 TFLOP/s
  assert seconds == pytest.approx(flops / (0.79 * peak))


def test_fused_attention_runs_at_its_own_share_of_the_peak():
  work = Work(8e12, 0, attention=3e12)
  peak = 989.5e12
  # 529 of 989 TFLOP/s of cuDNN's kernels, 794.5 of matmuls.
  seconds = matmul_seconds(work, CHIPS["h100"], Rates())
  assert seconds == pytest.approx(5e12 / (0.80 * peak) + 3e12 / (0.53 * peak))
  assert matmul_seconds(work * 2 + work, CHIPS["h100"], Rates()) == pytest.approx(3 * seconds)
  # Nothing is known of kernels on TPUs: as other matmuls.
  assert matmul_seconds(work, CHIPS["v6e"], Rates()) == pytest.approx(8e12 / (0.79 * 918e12))


# As the compiler for TPUs writes products of a decoder: with the heads as a window.
@pytest.mark.parametrize(
  ("left", "right", "line", "flops"),
  [
    (  # BTD,DF->BTF
      "bf16[8192,4096]",
      "bf16[14336,4096]",
      "bf16[8192,14336] convolution(%a, %b), dim_labels=bf_oi->bf",
      2 * 8192 * 4096 * 14336,
    ),
    (  # BTD,KHD->BTKH
      "bf16[8192,4096,1]",
      "bf16[8,128,4096]",
      "bf16[8192,8,128] convolution(%a, %b), window={size=8 pad=7_7 rhs_reversal=1}, "
      "dim_labels=bf0_0oi->b0f",
      2 * 8192 * 4096 * 8 * 128,
    ),
    (  # BTNH,BSNH->BNTS: N is a batch dim
      "bf16[8192,32,128]",
      "bf16[8192,128,32]",
      "f32[32,8192,8192] convolution(%a, %b), window={size=32 stride=32 pad=31_31 lhs_dilate=31 "
      "rhs_reversal=1}, dim_labels=b0f_oi0->0bf",
      2 * 32 * 8192 * 8192 * 128,
    ),
    (  # BNTS,BSNH->BTNH
      "bf16[8192,32,8192]",
      "bf16[32,128,8192]",
      "bf16[32,8192,128] convolution(%a, %b), window={size=32 stride=31 lhs_dilate=32}, "
      "dim_labels=b0f_0oi->0bf",
      2 * 32 * 8192 * 8192 * 128,
    ),
    (  # BTNH,NHD->BTD: N is summed over
      "bf16[8192,32,128]",
      "bf16[32,128,4096]",
      "bf16[8192,4096,1] convolution(%a, %b), window={size=32}, dim_labels=b0f_0io->bf0",
      2 * 8192 * 32 * 128 * 4096,
    ),
  ],
)
def test_matmuls_in_a_tpu_program(left, right, line, flops):
  assert convolved(left, right, line) == flops


@pytest.mark.parametrize(("stride", "padding"), [(1, "VALID"), (1, "SAME"), (2, "SAME")])
def test_a_convolution_of_an_image_counts_what_falls_on_it(stride, padding):
  image, kernel = np.ones((2, 9, 11, 3), np.float32), np.ones((3, 5, 3, 4), np.float32)
  ones = jax.lax.conv_general_dilated(
    image, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
  )  # each result is the number of products that it is a sum of
  first, last = jax.lax.padtype_to_pads((9, 11), (3, 5), (stride, stride), padding)
  sizes = "x".join(map(str, ones.shape[1:3]))
  line = (
    f"f32[2,{sizes.replace('x', ',')},4] convolution(%a, %b), window={{size=3x5 "
    f"stride={stride}x{stride} pad={first[0]}_{first[1]}x{last[0]}_{last[1]}}}, "
    "dim_labels=b01f_01io->b01f"
  )
  assert convolved("f32[2,9,11,3]", "f32[3,5,3,4]", line) == 2 * float(ones.sum())


def test_the_flops_of_a_compiled_matmul():
  x, y = jnp.ones((48, 64)), jnp.ones((64, 80))
  text = jax.jit(lambda x, y: jnp.sin(x @ y)).lower(x, y).compile().as_text()
  program = hlo.parse(text)
  costs = Costs(program)
  computation = program.computations[program.entry]
  flops = sum(costs.work(computation, one).flops for one in computation.instructions.values())
  assert flops == 2 * 48 * 64 * 80


# As printed: the kernel's metadata goes over several lines.
SPLASH = """%{name}.4 = (f32[512,128], bf16[4,1024,128]) custom-call(%m, %n, %q, %k, %v), \
custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 512}}"
}}}}, metadata={{op_name="jit(f)/while/body/pallas_call"}}
  ROOT %last = f32[] constant(0)"""


@pytest.mark.parametrize(
  ("name", "products", "table", "share"),
  [
    ("splash_mha_fwd_residuals", 2, "1,2,2", 3 / 4),  # three of the four blocks of 512 by 512
    ("splash_mha_dkv_no_residuals", 4, "1,2,2", 3 / 4),
    ("splash_mha_dq_no_residuals", 3, "1,2,2", 3 / 4),
    ("splash_mha_fwd_residuals", 2, "1,8,2", 2 / 8),  # a window of at most two of eight blocks
    ("splash_mha_dkv_no_residuals", 4, "1,2,8", 2 / 8),
    ("another_kernel", 0, "1,2,2", 0),
  ],
)
def test_the_attention_kernel_computes_the_blocks_that_the_mask_leaves(
  name, products, table, share
):
  text = entry(
    f"%m = s8[{table}] parameter(0)",
    f"%n = s8[{table}] parameter(1)",
    *(f"%{x} = bf16[4,1024,128] parameter({i})" for i, x in enumerate("qkv", start=2)),
    SPLASH.format(name=name),
  )
  assert work_of(text, f"{name}.4").flops == products * 2 * 4 * 1024 * 1024 * 128 * share
  program = hlo.parse(text)
  assert program.computations[program.entry].root == "last"


@pytest.mark.parametrize(
  ("name", "last", "result"),
  [
    ("ragged-dot-none", "bf16[4,256,512]", "bf16[1024,512]"),
    ("tgmm", "bf16[1024,512]", "f32[4,256,512]"),
  ],
)
def test_a_grouped_matmul_multiplies_each_row_by_one_kernel(name, last, result):
  """As in a program for v5p; a dense one would have four times the operations."""
  text = entry(
    "%n = s32[1] parameter(0)",
    "%x = bf16[1024,256] parameter(1)",
    f"%w = {last} parameter(2)",
    f"%{name}.7 = {result} custom-call(%n, %n, %n, %n, %n, /*index=5*/%x, %w), "
    'custom_call_target="tpu_custom_call"',
  )
  assert work_of(text, f"{name}.7").flops == 2 * 1024 * 256 * 512


@pytest.mark.parametrize("table", [True, False])
def test_the_attention_kernel_computes_all_blocks_of_a_ring_step_and_at_most_all_of_gathered_keys(
  table,
):
  tables = [f"%{x} = s32[1,2,8] parameter({i})" for i, x in enumerate("mn", start=3)]
  text = entry(
    "%q = bf16[4,512,128] parameter(0)",
    *(f"%{x} = bf16[4,2048,128] parameter({i})" for i, x in enumerate("kv", start=1)),
    *(tables if table else ()),
    SPLASH.format(name="splash_mha_dq").replace("%m, %n, ", "%m, %n, " if table else ""),
  )
  assert work_of(text, "splash_mha_dq.4").flops == 3 * 2 * 4 * 512 * 2048 * 128


def test_a_matmul_of_cublas_leaves_its_workspace_alone():
  text = entry(
    "%a = bf16[16384,2048]{1,0} parameter(0)",
    "%b = bf16[2048,512]{1,0} parameter(1)",
    "ROOT %c = (bf16[16384,512]{1,0}, s8[4194304]{0}) custom-call(%a, %b), "
    'custom_call_target="__cublas$lt$matmul", metadata={op_name="x"}, backend_config='
    '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}',
  )
  found = work_of(text, "c")
  assert found.flops == 2 * 16384 * 2048 * 512
  assert found.bytes == 2 * (16384 * 2048 + 2048 * 512 + 16384 * 512)


@pytest.mark.parametrize(("backward", "matmuls"), [("", 2), ("Backward", 5)])
@pytest.mark.parametrize(("window", "pairs"), [(0, 8 * 9 / 2), (3, 1 + 2 + 6 * 3)])
def test_attention_of_cudnn_skips_what_the_mask_excludes(backward, matmuls, window, pairs):
  text = entry(
    "%q = bf16[2,8,6,64]{3,2,1,0} parameter(0)",
    "%k = bf16[2,8,2,64]{3,2,1,0} parameter(1)",
    "ROOT %c = (bf16[2,6,8,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), "
    f'custom_call_target="__cudnn$fmhaSoftmax{backward}", backend_config='
    f'{{"cudnn_fmha": {{"mask_type": "CAUSAL", "sliding_window_length": {window}}}}}',
  )
  found = work_of(text, "c")
  assert found.flops == found.attention == matmuls * 2 * 2 * 6 * pairs * 64
  assert found.small_heads == found.flops  # of 64 run at half the speed of 128


@pytest.mark.parametrize(
  ("shape", "slowest", "fastest"),
  [
    ((16384, 2048, 8192), 767, 806),
    ((16384, 8192, 2048), 767, 806),
    ((16384, 2048, 512), 613, 631),
    ((32768, 768, 768), 620, 647),
  ],
)
def test_the_rate_of_a_matmul_on_an_h100_is_that_which_was_measured(shape, slowest, fastest):
  """docs/performance.md, in TFLOP/s of bfloat16."""
  m, k, n = shape
  chip, work = CHIPS["h100"], Work(2.0 * m * k * n, 2.0 * (m * k + k * n + m * n))
  memory = work.bytes / Rates().bandwidth(chip)
  seconds = seconds_alone(matmul_seconds(work, chip, Rates()), memory, chip)
  assert 0.97 * slowest < work.flops / seconds / 1e12 < 1.03 * fastest
  assert seconds_alone(2.0, 3.0, CHIPS["v5p"]) == 3.0
  assert seconds_alone(0.0, 3.0, chip) == 3.0
