"""Dynamic work queue: boxes of the product are claimed by fetch-and-add on one shared ticket.

Source: the dynamic load balancing of Global Arrays' `ga_dgemm` callers (J. Nieplocha, R. Harrison and
R. Littlefield, 1996). Any placements; a slow rank takes fewer boxes.
"""

from rma_mm.schedule.algorithm import Algorithm, stationary

QUEUE = Algorithm(
    name="queue",
    source="Nieplocha, Harrison and Littlefield 1996",
    summary="ranks claim boxes of C by fetch-and-add, pull A and B, push C by accumulate; any placements",
    work=stationary("C"),
    over="k",
    order="ticket",
    result="accumulate",
)
