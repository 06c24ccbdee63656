"""What the tests of planning share."""

import dataclasses

from planning import step_time
from planning.interconnect import in_order
from planning.topology import parse
from runtime import hlo
from runtime.chips import CHIPS, Chip, Rates
from runtime.collectives import collectives
from tests.runtime.programs import make_mesh

# Constants that are easy to compute with: everything is reached, and hops take no time.
IDEAL = Rates(matmul=1.0, memory=1.0, link=1.0, hop_seconds=1e-12, spread=0.1)

# A product of 2e9 operations takes 1 s; an all-reduce of 4 kB takes 1 s (2 V / W); memory is free.
CHIP = dataclasses.replace(
  CHIPS["v5e"],
  flops=2e9,
  hbm_bandwidth=1e30,
  link_bandwidth=2 * 8e3,
  wraps=16,
  host_bandwidth=4e3,
)
PRODUCT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
HEAD = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""
GROUPS = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add"


def times(body: str, before: str = "", chip: Chip = CHIP) -> step_time.Times:
  """Returns what a program takes on 8 devices in a row.

  Args:
    body: the instructions of ENTRY.
    before: other computations.
    chip: of the devices.
  """
  text = f"{HEAD}{before}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
  found = in_order(parse("v5e:1x8"), 8)
  found = dataclasses.replace(found, topology=dataclasses.replace(found.topology, chip=chip))
  mesh = make_mesh(data=8)
  return step_time.times(hlo.parse(text), collectives(text, mesh), found, chip, IDEAL)


START = """
  %x = f32[1000,1000]{1,0} parameter(0)
  %v = f32[1000]{0} parameter(1)
"""
