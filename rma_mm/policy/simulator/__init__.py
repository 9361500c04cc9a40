"""Schedules in simulated time, operation by operation, on described machines."""
