"""Turn a schedule into calls on real memory, and run them."""
