"""Geometry of distributed data: spans, regions, meshes, placements, and their text forms."""
