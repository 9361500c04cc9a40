"""Products of batches of matrices."""
