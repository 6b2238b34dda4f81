"""Templates of scores, masks and reductions, which hold no tensors: autograd alone keeps them."""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

from torch import Tensor
from torch.utils._pytree import tree_map

from regard.masks import Mask
from regard.reductions.reduction import Reduction
from regard.scores.score_source import Scores

P = TypeVar("P")


@dataclass(frozen=True, eq=False)
class Template(Generic[P]):
    """A plan with stand-ins for its tensors.

    Attributes:
        plan: as for ``map_tensors``.
        stand_ins: the stand-ins, in the order of the tensors.
    """

    plan: P
    stand_ins: list[Tensor]

    def filled(self, tensors: Iterable[Tensor]) -> P:
        """Return the plan with these tensors instead of the stand-ins."""
        by_id = dict(zip(map(id, self.stand_ins), tensors, strict=True))
        return map_tensors(self.plan, lambda tensor: by_id.get(id(tensor), tensor))


def split(plan: P, first: Iterable[Tensor] = ()) -> tuple[Template[P], list[Tensor]]:
    """Return the template of a plan and its tensors, each once.

    Args:
        plan: as for ``map_tensors``.
        first: the tensors that come first, whether or not the plan has them.
    """
    pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if id(tensor) not in pairs:
            pairs[id(tensor)] = tensor, stand_in(tensor)
        return pairs[id(tensor)][1]

    plan = map_tensors(([*first], plan), replaced)[1]
    tensors, stand_ins = ([pair[side] for pair in pairs.values()] for side in (0, 1))
    return Template(plan, stand_ins), tensors


def map_tensors(plan: P, function: Callable[[Tensor], Tensor]) -> P:
    """Return a plan with the function applied to each of its tensors.

    A plan is a tensor, scores, a mask, a reduction, or a tuple, list or dict of plans; other
    objects stay as they are. The attributes of a reduction are plans, too, but its only tensors
    are those in ``Reduction.tensors``. Tensors inside other objects stay, such as those of a module
    or of the closure of a score_mod.
    """
    return _mapped(plan, function, function)


def stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and device that has memory for one number."""
    return tensor.new_zeros(()).expand(tensor.shape)


def _mapped(
    plan: P, function: Callable[[Tensor], Tensor], of_single: Callable[[Tensor], Tensor]
) -> P:
    """Apply ``of_single`` to tensors in the plan itself, ``function`` to those inside its parts."""

    def changed(value: Any) -> Any:
        match value:
            case Tensor():
                return of_single(value)
            case Scores() | Mask():
                return value.map(function)
            case Reduction() if value.tensors:
                return _copied(value, function)
            case _:
                return value

    return cast(P, tree_map(changed, plan))


def _copied(reduction: Reduction, function: Callable[[Tensor], Tensor]) -> Reduction:
    """Return a copy of a reduction with the function applied to its tensors."""
    ids = {id(tensor) for tensor in reduction.tensors}
    kind, copied = type(reduction), copy(reduction)
    # A cached property may depend on the tensors, so the copy computes it again.
    plan = {
        name: value
        for name, value in vars(reduction).items()
        if not isinstance(getattr(kind, name, None), cached_property)
    }
    plan = _mapped(plan, function, lambda tensor: function(tensor) if id(tensor) in ids else tensor)
    vars(copied).clear()
    vars(copied).update(plan)
    return copied
