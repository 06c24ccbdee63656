"""An optimizer's own arguments, as a config's text has them."""

import ast
from typing import Any


def parse_arguments(text: str) -> dict[str, Any]:
  """Returns name -> value of `b1=0.9,nesterov=True,mu_dtype=bfloat16`, as in a call in Python.

  Raises:
    ValueError: the text is not of this form.
  """
  try:
    call = ast.parse(f"f({text})", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
      raise ValueError(text)
    if any(word.arg is None for word in call.keywords):
      raise ValueError(text)
    return {
      word.arg: word.value.id if isinstance(word.value, ast.Name) else ast.literal_eval(word.value)
      for word in call.keywords
    }
  except (ValueError, SyntaxError) as error:
    raise ValueError(
      f"optimizer.arguments={text!r}: give name=value,name=value, such as b1=0.9,nesterov=True"
    ) from error
