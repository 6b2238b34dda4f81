"""The law of positions: computed positions count, and rotations see distances alone."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from regard.diagnosis.laws.lab import Lab, NotTried, Run, differs
from regard.diagnosis.laws.law import Breach, Law
from regard.diagnosis.laws.specimen import Contents
from regard.diagnosis.laws.tape import Place, Step, addresses, reached, tensors_in
from regard.diagnosis.laws.visibility import ignores_order

__all__ = ["Positions"]


class Positions(Law):
    """Positions that are computed change the output; where they rotate, distances alone count."""

    name = "positions"
    formula = "f(x, p) != f(x, 2 p); where p rotates queries and keys, f(x, p) = f(x, p + 1)"
    example = "apply_rotary(q, cos, sin)  # the result is not used"

    def breach(self, lab: Lab) -> Breach | None:
        """Put sines and cosines of other angles in the place of those of positions."""
        s = lab.specimen
        contents = s.contents(min(s.batch, 2), s.tokens, seed=5)
        run = lab.run(contents, keeps=True)
        waves = _waves_of_positions(run.steps)
        if (unused := _unused_table(run)) is not None:
            return Breach("Numbers that are computed from positions are not used.", unused.place)
        rotated = _Rotations(lab, contents, run, waves)
        if not waves and rotated.place is None:
            raise NotTried("It computes no sines of positions.", applies=False)
        turned = {n: _wave(run.steps[n], 1.5 * _angles(run.steps[n])) for n in waves}
        if waves and not differs(lab.run(contents, replaced=turned).rows, run.rows, 1e-9).any():
            first = run.steps[waves[0]]
            return Breach("Other sines and cosines of the positions change nothing.", first.place)
        if ignores_order(lab):
            raise NotTried(
                "It computes sines of positions, and what a token gets does not depend on the "
                "order of the others: they may stand along the axis of the heads."
            )
        return rotated.breach()


class _Rotations:
    """Tables of sines and cosines by which queries and keys are multiplied.

    A score of rotated queries and keys depends on the distance of their positions alone (Su et
    al., RoFormer, 2021, equation 16).
    """

    def __init__(self, lab: Lab, contents: Contents, run: Run, waves: list[int]) -> None:
        self._lab, self._contents, self._run = lab, contents, run
        tokens = lab.specimen.tokens
        moved = {n: _moved_angles(run.steps[n], tokens) for n in waves}
        self._steps = {n: wave for n, wave in moved.items() if wave is not None}
        given = {
            name: value
            for name, value in lab.specimen.by_name(run.arguments).items()
            if not any(t is value for t in run.inputs)
        }
        leaves, self._spec = tree_flatten(given)
        self._leaves: list[Any] = leaves
        self._arguments = _moved_tables(leaves, tokens)
        held = [t for _, _, t in _held(run.call)]
        self._held = _moved_tables(held, tokens)
        tables = [*(held[i] for i in self._held), *(leaves[i] for i in self._arguments)]
        known = {at for n in self._steps for at in run.steps[n].writes} | {*addresses(tables)}
        products = [place for t in run.inputs if (place := _product(run, known, t)) is not None]
        # Keys that are an argument may be rotated already, as those of a cache are.
        is_both = len(products) > 1 or len(run.inputs) == 1
        # Of some waves it may not be known which axis stands for the tokens.
        is_known = len(self._steps) == len(waves)
        self.place = products[0] if products and is_both and is_known else None
        """The line of the first product of a table and numbers of tokens; None if there is none."""

    def breach(self) -> Breach | None:
        """Return a breach if moving all positions by one changes the output."""
        if self.place is None:
            return None
        call = self._lab.fresh()
        for i, (part, name, _) in enumerate(_held(call)):
            if i in self._held:
                setattr(part, name, self._held[i])
        leaves = [self._arguments.get(i, leaf) for i, leaf in enumerate(self._leaves)]
        extra: dict[str, Any] = tree_unflatten(leaves, self._spec) if self._arguments else {}
        rows = self._lab.run(self._contents, call=call, replaced=self._steps, extra=extra).rows
        if not differs(rows, self._run.rows, _TOLERANCE).any():
            return None
        most = float((rows - self._run.rows).abs().max())
        return Breach(
            "Queries and keys are rotated, so that scores depend on the distance of two tokens "
            f"alone. With all positions one larger the output changes by up to {most:.3g}.",
            self.place,
        )


_TOLERANCE = 1e-4  # tables are made in float32


def _held(call: Callable[..., Any]) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the buffers of a module, and tensors that are attributes."""
    if not isinstance(call, nn.Module):
        return []
    return [
        (part, name, value)
        for part in call.modules()
        for name, value in {**dict(part.named_buffers(recurse=False)), **vars(part)}.items()
        if isinstance(value, Tensor)
    ]


def _moved_tables(given: list[Any], tokens: int) -> dict[int, Tensor]:
    """Return the tables of rotations among tensors by number, with all positions one larger.

    A table has complex numbers, or real and imaginary parts along its last axis, or there is one of
    cosines and one of sines.
    """
    found: dict[int, Tensor] = {}
    tables = {i: t for i, t in enumerate(given) if isinstance(t, Tensor) and t.ndim > 1}
    for i, table in tables.items():
        if table.is_complex():
            if (z := _moved_rotation(table, tokens)) is not None:
                found[i] = z
        elif table.is_floating_point() and i not in found:
            if (
                table.shape[-1] == 2
                and (z := _moved_rotation(torch.view_as_complex(table.contiguous()), tokens))
                is not None
            ):
                found[i] = torch.view_as_real(z)
                continue
            for j, other in tables.items():
                if i == j or other.shape != table.shape or other.dtype != table.dtype:
                    continue
                if (z := _moved_rotation(torch.complex(table, other), tokens)) is not None:
                    found |= {i: z.real, j: z.imag}
                    break
    return found


def _moved_rotation(z: Tensor, tokens: int) -> Tensor | None:
    """Return rotations, one for each position, times that of position 1; None if it has none."""
    axis = next((a for a in range(z.ndim - 1) if z.shape[a] >= max(tokens, 2)), None)
    if axis is None or not torch.allclose(z.abs(), torch.ones_like(z.abs()), atol=1e-4):
        return None
    first, second = z.narrow(axis, 0, 1), z.narrow(axis, 1, 1)
    one = torch.ones_like(first)
    is_rotation = torch.allclose(first, one, atol=1e-4) and not torch.allclose(second, one)
    return z * second if is_rotation else None


def _product(run: Run, tables: set[int], source: Tensor) -> Place | None:
    """Return the line of the first product of numbers of positions alone and of one argument."""
    moved, known = reached(run.steps, addresses(source)), set(tables)
    for step in run.steps:
        reads = set(step.reads)
        if not known.isdisjoint(reads):
            if moved.isdisjoint(reads):
                known |= step.writes
            elif step.name.startswith("mul") and step.place is not None:
                return step.place
    return None


def _angles(step: Step) -> Tensor:
    return cast(Tensor, step.args[-1]).double()


def _wave(step: Step, angles: Tensor) -> Tensor:
    if step.name == "polar":
        return torch.polar(cast(Tensor, step.args[0]).double(), angles)
    return angles.cos() if step.name == "cos" else angles.sin()


def _moved_angles(step: Step, tokens: int) -> Tensor | None:
    """Return what an operation gives with all positions one larger; None if it has no tokens."""
    angles = _angles(step)
    axis = next((a for a in range(angles.ndim - 1) if angles.shape[a] == tokens > 1), None)
    if axis is None:
        return None
    return _wave(step, angles + angles.narrow(axis, 1, 1) - angles.narrow(axis, 0, 1))


def _unused_table(run: Run) -> Step | None:
    """Return the last operation that makes numbers of positions alone, if nothing uses them."""
    used = {at for t in tensors_in(run.result) for at in addresses(t)}
    dead: list[Step] = []
    for step in reversed(run.steps):
        if used.isdisjoint(step.writes):
            dead.append(step)
        else:
            used |= {*step.reads, *step.writes}
    known: set[int] = set()
    others = {at for t in (*tensors_in(run.arguments), *run.parameters) for at in addresses(t)}
    found = None
    for step in run.steps:
        if not others.isdisjoint(step.reads):
            others |= step.writes
        elif step.name == "arange" or not known.isdisjoint(step.reads):
            known |= step.writes
            is_table = any(t.is_floating_point() and t.numel() > 1 for t in step.outputs)
            found = step if is_table and step in dead and step.place is not None else found
    return found


def _waves_of_positions(steps: list[Step]) -> list[int]:
    """Return the numbers of sines and cosines that depend on positions alone."""
    known: set[int] = set()
    waves: list[int] = []
    for number, step in enumerate(steps):
        depends = not known.isdisjoint(step.reads)
        if step.name == "arange" or depends:
            known |= step.writes
        if depends and step.name in ("cos", "sin", "polar") and step.outputs[0].numel() > 1:
            waves.append(number)
    return waves
