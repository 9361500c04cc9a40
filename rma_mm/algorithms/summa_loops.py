"""SUMMA as loops, for a first reading: what `SUMMA_C` in `summa.py` says in a table, written out for one rank.

On a square mesh the blocks A[i, t], B[t, j] and C[i, j] belong to the ranks (i, t), (t, j) and (i, j). In step t the
owners broadcast their blocks of A along their row of the mesh and of B along their column, and every rank multiplies.
A test proves that these are the operations of the table form, which also takes other meshes and placements.

Source: R. van de Geijn and J. Watts, "SUMMA: scalable universal matrix multiplication algorithm" (1997), figure 2.
"""

from collections.abc import Iterator

from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region, even_part
from rma_mm.schedule.ops import Broadcast, Finish, Multiply, Op, Ref, Slot


def summa_operations(m: int, n: int, k: int, mesh: MeshShape, rank: int) -> Iterator[Op]:
    """Yield the operations of `rank` for C[m, n] = A[m, k] @ B[k, n] on a q × q mesh, q at most m, n and k."""
    q, i, j = mesh.dims[0], *mesh.coords(rank).values()
    my_row = tuple(mesh.rank({"i": i, "j": t}) for t in range(q))
    my_column = tuple(mesh.rank({"i": t, "j": j}) for t in range(q))
    rows, cols = even_part(m, i, q), even_part(n, j, q)
    c = Ref(rank, "C", Region((rows, cols)))
    for t in range(q):
        panel = even_part(k, t, q)
        a = Ref(my_row[t], "A", Region((rows, panel)))
        b = Ref(my_column[t], "B", Region((panel, cols)))
        # The owner reads its block where it lies; the others receive it into scratch memory.
        a_here, b_here = (
            x if x.rank == rank else Ref(rank, Slot(f"{x.buffer}{t}", x.region), x.region) for x in (a, b)
        )
        yield Broadcast((b,), b_here if b_here is not b else None, my_column, panel.start)
        yield Broadcast((a,), a_here if a_here is not a else None, my_row, panel.start)
        yield Multiply(a_here, b_here, c, first=t == 0, step=panel.start)
    yield Finish(c, step=0)
