"""What is noticed of products while they run: counts of each rank, who became slow, and all of it as text."""
