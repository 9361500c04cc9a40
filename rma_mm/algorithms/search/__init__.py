"""Searches of the algorithms that have many forms: COSMA's grids and T10's points."""
