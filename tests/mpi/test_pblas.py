"""PBLAS products on sub-matrices of block-cyclic matrices, in the callers' own local arrays, as PDGEMM takes them."""

import numpy as np

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.geometry.notations.pblas import Descriptor
from tests.launch import parallel

CASES = [
    # (descriptor, ia, ja) of A, B and C; then m, n, k
    (
        (Descriptor(37, 29, 4, 3, 1, 0), 5, 2), (Descriptor(31, 40, 3, 5, 0, 1), 1, 7),
        (Descriptor(23, 40, 4, 5), 0, 0), (20, 30, 25),
    ),
    (*[(Descriptor(16, 16, 2, 2), 0, 0)] * 3, (16, 16, 16)),
    (
        (Descriptor(9, 9, 8, 8, 1, 1), 1, 1), (Descriptor(40, 12, 1, 7), 3, 0),
        (Descriptor(9, 12, 2, 2, 1, 1), 3, 1), (5, 11, 8),
    ),
]


def sub_matrix(whole, descriptor, mesh, at, extent):
    """A(ia : ia + m, ja : ja + n) as a matrix on the rank's full local array of A."""
    rank = mesh.rank if mesh.is_member else 0
    layout = descriptor.layout(mesh.grid, *at, *extent)
    full = Descriptor.layout(descriptor, mesh.grid).region(whole.shape, mesh.grid, rank)
    local = np.ascontiguousarray(whole[full.selector()])
    assert local.shape == descriptor.local_shape(mesh.grid, rank)
    part = local[descriptor.local_part(mesh.grid, rank, *at, *extent)]
    return DistMatrix.from_local(part, extent, mesh, layout), local


@parallel(ranks=(4, 6), env=("node", "nolocal"))
def test_sub_matrices_in_place(comm):
    grids = {4: [(2, 2), (4, 1)], 6: [(2, 3), (3, 2)]}[comm.size]
    for grid in grids:
        with Mesh(grid, comm) as mesh:
            for case in CASES:
                check(mesh, *case)


def check(mesh, first, second, third, shape):
    """C(ic:, jc:) = 2 A(ia:, ja:) B(ib:, jb:) − C, and nothing around it changes."""
    rows, cols = mesh.grid.dims
    if any(d.rsrc >= rows or d.csrc >= cols for d, *_ in (first, second, third)):
        return
    m, n, k = shape
    rng = np.random.default_rng(3)
    wholes, parts, locals_ = [], [], []
    for (d, i, j), extent in zip((first, second, third), ((m, k), (k, n), (m, n)), strict=True):
        wholes.append(rng.integers(-4, 5, (d.m, d.n)).astype(float))
        part, local = sub_matrix(wholes[-1], d, mesh, (i, j), extent)
        parts.append(part)
        locals_.append(local)
    A, B, C = parts
    rma_mm.matmul(A, B, mesh, out=C, alpha=2, beta=-1, algorithm="pblas")
    a, b, wanted = (whole[i : i + x.shape[0], j : j + x.shape[1]]
                    for whole, (_, i, j), x in zip(wholes, (first, second, third), parts, strict=True))
    wanted[:] = 2 * a @ b - wanted
    full = third[0].layout(mesh.grid).region(wholes[2].shape, mesh.grid, mesh.rank)
    assert np.array_equal(locals_[2], wholes[2][full.selector()])
