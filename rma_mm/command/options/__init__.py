"""Options of the commands: their parsers, and what is printed instead of a run."""
