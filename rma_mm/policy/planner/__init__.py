"""Choosing: among algorithms and placements for one product, among placements for chains, and while running."""
