"""The law of masks: what a mask hides has no influence."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.inputs.lab import Lab, NotTried, Run, differs
from regard.diagnosis.inputs.mask_forms import Form, form_of_given, given_forms, open_masks
from regard.diagnosis.inputs.specimen import Contents, Specimen
from regard.diagnosis.laws.calls import breach_of_nan
from regard.diagnosis.laws.law import Breach, Law


class Padding(Law):
    """A token that a mask hides has no influence: padded gives what it gives alone."""

    name = "padding"
    formula = "f([x, padding], mask)[:n] = f(x)"
    example = "scores.masked_fill(mask[:, None, :, None] == 0, -inf)  # hides rows, not columns"

    def breach(self, lab: Lab) -> Breach | None:
        """Hide tokens by each mask of keys whose meaning is known, and change them."""
        s = lab.specimen
        given = given_forms(s)
        groups = s.forms or tuple((form,) for form in given)
        sure = [[form for form in forms if form.is_sure and form.is_of_keys] for forms in groups]
        if not any(sure):
            raise NotTried("It takes no mask that was left to check.", applies=False)
        if not s.has_tokens or not lab.sees_rows:
            raise NotTried("No axis of its arguments and its output stands for the tokens.")
        for forms in filter(None, sure):
            violation = _Trial(lab, forms[0].argument, given).of(forms)
            if violation is not None:
                return violation
        return None


class _Trial:
    """Masks of one argument; the others that the caller passed hide nothing."""

    def __init__(self, lab: Lab, argument: str, given: list[Form]) -> None:
        self.lab, s = lab, lab.specimen
        self.masked = s.masked_by(argument)
        self.others = [form for form in given if form.argument != argument]
        self.side = _side_of_padding(s, argument)
        self.call = lab.fresh()
        self.batch = max(s.batch, 2) if s.has_batch and lab.has_batch else 1
        self.contents = s.contents(self.batch, s.tokens, seed=9)

    def of(self, forms: list[Form]) -> Breach | None:
        """Return what is wrong in the first form that the code takes.

        Raises:
            NotTried: the code takes none of the forms.
        """
        for form in forms:
            extra = {form.argument: form.encode(self._keys(at_start=False))}
            if (overflow := self.lab.overflow(self.contents, extra)) is not None:
                return Breach(*overflow[:2], kind=overflow[2])
            try:
                return self._broken(form)
            except _Refused:
                continue
        name = forms[0].argument
        raise NotTried(
            f"No mask that check made shows what {name} does: pass one as callers do, "
            f"args=(...), kwargs={{{name!r}: ...}}."
        )

    def _broken(self, form: Form) -> Breach | None:
        """Return a counterexample for one form of the mask.

        Raises:
            _Refused: the code does not take this form.
        """
        sides = {"start": (True,), "end": (False,)}.get(self.side, (False, True))
        for at_start in sides if form.axes != "lengths" else (False,):
            keep = self._keys(at_start=at_start)
            extra = {form.argument: form.encode(keep)}
            rows = self._run(self.contents, extra).rows
            if not rows.isfinite().all():
                count = int((~rows.isfinite()).any(-1).sum())
                says = (
                    f"Under a mask {count} of {rows.shape[0] * rows.shape[1]} rows are not finite."
                )
                return breach_of_nan(self._run(self.contents, extra, keeps=True), says)
            # Behind padding at the start positions may be others.
            if not at_start or self.side == "start" or self._is_shift_invariant():
                says = self._alone(form, keep, rows)
                if says is not None:
                    return Breach(says)
        return None

    def _keys(self, *, at_start: bool) -> Tensor:
        """Return padding of each sample, (batch, queries, keys)."""
        tokens = self.lab.specimen.tokens
        lengths = tokens - 2 - torch.arange(self.batch).clamp(max=2)
        keep = torch.arange(tokens) < lengths.flip(0)[:, None]
        keep = keep.flip(-1) if at_start else keep
        return keep[:, None].expand(self.batch, tokens, tokens)

    def _run(self, contents: Contents, extra: Mapping[str, Any], *, keeps: bool = False) -> Run:
        """Run with masks."""
        extra = {**open_masks(self.lab.specimen, contents, self.others), **extra}
        try:
            run = self.lab.run(contents, call=self.call, extra=extra, keeps=keeps)
        except Exception as error:
            raise _Refused from error
        first = next(iter(contents.values()))
        if run.rows.shape[1] != first.shape[1] or run.rows.shape[0] not in (1, first.shape[0]):
            raise _Refused
        return run

    def _alone(self, form: Form, keep: Tensor, rows: Tensor) -> str | None:
        """Without what is hidden a sample gives what it gives with it."""
        for sample in range(0 if self.lab.specimen.is_fixed else self.batch):
            real = keep[sample, 0]
            n = int(real.sum())
            part = {name: t[sample : sample + 1] for name, t in self.contents.items()}
            part |= {name: part[name][:, real] for name in self.masked}
            extra = {form.argument: form.encode(torch.ones(1, n, n, dtype=torch.bool))}
            alone = self._run(part, extra).rows[0]
            mine = rows[sample, ... if self.masked == self.lab.specimen.memory else real]
            if mine.shape != alone.shape or not differs(mine, alone).any():
                continue
            row = int(differs(mine, alone).any(-1).nonzero()[0])
            most = float((mine - alone).abs().max())
            return (
                f"Sample {sample + 1} with padding, under {form.argument}, differs by up to "
                f"{most:.3g} from the same {n} tokens alone, first in row {row + 1}."
            )
        return None

    def _is_shift_invariant(self) -> bool:
        """Return True if equal tokens give equal rows wherever they stand."""
        level = {n: t[:, :1].expand_as(t).clone() for n, t in self.contents.items()}
        rows = self.lab.run(level).rows
        return not bool(differs(rows, rows[:, :1].expand_as(rows)).any())


def _side_of_padding(specimen: Specimen, argument: str) -> str:
    """Return the end of the text where the caller's own mask hides keys: "start", "end" or ""."""
    for slot in specimen.masks:
        form = form_of_given(slot)
        if slot.name == argument and form is not None and form.axes in ("keys", "keys4"):
            hidden = (slot.value != 0) != form.keeps
            is_first, is_last = bool(hidden[..., 0].any()), bool(hidden[..., -1].any())
            if is_first != is_last:
                return "start" if is_first else "end"
    return ""


class _Refused(Exception):
    """The code raises when it is called with a mask of this form."""
