"""Rules of the code that no linter checks."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Names that a config's sections have in the code.
CONFIGS = {"config", "checkpoint", "data", "evaluation", "keys", "mesh", "model", "optimizer"}
CONFIGS |= {"partitioning", "planning", "processes", "training"}


@functools.cache
def sources():
  """Returns path -> syntax tree of the files of the project, but for tests."""
  found = [ROOT / "main.py", *ROOT.glob("[a-z]*/**/*.py")]
  names = {path.relative_to(ROOT): path for path in found}
  return {n: ast.parse(path.read_text()) for n, path in names.items() if n.parts[0] != "tests"}


def _own(node):
  """Returns the name of an attribute of `self` that an expression is, else None."""
  if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
    return node.attr if node.value.id == "self" else None
  return None


def _assigned(function):
  """Yields (line, attribute) of each attribute of `self` that a method assigns."""
  for node in ast.walk(function):
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets += [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For) else []
    targets += [node.optional_vars] if isinstance(node, ast.withitem) else []
    for target in targets:
      for part in ast.walk(target) if target is not None else ():
        if isinstance(getattr(part, "ctx", None), ast.Store) and (name := _own(part)):
          yield part.lineno, name


def late_attributes(tree):
  """Returns (line, class, attribute) of attributes that no `__init__` or class body sets."""
  found = []
  classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
  for one in classes.values():
    family, seen = [one], set()
    while family:  # base classes of the same file, too
      base = family.pop()
      family += [classes[b.id] for b in base.bases if isinstance(b, ast.Name) and b.id in classes]
      for node in base.body:
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "setup"):
          seen |= {name for _, name in _assigned(node)}
        elif isinstance(node, ast.AnnAssign | ast.Assign):
          targets = node.targets if isinstance(node, ast.Assign) else [node.target]
          seen |= {t.id for t in targets if isinstance(t, ast.Name)}
    for node in one.body:
      if isinstance(node, ast.FunctionDef) and node.name != "__init__":
        found += [(line, one.name, name) for line, name in _assigned(node) if name not in seen]
  return found


def config_defaults(tree):
  """Returns the lines that ask a config for a key with a default of their own."""
  return [
    node.lineno
    for node in ast.walk(tree)
    if isinstance(node, ast.Call)
    and isinstance(node.func, ast.Attribute)
    and node.func.attr == "get"
    and len(node.args) == 2
    and getattr(node.func.value, "attr", getattr(node.func.value, "id", "")) in CONFIGS
  ]


def hidden_attribute_errors(tree):
  """Returns the lines that pass over an AttributeError, which hides mistakes of the code."""
  caught = [
    (node.lineno, node.type)
    for node in ast.walk(tree)
    if isinstance(node, ast.ExceptHandler)
    and not any(isinstance(part, ast.Raise) for part in ast.walk(node))
  ] + [
    (node.lineno, ast.Tuple(node.args))
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "suppress"
  ]
  return [
    line
    for line, kinds in caught
    if kinds is not None
    and any(getattr(kind, "id", "") == "AttributeError" for kind in ast.walk(kinds))
  ]


def named_dims(tree):
  """Returns (line, text) of each string that spells the dims of an array, such as "BTD".

  Docstrings are left out, and equations of einsum, whose letters are their own.
  """
  known = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
      known.add(node.value)
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "einsum":
      known.add(node.args[0])
  return [
    (node.lineno, node.value)
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant)
    and isinstance(node.value, str)
    and node not in known
    and re.fullmatch("[A-Z]+", "".join(c for c in node.value if c not in ",->"))
  ]


def test_parallel_schedules_take_the_letters_of_a_models_dims():
  """Else they would depend on the models' legend, by strings that no import shows."""
  package = {p: t for p, t in sources().items() if p.parts[:2] == ("partitioning", "parallel")}
  assert len(package) >= 4
  lines = [
    f"{p}:{line}: {text!r}" for p, tree in package.items() for line, text in named_dims(tree)
  ]
  assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
  "source", ['f("T")', 'LETTERS = "BTNH", 1', 'g(f"BTD,{x}->{y}")', 'einsum(f"BTD,{x}->{y}", x)']
)
def test_letters_of_a_legend_are_found(source):
  assert len(named_dims(ast.parse(source))) == 1


def test_einsums_own_letters_are_left_alone():
  source = '"""BTD"""\nx = jnp.einsum("BTNH,BSNH->BNTS", f(q, "step"), k)'
  assert named_dims(ast.parse(source)) == []


def test_all_attributes_of_an_object_are_set_when_it_is_made():
  lines = [
    f"{path}:{line}: {owner}.{name} is first set outside of __init__"
    for path, tree in sources().items()
    for line, owner, name in late_attributes(tree)
  ]
  assert not lines, "\n".join(lines)


def test_a_config_has_all_of_its_keys():
  lines = [
    f"{path}:{line}: .get with a default; defaults stand in configs/"
    for path, tree in sources().items()
    if path.parts[0] != "configs"
    for line in config_defaults(tree)
  ]
  assert not lines, "\n".join(lines)


def test_no_attribute_error_is_passed_over():
  lines = [
    f"{path}:{line}" for path, tree in sources().items() for line in hidden_attribute_errors(tree)
  ]
  assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
  ("body", "late"),
  [
    ("  def __init__(self):\n    self.a = 0\n  def f(self):\n    self.a += 1", []),
    ("  def f(self):\n    self.a, self.b = 1, 2", ["a", "b"]),
    ("  def f(self):\n    for self.a in x:\n      self.a.b = 1", ["a"]),
    ("  def f(self):\n    with x as self.a:\n      pass", ["a"]),
    ("  def f(self):\n    other.a = 1", []),
  ],
)
def test_late_attributes_are_found(body, late):
  assert [name for _, _, name in late_attributes(ast.parse(f"class C:\n{body}"))] == late


def test_defaults_and_hidden_errors_are_found():
  assert config_defaults(ast.parse("x\nconfig.model.get('layers', 0)")) == [2]
  assert config_defaults(ast.parse("counts.get(text, 0)\nconfig.get('a')")) == []
  assert hidden_attribute_errors(ast.parse("x\nwith contextlib.suppress(AttributeError): y")) == [2]
  assert hidden_attribute_errors(ast.parse("try: x\nexcept (ValueError, AttributeError): y")) == [2]
  for handled in ("ValueError: y", "AttributeError as e: raise ValueError(e) from e"):
    assert hidden_attribute_errors(ast.parse(f"try: x\nexcept {handled}")) == []
