"""Algorithms written in DISTAL's scheduling words, or from an SBP signature, instead of in a table's words."""
