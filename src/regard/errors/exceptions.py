"""The exceptions of regard."""


class RegardError(Exception):
    """A failure that is not a wrong argument: a model without attention, a damaged recording.

    Wrong arguments raise ValueError, TypeError, IndexError or MemoryError.

    Example:
        >>> import regard
        >>> issubclass(regard.RegardError, Exception)
        True
    """
