"""Placements of matrices on a mesh, and the notations in which they are written."""

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.notation import notations, parse_layout
from rma_mm.geometry.notations.pblas import Descriptor

__all__ = ["Descriptor", "Layout", "notations", "parse_layout"]
