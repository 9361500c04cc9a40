"""Schedules: operations on regions in global coordinates, lowering from algorithms, and their readers."""
