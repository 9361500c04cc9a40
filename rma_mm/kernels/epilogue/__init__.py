"""What is done to elements of C once they are summed: bias, activation, and the cast into what is stored."""
