"""Where data is: spans and regions, meshes of ranks, placements of matrices, and their text form."""
