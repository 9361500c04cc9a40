"""Lowering: cut a rank's boxes, walk them, and fetch their operands alone, by node or in groups."""
