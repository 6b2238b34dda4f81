"""NumPy as somebody's code uses it. PyTorch and regard run without NumPy, so nothing imports it."""

import sys
from typing import Any


def loaded_numpy() -> Any:
    """Return the module ``numpy`` if something has imported it; else None.

    Example:
        >>> from regard.diagnosis.inputs.numpy_arrays import loaded_numpy
        >>> loaded_numpy().__name__
        'numpy'
    """
    return sys.modules.get("numpy")


def is_array(value: object) -> bool:
    """Return True if a value is a NumPy array.

    Example:
        >>> from regard.diagnosis.inputs.numpy_arrays import is_array
        >>> is_array([1.0])
        False
    """
    numpy = loaded_numpy()
    return numpy is not None and isinstance(value, numpy.ndarray)
