"""Windows: memory that ranks expose, and one-sided transfers. The hardware side; it knows no schedules.

Importing this package imports no MPI; opening a window does.
"""

from rma_mm.windows.base import Counters, Patch, Transfer, Window
from rma_mm.windows.checks.checked import Checks
from rma_mm.windows.opening import absent, open_window

__all__ = ["Checks", "Counters", "Patch", "Transfer", "Window", "absent", "open_window"]
