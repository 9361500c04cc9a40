"""Formats whose files hold several matrices, each by a name in the file, a module each."""
