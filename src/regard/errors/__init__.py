"""The exceptions of regard, and every check of shapes and kinds with its message.

Each message has one form: ``<argument> has <what came>; <what must hold>.`` and, on the next
line, what to do. A check runs before any work.
"""

from regard.errors.argument_checks import (
    DENSE_LIMIT,
    check_bases,
    check_count,
    check_index_bounds,
    check_memory,
    check_numbers,
    check_operand,
    check_path,
    check_product,
    check_progress,
    check_spans,
    check_whole,
    is_whole,
)
from regard.errors.formatting import (
    RegardError,
    bytes_text,
    count_text,
    dtype_text,
    kind_text,
    readable,
    shape_text,
    with_article,
)
from regard.errors.input_checks import (
    check_bias,
    check_broadcast,
    check_floating,
    check_nothing_added,
    check_query_key,
    check_scale,
    check_scores,
    check_sink_bias,
    check_softcap,
    check_tensor,
    check_weights,
)

__all__ = [
    "DENSE_LIMIT",
    "RegardError",
    "bytes_text",
    "check_bases",
    "check_bias",
    "check_broadcast",
    "check_count",
    "check_floating",
    "check_index_bounds",
    "check_memory",
    "check_nothing_added",
    "check_numbers",
    "check_operand",
    "check_path",
    "check_product",
    "check_progress",
    "check_query_key",
    "check_scale",
    "check_scores",
    "check_sink_bias",
    "check_softcap",
    "check_spans",
    "check_tensor",
    "check_weights",
    "check_whole",
    "count_text",
    "dtype_text",
    "is_whole",
    "kind_text",
    "readable",
    "shape_text",
    "with_article",
]
