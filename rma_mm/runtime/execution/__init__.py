"""From a schedule to calls on real memory, and running them."""
