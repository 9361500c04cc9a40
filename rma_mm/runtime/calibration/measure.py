"""All that is to be known of this machine, measured at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rma_mm.flavours import DEFAULT
from rma_mm.runtime.calibration.run_calibration import Wanted, run_calibration
from rma_mm.runtime.calibration.site import Site

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm.policy.model.machine import Machine


def measure(
    comm: MPI.Intracomm, node_of: Sequence[int], *, threads: int,
    dtypes: tuple[tuple[str, str], ...] = (("float32", "blas"),), seconds: float = 3.0,
    flavours: tuple[str, ...] = (DEFAULT.name,),
) -> Machine:
    """Return the figures of this machine, the same on every rank. Collective over `comm`; keeps nothing.

    node_of: the node of each rank. threads: BLAS threads of a rank. dtypes: (element type, kernel) of local products.
    seconds: about how long it takes; more makes it surer. flavours: of windows; one whose memory there is not is left
    out. Raises DtypeError or AlgorithmError for products that cannot be done so.
    """
    return run_calibration(comm, Site.of(comm, node_of, threads), Wanted(dtypes, flavours), seconds).machine
