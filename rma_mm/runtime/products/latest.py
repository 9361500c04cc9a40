"""What a plan remembers of its last execution, so that the next on the same matrices need not look at them again."""

from __future__ import annotations

from weakref import ref

from rma_mm.runtime.execution.executor import Executable
from rma_mm.runtime.matrices.matrix import DistMatrix

OWN = "the plan's own C"
"""What ranks agree on where no result matrix is passed."""


class Latest:
    """Operands that were checked, bound and agreed on. Holds none of them alive."""

    def __init__(
        self,
        matrices: tuple[DistMatrix, DistMatrix, DistMatrix, DistMatrix | None],
        executable: Executable,
        facts: tuple[object, ...],
        digest: int,
    ) -> None:
        """matrices: A, B, the result, and what is added to it where that is another."""
        self.executable, self.facts, self.digest = executable, facts, digest
        self._known = [(ref(matrix), ref(matrix.block)) for matrix in matrices if matrix is not None]
        self._is_own = facts[-1] == OWN

    def names(self, A: object, B: object, out: object, c: object) -> bool:
        """Whether these are the same matrices, still open; `out` is None where the plan's own C was meant."""
        if (out is None) != self._is_own or (c is None) != (len(self._known) == 3):
            return False
        given = (A, B, self._known[2][0]() if out is None else out, *(() if c is None else (c,)))
        for matrix, (known, block) in zip(given, self._known, strict=True):
            if matrix is not known() or not isinstance(matrix, DistMatrix):
                return False
            if matrix._block is None or matrix._block is not block():
                return False
        return True

    @property
    def matrices(self) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
        """A, B and the result, which must be alive."""
        A, B, out = (known() for known, _ in self._known[:3])
        assert A is not None and B is not None and out is not None
        return A, B, out

    @property
    def out(self) -> DistMatrix:
        """The result matrix."""
        return self.matrices[2]
