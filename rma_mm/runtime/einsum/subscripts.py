"""Subscripts of `einsum`, read: which indices operands and result have, and in what order products are formed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from rma_mm.classes import dataclass
from rma_mm.errors import OptionError, ShapeError, quoted

Indices = tuple[str, ...]
"""Letters; a dimension that the ellipsis stands for is called "…1" if it is the last of these, "…2" before it."""
_TERM = re.compile(r"([A-Za-z]*)(\.\.\.)?([A-Za-z]*)")


@dataclass(frozen=True)
class Subscripts:
    """The indices of each operand and of the result, and how long each index is."""

    operands: tuple[Indices, ...]
    output: Indices
    extents: tuple[tuple[str, int], ...]
    """An index that has 1 in some operands and n in others has n: the former are the same along it."""

    @property
    def shape(self) -> tuple[int, ...]:
        extents = dict(self.extents)
        return tuple(extents[name] for name in self.output)


def parse(text: object, shapes: Sequence[tuple[int, ...]]) -> Subscripts:
    """Return the subscripts in `text` for operands of these shapes.

    Raises OptionError for text that cannot be read, and where the result has an index twice, or one that no operand
    has; ShapeError for operands of other dimensions than they have indices, and an index of two lengths.

    >>> parse("ij,jk", [(2, 3), (3, 4)]).output
    ('i', 'k')
    >>> parse("b...j, kj -> b...k", [(2, 5, 3), (4, 3)]).operands
    (('b', '…1', 'j'), ('k', 'j'))
    """
    if not isinstance(text, str):
        raise OptionError(f"einsum: got the subscripts {quoted(text)}; write text as 'ij,jk->ik'")
    left, arrow, right = text.replace(" ", "").partition("->")
    terms = left.split(",")
    for term in (*terms, right):
        if not _TERM.fullmatch(term):
            wrong = next((letter for letter in term if not letter.isascii() or not letter.isalpha()), term)
            raise OptionError(
                f"einsum: got {wrong!r} in {quoted(text)}; indices are letters, with at most one ellipsis '...' in an "
                f"operand, commas between operands and one '->' before the result"
            )
    if len(terms) != len(shapes):
        raise OptionError(f"einsum: got {len(shapes)} operands for {quoted(text)}, which has {len(terms)}")
    operands = tuple(_indices(term, shape, n) for n, (term, shape) in enumerate(zip(terms, shapes, strict=True)))
    extents = _extents(operands, shapes)
    dots = tuple(f"…{n}" for n in range(sum(name.startswith("…") for name in extents), 0, -1))
    if arrow:
        before, ellipsis, after = _TERM.fullmatch(right).groups()  # type: ignore[union-attr]  # looked at above
        output = (*before, *(dots if ellipsis else ()), *after)
    else:
        every = [name for names in operands for name in names if not name.startswith("…")]
        output = (*dots, *sorted(name for name in set(every) if every.count(name) == 1))
    _check_output(output, extents, dots, text)
    return Subscripts(operands, output, tuple(extents.items()))


def _indices(term: str, shape: tuple[int, ...], number: int) -> Indices:
    before, ellipsis, after = _TERM.fullmatch(term).groups()  # type: ignore[union-attr]  # the caller has looked
    rest = len(shape) - len(before) - len(after)
    if rest < 0 or (rest and not ellipsis):
        raise ShapeError(
            f"einsum: operand {number} has the shape {shape} and the indices {term!r}; it needs an index for each of "
            f"its {len(shape)} dimensions, or '...' for the others"
        )
    return (*before, *(f"…{n}" for n in range(rest, 0, -1)), *after)


def _extents(operands: Sequence[Indices], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    found: dict[str, tuple[int, int]] = {}
    for number, (names, shape) in enumerate(zip(operands, shapes, strict=True)):
        own = dict(zip(names, shape, strict=True))
        for name, extent in zip(names, shape, strict=True):
            if extent != own[name]:
                raise ShapeError(
                    f"einsum: index {_named(name)} has {extent} and {own[name]} in operand {number}; a diagonal is "
                    f"taken of equal ones"
                )
            known, where = found.get(name, (1, number))
            if 1 not in (known, extent) and known != extent:
                raise ShapeError(
                    f"einsum: index {_named(name)} has {known} in operand {where} and {extent} in operand {number}; "
                    f"they must be equal, or one of them 1"
                )
            found[name] = (extent, number) if known == 1 else (known, where)
    return {name: extent for name, (extent, _) in found.items()}


def _check_output(output: Indices, extents: dict[str, int], dots: Indices, text: str) -> None:
    for name in output:
        if output.count(name) > 1:
            raise OptionError(f"einsum: index {name!r} appears twice in the result of {quoted(text)}; name it once")
        if name not in extents:
            raise OptionError(f"einsum: index {name!r} is in the result of {quoted(text)}, and in no operand")
    if lacking := [name for name in dots if name not in output]:
        raise OptionError(
            f"einsum: '...' stands for {len(lacking)} dimensions in {quoted(text)}, and the result has no '...'; add it"
        )


def _named(name: str) -> str:
    return f"-{name[1:]} of '...'" if name.startswith("…") else repr(name)


@dataclass(frozen=True)
class Pair:
    """A product of two: operands are numbered as they are given, and behind them the products in their order."""

    a: int
    b: int
    batch: Indices  # indices of both that are left; each group is in the order of the result
    m: Indices  # those of the first alone
    n: Indices  # those of the second alone
    k: Indices  # those of both that are summed over

    @property
    def names(self) -> Indices:
        return (*self.batch, *self.m, *self.n)

    @property
    def is_plain(self) -> bool:
        return not self.batch and len(self.m) == len(self.n) == len(self.k) == 1


def pairs(subscripts: Subscripts, operands: Sequence[Indices]) -> list[Pair]:
    """Return all products, one after the other; `operands`: the indices that are left of each, every one once.

    >>> [pair.names for pair in pairs(parse("ij,jk,kl", [(2, 3), (3, 4), (4, 5)]), ["ij", "jk", "kl"])][-1]
    ('i', 'l')
    """
    made: list[Pair] = []
    live = list(enumerate(operands))
    for step in path(subscripts):
        chosen = [live[n] for n in step]
        live = [each for n, each in enumerate(live) if n not in step]
        while len(chosen) > 1:
            needed = {name for _, names in (*live, *chosen[2:]) for name in names} | {*subscripts.output}
            made.append(_pair(chosen[0], chosen[1], needed, subscripts.output))
            chosen[:2] = [(len(operands) + len(made) - 1, made[-1].names)]
        live.append(chosen[0])
    return made


def _pair(one: tuple[int, Indices], other: tuple[int, Indices], needed: set[str], output: Indices) -> Pair:
    """Return the product of two operands, by number and indices, summed over indices that nothing else needs."""
    (a, left), (b, right) = (one, other) if _begins_with(one[1], other[1], output) else (other, one)

    def ordered(names: Iterable[str]) -> Indices:
        return tuple(sorted(names, key=lambda name: output.index(name) if name in output else len(output)))

    both = [name for name in left if name in right]
    return Pair(
        a, b, ordered(name for name in both if name in needed), ordered(name for name in left if name not in both),
        ordered(name for name in right if name not in both), tuple(name for name in both if name not in needed),
    )


def _begins_with(a: Indices, b: Indices, output: Indices) -> bool:
    """True if the unshared indices of the result begin with A's."""
    mine, others = (
        [output.index(x) for x in one if x in output and x not in other] for one, other in ((a, b), (b, a))
    )
    return not mine or not others or min(mine) < min(others)


def summed_early(subscripts: Subscripts, shapes: Sequence[tuple[int, ...]]) -> str | None:
    """Return an index that is summed over before all operands are multiplied; None if all sums come last.

    >>> shapes = [(2, 3), (3, 4), (4, 5)]
    >>> summed_early(parse("ij,jk,kl", shapes), shapes), summed_early(parse("ij,jk", shapes[:2]), shapes[:2])
    ('j', None)
    """
    extents = dict(subscripts.extents)
    along = [
        {name for name, extent in zip(names, shape, strict=True) if extent == extents[name] != 1}
        for names, shape in zip(subscripts.operands, shapes, strict=True)
    ]
    alone = {name for name in extents if name not in subscripts.output and sum(name in each for each in along) == 1}
    products = pairs(subscripts, [tuple(sorted(each - alone)) for each in along])
    return min(alone, default=None) or next((name for pair in products[:-1] for name in pair.k), None)


def path(subscripts: Subscripts) -> list[tuple[int, ...]]:
    """The operands to multiply next, by number; their product is appended to the others.

    As opt_einsum finds it, where that is installed (the extra `einsum`); else from left to right.
    """
    count = len(subscripts.operands)
    if count < 3 or find_spec("opt_einsum") is None:
        steps: list[tuple[int, ...]] = [(0, 1), *((left, 0) for left in range(count - 2, 0, -1))]
        return steps[: count - 1]
    import opt_einsum

    extents = dict(subscripts.extents)
    symbols = {name: opt_einsum.get_symbol(n) for n, name in enumerate(extents)}
    terms = ["".join(symbols[name] for name in names) for names in (*subscripts.operands, subscripts.output)]
    shapes = [tuple(extents[name] for name in names) for names in subscripts.operands]
    found, _ = opt_einsum.contract_path(f"{','.join(terms[:-1])}->{terms[-1]}", *shapes, shapes=True)
    return [tuple(sorted(step)) for step in found]
