"""Products on three-dimensional meshes: k is shared out too, and C summed over the layers.

Sources: R. Agarwal, S. Balle, F. Gustavson, M. Joshi and P. Palkar, "A three-dimensional approach to parallel matrix
multiplication" (1995); S. L. Johnsson, "Minimizing the communication time for matrix multiplication on
multiprocessors" (1993), in the placement of R. Yadav, A. Aiken and F. Kjolstad, "DISTAL" (2022); E. Solomonik and
J. Demmel, "Communication-optimal parallel 2.5D matrix multiplication" (2011), its SUMMA form after M. Schatz et al.
(2016); B. Wang, Q. Xu, Z. Bian and Y. You, "Tesseract" (2022); the load-balanced placements of the National
University of Singapore (S. Li et al., "3D parallelism" for large models, 2021). Any mesh R × C × D and any shape.

2.5-D gives every layer one range of k, on which it does SUMMA (or Cannon); the paper's Cannon form walks over all of k
in every layer, from other starts, and moves the same words. Its one-sided form needs no copy for each layer.
"""

from dataclasses import replace
from functools import partial

from rma_mm.algorithms.from_table import algorithm_from_table
from rma_mm.schedule.algorithm import Algorithm

_WORK = "m→i, n→j, k→l"

AGARWAL_3D = algorithm_from_table(
    "agarwal_3d", "Agarwal et al. 1995", "each element once; A and B gathered along j and i, C scattered along l",
    axes=3, a="m→i, k→(l,j)", b="k→l, n→(j,i)", c="m→i, n→(j,l)", work=_WORK, over="k", order="plain",
    result="reduce", grouped="ABC", prefetch_all="AB",
)

JOHNSON_3D = algorithm_from_table(
    "johnson_3d", "Johnsson 1993; Yadav et al. 2022", "A, B and C on three faces; A and B broadcast, C summed along l",
    axes=3, a="m→i, k→l, j=0", b="k→l, n→j, i=0", c="m→i, n→j, l=0", work=_WORK, over="k", order="plain",
    result="reduce", grouped="ABC",
)

_layered = partial(
    algorithm_from_table, axes=3, a="m→i, k→j, l=0", b="k→i, n→j, l=0", c="m→i, n→j, l=0", work=_WORK, over="k",
    result="reduce", grouped="ABC",
)
_SUMMA = _layered(
    "solomonik_25d", "Solomonik and Demmel 2011", "A and B copied to D layers, each does SUMMA on its part of k",
    order="plain", staged_to={"A": "m→i, k→j", "B": "k→i, n→j"},
)
_CANNON = _layered(
    "solomonik_25d:cannon", _SUMMA.source, "A and B shared out to D layers, each does Cannon on its part of k",
    rotate_by=("i", "j"), staged_to={"A": "m→i, k→(l, j:skew(i))", "B": "k→(l, i:skew(j)), n→j"},
)


def _form(text: str) -> Algorithm | str:
    forms = {"pull": _SUMMA.pulled, "cannon": _CANNON}
    return forms.get(text, "solomonik_25d does SUMMA in each layer; it has the forms :cannon and :pull (one-sided)")


SOLOMONIK_25D = replace(_SUMMA, form=_form)

TESSERACT = algorithm_from_table(
    "tesseract", "Wang, Xu, Bian and You 2022", "rows over i and l; B copied to D layers, each does SUMMA on its rows",
    axes=3, a="m→(i,l), k→j", b="k→i, n→j", c="m→(i,l), n→j", work="m→(i,l), n→j", over="k", order="plain",
    grouped="AB", also_accepts={"B": "k→i, n→j, l=0"}, staged_to={"B": "k→i, n→j"},
)

NUS_3D = algorithm_from_table(
    "nus_3d", "Bian, Xu, Wang and You 2021", "each element once, rows first; A and B gathered, C scattered along l",
    axes=3, a="m→(i,j), k→l", b="k→l, n→(j,i)", c="m→(i,l), n→j", work=_WORK, over="k", order="plain",
    result="reduce", grouped="ABC", prefetch_all="AB",
)
