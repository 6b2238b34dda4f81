"""The weights of a function of query, key and value, read from its outputs alone.

With indicator values, value[s, c] = 1 where s = c and else 0, the output is the weights. So nothing
of the function is looked at: it may use NumPy, loops or kernels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.diagnosis.facts.paths import Path
from regard.diagnosis.facts.rows import Rows, Unread, without_nan_rows

Run = Callable[[dict[str, Tensor]], Tensor]
"""A run with query, key and value (batch, tokens, ...) that gives (batch, tokens, columns)."""


def rows_of_function(run: Run, contents: dict[str, Tensor], name: str) -> Rows:
    """Return the rows of a function of query, key and value.

    Args:
        run: as above.
        contents: query, key and value, (batch, tokens, head_dim) or (batch, tokens, heads,
            head_dim).
        name: of the function.

    Raises:
        Unread: its outputs are no weights times values.
    """
    query, key, value = (_by_head(contents[source]) for source in ("query", "key", "value"))
    batch, heads, tokens, width = value.shape
    weights = torch.zeros(batch, heads, query.shape[2], tokens, dtype=torch.float64)
    for start in range(0, tokens, width):
        indicators = torch.zeros_like(contents["value"])
        for column in range(min(width, tokens - start)):
            indicators[:, start + column, ..., column] = 1.0
        rows = run({**contents, "value": indicators})
        if rows.shape != (batch, query.shape[2], heads * width):
            shape = f"(batch, tokens, {rows.shape[-1]})"
            raise Unread("output", f"it gives {shape} for values of {heads * width} columns")
        part = rows.reshape(batch, -1, heads, width).transpose(1, 2)
        part = part[..., : min(width, tokens - start)]
        weights[..., start : start + part.shape[-1]] = part
    rows = run(contents).reshape(batch, -1, heads, width).transpose(1, 2)
    if not torch.allclose(rows, weights @ value, rtol=0, atol=1e-9, equal_nan=True):
        raise Unread("product", "its output is no sum of the values, each with its own weight")
    paths = (Path("query", (), "", None), Path("key", (), "", None), Path("value", (), "", None))
    weights = without_nan_rows(weights)
    return Rows(name, {}, query, key, value, weights, tuple(range(heads)), paths)


def _by_head(tensor: Tensor) -> Tensor:
    """Return (batch, heads, tokens, head_dim)."""
    return tensor.transpose(1, 2) if tensor.ndim == 4 else tensor[:, None]
