"""The law of masks: what a mask hides has no influence."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.inputs.lab import Lab, NotTried, Run, as_tensors, differs, normal
from regard.diagnosis.inputs.mask_forms import Form, form_of_given
from regard.diagnosis.inputs.specimen import Contents, Specimen
from regard.diagnosis.inputs.subject import is_installed
from regard.diagnosis.inputs.tape import tensors_in
from regard.diagnosis.laws.law import Breach, Law
from regard.diagnosis.laws.not_finite import breach_of_nan
from regard.diagnosis.laws.visibility import pair_of

__all__ = ["Padding"]


class Padding(Law):
    """A token that a mask hides has no influence: padded gives what it gives alone."""

    name = "padding"
    formula = "f([x, padding], mask)[:n] = f(x)"
    example = "scores.masked_fill(mask[:, None, :, None] == 0, -inf)  # hides rows, not columns"

    def breach(self, lab: Lab) -> Breach | None:
        """Hide tokens by each mask that the code takes, and change them."""
        s = lab.specimen
        given = [form for slot in s.masks if (form := form_of_given(slot)) is not None]
        tried = s.forms or tuple((form,) for form in given)
        if not tried:
            raise NotTried("It takes no mask that was left to check.", applies=False)
        if not s.has_tokens or not lab.sees_rows:
            raise NotTried("No axis of its arguments and its output stands for the tokens.")
        for forms in tried:
            found = _Trial(lab, forms[0].argument).of(forms)
            if found is not None:
                return found
        return None


class _Trial:
    """Masks of one argument."""

    def __init__(self, lab: Lab, argument: str) -> None:
        self.lab, s = lab, lab.specimen
        self.masked = s.masked_by(argument)
        self.is_of_memory = self.masked == s.memory
        given = [form for slot in s.masks if (form := form_of_given(slot)) is not None]
        self.others = [form for form in given if form.argument != argument]
        self.side = _side_of_padding(s, argument)
        self.call = lab.fresh()
        self.batch = max(s.batch, 2) if s.has_batch and lab.has_batch else 1
        self.tokens = s.tokens
        self.contents = s.contents(self.batch, self.tokens, seed=9)
        if given:  # the caller's own mask may be all that makes the code causal
            open_ = {form.argument: form.slot() for form in given}
            slots = tuple(
                replace(open_.get(slot.name, slot), is_array=slot.is_array) for slot in s.slots
            )
            lab = Lab(replace(s, slots=slots, causal=None))
        is_causal = bool(lab.specimen.causal) or not bool(lab.influence.triu(1).any())
        self.is_causal = is_causal and not self.is_of_memory

    def of(self, forms: tuple[Form, ...]) -> Breach | None:
        """Return what is wrong in every form that the code takes; None if one is right.

        Raises:
            NotTried: the code takes none of the forms, or nothing declares what True means.
        """
        name = forms[0].argument
        first: Breach | None = None
        for form in forms:
            extra = {form.argument: form.encode(self._keys(at_start=False))}
            if (overflow := self.lab.overflow(self.contents, extra)) is not None:
                return Breach(*overflow, kind="mask-fill-value")
            try:
                found = self._broken(form)
            except _Refused:
                continue
            if found is None:
                if form.is_sure or form.kind == "added" or is_installed(self.lab.specimen.call):
                    self.lab.readings.append(form.words)
                    return None
                raise NotTried(_undeclared(form))
            if found.kind in _NOT_FINITE:
                return found
            first = first or found
            if form.is_sure and form.axes in ("keys", "lengths"):
                break  # the name says that this form is meant
        if first is None:
            raise NotTried(
                f"No mask that check made shows what {name} does: pass one as callers do, "
                f"args=(...), kwargs={{{name!r}: ...}}."
            )
        return first

    def _keys(self, *, at_start: bool) -> Tensor:
        """Return padding of each sample, (batch, queries, keys)."""
        lengths = self.tokens - 2 - torch.arange(self.batch).clamp(max=2)
        keep = torch.arange(self.tokens) < lengths.flip(0)[:, None]
        keep = keep.flip(-1) if at_start else keep
        return keep[:, None].expand(self.batch, self.tokens, self.tokens)

    def _changed(self, tokens: Tensor) -> Contents:
        """Return the contents with other numbers in some tokens, bool, (batch, tokens)."""
        other = self.lab.specimen.changed(self.contents, only=self.masked)
        return {
            name: torch.where(tokens.view(*tokens.shape, *[1] * (t.ndim - 2)), other[name], t)
            for name, t in self.contents.items()
        }

    def _masked(self, form: Form, keep: Tensor, contents: Contents | None = None) -> Tensor:
        """Return the rows under a mask, (batch, queries, keys), True = may attend."""
        contents = self.contents if contents is None else contents
        return self._run(contents, {form.argument: form.encode(keep)}).rows

    def _run(self, contents: Contents, extra: Mapping[str, Any], *, keeps: bool = False) -> Run:
        """Run with masks; the others that the caller passed hide nothing."""
        open_: dict[str, Any] = {}
        for form in self.others:
            batch, tokens = contents[self.lab.specimen.masked_by(form.argument)[0]].shape[:2]
            open_[form.argument] = form.encode(torch.ones(batch, tokens, tokens, dtype=torch.bool))
        try:
            run = self.lab.run(contents, call=self.call, extra={**open_, **extra}, keeps=keeps)
        except Exception as error:
            raise _Refused from error
        first = next(iter(contents.values()))
        if run.rows.shape[1] != first.shape[1] or run.rows.shape[0] not in (1, first.shape[0]):
            raise _Refused
        return run

    def _broken(self, form: Form) -> Breach | None:
        """Return a counterexample for one form of the mask.

        Raises:
            _Refused: the code does not take this form.
        """
        # After the tokens, padding is later than any token: a causal mask hides it by itself.
        at_start = self.is_causal and form.is_of_keys and form.axes != "lengths"
        keep = self._keys(at_start=at_start)
        if form.axes == "pairs":  # one mask for all samples
            keep = keep[:1].expand_as(keep)
        extra = {form.argument: form.encode(keep)}
        run = self._run(self.contents, extra)
        rows, own = run.rows, self.lab.specimen.by_name(run.arguments)[form.argument]
        if differs(extra[form.argument], torch.as_tensor(own)).any():
            return Breach(f"The argument {form.argument} is changed in place.", extra=extra)
        if not rows.isfinite().all():
            count = int((~rows.isfinite()).any(-1).sum())
            says = f"Under a mask {count} of {rows.shape[0] * rows.shape[1]} rows are not finite."
            return breach_of_nan(self._run(self.contents, extra, keeps=True), says, extra)
        says = self._moved(form, keep[:, 0], rows, extra) or self._returned(form, keep, run.result)
        is_free = not at_start or self.side == "start" or self._is_shift_invariant()
        if says is None and is_free:
            says = self._alone(form, keep, rows)
        if says is None and form.axes in ("keys", "keys4") and not self.side:
            other = self._keys(at_start=not at_start)
            extra = {form.argument: form.encode(other)}
            says = self._moved(form, other[:, 0], self._run(self.contents, extra).rows, extra)
        if says is not None:
            return Breach(says, kind=self._kind(form, keep, rows), extra=extra)
        if form.axes in ("keys", "lengths") and form.is_sure and self._differs_from_none(form):
            says = f"With {form.argument} that hides nothing the output is not that without it."
            return Breach(says, extra={form.argument: form.encode(torch.ones_like(keep))})
        return None if form.is_of_keys else self._pairs(form)

    def _differs_from_none(self, form: Form) -> bool:
        """Return True if a mask that hides nothing gives another output than no mask."""
        s = self.lab.specimen
        if is_installed(s.call) or any(slot.name == form.argument for slot in s.slots):
            return False  # the code needs a mask, or the caller passes one
        own = self._masked(form, torch.ones_like(self._keys(at_start=False)))
        return bool(differs(self._run(self.contents, {}).rows, own).any())

    def _moved(
        self, form: Form, real: Tensor, rows: Tensor, extra: Mapping[str, Any]
    ) -> str | None:
        """Other numbers in hidden tokens move nothing that is read; in the others all of it."""
        read = real | self.is_of_memory  # the rows of hidden tokens are not read
        by_hidden, by_real = (
            differs(self._run(self._changed(tokens), extra).rows, rows).any(-1) & read
            for tokens in (~real, real)
        )
        if by_hidden.any():
            sample, token = (int(n) + 1 for n in by_hidden.nonzero()[0])
            return (
                f"Other numbers in the tokens that {form.argument} hides move output {token} of "
                f"sample {sample}."
            )
        if not by_real.equal(read):
            return f"Tokens that {form.argument} does not hide move no output."
        return None

    def _returned(self, form: Form, keep: Tensor, result: Any) -> str | None:
        """Weights that are returned beside the output give hidden keys none."""
        if not form.is_of_keys:
            return None
        for matrices in as_tensors(result):
            if matrices.shape[-2:] != keep.shape[-2:] or matrices.shape[0] != len(keep):
                continue
            sums = matrices.detach().double().sum(-1)
            if matrices.ndim < 3 or differs(sums, torch.ones_like(sums), 1e-6).any():
                continue
            shape = (len(keep), *[1] * (matrices.ndim - 3), *keep.shape[1:])
            hidden = (~keep & keep.mT).view(shape)  # the rows of hidden tokens are not read
            most = float(matrices.detach().masked_fill(~hidden, 0).max())
            if most > 1e-9:
                return (
                    f"The weights that it returns give up to {most:.3g} to tokens that "
                    f"{form.argument} hides."
                )
        return None

    def _alone(self, form: Form, keep: Tensor, rows: Tensor) -> str | None:
        """Without what is hidden a sample gives what it gives with it."""
        for sample in range(0 if self.lab.specimen.is_fixed else self.batch):
            real = keep[sample, 0]
            n = int(real.sum())
            part = {name: t[sample : sample + 1] for name, t in self.contents.items()}
            part |= {name: part[name][:, real] for name in self.masked}
            ones = torch.ones(1, n, n, dtype=torch.bool)
            alone = self._masked(form, ones, part)[0]
            mine = rows[sample] if self.is_of_memory else rows[sample, real]
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

    def _pairs(self, form: Form) -> Breach | None:
        """Each query sees the keys that its own row of the mask allows."""
        count = 1 if form.axes == "pairs" else self.batch
        keep = normal(5, count, self.tokens, self.tokens) < 0.3
        keep |= torch.eye(self.tokens, dtype=torch.bool)
        keep = keep.expand(self.batch, self.tokens, self.tokens)
        extra = {form.argument: form.encode(keep)}
        rows = self._run(self.contents, extra).rows
        change = self.lab.specimen.changed
        others = (change(self.contents, token=j, only=self.masked) for j in range(self.tokens))
        moved = [differs(self._run(contents, extra).rows, rows).any(-1) for contents in others]
        seen = torch.stack(moved, -1)
        allowed = keep.tril() if self.is_causal else keep
        eye = torch.eye(self.tokens, dtype=torch.bool)
        bad = (seen != allowed) & ~eye
        if not bad.any():
            return None
        sample, row, token = (int(n) for n in bad.nonzero()[0])
        verb = "moves" if seen[sample, row, token] else "does not move"
        return Breach(
            f"Under {form.argument} token {token + 1} {verb} output {row + 1} of sample "
            f"{sample + 1}.",
            None,
            pair_of(seen[sample], allowed[sample]),
            kind=self._kind(form, keep, rows),
            extra=extra,
        )

    def _kind(self, form: Form, keep: Tensor, rows: Tensor) -> str:
        """Return what the code makes of the mask instead, if that can be told."""
        try:
            plain = self._masked(form, torch.ones_like(keep))
            if not differs(plain, rows).any():
                return "mask-unused"
            if form.is_sure and form.axes != "lengths" and self._is_right_inverted(form, keep):
                return "mask-inverted"
            beyond = self._keys(at_start=False)
            if form.axes == "lengths" and self._is_right_inverted(form, beyond):
                return "mask-inverted"
            if self.batch > 1 and form.axes != "pairs" and self._is_of_others(form, keep, rows):
                return "mask-of-another-sample"
            if self._is_of_rows(form, plain) or (form.is_of_keys and self._fills_rows(form, keep)):
                return "padding-on-queries"
        except _Refused:
            return ""
        return "" if form.is_sure else "undeclared"

    def _is_right_inverted(self, form: Form, keep: Tensor) -> bool:
        """Return True if the mask hides nothing where the opposite would hide everything else."""
        hidden = keep.any(1) if form.is_of_keys else keep.any(1) & keep.all(1)
        rows, moved = (self._masked(form, keep, c) for c in (None, self._changed(hidden)))
        # Rows of hidden tokens read hidden tokens only.
        read = ~hidden | self.is_of_memory
        return bool(hidden.any()) and not bool((differs(moved, rows).any(-1) & read).any())

    def _is_of_rows(self, form: Form, plain: Tensor) -> bool:
        """Return True if hiding one token changes its own row alone."""
        keep = torch.ones_like(self._keys(at_start=False))
        at = self.tokens - 1 if form.axes == "lengths" else 0 if self.is_causal else 1
        keep[:, :, at] = False
        moved = differs(self._masked(form, keep), plain).any(-1)
        own = torch.arange(self.tokens) == at
        return bool(moved.any()) and not bool((moved & ~own).any())

    def _fills_rows(self, form: Form, keep: Tensor) -> bool:
        """Return True if scores are filled where a query is hidden, and nowhere else."""
        extra = {form.argument: form.encode(keep)}
        run = self.lab.run(self.contents, call=self.call, extra=extra, keeps=True)
        for step in run.steps:
            masks = [t for t in tensors_in(step.args) if t.dtype == torch.bool and t.ndim > 1]
            if step.name not in ("masked_fill", "masked_fill_", "where") or not masks:
                continue
            mask = masks[0].expand(step.outputs[0].shape)
            is_square = mask.shape[-2:] == (self.tokens, self.tokens)
            if is_square and mask.equal(mask[..., :1].expand_as(mask)):
                return not mask.equal(mask[..., :1, :].expand_as(mask))
        return False

    def _is_of_others(self, form: Form, keep: Tensor, rows: Tensor) -> bool:
        """Return True if the mask of one sample moves another one, or does not move its own."""
        for sample in range(self.batch):
            other = keep.clone()
            other[sample] = True
            moved = differs(self._masked(form, other), rows).flatten(1).any(-1)
            own = torch.arange(self.batch) == sample
            if bool((moved & ~own).any()):
                return True
        return False


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


_NOT_FINITE = ("nan", "nan-rows", "mask-fill-value")


class _Refused(Exception):
    """The code raises when it is called with a mask of this form."""


def _undeclared(form: Form) -> str:
    """Return the argument that would declare the meaning that the code gives a mask."""
    verb = "keeps" if form.keeps else "hides"
    value = "True" if form.kind == "bool" else "1"
    return (
        f"The code reads {form.argument} so that {value} {verb} a key. Nothing says if its callers "
        f"mean that: pass means={{{form.argument!r}: '{value} {verb}'}}, or what they mean."
    )
