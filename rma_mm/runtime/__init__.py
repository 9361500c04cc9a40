"""Real ranks: meshes over MPI, distributed matrices, plans, and the executor of schedules."""
