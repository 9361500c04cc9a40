"""Elements of matrices: their types, and the arithmetic that products do on them."""
