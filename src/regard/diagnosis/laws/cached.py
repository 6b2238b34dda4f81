"""The law of caches: piece by piece gives what all at once gives."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, cast, get_args, get_type_hints

import torch
from torch import Tensor, nn

from regard.diagnosis.inputs.lab import Lab, NotTried, Run, differs
from regard.diagnosis.inputs.signature import is_cache, signature_of
from regard.diagnosis.inputs.specimen import Contents, Specimen
from regard.diagnosis.inputs.subject import is_installed
from regard.diagnosis.inputs.tape import Place, addresses, first_place, tensors_in
from regard.diagnosis.laws.law import Breach, Law

FILLED = (
    "The example fills its cache, so that no run is without one: pass an example of several tokens "
    "with caches of zeros, and the positions of the tokens, from 0."
)


class Cache(Law):
    """Tokens that come piece by piece, with a cache, give what they give at once.

    A cache is what a call gives back, fills or keeps, what grows with the tokens or is written, and
    what the next call goes on with.
    """

    name = "cache"
    formula = "f(x[n:], cache of f(x[:n])) = f(x)[n:]"
    example = "k = torch.cat([k, past_k], dim=2)  # the new keys before the old ones"

    def breach(self, lab: Lab) -> Breach | None:
        """Run all tokens at once, and the last two one by one."""
        s = lab.specimen
        is_direct = {"query", "key", "value"} <= set(s.sources)
        has_cached_keys = any(slot.source and is_cache(slot.name) for slot in s.slots)
        if is_direct and (s.has_fewer_queries or has_cached_keys):
            return self._continued(lab)
        if is_installed(s.call):
            raise NotTried("Its cache is an object of its package.", applies=False)
        if not s.has_tokens or not lab.sees_rows or s.is_fixed or s.tokens < _FEWEST:
            raise NotTried("Its tokens cannot be cut into pieces.", applies=False)
        contents = s.contents(s.batch, s.tokens, seed=8)
        breaches: list[Breach] = []
        for way in _ways(lab, contents):
            try:
                breach = self._in_pieces(lab, contents, lab.run(contents).rows, way)
            except NotTried:
                if way.goes_on:
                    raise
                continue
            if breach is None:
                return None
            breaches.append(breach)
        if breaches:
            return breaches[0]
        named = next(filter(is_cache, signature_of(s.call).parameters), None)
        if named is not None:
            raise NotTried(f"No call goes on with {named}: pass an example that shows one.")
        raise NotTried("It takes no cache.", applies=False)

    def _in_pieces(
        self, lab: Lab, contents: Contents, rows_at_once: Tensor, way: "_Way"
    ) -> Breach | None:
        """Compare the last rows with those of pieces of several sizes."""
        s, is_causal = lab.specimen, self._is_causal(lab, contents, rows_at_once)
        splits = ((1, 1), (2,), (1,) * (s.tokens - 1)) if is_causal else ((1, 1),)
        for sizes in splits:
            try:
                rows = way(contents, sizes)
            except NotTried:
                if sizes == splits[0]:
                    raise
                continue  # much code takes one new token at a time
            count = sum(sizes) if is_causal else 1
            rows, right = rows[:, -count:], rows_at_once[:, -count:]
            if rows.shape == right.shape and not differs(rows, right).any():
                continue
            if sizes == (2,) and self._takes_one_token(lab, contents, rows, way):
                lab.notes.append("With a cache it takes one new token at a time.")
                continue
            if not is_causal and s.causal is False:
                raise NotTried(
                    "Its tokens see later ones: pieces of a text need not give what all of it "
                    "gives."
                )
            if not way.goes_on:
                raise NotTried("It takes no cache.")
            return self._breach(lab, contents, sizes, rows, right, way)
        return None

    @staticmethod
    def _breach(
        lab: Lab,
        contents: Contents,
        sizes: Sequence[int],
        rows: Tensor,
        right: Tensor,
        way: "_Way",
    ) -> Breach:
        """Return the breach of pieces, with the first row that differs."""
        if rows.shape != right.shape:
            return Breach(f"With a cache it gives {tuple(rows.shape)}: {tuple(right.shape)}.")
        tokens = lab.specimen.tokens
        first = int(differs(rows, right).any(-1).any(0).nonzero()[0]) + tokens - right.shape[1] + 1
        most = float((rows - right).abs().max())
        words = "two tokens together" if sizes == (2,) else "tokens one by one"
        line = way.place  # further calls of the way move it
        is_top_left = sizes == (1, 1) and Cache._sees_oldest_alone(lab, contents, way)
        line = None if is_top_left else line
        where = "" if line is None else " The line is the first one that uses the cache."
        return Breach(
            f"After {tokens - sum(sizes)} tokens in a cache, and then {words}, token {first} of "
            f"{tokens} differs by up to {most:.3g} from a call with all tokens at once.{where}",
            line,
            kind="causal-top-left" if is_top_left else "",
        )

    @staticmethod
    def _takes_one_token(lab: Lab, contents: Contents, rows: Tensor, way: "_Way") -> bool:
        """Return True if two new tokens see all tokens, or are taken for the first two."""
        s = lab.specimen
        others = [way(s.changed(contents, token=j), (2,)) for j in range(s.tokens)]
        seen = torch.stack([differs(other, rows).any(-1)[0] for other in others])  # (tokens, 2)
        places = torch.arange(s.tokens)[:, None]
        newest = torch.arange(2)
        own = places == s.tokens - 2 + newest  # by its query a token moves its own row
        return bool(seen.all()) or (seen | own).equal((places <= newest) | own)

    @staticmethod
    def _sees_oldest_alone(lab: Lab, contents: Contents, way: "_Way") -> bool:
        """Return True if the newest token sees the oldest of a cache, and not the second."""
        base = way(contents)[:, -1]
        moved = [way(lab.specimen.changed(contents, token=j))[:, -1] for j in (0, 1)]
        return [bool(differs(rows, base).any()) for rows in moved] == [True, False]

    @staticmethod
    def _continued(lab: Lab) -> Breach | None:
        """Compare the last queries, with the keys of all tokens, with the last rows."""
        s = lab.specimen
        contents = s.contents(s.batch, s.tokens, seed=8)
        rows_at_once = lab.run(contents).rows
        if not Cache._is_causal(lab, contents, rows_at_once):
            raise NotTried(
                "Its tokens see later ones, so that no cache can be of use.", applies=False
            )
        try:
            rows = lab.run({**contents, "query": contents["query"][:, -2:]}).rows
        except Exception as error:
            raise NotTried(
                f"With fewer queries than keys it raises {type(error).__name__}.", applies=False
            ) from error
        if (
            rows.shape != rows_at_once[:, -2:].shape
            or not differs(rows, rows_at_once[:, -2:]).any()
        ):
            return None
        if s.causal is None:
            raise NotTried(
                "With fewer queries than keys its first query sees the first key only: pass "
                "causal=True if the last query is the newest token, as with a cache."
            )
        most = float((rows - rows_at_once[:, -2:]).abs().max())
        return Breach(
            f"The last two queries, with the keys of all {s.tokens} tokens, differ by up to "
            f"{most:.3g} from a call with all queries.",
            kind="causal-top-left",
        )

    @staticmethod
    def _is_causal(lab: Lab, contents: Contents, rows_at_once: Tensor) -> bool:
        other = lab.run(lab.specimen.changed(contents, token=-1)).rows
        return not bool(differs(other[:, :-1], rows_at_once[:, :-1]).any())


_FEWEST = 4  # tokens that can be cut
_PIECE = 2  # tokens of the first piece of a trial


@dataclass(eq=False)
class _Way:
    """One way to pass on what a call gives back, fills or keeps.

    Attributes:
        lab: runs the code.
        caches: names of its arguments that take a cache; none if it keeps one.
        flags: names of those that ask for one.
        starts: names of those that take the number of tokens before a piece.
        empty: what the first call gets as its cache.
        place: the line of the last piece that first uses the cache; None if none is the user's.
    """

    lab: Lab
    caches: tuple[str, ...]
    flags: tuple[str, ...]
    starts: tuple[str, ...]
    empty: Mapping[str, Any] = field(default_factory=dict[str, Any])
    place: Place | None = None

    def __call__(self, contents: Contents, sizes: Sequence[int] = (1, 1)) -> Tensor:
        """Return the rows of pieces of these sizes after a first one of all other tokens."""
        first = self.lab.specimen.tokens - sum(sizes)
        try:
            runs, _ = self._fed(contents, (first, *sizes))
        except Exception as error:
            raise NotTried(f"In such pieces it raises {type(error).__name__}.") from error
        return torch.cat([run.rows for run in runs[1:]], 1)

    @cached_property
    def goes_on(self) -> bool:
        """True if what a call got moves the next one, by something that grows, or is kept.

        Arguments that take what a call gave back for another use do not grow with the tokens.
        """
        s = self.lab.specimen
        contents = s.contents(s.batch, s.tokens, seed=8)
        changed = s.changed(s.changed(contents, token=0), token=1)
        with suppress(Exception):  # it may take no such argument
            runs, counts = self._fed(contents, (_PIECE, 1))
            others, _ = self._fed(changed, (_PIECE, 1))
            return (counts[0] < counts[1] or not self.caches) and bool(
                differs(runs[1].rows, others[1].rows).any()
            )
        return False

    def record(self, contents: Contents) -> tuple[tuple[str, ...], bool, bool]:
        """Return what the first call of the way does with what may be a cache.

        Returns:
            The arguments that it writes into; True if it writes into what the module keeps; True if
            it gives back more than its output.
        """
        call = self.lab.fresh()
        kept = {*addresses([tensor for _, tensor in _kept(call)])}
        with suppress(Exception):  # it may take no such argument
            run = self._piece(contents, call, dict(self.empty), 0, _PIECE)
            writes = [step.writes for step in run.steps if step.name.endswith("_")]
            at = set[int]().union(*writes)
            given = self.lab.specimen.by_name(run.arguments).items()
            tensors = {name: _tensors_of(value) for name, value in given}
            written = tuple(
                name
                for name, of_name in tensors.items()
                if any(bool(t.any()) for t in of_name)
                and (name in self.empty or not at.isdisjoint(addresses(of_name)))
            )
            result = cast("Sized", run.result) if isinstance(run.result, tuple | Mapping) else ()
            return written, not at.isdisjoint(kept), len(result) > 1
        return (), False, False

    def _piece(
        self,
        contents: Contents,
        call: Callable[..., Any],
        held: Mapping[str, Any],
        done: int,
        size: int,
    ) -> Run:
        """Return the run of the tokens behind the first ones that are done."""
        piece = {name: t[:, done : done + size] for name, t in contents.items()}
        extra = {**dict.fromkeys(self.flags, True), **dict.fromkeys(self.starts, done)}
        extra |= {**_tables(self.lab, done, size), **held}
        return self.lab.run(piece, call=call, extra=extra, keeps=True)

    def _fed(self, contents: Contents, sizes: Sequence[int]) -> tuple[list[Run], list[int]]:
        """Return the run of each piece, and the count of the numbers other than 0 it hands on.

        Raises:
            Exception: whatever the code raises.
        """
        lab, call = self.lab, self.lab.fresh()
        runs: list[Run] = []
        counts: list[int] = []
        held, done = dict(self.empty), 0
        for size in sizes:
            run = self._piece(contents, call, held, done, size)
            done += size
            held = self._held(run, contents, done)
            counts.append(sum(int((t != 0).sum()) for t in _tensors_of([*held.values()])))
            runs.append(run)
        given = lab.specimen.by_name(runs[-1].arguments)
        passed = {at for n in self.caches for at in addresses(_tensors_of(given.get(n)))}
        kept = {*addresses([tensor for _, tensor in _kept(call)])}
        self.place = first_place(
            runs[-1].steps,
            lambda step: (
                not passed.isdisjoint(step.reads)
                or (step.name.endswith("_") and not kept.isdisjoint(step.writes))
            ),
        )
        return runs, counts

    def _held(self, run: Run, contents: Contents, done: int) -> dict[str, Any]:
        """Return what the next call gets as its cache.

        Raises:
            NotTried: the call gives back nothing that the arguments could take.
        """
        caches, s = self.caches, self.lab.specimen
        if not caches:
            return {}  # in its buffers
        result = run.result
        if isinstance(result, Mapping):
            result = tuple(cast("Mapping[str, Any]", result).values())
        rest = list(cast("Sequence[Any]", result)[1:]) if isinstance(result, tuple) else []
        # Weights have a row for each query, and a column for each key.
        of_weights = (run.rows.shape[1], done)
        rest = [p for p in rest if p is not None and getattr(p, "shape", ())[-2:] != of_weights]
        if not rest and {"key", "value"} <= set(contents):
            rest = [s.sources[n].lay_out(contents[n][:, :done]) for n in ("key", "value")]
        arguments = s.by_name(run.arguments)
        if not rest and set(caches) <= set(arguments):
            return {name: arguments[name] for name in caches}  # it writes into them
        if not all(map(_tensors_of, rest)) or not rest:
            raise NotTried("It gives back no cache.")
        if len(caches) == 1:
            return {caches[0]: rest[0] if len(rest) == 1 else tuple(rest)}
        return dict(zip(caches, tensors_in(rest), strict=True))


def _ways(lab: Lab, contents: Contents) -> Iterator[_Way]:
    """Yield the ways in which pieces may be passed, as a run of the first piece shows them.

    A cache is what the call writes into, what the module keeps, or what the call gives back beside
    its output; an argument of the caller's that the call only reads takes none.
    """
    s = lab.specimen
    slots = {slot.name: slot for slot in s.slots}
    masks = {form.argument for form, *_ in s.forms}
    values = {
        name: slots[name].value if name in slots else parameter.default
        for name, parameter in signature_of(s.call).parameters.items()
        if name not in masks
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and not (name in slots and (slots[name].source or slots[name].meaning))
    }
    starts = tuple(name for name, value in values.items() if type(value) is int and value == 0)
    flags = tuple(name for name, value in values.items() if value is False)
    open_names = [
        name
        for name, value in values.items()
        if not isinstance(value, int | float | str | type) and (name not in slots or is_cache(name))
    ]
    for own_flags in ((), *((flag,) for flag in flags)) if values or _kept(s.call) else ():
        for own_starts in dict.fromkeys((starts, ())):
            plain = _Way(lab, (), own_flags, own_starts)
            written, is_kept, gives_back = plain.record(contents)
            caches = tuple(name for name in written if name in values)
            if caches:
                yield replace(plain, caches=caches)
            if own_starts and is_kept:
                yield plain
            if gives_back or {"key", "value"} <= set(contents):
                for caches in (*((name,) for name in open_names), *pairwise(open_names)):
                    yield replace(plain, caches=caches)
            for name in open_names:
                for empty in _empty_caches(lab, name):
                    way = replace(plain, caches=(name,), empty=empty)
                    if name in way.record(contents)[0]:
                        yield way


def _empty_caches(lab: Lab, name: str) -> Iterator[dict[str, Any]]:
    """Yield the objects that the first call may get as its cache, and write into."""
    call = lab.specimen.call
    with suppress(Exception):  # annotations may name what is not there
        hint = get_type_hints(call.forward if isinstance(call, nn.Module) else call)[name]
        for own in get_args(hint) or (hint,):
            if isinstance(own, type) and own.__module__ not in ("builtins", "torch"):
                yield {name: own()}
    yield from ({name: {}}, {name: []})


def _tensors_of(cache: object) -> list[Tensor]:
    """Return the tensors in a cache of any kind."""
    parts = cast("list[object]", cache) if isinstance(cache, list) else [cache]
    return [
        tensor
        for part in parts
        for tensor in tensors_in(part) or tensors_in(getattr(part, "__dict__", {}))
    ]


def _kept(call: Callable[..., Any]) -> list[tuple[str, Tensor]]:
    """Return the buffers of a module, and its other tensors that are no parameters, by name."""
    if not isinstance(call, nn.Module):
        return []
    return [
        (f"{prefix}.{name}", value)
        for prefix, part in cast("Iterator[tuple[str, nn.Module]]", call.named_modules())
        for name, value in (*part.named_buffers(recurse=False), *vars(part).items())
        if isinstance(value, Tensor)
    ]


def has_filled_cache(specimen: Specimen) -> bool:
    """Return True if an example continues a text: its cache holds keys, or it begins behind 0."""
    for slot in specimen.slots:
        tensors = [part.value for part in slot.parts] or _tensors_of(slot.value)
        if is_cache(slot.name) and not slot.source and any(bool(t.any()) for t in tensors):
            return True
    is_behind = any(type(slot.value) is int and slot.value > 0 for slot in specimen.slots)
    _, is_kept, _ = _Way(Lab(specimen), (), (), ()).record(
        specimen.contents(specimen.batch, specimen.tokens)
    )
    return is_behind and is_kept


def _tables(lab: Lab, done: int, size: int) -> dict[str, Any]:
    """Return the rows of tables in the example, such as positions, for some of the tokens."""
    s = lab.specimen
    return {
        slot.name: slot.constant(s.batch, size, done)
        for slot in s.slots
        if any("t" in part.axes for part in slot.parts) and not slot.meaning
    }
