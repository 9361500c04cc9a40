"""Universal one-sided products by slicing: any placements of A, B and C, any replication.

One operand stays where it is and its owners do the work. With C stationary each rank pulls what it needs of A and
B; with A (or B) stationary it pulls the other and pushes partial C to the owners by accumulate.

Source: B. Brock and R. Golin, "Slicing Is All You Need" (2025), which generalises the stationary-A, -B and -C
forms of SUMMA (R. van de Geijn and J. Watts, 1997; M. Schatz, R. van de Geijn and J. Poulson, 2016).

Three forms multiply half of a symmetric C: `:syrk` where its owners do so, and two of one matrix times its own
transpose. In `:triangles` each rank does so for few blocks of rows, which it fetches once: between P nodes A then costs
about mk(√P − 1) words, against mk(P − 1)/2 on rows. In `:summands` each rank multiplies all of the half, for a share of
k: no element of A is fetched twice, so that one in a file is read once, and of C about P·m²/2 words are pushed. Of any
other product it multiplies all, P·mn words.
"""

from dataclasses import replace

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.schedule.algorithm import Algorithm, PlacedProblem, Problem, stationary

_SOURCE = "Brock and Golin 2025; van de Geijn and Watts 1997"
_SYRK = "Beaumont, Eyraud-Dubois, Vérité and Langou 2022; Al Daas, Ballard, Grigori, Kumar and Rouse 2023"

_ANY_C = Algorithm(
    name="stationary_c",
    source=_SOURCE,
    summary="owners of C pull the A and B they need, in rotated order; any placements",
    work=stationary("C"),
    over="k",
)


def _fit(problem: Problem) -> Algorithm | str:
    if problem.symmetry is None:
        return "multiplies half of a symmetric C; pass one matrix and its transpose, or say symmetric=True"
    if problem.layouts[2] is not None and problem.layouts[2].partial:
        return "cannot make a C of partial sums; place C without sum"
    return replace(SYRK, specialize=None)


SYRK = replace(
    _ANY_C,
    name="stationary_c:syrk",
    source=_SYRK,
    summary="owners of a symmetric C multiply half of it, and mirror the other; any placements",
    half=True,
    specialize=_fit,
)
"""The halves that ranks multiply are chosen in `rma_mm.schedule.lowering.syrk`."""


def _fit_triangles(problem: Problem) -> Algorithm | str:
    fitted, c = _fit(problem), problem.layouts[2]
    if problem.symmetry is None or not problem.symmetry.is_own:
        return "reads A as both factors: pass one matrix and its transpose, and to plan() neither symmetric nor fill"
    if c is not None and any(level.kind == "cyclic" or level.fold for split in c.splits for level in split):
        return "takes no C that is dealt out, which the diagonal cuts too often; place one block of it on each rank"
    return fitted if isinstance(fitted, str) else replace(TRIANGLES, specialize=None)


def _in_order(problem: PlacedProblem) -> Layout:
    return Layout(((Level(problem.mesh.names),), (), ()))


TRIANGLES = Algorithm(
    name="stationary_c:triangles",
    source=_SYRK,
    summary="ranks multiply few blocks of rows of A with each other, each fetched once, and push half of a symmetric C",
    work=_in_order,
    over="k",
    result="accumulate",
    half=True,
    specialize=_fit_triangles,
)
"""Blocks are dealt to ranks by `rma_mm.schedule.lowering.difference_cover`."""


def _shares_of_k(problem: PlacedProblem) -> Layout:
    """Return even shares of k in which no two ranks read the same chunk of a file."""
    axes, together = problem.mesh.names, problem.chunk_multiple(2)
    share = -(-problem.shape[2] // (together * problem.mesh.size)) * together
    level = Level(axes, "cyclic", (share,)) if together > 1 else Level(axes)
    return Layout(((), (), (level,)))


def _fit_summands(problem: Problem) -> Algorithm | str:
    is_half = problem.symmetry is not None and not isinstance(_fit_triangles(problem), str)
    return replace(SUMMANDS, half=is_half, specialize=None)


SUMMANDS = replace(
    _ANY_C,
    name="stationary_c:summands",
    source=f"{_SYRK}; van de Geijn and Watts 1997",
    summary="ranks multiply all of C, or half of a symmetric one, for a share of k each, and push their summands",
    work=_shares_of_k,
    order="plain",
    result="accumulate",
    specialize=_fit_summands,
)


def _form(text: str) -> Algorithm | str:
    forms = {"syrk": SYRK, "triangles": TRIANGLES, "summands": SUMMANDS}
    known = "stationary_c has the forms :summands and, for a C that is known to be symmetric, :syrk and :triangles"
    return forms.get(text, known)


STATIONARY_C = replace(_ANY_C, form=_form)

STATIONARY_A = Algorithm(
    name="stationary_a",
    source=_SOURCE,
    summary="owners of A pull B and push partial C by accumulate; any placements",
    work=stationary("A"),
    over="n",
    end_at_owner=True,
    result="accumulate",
)

STATIONARY_B = Algorithm(
    name="stationary_b",
    source=_SOURCE,
    summary="owners of B pull A and push partial C by accumulate; any placements",
    work=stationary("B"),
    over="m",
    end_at_owner=True,
    result="accumulate",
)
