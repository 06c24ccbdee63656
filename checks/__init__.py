"""Checks of any JAX train step: its sharding, its numbers, its communication. Needs jax and numpy.

Three ways in: `python main.py check FILE.py`; `python -m checks FILE.py` in the environment of
another framework, with this folder's parent on PYTHONPATH; and the functions `check` of the modules
here in a test suite, such as `equality.check(Case(program({"data": 8})), Case(program({})))`.
"""

from checks.case import Case
from checks.program import Description, Program
from checks.report import Finding

__all__ = ["Case", "Description", "Finding", "Program"]
