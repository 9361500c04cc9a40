"""Products of batches of matrices, cut over the mesh."""
