"""The ranks: who calls together, what they agree on, and the memory that they expose."""
