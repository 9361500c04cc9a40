"""What every trial raises."""


class Wrong(Exception):
    """A result that is not NumPy's."""
