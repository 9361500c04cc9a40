"""Graphs as matrices: shortest and widest paths, what is reached."""
