"""Running compiled models without their compiled code."""

from typing import Any, Literal, cast

import torch

from regard.errors import kind_text
from regard.tracing.shared_setting import SharedSetting

_REMEDY = 'Pass compiled="eager" to run compiled parts uncompiled, or leave it out.'


UNCOMPILED = SharedSetting(lambda: cast(Any, torch.compiler).set_stance("force_eager"))
"""Everything that torch.compile made runs as the Python that it was made of, on every thread.

What was compiled stays compiled, and runs again after the last block.
"""


def check_compiled(compiled: object) -> Literal["eager"] | None:
    """Return the argument ``compiled`` of `observe`; raise an error unless it is "eager" or None.

    Raises:
        TypeError: it is no text.
        ValueError: it is another text.
    """
    if compiled is None or compiled == "eager":
        return cast("Literal['eager'] | None", compiled)
    if isinstance(compiled, str):
        raise ValueError(f'compiled is {compiled!r}; it must be "eager".\n    {_REMEDY}')
    raise TypeError(f'compiled is {kind_text(compiled)}; it must be "eager".\n    {_REMEDY}')
