"""Reading a compiled program: layouts, tiles and the names of arguments."""

import jax
import jax.numpy as jnp
import pytest

from runtime import hlo


@pytest.mark.parametrize(
  ("shape", "size"),
  [
    ("f32[3,128,192]{2,1,0:T(8,128)}", 4 * 3 * 128 * 256),  # 192 columns fill 256 lanes
    ("f32[3,128,192]{1,2,0:T(8,128)}", 4 * 3 * 128 * 192),  # the long dim is minor: no padding
    ("f32[3,128,4,16]{1,3,2,0:T(8,128)}", 4 * 3 * 128 * 4 * 16),
    ("bf16[5,100]{1,0:T(8,128)(2,1)}", 2 * 8 * 128),
    ("f32[100]{0:T(128)}", 4 * 128),
    ("s32[]{:T(128)}", 4),
    ("f32[5,7]{1,0}", 4 * 35),
    ("f32[5,7]", 4 * 35),
  ],
)
def test_tiles_are_filled_up_along_the_minor_dims(shape, size):
  assert hlo.tiled_bytes(shape) == size


def test_arguments_have_the_names_that_jax_gives_them():
  def step(state, batch):
    return {"params": {"mlp": {"kernel": state["params"]["mlp"]["kernel"] + batch["x"].sum()}}}

  x = jnp.ones((3, 5))
  text = jax.jit(step).lower({"params": {"mlp": {"kernel": x}}}, {"x": x}).compile().as_text()
  shapes = hlo.entry_parameters(hlo.parse(text))
  assert set(shapes) == {"state/params/mlp/kernel", "batch/x"}
  assert shapes["batch/x"].startswith("f32[3,5]")


def test_an_operand_may_be_an_element_of_a_tuple():
  text = (
    "HloModule m\n\nENTRY %main (a: f32[3]) -> f32[5] {\n"
    "  %a = f32[3]{0} parameter(0)\n"
    '  %pair = (f32[3]{0}, (f32[5]{0}, s8[7]{0})) custom-call(%a), custom_call_target="x"\n'
    "  %inner = (f32[5]{0}, s8[7]{0}) get-tuple-element(%pair), index=1\n"
    "  ROOT %b = f32[5]{0} negate(%inner#0)\n}\n"
  )
  program = hlo.parse(text)
  main = program.computations["main"]
  assert main.operand_shapes(main.instructions["b"]) == ["f32[5]{0}"]
  assert hlo.tuple_index(main.instructions["inner#0"]) == 0
  assert main.instructions["inner#0"].operand_names == ("inner",)
