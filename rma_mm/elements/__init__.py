"""What an element of a matrix is: its type, and the arithmetic that products do on it."""
