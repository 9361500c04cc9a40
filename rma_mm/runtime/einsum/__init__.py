"""Sums of products in index notation."""
