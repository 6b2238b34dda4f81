"""What a layer checks before it works: sizes when it is made, shapes when it is called."""

from torch import Tensor

from regard.errors import check_count, check_tensor, shape_text

__all__ = ["check_heads", "check_input", "check_memory_input"]


def check_heads(
    embed_dim: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
) -> tuple[int, int, int]:
    """num_kv_heads, head_dim and value_dim, worked out where they are left out.

    Raises:
        TypeError: a size that is no whole number.
        ValueError: a size below 1, or head counts that do not divide.
    """
    check_count("embed_dim", embed_dim)
    check_count("num_heads", num_heads)
    num_kv_heads = check_count("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads is {num_kv_heads} and num_heads is {num_heads}; num_heads must be a "
            "multiple of num_kv_heads (grouped-query attention).\n"
            f"    Use num_kv_heads={_divisor_below(num_heads, num_kv_heads)}."
        )
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"num_heads is {num_heads} and embed_dim is {embed_dim}; embed_dim must be a multiple "
            "of num_heads when head_dim is left out.\n"
            f"    Use num_heads={_divisor_below(embed_dim, num_heads)}, or pass head_dim: with it, "
            "heads of any width do."
        )
    head_dim = check_count("head_dim", embed_dim // num_heads if head_dim is None else head_dim)
    value_dim = check_count("value_dim", head_dim if value_dim is None else value_dim)
    return num_kv_heads, head_dim, value_dim


def _divisor_below(number: int, limit: int) -> int:
    """The largest divisor of number that is at most limit."""
    return next(n for n in range(min(number, limit), 0, -1) if number % n == 0)


def check_input(name: str, x: object, width_name: str, width: int) -> Tensor:
    """That x is a floating tensor (..., tokens, width).

    Raises:
        TypeError: no tensor, or not of a floating dtype.
        ValueError: fewer than two axes, an empty one, or another width.
    """
    axes = f"(..., tokens, {width_name})"
    x = check_tensor(name, x, axes)
    if x.shape[-1] == width:
        return x
    remedy = f"{name} {shape_text(x.shape)} was read as {axes}."
    if x.shape[-2] == width:
        remedy = f"{name} {shape_text(x.shape)} looks transposed; pass {name}.mT."
    raise ValueError(
        f"{name} has {width_name} {x.shape[-1]}; this layer was made for {width_name} {width}.\n"
        f"    {remedy}"
    )


def check_memory_input(x: Tensor, memory: object, memory_dim: int) -> Tensor:
    """That memory, (..., tokens, memory_dim), has the batch axes of x.

    Raises:
        TypeError: no tensor, or not of a floating dtype.
        ValueError: a wrong width, or other batch axes.
    """
    memory = check_input("memory", memory, "memory_dim", memory_dim)
    if memory.shape[:-2] == x.shape[:-2]:
        return memory
    wanted = (*x.shape[:-2], *memory.shape[-2:])
    raise ValueError(
        f"memory has shape {shape_text(memory.shape)} and x has {shape_text(x.shape)}; "
        "their batch axes must be equal.\n"
        f"    For one memory for the whole batch use memory.expand{shape_text(wanted)}."
    )
