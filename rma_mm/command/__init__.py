"""The command line: its arguments, the job it runs, what it reports, and how it ends."""
