"""A loop nest as text: one forall statement with its relations, or nested lines of pseudocode."""

from __future__ import annotations

from rma_mm.classes import dataclass


@dataclass(frozen=True)
class Loop:
    name: str
    extent: str  # how often it runs, in symbols
    is_distributed: bool = False  # true if each time is another rank's
    loads: tuple[tuple[str, str], ...] = ()  # what is fetched at its head: tensor, tile
    adds: tuple[tuple[str, str], ...] = ()  # what is added to the result at its end

    @property
    def moved(self) -> list[str]:
        return [name for name, _ in (*self.loads, *self.adds)]


@dataclass(frozen=True)
class Nest:
    """Loops around a statement, outermost first, and the relations that tie them to its indices."""

    statement: str
    loops: tuple[Loop, ...]
    relations: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Write the nest as DISTAL does, with all distributed loops fused into one."""
        text = self.statement
        for loop in reversed(self.loops):
            moved = [f"transfers: {', '.join(f'transfer({name})' for name in loop.moved)}"] if loop.moved else []
            fused = ["Distributed"] if loop.is_distributed and loop is self.loops[0] else []
            text = f"forall({', '.join([loop.name, text, *fused, *moved])})"
        return f"suchthat({text}, {' and '.join(self.relations)})" if self.relations else text

    def pseudocode(self) -> str:
        """Nested lines: @parallel is over ranks, load fetches a tile, add sums one into the result where it lives."""
        lines: list[str] = []
        behind: list[str] = []
        for depth, loop in enumerate(self.loops):
            room = "    " * depth
            lines.append(f"{room}{'@parallel ' * loop.is_distributed}for {loop.name} in range({loop.extent}):")
            lines += [f"{room}    load {name}{tile}" for name, tile in loop.loads]
            behind = [*(f"{room}    add {name}{tile}" for name, tile in loop.adds), *behind]
        return "\n".join([*lines, f"{'    ' * len(self.loops)}{self.statement}", *behind])
