"""The formula that code computes: found in one run, and verified in others.

runs ──► traces ──► rows ──► facts ──► weights of the facts = weights of other runs
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from regard.diagnosis.facts.formula import Facts, facts_of, mask_in, table_in
from regard.diagnosis.facts.merged_heads import HeadOutputs
from regard.diagnosis.facts.rows import Mistake, Rows, Unread
from regard.diagnosis.facts.runs import Run, Runs
from regard.diagnosis.facts.surroundings import lines_of, surroundings_of
from regard.diagnosis.facts.weak_masks import raise_for_weak_mask
from regard.diagnosis.facts.written import Written
from regard.diagnosis.inputs.mask_forms import Form
from regard.diagnosis.inputs.specimen import Specimen
from regard.diagnosis.inputs.subject import FEW_BITS

_MOST_READINGS = 3
_MOST_FORMS = 24
_CLOSE = 1e-6
_SHARP = 5.0
"""The size of inputs whose weights are close to 0 and 1."""


@dataclass(frozen=True)
class Domain:
    """The inputs that statements were verified on.

    Attributes:
        lengths: the number of tokens of each, that of the input that the facts were found in first.
        difference: the largest difference between an output and the formula.
        attended: the lengths of texts that tokens of another one attended to; empty if they are as
            long as the tokens' own.
        casts: the dtypes of few bits that the code casts to; float64 took their place.
    """

    lengths: tuple[int, ...] = ()
    difference: float = 0.0
    attended: tuple[int, ...] = ()
    casts: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Statement:
    """The facts of one attention, verified.

    Attributes:
        facts: its facts.
        rows: the numbers that they were found in.
        written: the lines of the run without a mask, by "", and of that with one, by its argument.
    """

    facts: Facts
    rows: Rows
    written: Mapping[str, Written]


@dataclass(frozen=True, eq=False)
class Computed:
    """The statements about some code.

    Attributes:
        statements: one for each attention; empty if one could not be read.
        unread: the first stage that could not be read, with the reason; None if all was.
        specimen: the code with its arguments as they were read.
        domain: the inputs that confirm the statements.
    """

    statements: tuple[Statement, ...]
    unread: Unread | None
    specimen: Specimen
    domain: Domain = field(default_factory=Domain)


def computed(specimens: Iterable[Specimen]) -> Computed:
    """Return the statements about code, for the first reading of its arguments that has them.

    Args:
        specimens: the code with its arguments, one for each reading.
    """
    failures: list[Computed] = []
    for specimen in islice(specimens, _MOST_READINGS):
        search = _Search(Runs(specimen))
        try:
            return search.computed()
        except Unread as error:
            unread = error
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            unread = Unread("projection", f"it raised {type(error).__name__}")
        failures.append(Computed((), unread, specimen))
    return failures[0]


class _Search:
    """The search for the facts of one specimen."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        # Each mask has one form, with the meaning that the runs showed, or all its forms if none
        # of them could be read.
        self._mask_forms: tuple[tuple[Form, ...], ...] = ()

    def computed(self) -> Computed:
        """Return a statement for each attention.

        Raises:
            Unread: a stage of an attention could not be read, or the other runs differ.
        """
        base = self._base()
        all_facts = self._facts(base)
        all_facts, masked = self._with_masks(base, all_facts)
        runs = [base, *masked, *self._others(base.sizes.tokens)]
        if len(runs) == 1:
            raise Unread("output", "it runs on one input alone, so that nothing can be verified")
        lengths = tuple(run.sizes.tokens for run in runs)
        statements: list[Statement] = []
        difference, attended = 0.0, ()
        for number, facts in enumerate(all_facts):
            difference = max(difference, *(_difference(facts, run, number) for run in runs))
            keys = tuple(run.rows[number].key.shape[-2] for run in runs)
            attended += keys if facts.around.crosses and keys != lengths else ()
            written = {
                run.mask_argument: Written(run.trace, run.rows[number].attentions[0])
                for run in (base, *masked)
                if run.trace is not None
            }
            statements.append(Statement(facts, base.rows[number], written))
        specimen = replace(self._runs.specimen, forms=self._mask_forms)
        domain = Domain(lengths, difference, attended, _casts(base))
        return Computed(tuple(statements), None, specimen, domain)

    def _base(self) -> Run:
        """Return the run that facts are found in, the longest one that can be read."""
        failures: list[Exception] = []
        for tokens in dict.fromkeys(self._runs.lengths()):
            try:
                return self._runs.run(tokens, seed=0)
            except Unread as error:
                # Equal ids cannot be told apart, and a shorter text has fewer of them.
                if not self._runs.has_ids:
                    raise
                failures.append(error)
            except Exception as error:  # noqa: BLE001  # it may not take so many tokens
                failures.append(error)
        raise next((error for error in failures if isinstance(error, Unread)), failures[0])

    def _facts(self, base: Run) -> list[Facts]:
        """Return the facts of all attentions of the run, with their surroundings and lines."""
        all_facts = self._plain_facts(base)
        added_positions = self._runs.added_positions(base)
        is_alone = len(base.rows) == 1
        found: list[Facts] = []
        for rows, facts in zip(base.rows, all_facts, strict=True):
            lines = _lines_in(base, rows)
            if facts.mask is None and self._runs.has_one_length and not base.arguments:
                facts = replace(facts, mask=table_in(rows))
            if facts.mask is None:
                reason = "which keys a query sees follows no rule that is known"
                raise Unread("mask", reason, lines.get("softmax", ""))
            around, merge_line = surroundings_of(
                rows, base.trace, base.sizes, self._runs.specimen.sources, is_alone=is_alone
            )
            if self._runs.specimen.given:
                scale = tuple(scale * facts.head_dim**0.5 for scale in facts.scale)
                facts = replace(facts, scale=scale, has_given_scores=True)
            found.append(
                replace(
                    facts,
                    around=around,
                    added_positions=added_positions,
                    fills_empty_rows=_fills_empty_rows(facts, rows, base),
                    lines={**lines, "merge": merge_line},
                )
            )
        return found

    def _plain_facts(self, base: Run) -> list[Facts]:
        """Return the facts of all attentions of the run.

        What is added to scores is told from what query and key give them by two samples that have
        it in common, so code without a batch is run once more.
        """
        try:
            return [facts_of(rows, base.arguments) for rows in base.rows]
        except Unread as error:
            for rows in base.rows:
                raise_for_weak_mask(rows, base.arguments, _weak_line(base, rows))
                if base.trace is not None and not error.line:
                    error.line = Written(base.trace, rows.attentions[0]).of_any_mask()
            if base.sizes.batch is not None or error.stage != "scores":
                raise
        other = self._runs.run(base.sizes.tokens, seed=7)
        both = zip(base.rows, other.rows, strict=True)
        return [facts_of(rows.with_samples_of(more), base.arguments) for rows, more in both]

    def _others(self, tokens: int) -> Iterator[Run]:
        """Yield runs with other numbers, other lengths, and sharp weights.

        Raises:
            Unread: one of them cannot be read, so that the formula holds for some inputs alone.
        """
        lengths = [tokens, tokens]
        if not self._runs.has_one_length:
            lengths = [*[n for n in self._runs.short if n < tokens][:2], tokens]
        sizes = (1.0, _SHARP, 1.0)
        for seed, (length, size) in enumerate(zip(lengths, sizes, strict=False), 1):
            try:
                yield self._runs.run(length, seed=seed, size=size, has_other_memory=seed == 1)
            except Unread:
                if not self._runs.repeats_ids(length):
                    raise
            except Exception:  # noqa: BLE001  # it may take one length alone
                continue

    def _with_masks(self, base: Run, all_facts: list[Facts]) -> tuple[list[Facts], list[Run]]:
        """Return the facts with the mask of each argument that is one, and a run with each.

        Raises:
            Unread: an argument follows no rule in any of its forms.
        """
        runs: list[Run] = []
        for forms in self._runs.specimen.forms:
            unread: Unread | None = None
            without_effect: tuple[list[Facts], Run] | None = None
            for form in _tried(forms)[:_MOST_FORMS]:
                try:
                    run = self._runs.run(base.sizes.tokens, seed=5, form=form)
                    with_mask = [
                        self._with_mask(facts, run, number)
                        for number, facts in enumerate(all_facts)
                    ]
                    for number, facts in enumerate(with_mask):
                        _difference(facts, run, number)
                except Unread as error:
                    # If no form fits, a mistake that shows says most.
                    if unread is None or (error.mistakes and not unread.mistakes):
                        unread = error
                    continue
                except Exception:  # noqa: BLE001  # it may take a mask of another form
                    continue
                if any(facts.masked[form.argument].hidings for facts in with_mask):
                    without_effect, unread = (with_mask, run), None
                    self._mask_forms += ((_as_measured(form, with_mask),),)
                    break
                argument = form.argument
                patterns = [(each.masked[argument].pattern, each.mask) for each in with_mask]
                is_kept = all(mask and pattern == mask.pattern for pattern, mask in patterns)
                if is_kept or form.is_of_keys:
                    without_effect = without_effect or (with_mask, run)
                else:
                    reason = f"{argument} changes which keys are seen by no rule that is known"
                    unread = unread or Unread("mask", reason, with_mask[0].lines.get("softmax", ""))
            if without_effect is not None and unread is None:
                all_facts = without_effect[0]
                runs.append(without_effect[1])
            elif unread is not None:
                raise unread
            else:
                self._mask_forms += (forms,)
        return all_facts, runs

    def _with_mask(self, facts: Facts, run: Run, number: int) -> Facts:
        """Return the facts of an attention with the mask of a run that passes one."""
        rows, argument = run.rows[number], run.mask_argument
        lines = _lines_in(run, rows)
        raise_for_weak_mask(rows, {argument: run.arguments[argument]}, _weak_line(run, rows))
        mask = mask_in(rows, run.arguments)
        if mask is None:
            reason = f"the keys that {argument} hides follow no rule that is known"
            line = "" if run.trace is None else Written(run.trace, rows.attentions[0]).of_any_mask()
            raise Unread("mask", reason, line or facts.lines.get("softmax", ""))
        is_of_keys = run.form is not None and run.form.is_of_keys
        around = facts.around
        if run.trace is not None and len(run.rows) == 1:
            outputs = HeadOutputs(rows, run.trace, run.sizes)
            returns_others = around.returns_other_weights or outputs.return_other_weights()
            around = replace(around, returns_other_weights=returns_others)
        return replace(
            facts,
            around=around,
            masked={**facts.masked, argument: mask},
            lines={**facts.lines, f"mask {argument}": lines.get("mask", "")},
            key_masks=facts.key_masks | {argument} if is_of_keys else facts.key_masks,
        )


def _fills_empty_rows(facts: Facts, rows: Rows, base: Run) -> bool:
    """Return True if rows that see no key by the mask weigh every key, as low numbers do."""
    weights = facts.weights(rows.query, rows.key, facts.mask, base.arguments)
    if weights is None:
        return False
    of_empty = rows.weights[weights.sum(-1) == 0]
    return bool(of_empty.numel()) and bool((of_empty > 0).all())


def _lines_in(run: Run, rows: Rows) -> Mapping[str, str]:
    """Return the ``file:line`` of each stage of an attention."""
    return rows.lines if run.trace is None else lines_of(rows, run.trace)


def _weak_line(run: Run, rows: Rows) -> str:
    """Return the line of a mask that hides nothing; "" where none is known."""
    written = "" if run.trace is None else Written(run.trace, rows.attentions[0]).of_added_mask()
    return written or _lines_in(run, rows).get("softmax", "")


def _tried(forms: Sequence[Form]) -> list[Form]:
    """Return the forms of a mask to try, in order.

    The runs show what True means. So the other meaning is tried last, as a mask that hides what it
    should keep may leave rows without a key. Bool comes before whole numbers, because ``~mask``
    makes other numbers of these. Additive masks come early, because code that adds its mask accepts
    a bool one, too.
    """
    axes = [*dict.fromkeys(form.axes for form in forms)]
    added = [form for form in forms if form.kind == "added"]
    marks = sorted(
        (form for form in forms if form.kind != "added"),
        key=lambda form: (axes.index(form.axes), form.kind == "long"),
    )
    first = [form for form in marks if form.keeps == forms[0].keeps]
    others = [form for form in marks if form.keeps != forms[0].keeps]
    return [*first[:2], *added[:1], *first[2:], *added[1:], *others]


def _as_measured(form: Form, all_facts: Sequence[Facts]) -> Form:
    """Return the form of a mask with the meaning that its run shows."""
    readings = {
        hiding.reading
        for facts in all_facts
        for hiding in facts.masked[form.argument].hidings
        if hiding.argument == form.argument
    }
    return replace(form, keeps="hides" not in readings, is_sure=True)


def _casts(run: Run) -> tuple[str, ...]:
    """Return the dtypes of few bits that a run asks for, by name."""
    steps = () if run.trace is None else run.trace.steps
    given = [value for step in steps for value in step.kwargs.values()]
    dtypes = {value for value in given if isinstance(value, torch.dtype) and value in FEW_BITS}
    return tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _difference(facts: Facts, run: Run, number: int) -> float:
    """Return the largest difference between the output of the facts and that of a run.

    Raises:
        Unread: the run has other facts.
    """
    line, tokens = facts.lines.get("softmax", ""), run.sizes.tokens
    if number >= len(run.rows):
        raise Unread("product", f"with {tokens} tokens it has fewer attentions", line)
    rows = run.rows[number]
    memory, kv_len = run.sizes.memory, rows.key.shape[-2]
    if facts.around.crosses and rows.query.shape[-2] == tokens and memory not in (None, kv_len):
        reason = f"of {memory} tokens that are attended to only {kv_len} are seen"
        raise Unread("product", reason, line)
    if not facts.has_paths(rows):
        raise Unread("projection", f"{tokens} tokens are projected in another way", line)
    mask = facts.masked.get(run.mask_argument, facts.mask)
    weights = facts.weights(rows.query, rows.key, mask, run.arguments)
    if weights is None:
        raise Unread("mask", f"the mask of {tokens} tokens follows no rule", line)
    # A row in which all keys are masked has no weights of its own.
    is_dead = weights.sum(-1, keepdim=True) == 0
    if mask is not None and mask.hidings:
        is_dead = is_dead | rows.is_empty
    gap = (weights - rows.weights.nan_to_num(0.0)) @ rows.value
    difference = float(torch.where(is_dead, 0.0, gap).abs().max())
    if not difference <= _CLOSE * max(1.0, float(rows.value.abs().max())):
        reason = f"on {tokens} tokens the formula differs by {difference:.1g}"
        raise Unread("softmax", reason, line, _mistakes_of_length(facts, run, number))
    return difference


def _mistakes_of_length(facts: Facts, run: Run, number: int) -> list[Mistake]:
    """Return the mistake of a scale that differs between numbers of tokens, if that is all."""
    rows = run.rows[number]
    with suppress(Unread):
        of_length = facts_of(rows, run.arguments)
        is_same = str(of_length.mask) == str(facts.mask) and of_length.softcap == facts.softcap
        if is_same and not of_length.has_scale(facts.scale[0]):
            scales = f"{of_length.scale[0]:.4g} for {run.sizes.tokens} tokens"
            says = f"The scale follows the number of tokens: {scales}, else {facts.scale[0]:.4g}."
            line = facts.lines.get("scale") or facts.lines.get("product", "")
            return [Mistake("wrong-scale", says, line, scale=of_length.scale[0], is_choice=True)]
    return []
