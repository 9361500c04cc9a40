"""Algorithms from SBP signatures: the placements of A and B along each mesh axis determine what that axis does.

    A     B     the axis cuts                                                      C
    S(0)  B     m                                                                  its rows
    B     S(1)  n                                                                  its columns
    S(1)  S(0)  k; C is summed by a reduce-scatter                                 its rows
    B     B     m: replicas share the work out by rows, which are gathered
                where C is wanted as B                                             its rows
    P     B     m, once A's summands are added up by a reduce-scatter over rows    its rows
    B     P     k, once B's summands are added up by a reduce-scatter over rows    its rows

Axes that cut C's rows nest in the order S(0)·B, P·B, sums over k, B·B, those of one kind in the order of the mesh.

Source: J. Yuan et al., "OneFlow: redesign the distributed deep learning framework from scratch" (2021), sections 3.1
and 3.2. There P·B and B·P are multiplied as they are and C stays P; here the summands are added first.
"""

from __future__ import annotations

import re
from dataclasses import replace

from rma_mm.algorithms.from_table import one_sided, placed_work
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import AXIS_NAMES, MeshShape
from rma_mm.geometry.notations.sbp import Placed, Sbp, deduce, parse_sbp, sbp_text, sbp_to_layout
from rma_mm.schedule.algorithm import Algorithm, Wanted, stationary

SOURCE = "Yuan et al. 2021 (OneFlow)"

CUT: dict[tuple[Placed, Placed], str] = {
    ("S(0)", "B"): "m",
    ("P", "B"): "m",
    ("S(1)", "S(0)"): "k",
    ("B", "P"): "k",
    ("B", "B"): "m",
    ("B", "S(1)"): "n",
}
"""Dimension of (m, n, k) that an axis cuts, by the placements of A and B along it; nested cuts follow this order."""


def signed(a: str | Sbp, b: str | Sbp, name: str = "", summed: bool = True) -> Algorithm:
    """Return the algorithm that multiplies A and B with these SBP signatures.

    Parameters
    ----------
    a, b : str or tuple
        Signatures, with one word for each axis of the mesh: S(0), S(1), B or P.
    name : str
        Its name; by default the signatures.
    summed : bool
        True to add up partial sums of C. False leaves C partial where the signatures make it so, unless another
        placement is requested.

    Returns
    -------
    Algorithm
        The algorithm, to be registered.

    Raises
    ------
    LayoutError
        If there is no such product; it says what would fit.

    Examples
    --------
    >>> algorithm = signed("S(0), B", "B, S(1)")
    >>> algorithm.name, algorithm.result, [str(layout) for layout in algorithm.placements(MeshShape((2, 2)))]
    ('(S(0), B)·(B, S(1))', 'here', ["P('i', None)", "P(None, 'j')", "P('i', 'j')"])
    """
    a, b = _parsed(a), _parsed(b)
    c = deduce(a, b)
    pairs = list(zip(a, b, strict=True))
    spare = "".join(x for x, sbp in zip("AB", (a, b), strict=True) if {"B", "P"} & set(sbp))

    def placements(mesh: MeshShape) -> Wanted | str:
        if len(mesh.dims) != len(a):
            return f"needs a mesh of as many axes as {sbp_text(a)} has words; this one is {mesh}"
        return sbp_to_layout(a, mesh), sbp_to_layout(b, mesh), _shared(pairs, mesh)

    def also(mesh: MeshShape) -> dict[str, Layout]:
        return {"C": _shared(pairs, mesh, copies=True) if summed else sbp_to_layout(c, mesh)}

    # where C stays, its placement says who multiplies, summands cut k; else the pairs do
    is_here = not summed or "k" not in (CUT[pair] for pair in pairs)
    algorithm = Algorithm(
        name or f"{sbp_text(a)}·{sbp_text(b)}", SOURCE, f"the product of A {sbp_text(a)} and B {sbp_text(b)}",
        stationary("C") if is_here else placed_work(_work(pairs), len(a)), "k", order="plain",
        result="here" if is_here else "reduce", placements=placements, also_accepts=also,
        grouped=f"{spare}C", prefetch_all=spare,
    )
    return replace(algorithm, form=one_sided(algorithm))


def _parsed(sbp: str | Sbp) -> Sbp:
    """Return a signature that is given, or the one that a text spells."""
    if not isinstance(sbp, str):
        return sbp
    axes = min(max(1, len(re.findall("[SBP]", sbp))), len(AXIS_NAMES))
    return parse_sbp(sbp, MeshShape((1,) * axes))


def _axes(pairs: list[tuple[Placed, Placed]], names: tuple[str, ...], dims: str) -> list[str]:
    """Return the axes that cut one of `dims`, in the order in which they nest."""
    order = list(CUT)
    found = [(order.index(pair), n) for n, pair in enumerate(pairs) if CUT[pair] in dims]
    return [names[n] for _, n in sorted(found)]


def _work(pairs: list[tuple[Placed, Placed]]) -> str:
    cuts = {dim: ",".join(_axes(pairs, AXIS_NAMES, dim)) for dim in "mnk"}
    return ", ".join(f"{dim}→({axes})" for dim, axes in cuts.items() if axes)


def _shared(pairs: list[tuple[Placed, Placed]], mesh: MeshShape, copies: bool = False) -> Layout:
    """C with each element held once; with `copies`, held by every rank along axes that are B·B."""
    copied = {axis for axis, pair in zip(mesh.names, pairs, strict=True) if copies and pair == ("B", "B")}
    rows, cols = (
        tuple(Level((axis,)) for axis in _axes(pairs, mesh.names, dims) if axis not in copied) for dims in ("mk", "n")
    )
    return Layout((rows, cols))
