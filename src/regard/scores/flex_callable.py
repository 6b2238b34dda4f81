"""The callables of FlexAttention, score_mod and mask_mod, applied to boxes.

Such a callable is written for one score: its arguments are scalar tensors, and so is what it
returns. ``torch.vmap`` runs it over a whole box at once.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.errors import dtype_text, kind_text, shape_text
from regard.scores.box import Box, broadcast_index, positions


class Kind(NamedTuple):
    """A kind of callable, such as score_mod: the arguments it takes and the result it returns.

    Attributes:
        name: the name of the callable in messages, such as "score_mod".
        arguments: the names of its arguments, all of them scalar tensors.
        returns: the description of its result in messages.
        takes_score: True if it takes a score before the four indices.
        otherwise: the sentence in messages that says which parameter takes other callables.
        gives_bool: True if it returns a bool, False if it returns a number.
    """

    name: str
    arguments: tuple[str, ...]
    returns: str
    takes_score: bool
    otherwise: str
    gives_bool: bool = False

    @property
    def text(self) -> str:
        """The signature of the callable: ``score_mod(score, b, h, q_idx, kv_idx)``."""
        return f"{self.name}({', '.join(self.arguments)})"


SCORE_MOD = Kind(
    "score_mod",
    ("score", "b", "h", "q_idx", "kv_idx"),
    "the new score, one number",
    True,
    "A mask_mod(b, h, q_idx, kv_idx) goes to mask=, a position bias such as ALiBi to bias=.",
)
MASK_MOD = Kind(
    "mask_mod",
    ("b", "h", "q_idx", "kv_idx"),
    "True (may attend) or False, one bool",
    False,
    "A score_mod(score, b, h, q_idx, kv_idx) goes to score_mod=.",
    gives_bool=True,
)


@dataclass(frozen=True, eq=False)
class FlexCallable:
    """A score_mod or mask_mod fitted to a matrix.

    Attributes:
        function: takes scalar tensors: a score, if it is a score_mod, then b, h, q_idx, kv_idx.
        batch: the index b of each batch entry, with all axes of the matrix; the axes of heads, rows
            and columns have length 1. Several batch axes are numbered as if they were flattened.
        head: the index h of each head, with all axes of the matrix; all but the head axis have
            length 1.
    """

    function: Callable[..., Tensor]
    batch: Tensor
    head: Tensor

    @classmethod
    def fitted(
        cls,
        function: object,
        kind: Kind,
        shape: torch.Size,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> "FlexCallable":
        """Check a callable with a trial call at the corners of the matrix, and fit it to the shape.

        Args:
            function: the argument to check.
            kind: the required kind of callable, such as SCORE_MOD or MASK_MOD.
            shape: the shape of the matrix, (..., num_heads, q_len, kv_len).
            device: the device of the matrix.
            dtype: the dtype of the scores passed to a score_mod.

        Raises:
            TypeError: the function is not callable, has other arguments, or returns another dtype.
            ValueError: the trial call fails, does not return a scalar tensor, or uses a tensor that
                requires a gradient.
        """
        _check_arguments(function, kind)
        flex = cls.untried(cast(Callable[..., Tensor], function), shape, device)
        _try_out(flex, kind, shape, dtype)
        return flex

    @classmethod
    def untried(
        cls, function: Callable[..., Tensor], shape: torch.Size, device: torch.device
    ) -> "FlexCallable":
        """Fit a callable to a matrix of this shape, without a trial."""
        batch, heads = shape[:-3], shape[-3:-2]
        return cls(
            function,
            torch.arange(prod(batch), device=device).reshape(*batch, *(1 for _ in heads), 1, 1),
            torch.arange(prod(heads), device=device).reshape(*(1 for _ in batch), *heads, 1, 1),
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> "FlexCallable":
        """Return the same callable with the function applied to its batch and head indices."""
        return FlexCallable(self.function, function(self.batch), function(self.head))

    def __call__(self, box: Box, *scores: Tensor) -> Tensor:
        """Apply the callable to every score of a box, (..., rows, columns)."""
        batch = broadcast_index(self.batch, box.leading).flatten()
        head = broadcast_index(self.head, box.leading).flatten()
        q_idx, kv_idx = (positions(part, batch.device) for part in (box.rows, box.columns))
        # Each level of vmap takes the CPU some time, so indices of one entry go without.
        batch, head = (each if len(each) > 1 else each[0] for each in (batch, head))
        indices = (batch, head, q_idx, kv_idx)
        lengths = [len(each) for each in indices if each.ndim]
        values = _over(self.function, *indices, scores=len(scores))(
            *(each.reshape(lengths) for each in scores), *indices
        )
        return values.reshape(box.size)

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


def _over(function: Callable[..., Tensor], *indices: Tensor, scores: int) -> Callable[..., Tensor]:
    """Vectorise a function over those of its indices that are vectors; the result has their axes.

    Args:
        function: takes scalar tensors: a score, if there are scores, then b, h, q_idx and kv_idx.
        indices: b, h, q_idx and kv_idx.
        scores: 1 if it takes a score, else 0; the scores have the axes of the result.
    """
    for place, index in reversed(list(enumerate(indices))):
        axes = tuple(0 if axis == place else None for axis in range(len(indices)))
        if index.ndim:
            function = torch.vmap(function, in_dims=((0,) * scores) + axes)

    def over(*arguments: Tensor) -> Tensor:
        with _IndexByTensors():
            return function(*arguments)

    return over


class _IndexByTensors(TorchFunctionMode):
    """Run ``table[h, q_idx]`` as a tensor operation.

    Python's indexing would convert the indices to Python numbers, which ``torch.vmap`` forbids.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__getitem__:
            table, index = cast(tuple[Tensor, Any], args)
            items = cast(tuple[Any, ...], index if isinstance(index, tuple) else (index,))
            if all(isinstance(item, Tensor | int) for item in items):
                at = [torch.as_tensor(item, device=table.device) for item in items]
                return torch.ops.aten.index(table, at)
        return func(*args, **(kwargs or {}))


def _check_arguments(function: object, kind: Kind) -> None:
    if not callable(function):
        raise TypeError(
            f"{kind.name} is {kind_text(function)}; it must be a callable, {kind.text}.\n"
            f"    {kind.otherwise}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables have no signature; the trial call checks them
        return
    try:
        signature.bind(*kind.arguments)
    except TypeError:
        raise TypeError(
            f"{kind.name} takes {signature}; it must take {len(kind.arguments)} scalar tensors, "
            f"{kind.text}.\n    {kind.otherwise}"
        ) from None


def _try_out(flex: FlexCallable, kind: Kind, shape: torch.Size, dtype: torch.dtype) -> None:
    """Call the function at the corners of the matrix and check the result."""
    counts = (flex.batch.numel(), flex.head.numel(), *shape[-2:])
    device = flex.batch.device
    corners = [torch.arange(0, max(1, n), max(1, n - 1), device=device) for n in counts]
    scores = [torch.zeros([len(c) for c in corners], dtype=dtype, device=device)]
    returned: list[object] = []

    def noting(*arguments: Tensor) -> Tensor:
        answer: object = flex.function(*arguments)
        is_tensor = isinstance(answer, Tensor)
        returned.append(answer.dtype if is_tensor and not answer.ndim else _came(answer))
        return answer if is_tensor else arguments[-1]

    try:
        values = _over(noting, *corners, scores=int(kind.takes_score))(
            *scores[: kind.takes_score], *corners
        )
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{kind.name} raised {type(error).__name__}: {reason}\n"
            f"    It is called as {kind.text} with scalar tensors and must return "
            f"{kind.returns}. Choose with torch.where, not with if."
        ) from error
    _check_answer(returned[0], kind)
    if values.requires_grad:
        instead = ", or pass what it adds to the scores as bias=" if kind.takes_score else ""
        raise ValueError(
            f"{kind.name} uses a tensor that requires a gradient; none would flow to it.\n"
            f"    Detach that tensor{instead}."
        )


def _came(answer: object) -> str:
    if isinstance(answer, Tensor):
        return f"a tensor of shape {shape_text(answer.shape)}"
    return kind_text(answer)


def _check_answer(came: object, kind: Kind) -> None:
    """Raise an error unless the result of a trial is a scalar tensor of the right dtype."""
    if not isinstance(came, torch.dtype):
        raise ValueError(
            f"{kind.name} returns {came}; it must return {kind.returns}, as a tensor.\n"
            f"    It is called as {kind.text} with scalar tensors."
        )
    if came == torch.bool if kind.gives_bool else came.is_floating_point:
        return
    raise TypeError(
        f"{kind.name} returns {dtype_text(came)}; it must return {kind.returns}.\n"
        f"    {kind.otherwise}"
    )
