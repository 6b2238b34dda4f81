"""The exceptions and warnings of regard."""


class RegardError(Exception):
    """A failure that is not a wrong argument: a model without attention, a damaged recording.

    Wrong arguments raise ValueError, TypeError, IndexError or MemoryError.

    Example:
        >>> import regard
        >>> issubclass(regard.RegardError, Exception)
        True
    """


class RefusedWarning(UserWarning):
    """A warning that attention was refused; ``Recording.refused`` has module, line and reason.

    Example:
        >>> import regard
        >>> issubclass(regard.RefusedWarning, UserWarning)
        True
    """
