"""Schedules as pictures: text for small meshes, and pages of HTML."""
