"""Find the products that complete what a Finish closes, so that it is closed while it is in the cache."""

from __future__ import annotations

from collections.abc import Sequence

from rma_mm.schedule.ops import Barrier, Claim, Finish, LocalOp, Multiply, Op, Ref


def closing(ops: Sequence[Op]) -> set[int]:
    """Return the identities of the Finishes of one rank that its last products can include, and of these products.

    A product is the last where nothing after it writes its part of C. Such products do a Finish where they make up all
    of what it closes, since the barrier before it: each of them then closes its part, and the Finish does nothing.
    """
    found: set[int] = set()
    for at, op in enumerate(ops):
        if isinstance(op, Finish):
            last = _last_products(ops[:at], op.c)
            if last and _size(last) == op.c.region.size:
                found |= {id(op), *map(id, last)}
    return found


def _last_products(before: Sequence[Op], c: Ref) -> list[Multiply]:
    """Products into `c` that no later operation writes over or adds to, the latest first; disjoint."""
    found: list[Multiply] = []
    later: list[Ref] = []
    for op in reversed(before):
        if isinstance(op, Barrier | Claim):
            break
        if not isinstance(op, LocalOp):
            later += [ref for ref in op.refs if ref.rank == c.rank and ref.buffer == c.buffer]
            continue
        if op.c.rank != c.rank or op.c.buffer != c.buffer:
            continue
        is_last = not any(ref.region & op.c.region for ref in later)
        if isinstance(op, Multiply) and is_last and op.c.region.issubset(c.region):
            found.append(op)
            if _size(found) == c.region.size:
                break
        later.append(op.c)
    return found


def _size(products: Sequence[Multiply]) -> int:
    return sum(product.c.region.size for product in products)
