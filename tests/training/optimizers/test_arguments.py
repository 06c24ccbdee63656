"""An optimizer's own arguments, as a text has them; test_optimizer.py has what is refused."""

from training.optimizers.spec import parse_arguments


def test_arguments_are_read_as_in_a_call():
  text = "a=1e-3,b=(0.9, 0.99),c=True,d=bfloat16,e='x,y',f=None"
  wanted = {"a": 1e-3, "b": (0.9, 0.99), "c": True, "d": "bfloat16", "e": "x,y", "f": None}
  assert parse_arguments(text) == wanted
  assert parse_arguments("") == {}
