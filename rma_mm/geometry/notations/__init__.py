"""The notations in which placements are written, a module each. `geometry.notation` is their door."""
