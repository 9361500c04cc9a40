"""Matrices, and arrays of other dimensions, from files and into them, each rank its own part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rma_mm.errors import ShapeError, display_path
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.formats import Path, check_dimensions
from rma_mm.runtime.files.opened import extents_of, open_array
from rma_mm.runtime.files.output import Output, Saving
from rma_mm.runtime.matrices.arguments import by_chunks, checked_mesh, keeps_whole, placed
from rma_mm.runtime.ranks.agreement import agreed

if TYPE_CHECKING:
    from rma_mm.runtime.ranks.mesh import Mesh


def loaded(
    kind_of: Callable[[tuple[int, ...]], Any], named_as: tuple[Path, str | None, str | None], mesh: Mesh | None,
    layout: str | Layout | None, allow_external: bool | None = None,
) -> Any:
    """Load a matrix or an array from a file. Collective.

    kind_of: shape → the class to make. named_as: (path, type, format). Where a layout cuts chunks, each is read by
    one rank, and the elements are moved then.
    """
    path, dtype, form = named_as
    said = {"path": str(path), "layout": layout, "format": form, "allow_external": allow_external}
    mesh = checked_mesh(mesh)
    with agreed(mesh.comm, "load", **said) as facts:
        file = open_array(path, dtype, form, allow_external)
        shape: Any = extents_of(file)
        kind = kind_of(shape)
        if kind.is_matrix and len(shape) != 2:
            raise ShapeError(
                f"{display_path(path)}: holds an array of shape {shape}; DistMatrix has two dimensions: use load"
            )
        place = read_as = placed(layout, shape, mesh)
        chunks = getattr(file, "chunks", None)
        if chunks and not keeps_whole(place, shape, mesh.grid, chunks):
            read_as = by_chunks(shape, mesh, chunks)
        facts |= {**file.facts, "shape": shape, "chunks": chunks}
    made = kind.allocated(mesh, shape, file.dtype, read_as)
    with agreed(mesh.comm, "load"):
        made.read_from(file)
    made.keep_first_summand()
    if layout is None or read_as is place:
        return made
    with made:
        return made.redistribute(place)


def saved(matrix: Any, path: Path, options: Mapping[str, Any]) -> None:
    """A matrix, or another array, in a file, as `DistMatrix.save` says. Collective."""
    with agreed(matrix.mesh.comm, "save", path=str(path), **options) as facts:
        facts["matrix"] = matrix.facts
        how = Saving.of(options)
        check_dimensions(path, matrix.shape, how.format)
    with Output.collective(matrix.mesh.comm, path, matrix.shape, matrix.dtype, how) as output:
        write(matrix, output)


def write(matrix: Any, output: Output, at: tuple[int, int] = (0, 0)) -> Any:
    """All of a matrix, or another array, in a file: each element by one rank, each unit of the file too. Collective.

    at: where in the file it begins. Returns it as it was written: placed so that no unit is cut.
    """
    shape, mesh, layout = matrix.shape, matrix.mesh.grid, matrix.layout
    if not layout.is_single(mesh):
        layout = layout.single(mesh)
    if output.unit and not keeps_whole(layout, shape, mesh, output.unit):
        layout = by_chunks(shape, matrix.mesh, output.unit)
    whole = matrix if layout == matrix.layout else matrix.redistribute(layout)
    flat = getattr(whole, "folded", whole)
    output.write(shifted(flat.region, at), flat.tile)
    return flat


def shifted(region: Region, at: tuple[int, int]) -> Region:
    return Region(
        Span((start + by, stop + by) for start, stop in span.runs) for span, by in zip(region, at, strict=True)
    )
