"""Cost of a product on a machine: its volumes from placements alone, and their price in seconds."""
