"""Chains of products: placed together, prepared once, run many times."""
