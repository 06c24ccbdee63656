"""The rows about checkpoints: 2, 9, 10, 11 and 12."""

from tests.faults.rows_damage import row_11
from tests.faults.rows_disks import row_12
from tests.faults.rows_restores import row_9, row_10
from tests.faults.rows_saves import row_2

__all__ = ["row_2", "row_9", "row_10", "row_11", "row_12"]
