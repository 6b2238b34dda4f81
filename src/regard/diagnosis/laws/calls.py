"""Laws about calls: any size runs, nothing changes, samples stay apart."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.diagnosis.inputs.lab import Lab, NotTried, Run, differs
from regard.diagnosis.inputs.signature import is_cache, signature_of
from regard.diagnosis.inputs.source import number_line
from regard.diagnosis.inputs.specimen import Contents, Specimen
from regard.diagnosis.inputs.subject import is_installed
from regard.diagnosis.inputs.tape import (
    Place,
    Step,
    addresses,
    first_place,
    in_words,
    place_in,
    place_of,
    tensors_in,
)
from regard.diagnosis.laws.arithmetic import DROPS
from regard.diagnosis.laws.law import Breach, Law


class Runs(Law):
    """Any batch and any number of tokens runs, and gives finite numbers."""

    name = "runs"
    formula = "f(x) is finite, (batch, tokens, ...) for x (batch, tokens, ...)"
    example = "scores = q @ k.T  # turns all axes of a batch round"

    def breach(self, lab: Lab) -> Breach | None:
        """Run with other sizes, down to one sample and one token."""
        s = lab.specimen
        contents = s.contents(s.batch, s.tokens)
        if (overflow := lab.overflow(contents, {})) is not None:
            return Breach(*overflow[:2], kind=overflow[2])
        first = lab.run(contents, is_double=False, keeps=True)
        violation = _not_finite(first, s, s.batch, s.tokens)
        if violation is not None:
            return violation
        if (turned := self._turned(lab)) is not None:
            return turned
        for name in s.memory:
            if lab.run(s.changed(contents, only=[name]), is_double=False).rows.equal(first.rows):
                return Breach(f"Other numbers in {name} move no output.", kind="idle")
        lab.notes += _notes_on_arguments(s)
        for batch, tokens, memory in self._sizes(lab):
            contents = s.contents(batch, tokens)
            if memory != tokens:
                contents = s.with_memory_of(memory, contents)
            try:
                run = lab.run(contents, is_double=False, keeps=True)
            except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
                # Code that keeps the k largest needs k tokens; other code says which it takes.
                is_refused = isinstance(error, AssertionError | NotImplementedError)
                is_short = "selected index k" in str(error)
                if is_refused or is_short or self._is_limit(lab, batch, tokens):
                    if 1 < tokens < s.tokens:
                        lab.specimen = replace(s, is_fixed=True)
                        lab.notes.append(f"It runs with {s.tokens} tokens, not with {tokens}.")
                    continue
                others = "" if memory == tokens else f" that attend to {memory} others"
                said = f"{_sized(batch, tokens)}{others}: {in_words(error)}."
                return Breach(said, place_of(error), kind="raises")
            violation = _not_finite(run, s, batch, tokens)
            if violation is not None:
                return violation
            if lab.has_batch and run.rows.shape[0] != batch:
                return Breach(f"{_sized(batch, tokens)} gave {run.rows.shape[0]} samples.")
        axes = next(iter(s.sources.values())).axes
        is_tokens_first = axes[:2] == ("b", "t") and len(axes) == lab.output_ndim == 4
        if is_tokens_first and lab.output_axes == (0, 2):
            raise NotTried(
                "It takes (batch, tokens, heads, dim) and gives (batch, heads, tokens, dim): "
                "return output.transpose(1, 2), or take (batch, heads, tokens, dim)."
            )
        return None

    @staticmethod
    def _turned(lab: Lab) -> Breach | None:
        """Compare the axes of the output's batch and tokens with those of the input."""
        axes = next(iter(lab.specimen.sources.values())).axes
        given = tuple(axes.index(letter) for letter in "bt") if {"b", "t"} <= set(axes) else None
        if given is None or len(axes) not in (3, 4) or lab.output_ndim != len(axes):
            return None
        is_with_heads = len(axes) == 4 and lab.output_axes in ((0, 1), (0, 2))
        if given == lab.output_axes or None in lab.output_axes or is_with_heads:
            return None
        return Breach(
            f"Batch and tokens are axes {given[0]} and {given[1]} of the input, and "
            f"{lab.output_axes[0]} and {lab.output_axes[1]} of the output."
        )

    @staticmethod
    def _sizes(lab: Lab) -> Iterator[tuple[int, int, int]]:
        """Yield numbers of samples, of tokens, and of those that they attend to."""
        s = lab.specimen
        batches = [1, s.batch + 1] if s.has_batch else []
        yield from ((batch, s.tokens, s.tokens) for batch in batches)
        # A mask of the caller has the length of the other text.
        is_plain = all(slot.source or slot.kind == "fixed" for slot in s.slots)
        if s.memory and s.has_tokens and is_plain and (s.apart or not (s.is_fixed or s.is_example)):
            yield s.batch, s.tokens, s.tokens + 2
        if s.has_tokens and not s.is_fixed:
            most = s.tokens + 4 if s.most_tokens is None else s.most_tokens
            lengths = (max(s.tokens - 2, 2), s.tokens + 4, 1)
            yield from ((s.batch, n, n) for n in lengths if n <= most and n != s.tokens)

    @staticmethod
    def _is_limit(lab: Lab, batch: int, tokens: int) -> bool:
        """Return True if the code has a size of its own that explains why it refuses this one."""
        s = lab.specimen
        call = s.call
        if not isinstance(call, nn.Module):
            return False
        sizes = {n for t in (*call.parameters(), *call.buffers()) for n in t.shape}
        for part in call.modules():
            sizes |= {v for v in vars(part).values() if isinstance(v, int)}
            config = getattr(part, "config", None)
            sizes |= {v for v in getattr(config, "__dict__", {}).values() if isinstance(v, int)}
        widths = {n for slot in s.sources.values() for n in slot.axes}
        if s.tokens in widths and tokens != s.tokens:
            return False  # it runs with as many tokens as columns alone
        if tokens > s.tokens:
            return any(s.tokens <= n < tokens for n in sizes)
        if tokens != s.tokens:
            return s.tokens in sizes
        return batch > s.batch and any(s.batch <= n < batch for n in sizes - {2})


def _notes_on_arguments(s: Specimen) -> list[str]:
    """Return which arguments were left out, and which masks are needed despite a default."""
    parameters = signature_of(s.call).parameters
    if is_installed(s.call) or not {slot.name for slot in s.slots} <= {*parameters}:
        return []
    optional = [n for n, p in parameters.items() if p.default is None]
    tried = {slot.name for slot in s.slots} | {form.argument for form, *_ in s.forms}
    left = [n for n in optional if n not in tried and not is_cache(n) and "scale" not in n]
    needed = [slot.name for slot in s.slots if slot.kind in ("filled", "lengths")]
    notes = [
        f"It does not run without {n}, whose default is None." for n in needed if n in optional
    ]
    if left and s.is_example:
        notes.append(f"The laws were tried without {', '.join(left)}, as the example leaves out.")
    elif left:
        notes.append(
            f"The laws were tried without {', '.join(left)}: pass an example call to try that."
        )
    flags = {n: p.default for n, p in parameters.items() if isinstance(p.default, bool)}
    kept = [f"{n}={value}" for n, value in flags.items() if n not in tried and "cache" not in n]
    if kept:
        notes.append(f"It was tried with {', '.join(kept)} alone.")
    return notes


def _sized(batch: int, tokens: int) -> str:
    samples = f"{batch} samples" if batch > 1 else "One sample"
    return f"{samples} of {tokens} tokens" if tokens > 1 else f"{samples} of one token"


def _not_finite(run: Run, s: Specimen, batch: int, tokens: int) -> Breach | None:
    wrong = int((~run.rows.isfinite()).sum())
    if not wrong:
        return None
    says = f"{_sized(batch, tokens)}: {wrong} of {run.rows.numel()} numbers are NaN or infinite."
    # A mask whose meaning is unknown may hide all keys where it should hide none.
    passed = {slot.name for slot in s.slots if slot.kind in ("filled", "lengths")}
    are_known = [form.is_sure for form, *_ in s.forms if form.argument in passed]
    return replace(breach_of_nan(run, says), is_definite=all(are_known))


def breach_of_nan(run: Run, says: str) -> Breach:
    """Return the breach of a run whose numbers are not finite, at the operation that begins it.

    A softmax of -inf alone has no key to attend to; one of inf has masked keys that are inf.

    Args:
        run: with its steps.
        says: what is not finite, in a sentence.
    """
    step = next(filter(_begins, run.steps), None)
    scores = next(iter(tensors_in(step.args)), None) if step is not None else None
    kind = "nan"
    if step is not None and scores is not None and "softmax" in step.name:
        if bool((scores == torch.inf).any()):
            kind = "mask-fill-value"
        elif bool((scores == -torch.inf).all(int(step.args[1])).any()):
            kind = "nan-rows"
    origin = None if step is None else step.place
    return Breach(says, origin, kind=kind)


def _begins(step: Step) -> bool:
    """Return True for an operation that gives NaN and reads none."""
    given, read = (
        any(t.is_floating_point() and bool(t.isnan().any()) for t in tensors)
        for tensors in (step.outputs, tensors_in(step.args))
    )
    return given and not read


class Pure(Law):
    """In eval mode the same call gives the same output, and changes no argument."""

    name = "pure"
    formula = "f(x) = f(x), and x is as it was"
    example = "q *= head_dim**-0.5  # in place: the caller's tensor is scaled as well"

    def breach(self, lab: Lab) -> Breach | None:
        """Call twice, and with another seed, and compare arguments and outputs."""
        s = lab.specimen
        contents = s.contents(s.batch, s.tokens)
        run = lab.run(contents, keeps=True)
        violation = self._argument_changed(lab, contents, run) or self._mask_changed(lab, contents)
        if violation is not None:
            return violation
        if lab.changed_defaults:
            names = ", ".join(sorted(lab.changed_defaults))
            return Breach(f"A call changes the default of {names}, which the next call gets.")
        reseeded_run = lab.run(contents, seed=1, keeps=True)
        if differs(reseeded_run.rows, run.rows).any():
            most = float((reseeded_run.rows - run.rows).abs().max())
            is_drop = any(step.name in DROPS for step in run.steps)
            moved = _first_moved(run, [reseeded_run])
            drop = next((s for s in run.steps if s.name in DROPS and s.place == moved), None)
            return Breach(
                f"Two calls with other random seeds differ by up to {most:.3g}.",
                moved if drop is None else place_in(_line_of_chance(drop)),
                kind="dropout-in-eval" if is_drop else "random",
                is_definite=is_drop,
            )
        again = lab.run(contents, call=run.call)
        if again.rows.shape != run.rows.shape:
            return Breach(
                f"The second call gives {tuple(again.rows.shape)} where the first gave "
                f"{tuple(run.rows.shape)}."
            )
        if differs(again.rows, run.rows).any():
            most = float((again.rows - run.rows).abs().max())
            return Breach(
                f"The second of two equal calls differs by up to {most:.3g}.",
                first_place(run.steps, lambda step: step.name.endswith("_")),
            )
        if isinstance(s.call, nn.Module):
            reseeded = s.contents(s.batch, s.tokens, seed=1)
            fresh, left = lab.run(reseeded).rows, lab.run(reseeded, call=run.call).rows
            if left.shape != fresh.shape or differs(left, fresh).any():
                return Breach("A call depends on the inputs of the calls before it.")
        return None

    @staticmethod
    def _mask_changed(lab: Lab, contents: Contents) -> Breach | None:
        """Find a mask that the code takes, and changes in place or keeps for the next call."""
        s = lab.specimen
        # Each hides keys that the other one shows, also if True has the other meaning.
        keep = torch.ones(s.batch, s.tokens, s.tokens, dtype=torch.bool)
        without_first, without_last = keep.clone(), keep
        without_first[..., 0], without_last[..., -2:] = False, False
        for forms in s.forms:
            for form in forms:
                name, mask = form.argument, form.encode(without_first)
                call, changed = lab.fresh(), {name: form.encode(without_last)}
                try:
                    run = lab.run(contents, call=call, extra={name: mask})
                    lab.run(contents, call=call, extra=changed)
                    again = lab.run(contents, call=call, extra={name: mask}).rows
                except Exception:  # noqa: BLE001  # it may take a mask of another form
                    continue
                if not mask.equal(torch.as_tensor(s.by_name(run.arguments)[name])):
                    return Breach(f"The argument {name} is changed in place.")
                if again.shape != run.rows.shape or differs(again, run.rows).any():
                    return Breach(f"A call depends on the {name} of the call before it.")
                break
        return None

    @staticmethod
    def _argument_changed(lab: Lab, contents: Contents, run: Run) -> Breach | None:
        s = lab.specimen
        after = s.by_name(run.arguments)
        for name, old in s.by_name(s.arguments(contents, torch.float64, {})).items():
            new = after[name]
            if "cache" in name or "past" in name or type(old).__module__ == "numpy":
                if type(old).__module__ != "numpy" or bool((old == new).all()):
                    continue
            elif not isinstance(old, Tensor) or old.equal(new):
                continue
            start = addresses(new)

            def writes(step: Step, start: list[int] = start) -> bool:
                return step.name.endswith("_") and step.reads[:1] == start

            return Breach(
                f"The argument {name} is changed in place.", first_place(run.steps, writes)
            )
        return None


def _line_of_chance(step: Step) -> str:
    """Return the line of the chance with which an operation drops, or keeps, numbers."""
    kept = [1 - value for value in step.args if isinstance(value, float)]
    return number_line(step, kept, is_local=True)


def _first_moved(base: Run, others: Sequence[Run]) -> Place | None:
    """Return the line of the first operation with a number that all of the other runs move."""
    for steps in zip(base.steps, *(run.steps for run in others), strict=False):
        # Memory that nobody has written yet holds any numbers.
        if steps[0].place is None or steps[0].name.startswith("empty"):
            continue
        for own, *rest in zip(*(step.outputs for step in steps), strict=False):
            if all(t.shape == own.shape for t in rest):
                moved = [differs(t.double(), own.double()) for t in rest]
                if bool(torch.stack(moved).all(0).any()):
                    return steps[0].place
    return None


class Samples(Law):
    """Each sample of a batch gives what it gives alone."""

    name = "samples"
    formula = "f([a, b])[0] = f([a])[0]"
    example = "weights = scores.softmax(dim=0)  # over the batch"

    def breach(self, lab: Lab) -> Breach | None:
        """Change one sample of two, and run each alone."""
        s = lab.specimen
        if not s.has_batch:
            raise NotTried("It takes no batch.", applies=False)
        if not lab.has_batch:
            raise NotTried("Its output has no axis for the batch.")
        contents = s.contents(2, s.tokens)
        base = lab.run(contents, keeps=True)
        runs = [lab.run(s.changed(contents, sample=b), keeps=True) for b in range(2)]
        moved = torch.stack([differs(r.rows, base.rows).flatten(1).any(1) for r in runs], 1).float()
        for b in range(2):
            if moved[1 - b, b]:
                most = float((runs[b].rows[1 - b] - base.rows[1 - b]).abs().max())
                caption = "which sample (across) moves which (down): 1 if it does"
                return Breach(
                    f"Other numbers in sample {b + 1} move the output of sample {2 - b} by "
                    f"{most:.3g}; they should move it by 0.",
                    _first_moved(base, runs),
                    (moved, torch.eye(2), caption),
                    kind="attends-across-batch",
                )
        given = [slot for slot in s.slots if slot.kind == "given" and "b" in slot.axes]
        nested = [part for slot in s.slots if slot.kind == "nested" for part in slot.parts]
        for b in range(0 if any("b" in part.axes for part in nested) else 2):
            own = {g.name: g.constant(2, s.tokens).narrow(g.axes.index("b"), b, 1) for g in given}
            try:
                alone = lab.run({name: t[b : b + 1] for name, t in contents.items()}, extra=own)
            except Exception:
                if not given:
                    raise
                break  # a table may have as many rows as there are samples by chance
            if alone.rows[0].shape != base.rows[b].shape:
                return Breach(
                    f"Sample {b + 1} gives {tuple(alone.rows[0].shape)} alone and "
                    f"{tuple(base.rows[b].shape)} in a batch.",
                    kind="attends-across-batch",
                )
            if differs(alone.rows[0], base.rows[b]).any():
                most = float((alone.rows[0] - base.rows[b]).abs().max())
                says = f"Sample {b + 1} differs by {most:.3g} between alone and in a batch of 2"
                if given:  # the numbers of the other sample in these
                    return Breach(f"{says}.", kind="attends-across-batch")
                return Breach(
                    f"{says}, whatever the other one holds: its place in the batch moves it."
                )
        return None
