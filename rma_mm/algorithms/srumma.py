"""SRUMMA: two-dimensional blocks, C stationary, node-mates' tiles read in place, others got ahead of time.

Source: M. Krishnan and J. Nieplocha, "SRUMMA: a matrix multiplication algorithm suitable for clusters and scalable
shared memory systems", IPDPS 2004. Its diagonal shift of starting points is the rotated order; its restriction to
even blocks is gone.
"""

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.schedule.algorithm import Algorithm, stationary


def _blocks(mesh: MeshShape) -> tuple[Layout, Layout, Layout] | str:
    if len(mesh.dims) != 2:
        return f"srumma needs a mesh of two axes, as (2, 3); this one is {mesh.dims}"
    rows, cols = (Level((axis,)) for axis in mesh.names)
    blocks = Layout(((rows,), (cols,)))
    return blocks, blocks, blocks


SRUMMA = Algorithm(
    name="srumma",
    source="Krishnan and Nieplocha 2004",
    summary="2-D blocks; C stationary; tiles of the node in place, others by get, double buffered",
    work=stationary("C"),
    over="k",
    placements=_blocks,
)
