"""Compiled calls: a product that is executed often, with its meetings and all its steps, as one machine code."""
