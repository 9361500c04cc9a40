"""Choose an algorithm and placements: candidates, their prices in words, and why each loser lost."""
