"""Ranks that are threads of one process: their communicator, their windows, and the calls that run on all of them."""
