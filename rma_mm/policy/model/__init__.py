"""What a product costs on a machine: its volumes from placements alone, and their price in seconds."""
