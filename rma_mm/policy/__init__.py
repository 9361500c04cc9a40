"""Which algorithm, on which placements: candidates, their price in words, and why each loser lost."""
