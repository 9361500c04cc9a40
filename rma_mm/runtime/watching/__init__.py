"""Observation of running products: counters of each rank, slow ranks, and all of it as text."""
