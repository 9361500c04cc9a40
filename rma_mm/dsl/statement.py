"""One product in index notation: `C(m,n) = A(m,k) * B(k,n)`, with any names of tensors and indices.

A factor may lie transposed, as in `A(k,m)`, and the factors may stand in either order. The engine multiplies two
matrices and sums over the one index that they share; whatever else is written is refused, with a mark under it.
"""

from __future__ import annotations

import re
from typing import NoReturn

from rma_mm.classes import dataclass
from rma_mm.errors import AlgorithmError
from rma_mm.geometry.notations.reader import Reader

PLAIN = "C(m,n) = A(m,k) * B(k,n)"  # the product in the names of this package
_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z_]\w*)|(?P<number>[0-9]+)|(?P<mark>\+=|[=(),*+/-]))")
_RULE = "the engine multiplies two matrices"


@dataclass(frozen=True)
class Access:
    name: str
    rows: str
    cols: str

    def __str__(self) -> str:
        return f"{self.name}({self.rows},{self.cols})"


@dataclass(frozen=True)
class Statement:
    """A product as it was written, and which part each factor has in it.

    >>> statement = parse_statement("Y(o,b) = X(b,i) * W(o,i)")
    >>> statement.operands, statement.options
    (('W', 'X'), {'transpose_b': True})
    >>> dict(zip("mnk", statement.indices))
    {'m': 'o', 'n': 'b', 'k': 'i'}
    """

    result: Access
    factors: tuple[Access, Access]  # in the order in which they were written

    @property
    def left_factor(self) -> Access:
        return next(each for each in self.factors if self.result.rows in (each.rows, each.cols))

    @property
    def right(self) -> Access:
        return next(each for each in self.factors if self.result.cols in (each.rows, each.cols))

    @property
    def contracted_index(self) -> str:
        return self.left_factor.cols if self.left_factor.rows == self.result.rows else self.left_factor.rows

    @property
    def indices(self) -> tuple[str, str, str]:
        return self.result.rows, self.result.cols, self.contracted_index

    @property
    def access(self) -> dict[str, Access]:
        return {"A": self.left_factor, "B": self.right, "C": self.result}

    @property
    def names(self) -> dict[str, str]:
        return {x: access.name for x, access in self.access.items()}

    @property
    def operands(self) -> tuple[str, str]:
        return self.left_factor.name, self.right.name

    @property
    def transposed(self) -> str:
        return "A" * (self.left_factor.cols == self.result.rows) + "B" * (self.right.rows == self.result.cols)

    @property
    def options(self) -> dict[str, bool]:
        return {f"transpose_{x.lower()}": True for x in self.transposed}

    def __str__(self) -> str:
        return f"{self.result} += {self.factors[0]} * {self.factors[1]}"


def parse_statement(text: str) -> Statement:
    """Return the product that `text` writes. Raises AlgorithmError, with a mark under what is wrong, for anything else.

    >>> parse_statement("C(m,n) = A(m,k) * B(j,n)")
    Traceback (most recent call last):
    rma_mm.errors.AlgorithmError: product: k is in one factor only; what is summed over is in both, as in \
C(m,n) = A(m,k) * B(k,n)
      C(m,n) = A(m,k) * B(j,n)
                   ^
    """
    if not isinstance(text, str):
        raise AlgorithmError(f"product: got {text!r}; the statement is a text, as in {PLAIN}")
    return _Reader(text, f"as in {PLAIN}", token=_TOKEN).statement()


class _Reader(Reader):
    def fail(self, what: str, column: int | None = None) -> NoReturn:
        raise AlgorithmError(f"product: {what}, {self.forms}\n{self.marked(column)}")

    def statement(self) -> Statement:
        self.columns: dict[tuple[int, str], int] = {}
        result = self.access(0)
        if self.peek("+="):
            self.fail("+= is for matmul's out= and beta=1; the statement says what is multiplied, with =")
        self.mark("=")
        first = self.access(1)
        self.mark("*")
        second = self.access(2)
        if self.peek("*"):
            self.fail(f"a third factor; {_RULE}")
        self.end()
        self.check(result, first, second)
        return Statement(result, (first, second))

    def access(self, number: int) -> Access:
        begin = self.tokens[self.at][2]
        name = self.next("word", "the name of a matrix")
        self.columns[number, ""] = begin
        self.mark("(")
        indices: list[str] = []
        while not self.peek(")"):
            self.columns.setdefault((number, self.tokens[self.at][1]), self.tokens[self.at][2])
            indices.append(self.next("word", "an index"))
            if indices.count(indices[-1]) > 1:
                self.fail_before(f"{indices[-1]} twice in one matrix; {_RULE}, and takes no diagonals")
            self.comma(")")
        self.mark(")")
        if len(indices) != 2:
            more = "; a vector is a matrix of one row or column" if len(indices) == 1 else ""
            self.fail(f"{name} has {len(indices)} indices; {_RULE}, of two indices each{more}", begin)
        return Access(name, *indices)

    def check(self, result: Access, *factors: Access) -> None:
        """Refuse anything but a sum over the one index that both factors share."""
        taken = [{each.rows, each.cols} for each in factors]
        for index in (result.rows, result.cols):
            if not any(index in each for each in taken):
                self.fail(f"{index} is in neither factor", self.columns[0, index])
            if all(index in each for each in taken):
                self.fail(f"{index} is in all three; {_RULE}, and sums over what they share", self.columns[2, index])
        for number, own, other in ((1, taken[0], taken[1]), (2, taken[1], taken[0])):
            alone = own - other - {result.rows, result.cols}
            if alone:
                index = min(alone, key=lambda each: self.columns[number, each])
                self.fail(f"{index} is in one factor only; what is summed over is in both", self.columns[number, index])
        if result.name in {each.name for each in factors}:
            number = 1 if factors[0].name == result.name else 2
            self.fail(f"{result.name} is the result; no factor is", self.columns[number, ""])
