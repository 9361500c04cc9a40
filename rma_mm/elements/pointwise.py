"""Element-wise work: what may be done to elements, in what order, and of what type the result is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import BFLOAT16, accumulator, check_dtype, is_half, rank
from rma_mm.errors import DtypeError, truncate

Array = NDArray[Any]

ACTIVATIONS = {"relu": (1, 2), "gelu": (2,)}
"""Activations, with the ranks of the types that each accepts (`dtypes.rank`)."""

SIDES = ("column", "row")  # what one value of a bias may belong to


class Constant(NamedTuple):
    """A number, as Python has it; 1 and 1.0 are two: they make different types of integers. So are 0.0 and -0.0."""

    kind: str  # its type, and how it is written
    value: Any

    @classmethod
    def of(cls, value: Any) -> Constant:
        return cls(f"{type(value).__name__} {value!r}", value)


class ElementOperation(NamedTuple):
    """Something that is done to elements."""

    arity: int
    takes: tuple[int, ...]  # the ranks of the types that it takes (`dtypes.rank`)
    text: str  # how it is written
    probe: Callable[..., Any]  # something of NumPy's whose result has the same type


LONG = 400  # characters after which an operation is no longer written out
REAL = (2,)
OPERATIONS = {
    "+": ElementOperation(2, (0, 1, 2, 3), "({} + {})", np.add),
    "-": ElementOperation(2, (1, 2, 3), "({} - {})", np.subtract),
    "*": ElementOperation(2, (0, 1, 2, 3), "({} * {})", np.multiply),
    "/": ElementOperation(2, (1, 2, 3), "({} / {})", np.true_divide),
    "**": ElementOperation(2, REAL, "({} ** {})", np.power),
    ">": ElementOperation(2, (0, 1, 2), "({} > {})", np.greater),
    ">=": ElementOperation(2, (0, 1, 2), "({} >= {})", np.greater_equal),
    "<": ElementOperation(2, (0, 1, 2), "({} < {})", np.less),
    "<=": ElementOperation(2, (0, 1, 2), "({} <= {})", np.less_equal),
    "where": ElementOperation(3, (0, 1, 2, 3), "where({}, {}, {})", np.where),
    "exp": ElementOperation(1, REAL, "exp({})", np.exp),
    "log": ElementOperation(1, REAL, "log({})", np.log),
    "sqrt": ElementOperation(1, REAL, "sqrt({})", np.sqrt),
    "tanh": ElementOperation(1, REAL, "tanh({})", np.tanh),
    "sigmoid": ElementOperation(1, REAL, "sigmoid({})", np.positive),
    "neg": ElementOperation(1, (1, 2, 3), "(-{})", np.negative),
    "conj": ElementOperation(1, (0, 1, 2, 3), "{}.conj()", np.positive),
    "relu": ElementOperation(1, (1, 2), "relu({})", np.positive),
    "relu'": ElementOperation(1, (1, 2), "relu'({})", np.positive),
    "gelu": ElementOperation(1, REAL, "gelu({})", np.positive),
    "gelu'": ElementOperation(1, REAL, "gelu'({})", np.positive),
}
"""Functions by name; gelu' and relu' are derivatives, that of relu being 0 at 0."""
RANKS = ("truth values", "integers", "real numbers", "complex numbers")


def result_of(name: str, operands: list[np.dtype[Any] | Constant]) -> np.dtype[Any]:
    """The element type of an operation, by NumPy's rules: Python's numbers take that of the matrix where they can.

    Raises DtypeError if it has none.

    >>> result_of("*", [np.dtype("float32"), Constant.of(2)])
    dtype('float32')
    """
    operation = OPERATIONS[name]
    for x in operands:
        if isinstance(x, np.dtype) and rank(x) not in operation.takes:
            takes = ", ".join(RANKS[n] for n in operation.takes)
            raise DtypeError(f"{operation.text.format('x', 'y')} of {x.name}; it takes {takes}")
    has_number = any(isinstance(x, Constant) for x in operands)
    like = {BFLOAT16: np.dtype(np.float16)} if has_number else {}  # NumPy has no rule for numbers with bfloat16
    ones = [x.value if isinstance(x, Constant) else np.ones(1, like.get(x, x)) for x in operands]
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(operation.probe(*ones)).dtype
    except (TypeError, OverflowError) as error:
        raise DtypeError(f"{str(error).rstrip('.')}; use a wider type") from None
    if BFLOAT16 in operands and has_number and found == np.float16:
        return check_dtype(BFLOAT16)
    return check_dtype(found, "the result's dtype")


@dataclass(frozen=True)
class Pointwise:
    """Element-wise operations in order, each on operands and on earlier results; equal values mean equal work.

    Shapes broadcast as NumPy's do. Halves are widened first, and what comes of it is rounded once.
    """

    reads: int  # operands
    ops: tuple[tuple[str, tuple[int | Constant, ...]], ...]
    """Name of each operation, and what it is done to: numbers below `reads` are operands, those above operations."""
    result: int | Constant  # which of these is the result

    def text(self, names: list[str]) -> str:
        """Write the expression as users do, with operands of these names."""
        found = list(names)
        for name, args in self.ops:
            operands = [_written(x, found) for x in args]
            template = OPERATIONS[name].text
            found.append(truncate(template.format(*(map(bare, operands) if template[0].isalpha() else operands)), LONG))
        whole = _written(self.result, found)
        return bare(whole) if self.ops else whole


def _written(x: int | Constant, names: list[str]) -> str:
    return str(x.value) if isinstance(x, Constant) else names[x]


def bare(text: str) -> str:
    """Return a text without the parentheses around all of it."""
    depth = 0
    for n, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[1:-1] if n and n == len(text) - 1 else text
    return text


def working(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return accumulator(dtype) if is_half(dtype) else dtype
