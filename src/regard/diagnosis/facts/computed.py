"""What code computes: facts found in one run, and verified in runs that were not used to find them.

runs ──► traces ──► rows ──► facts ──► weights of the facts = weights of other runs
"""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.diagnosis.facts.black_box import rows_of_function
from regard.diagnosis.facts.formula import Facts, consistent, facts_of, is_empty, mask_in
from regard.diagnosis.facts.merged_heads import keeps_order, merged, returns_others
from regard.diagnosis.facts.origins import Numbers, Sizes, located
from regard.diagnosis.facts.rows import Rows, Unread, rows_of
from regard.diagnosis.facts.stages import stage_lines
from regard.diagnosis.facts.trace import Trace, traced
from regard.diagnosis.laws.lab import Lab
from regard.diagnosis.laws.mask_forms import Form
from regard.diagnosis.laws.specimen import Contents, Specimen

__all__ = ["Computed", "Domain", "Statement", "computed"]

_FORMS = 16  # of a mask that are tried
_LONGEST = 64
_CLOSE = 1e-6
_BATCHES = (3, 2, 5, 7, 11)
_LENGTHS = (7, 11, 13, 17, 19, 23)
_LONG = (11, 17, 23, 29, 37, 41, 47, 53, 61, 67)
_SHARP = 5.0
"""The size of inputs that make weights sharp."""


@dataclass(frozen=True)
class Domain:
    """The inputs that a statement was verified on.

    Attributes:
        inputs: how many.
        shortest: the number of tokens of the shortest one.
        longest: of the longest one.
        difference: the largest difference between an output and the formula.
    """

    inputs: int
    shortest: int
    longest: int
    difference: float


@dataclass(frozen=True, eq=False)
class Statement:
    """What one attention of the code computes, and where that was verified.

    ``rows`` are the numbers that it was found in.
    """

    facts: Facts
    domain: Domain
    rows: Rows


@dataclass(frozen=True, eq=False)
class Computed:
    """What code computes.

    Attributes:
        statements: one for each attention that could be read.
        unread: the first stage that could not be read, with the reason; None if all was.
        runs: how often the code ran.
        specimen: the code with its arguments as they were read.
    """

    statements: tuple[Statement, ...]
    unread: Unread | None
    runs: int
    specimen: Specimen


def computed(specimens: Sequence[Specimen]) -> Computed:
    """Return what code computes, read in the first way in which all of it can be read.

    Args:
        specimens: the code with its arguments, in each way to read them.
    """
    first: Computed | None = None
    runs = 0
    for specimen in specimens[:3]:
        search = _Search(specimen)
        try:
            statements = tuple(search.statements())
            own = replace(specimen, forms=tuple(search.forms)) if search.forms else specimen
            found = Computed(statements, None, search.runs, own)
        except Unread as error:
            found = Computed((), error, search.runs, specimen)
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            reason = f"it raised {type(error).__name__}"
            found = Computed((), Unread("projection", reason), search.runs, specimen)
        runs += found.runs
        if found.unread is None:
            return replace(found, runs=runs)
        first = first or found
    assert first is not None
    return replace(first, runs=runs)


@dataclass(frozen=True, eq=False)
class _Run:
    """The attentions of a run, and the arguments that may be masks."""

    rows: list[Rows]
    arguments: dict[str, Tensor]
    tokens: int
    masked: str = ""  # the argument that hides keys
    lines: str = ""  # that of the mask, where the outputs gave the weights
    merged: tuple[tuple[bool | None, str], ...] = ()
    pieces: tuple[bool, ...] = ()
    returns_others: tuple[bool, ...] = ()
    is_in_order: bool | None = None
    repeated: frozenset[int | str] = frozenset()  # steps of projections that run twice


class _Search:
    """Runs of one specimen."""

    def __init__(self, specimen: Specimen) -> None:
        self._specimen = specimen
        self._lab = Lab(specimen)
        self.runs = 0
        self.forms: list[tuple[Form, ...]] = []  # of masks, as they were read
        # A function is read from its outputs; None: that was not tried; False: they do not tell,
        # as where query and key are turned inside, so that it is traced.
        self._is_closed: bool | None = None
        taken = self._taken()
        free = [n for n in _BATCHES if n not in taken]
        if any(slot.high for slot in specimen.slots):
            free.sort()  # so that fewer ids are alike
        self._batch = specimen.batch if specimen.segments else (free or [specimen.batch])[0]
        if not specimen.has_batch:
            self._batch = 1
        self._free = [n for n in _LENGTHS if n not in taken and n != self._batch]
        most = max([n for n in taken if n <= _LONGEST], default=0)
        self._long = next(n for n in _LONG if n > most and n not in taken and n != self._batch)

    def _taken(self) -> set[int]:
        """Return the lengths of axes, attributes and defaults of the code."""
        taken = {n for slot in self._specimen.slots for n in slot.axes if isinstance(n, int)}
        model = self._lab.model
        for parameter in model.parameters() if model is not None else ():
            taken |= {*parameter.shape}
        for module in model.modules() if model is not None else ():
            taken |= {value for value in vars(module).values() if type(value) is int}
        for module in model.modules() if model is not None else (self._specimen.call,):
            call = getattr(module, "forward", module)
            with suppress(TypeError, ValueError):
                values = [p.default for p in inspect.signature(call).parameters.values()]
                taken |= {value for value in values if type(value) is int}
        return taken

    def _lengths(self) -> Iterator[int]:
        """Yield the numbers of tokens to find facts with, the longest first."""
        s = self._specimen
        if s.is_fixed or s.segments or s.is_example:
            yield s.tokens
            return
        if s.most_tokens is not None:
            yield from (n for n in reversed(self._free) if n <= s.most_tokens)
            return
        yield self._long
        yield from reversed(self._free)
        yield s.tokens

    def statements(self) -> Iterator[Statement]:
        """Yield a statement for each attention.

        Raises:
            Unread: a stage of an attention could not be read.
        """
        base = self._base()
        facts = [facts_of(rows, base.arguments) for rows in base.rows]
        if not facts[0].lines:
            lines = self._lines()
            facts = [replace(own, lines=lines) for own in facts]
        if any(own.mask is None for own in facts):
            line = next(own for own in facts if own.mask is None).lines.get("softmax", "")
            raise Unread("mask", "which keys a query sees follows no rule that is known", line)
        given = {*self._specimen.sources}
        facts = [replace(own, **_around(base, at, given)) for at, own in enumerate(facts)]
        adds = self._adds_positions(base)
        facts = [replace(own, adds_positions=adds) for own in facts]
        facts, hidden = self._with_masks(base, facts)
        checks = [base, *hidden, *self._others(base.tokens)]
        if len(checks) == 1:
            raise Unread("output", "it runs on one input alone, so that nothing can be verified")
        for at, own in enumerate(facts):
            worst = 0.0
            for run in checks:
                worst = max(worst, _difference(own, run, at))
            lengths = [run.tokens for run in checks]
            domain = Domain(len(checks) - 1, min(lengths), max(lengths), worst)
            yield Statement(own, domain, base.rows[at])

    def _base(self) -> _Run:
        failure: Exception | None = None
        for tokens in dict.fromkeys(self._lengths()):
            try:
                return self._run(tokens, seed=0)
            except Unread as error:
                # More tokens than ids are there are alike, so that they are not told apart.
                if not any(slot.high for slot in self._specimen.slots):
                    raise
                failure = failure or error
            except Exception as error:  # noqa: BLE001  # it may not take so many tokens
                failure = failure or error
        assert failure is not None
        raise failure

    def _others(self, base: int) -> Iterator[_Run]:
        """Yield runs with other numbers and other lengths; some with sharp weights."""
        s = self._specimen
        lengths = [base, base]
        if not (s.is_fixed or s.segments or s.is_example):
            fewer = [n for n in self._free if n < base]
            lengths = [*fewer[:2], base]
        for seed, (tokens, size) in enumerate(zip(lengths, (1.0, _SHARP, 1.0), strict=False), 1):
            try:
                yield self._run(tokens, seed=seed, size=size)
            except Unread:
                raise  # the formula holds for some inputs alone
            except Exception:  # noqa: BLE001  # it may take one length alone
                continue

    def _adds_positions(self, base: _Run) -> bool | None:
        """Return True if tokens that are alike are projected to other queries."""
        s, source = self._specimen, base.rows[0].paths[0].source
        if self._lab.model is None or isinstance(source, str):
            return None
        contents = s.contents(self._batch, base.tokens)
        contents = {name: t[:1, :1].expand_as(t).clone() for name, t in contents.items()}
        args, kwargs = s.arguments(contents, torch.float64, {})
        named = s.by_name((args, kwargs))
        self.runs += 1
        with suppress(Exception):  # it may not take one token many times
            trace = traced(self._lab.fresh(), args, kwargs, [named[n] for n in self._of_tokens])
            output = trace.steps[source].outputs[0].double()
            place = located(output.shape, self._sizes(base.tokens))
            if place is not None:
                first = torch.zeros(int(place.column.max()) + 1, dtype=torch.float64)
                first[place.column.flatten()] = output.flatten()
                return bool((output - first[place.column]).abs().max() > _CLOSE)
        return None

    def _lines(self, extra: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Return the lines of the stages of a function whose weights its outputs gave."""
        s = self._specimen
        masks = extra or {}
        tokens = next((t.shape[-1] for t in masks.values() if t.ndim > 1), s.tokens)
        batch = self._batch if masks else s.batch
        args, kwargs = s.arguments(s.contents(batch, tokens), torch.float64, masks)
        named = {**s.by_name((args, kwargs))} if not masks else self._named(args, kwargs, masks)
        inputs = [named[name] for name in self._of_tokens]
        if not all(isinstance(given, Tensor) for given in inputs):
            return {}
        self.runs += 1
        with suppress(Exception):  # it ran before, but not under a trace
            trace = traced(self._lab.fresh(), args, kwargs, inputs)
            if trace.attentions:
                return stage_lines(trace, trace.attentions[0])
            if trace.refused:
                return {"softmax": trace.refused[0][1]}
        return {}

    def _sizes(self, tokens: int) -> Sizes:
        s = self._specimen
        axes = next(iter(s.sources.values())).axes
        is_turned = "b" in axes and "t" in axes and axes.index("t") < axes.index("b")
        batch = self._batch if s.has_batch else None
        given = (slot.constant(self._batch, tokens) for slot in s.slots if slot.kind == "given")
        positions = tuple(
            table
            for table in given
            if table.dtype in (torch.int32, torch.int64)
            and table.shape in ((tokens,), (1, tokens), (self._batch, tokens))
        )
        return Sizes(batch, tokens, is_turned, positions)

    def _with_masks(self, base: _Run, facts: list[Facts]) -> tuple[list[Facts], list[_Run]]:
        """Return the facts with the mask of each argument that is one, and a run with each."""
        found: list[_Run] = []
        for forms in self._specimen.forms:
            unread: Unread | None = None
            unused: tuple[list[Facts], _Run] | None = None
            for form in _apart(forms)[:_FORMS]:
                try:
                    run = self._run(base.tokens, seed=5, masked=form)
                    own = [self._masked(known, at, run, form) for at, known in enumerate(facts)]
                    for at, known in enumerate(own):
                        _difference(known, run, at)
                except Unread as error:
                    unread = unread or error
                    continue
                except Exception:  # noqa: BLE001  # it may want a mask of another form
                    continue
                if any(known.masked[run.masked].hidings for known in own):
                    facts, unread, unused = own, None, None
                    if form.is_of_keys:
                        self.forms.append((_as_measured(form, own, run.masked),))
                    found.append(run)
                    break
                unused = unused or (own, run)
            if unused is not None:
                facts = unused[0]
                found.append(unused[1])
            elif unread is not None:
                raise unread
        return facts, found

    def _masked(self, facts: Facts, at: int, run: _Run, form: Form) -> Facts:
        """Return facts with the mask of a call that passes one."""
        mask = mask_in(run.rows[at], run.arguments)
        if mask is None:
            reason = f"what {run.masked} hides follows no rule that is known"
            raise Unread("mask", reason, facts.lines.get("softmax", ""))
        kind = "of_keys" if form.is_of_keys else "of_pairs"
        own = getattr(facts, kind) | {run.masked}
        lines = {
            **facts.lines,
            f"mask {run.masked}": run.lines or run.rows[at].lines.get("mask", ""),
        }
        masked = {**facts.masked, run.masked: mask}
        return replace(facts, masked=masked, lines=lines, **{kind: own})

    def _run(
        self,
        tokens: int,
        *,
        seed: int,
        size: float = 1.0,
        masked: Form | None = None,
    ) -> _Run:
        s, lab = self._specimen, self._lab
        contents = s.contents(self._batch, tokens, seed, size)
        contents = {n: _distinct(t, s.sources[n].high, seed) for n, t in contents.items()}
        extra = {} if masked is None else {masked.argument: self._pattern(masked, tokens)}
        args, kwargs = s.arguments(contents, torch.float64, extra)
        named = self._named(args, kwargs, extra)
        arguments = {
            name: t.clone()
            for name, t in named.items()
            if isinstance(t, Tensor) and (name in extra or name not in self._of_tokens)
        }
        name = "" if masked is None else masked.argument
        if (rows := self._of_outputs(contents, extra, arguments)) is not None:
            line = self._lines(extra).get("mask", "") if extra else ""
            return _Run([rows], arguments, tokens, name, line)
        inputs = [named[name] for name in self._of_tokens if isinstance(named[name], Tensor)]
        if len(inputs) < len(self._of_tokens):
            raise Unread("projection", "NumPy code with projections inside cannot be looked into")
        known = {slot.source: named[slot.name].clone() for slot in s.slots if slot.source}
        self.runs += 1
        trace = traced(lab.fresh(), args, kwargs, inputs)
        if not trace.attentions:
            reason, line = next(iter(trace.refused), ("no softmax of scores meets a value", ""))
            raise Unread("product", reason.partition("\n")[0].rstrip("."), line)
        return self._of_trace(trace, known, arguments, tokens, name)

    def _of_outputs(
        self, contents: Contents, extra: Mapping[str, Any], arguments: Mapping[str, Tensor]
    ) -> Rows | None:
        """Return the rows of a function of query, key and value; None where it is traced."""
        is_function = {*self._specimen.sources} == {"query", "key", "value"}
        if not is_function or self._lab.model is not None or self._is_closed is False:
            return None
        with suppress(Unread):
            rows = self._black_box(contents, extra)
            if self._is_closed is None:
                self._is_closed = False
                facts_of(rows, arguments)
                self._is_closed = True
            return rows
        return None

    def _of_trace(
        self,
        trace: Trace,
        known: Mapping[str, Tensor],
        arguments: dict[str, Tensor],
        tokens: int,
        name: str,
    ) -> _Run:
        """Return a run with what its trace tells."""
        sizes = self._sizes(tokens)
        found = rows_of(trace, Numbers(known, trace.steps), sizes)
        for own in found:
            if isinstance(own, Unread):
                raise own
        rows = [own for own in found if isinstance(own, Rows)]
        heads = tuple(merged(own, trace, sizes) for own in rows)
        rows = [
            replace(
                own,
                lines={**own.lines, **stage_lines(trace, own.attentions[0]), **_ways(own, trace)},
            )
            for own in rows
        ]
        pieces = tuple(_projects_pieces(own, trace, self._batch * tokens) for own in rows)
        others = (len(rows) == 1 and returns_others(rows[0], trace),)
        repeated = _repeated(trace, rows)
        in_order = keeps_order(rows[0], trace, sizes) if len(rows) == 1 else None
        return _Run(rows, arguments, tokens, name, "", heads, pieces, others, in_order, repeated)

    def _named(
        self, args: list[Any], kwargs: dict[str, Any], extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return {**self._specimen.by_name((args, kwargs)), **extra}

    @property
    def _of_tokens(self) -> list[str]:
        return [slot.name for slot in self._specimen.slots if slot.source]

    def _black_box(self, contents: Contents, extra: Mapping[str, Any]) -> Rows:
        def run(own: Contents) -> Tensor:
            self.runs += 1
            return self._lab.run(own, extra=extra).rows

        return rows_of_function(run, contents, self._specimen.name)

    def _pattern(self, form: Form, tokens: int) -> Tensor:
        """Return a mask of that form that hides some keys, in each sample others."""
        generator = torch.Generator().manual_seed(11)
        shape = (self._batch, 1, tokens) if form.is_of_keys else (self._batch, tokens, tokens)
        keep = torch.rand(shape, generator=generator) < 0.6
        if form.axes == "lengths":
            lengths = torch.arange(self._batch) % max(tokens - 2, 1) + 2
            keep = (torch.arange(tokens) < lengths[:, None])[:, None, :]
        keep[..., 0] = True  # no row is empty, whatever else is masked
        if not form.is_of_keys:
            keep |= torch.eye(tokens, dtype=torch.bool)
        return form.encode(keep.expand(self._batch, tokens, tokens))


def _around(run: _Run, at: int, given: Collection[str]) -> dict[str, Any]:
    """Return what is known beside the formula: shared numbers, and how heads are merged.

    Args:
        run: of the code.
        at: the number of the attention.
        given: the names of the inputs.
    """
    rows = run.rows[at]
    parts = {"query": rows.query, "key": rows.key, "value": rows.value}
    pairs = (("query", "key"), ("query", "value"), ("key", "value"))
    sources = {name: path.source for name, path in zip(parts, rows.paths, strict=True)}
    shares = [
        f"{one} {other} layer" if sources[one] in run.repeated else f"{one} {other}"
        for one, other in pairs
        if isinstance(sources[one], int)  # one input may be query, key and value
        and parts[one].shape == parts[other].shape
        and torch.equal(parts[one], parts[other])
    ]
    if {*parts} <= {*given}:
        shares += [
            f"{name} is {source}"
            for name, source in zip(parts, rows.inputs, strict=True)
            if source and source != name
        ]
    numbers = (rows.query, rows.key, rows.weights)
    if rows.query.shape[1] > 1 and all(torch.equal(t[:, :1].expand_as(t), t) for t in numbers):
        shares.append("heads")
    if run.is_in_order is False:
        shares.append("order")
    if run.returns_others[at : at + 1] == (True,):
        shares.append("returned")
    if run.pieces[at : at + 1] == (True,):
        shares.append("pieces")
    if isinstance(rows.paths[2].source, str) and not isinstance(rows.paths[0].source, str):
        shares.append("value input")
    found: dict[str, Any] = {
        "consistent": consistent(rows, run.arguments),
        "shares": tuple(shares),
        "crosses": rows.crosses,
        "is_module": not isinstance(rows.paths[0].source, str),
        "value_heads": rows.value_map or rows.head_map,
    }
    if run.merged:
        is_merged, line = run.merged[at]
        found |= {"is_merged": is_merged, "lines": {**rows.lines, "merge": line}}
    return found


def _projects_pieces(rows: Rows, trace: Trace, tokens: int) -> bool:
    """Return True if one matrix projects each of several pieces of a token."""
    source = rows.paths[0].source
    if isinstance(source, str):
        return False
    for given in trace.steps[source].inputs[-2:-1]:  # the rows, before the matrix
        flat = given.reshape(-1, given.shape[-1]) if given.ndim == 3 and len(given) == 1 else given
        if flat.ndim == 2 and len(flat) > tokens and len(flat) % tokens == 0:
            return len(cast(Tensor, flat[:, 0].unique())) > tokens
    return False


def _ways(rows: Rows, trace: Trace) -> dict[str, str]:
    """Return the lines of the projections, and of the step that gives all heads their keys."""
    found: dict[str, str] = {}
    for name, path in zip(("query", "key", "value"), rows.paths, strict=True):
        if not isinstance(path.source, int):
            continue
        output = trace.steps[path.source].outputs[0]
        again = [
            step
            for step in trace.steps[path.source : rows.attentions[0].at]
            if step.projects and step.outputs[0].equal(output)
        ]
        # A layer that gives the key first and the value later is at fault where it runs again.
        found[f"{name} layer"] = (again[-1] if name == "value" else again[0]).line
    attention = rows.attentions[0]
    if attention.key is None:
        return found
    keys = attention.key.flatten()
    for step in trace.steps[: attention.at]:
        for output in step.outputs:
            is_whole = output.is_floating_point() and output.numel() >= keys.numel()
            if (
                is_whole
                and step.depends
                and _repeats(output, keys)
                and bool(torch.isin(keys, output.double()).all())
            ):
                found["keys"] = step.line
                return found
    return found


def _repeated(trace: Trace, rows: Sequence[Rows]) -> frozenset[int | str]:
    """Return the projections of some attentions that a later step gives once more."""
    sources = {path.source for own in rows for path in own.paths if isinstance(path.source, int)}
    outputs = {source: trace.steps[source].outputs[0] for source in sources}
    return frozenset(
        source
        for source, output in outputs.items()
        for step in trace.steps[source + 1 :]
        if step.projects and step.outputs[0].equal(output)
    )


def _repeats(output: Tensor, keys: Tensor) -> bool:
    """Return True if a tensor holds each number of the keys as often as they do."""
    return int((output == keys[0]).sum()) >= int((keys == keys[0]).sum()) > 1


def _apart(forms: Sequence[Form]) -> list[Form]:
    """Return the forms that differ in more than their meaning, which is measured.

    The numbers that are added come early: code that adds its mask takes a bool one, too.
    """
    kinds: dict[tuple[str, str], Form] = {}
    for form in forms:
        kinds.setdefault((form.axes, form.kind), form)
    own = [*kinds.values()]
    added = [form for form in own if form.kind == "added"]
    # Bool before whole numbers, of which code that turns its mask round makes other ones.
    axes = [*dict.fromkeys(form.axes for form in own)]
    rest = sorted(
        (form for form in own if form.kind != "added"),
        key=lambda form: (axes.index(form.axes), form.kind == "long"),
    )
    return [*rest[:2], *added[:1], *rest[2:], *added[1:]]


def _as_measured(form: Form, facts: Sequence[Facts], argument: str) -> Form:
    """Return the form of a mask with the meaning that its runs show."""
    readings = {
        hiding.reading
        for known in facts
        for hiding in known.masked[argument].hidings
        if hiding.argument == argument
    }
    return replace(form, keeps="hides" not in readings, is_sure=True)


def _distinct(contents: Tensor, high: int, seed: int) -> Tensor:
    """Return ids of which no two are alike as far as there are so many."""
    if not high:
        return contents
    count = contents.numel()
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(high, generator=generator) for _ in range(count // high + 1)]
    return torch.cat(rows)[:count].reshape(contents.shape)


def _difference(facts: Facts, run: _Run, at: int) -> float:
    """Return the largest difference between the output of the facts and that of a run.

    Raises:
        Unread: the run has other facts.
    """
    line = facts.lines.get("softmax", "")
    if at >= len(run.rows):
        raise Unread("product", f"with {run.tokens} tokens it has fewer attentions", line)
    rows = run.rows[at]
    other = replace(facts, **_of_ways(rows))
    if not facts.same_ways(other):
        raise Unread("projection", f"{run.tokens} tokens are projected in another way", line)
    mask = facts.masked.get(run.masked, facts.mask)
    weights = facts.weights(rows.query, rows.key, mask, run.arguments)
    if weights is None:
        raise Unread("mask", f"what is masked of {run.tokens} tokens follows no rule", line)
    # A row in which all keys are masked has no weights of its own.
    own = rows.weights.nan_to_num(0.0)
    dead = weights.sum(-1, keepdim=True) == 0
    if mask is not None and mask.hidings:
        dead = dead | is_empty(rows)
    gap = torch.where(dead, 0.0, (weights - own) @ rows.value)
    difference = float(gap.abs().max())
    size = max(1.0, float(rows.value.abs().max()))
    if not difference <= _CLOSE * size:
        sentence = f"on {run.tokens} tokens the formula differs by {difference:.1g}"
        raise Unread("softmax", sentence, line)
    return difference


def _of_ways(rows: Rows) -> dict[str, Any]:
    query, key, value = (path.operations or () for path in rows.paths)
    return {
        "module": rows.module,
        "heads": rows.query.shape[1],
        "key_heads": rows.head_map,
        "head_dim": rows.query.shape[-1],
        "query": query,
        "key": key,
        "value": value,
    }
