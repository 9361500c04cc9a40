"""Matrices spread over a mesh, and how they move from one placement to another."""
