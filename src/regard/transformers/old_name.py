"""The attention implementation ``regard`` of earlier versions, which only says what to write."""

from typing import Any, NoReturn

from regard.errors import RegardError
from regard.transformers.kernel_wrappers import interface


def register_old_name() -> None:
    """Register the implementation ``regard``, which raises an error that names ``lazy``.

    Raises:
        RegardError: transformers is not installed, or too old.
    """
    from transformers import AttentionMaskInterface

    interface().register("regard", _refuse)
    AttentionMaskInterface.register("regard", _refuse)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RegardError(
        'attn_implementation="regard" is gone; a model keeps its own implementation.\n'
        '    Call model.set_attn_implementation("sdpa"), and regard.transformers.lazy(model).'
    )
