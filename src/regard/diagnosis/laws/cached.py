"""The law of caches: piece by piece gives what all at once gives."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast, get_args, get_type_hints

import torch
from torch import Tensor, nn

from regard.diagnosis.inputs.lab import Lab, NotTried, Run, differs
from regard.diagnosis.inputs.signature import is_cache, signature_of
from regard.diagnosis.inputs.specimen import Contents, Slot, Specimen
from regard.diagnosis.inputs.subject import is_installed
from regard.diagnosis.inputs.tape import Place, addresses, first_place, in_words, tensors_in
from regard.diagnosis.laws.law import Breach, Law

FILLED = (
    "The example fills its cache, so that no run is without one: pass an example of several tokens "
    "with caches of zeros, and the positions of the tokens, from 0."
)

_CACHE = re.compile(r"cache|past|^mem(ory)?_kv$")
_ANGLES = re.compile(r"cos|sin|freq|rot|rope|pos")
_FLAG = re.compile(r"^(use|return|output|update|with)_")
_START = re.compile(r"^(start_?pos|pos|offset|start|input_pos|cache_pos\w*|past_len\w*|cur_pos)$")


class Cache(Law):
    """Tokens that come piece by piece, with a cache, give what they give at once."""

    name = "cache"
    formula = "f(x[n:], cache of f(x[:n])) = f(x)[n:]"
    example = "k = torch.cat([k, past_k], dim=2)  # the new keys before the old ones"

    def breach(self, lab: Lab) -> Breach | None:
        """Run all tokens at once, and the last two one by one."""
        s = lab.specimen
        parameters = signature_of(s.call).parameters
        flags = [n for n, p in parameters.items() if _is_flag(n, p)]
        starts = [n for n in parameters if _START.match(n)]
        caches = [n for n in parameters if _CACHE.search(n) and n not in (*flags, *starts)]
        if not caches and not (starts and _kept(s.call)):
            is_direct = {"query", "key", "value"} <= set(s.sources)
            if is_direct and s.has_fewer_queries:
                return self._continued(lab)
            raise NotTried("It takes no cache.", applies=False)
        if any(slot.name in caches and slot.source for slot in s.slots):
            return self._continued(lab)
        if is_installed(s.call):
            raise NotTried("Its cache is an object of its package.", applies=False)
        if not all(_is_empty(lab, slot) for slot in s.slots if slot.name in caches):
            raise NotTried(FILLED)
        if not s.has_tokens or not lab.sees_rows or s.is_fixed:
            raise NotTried("Its tokens cannot be cut into pieces.")
        contents = s.contents(s.batch, s.tokens, seed=8)
        if not caches and not _has_room(lab, contents, starts):
            lab.notes.append("It keeps no keys between calls: set up its cache to check that.")
            raise NotTried("It keeps no keys between calls.", applies=False)
        try:
            whole = lab.run(contents).rows
        except Exception as error:
            raise NotTried(f"Without a cache it raises {type(error).__name__}.") from error
        return self._in_pieces(lab, contents, whole, _Pieces(lab, caches, flags, starts))

    def _in_pieces(
        self, lab: Lab, contents: Contents, whole: Tensor, pieces: "_Pieces"
    ) -> Breach | None:
        """Compare the last rows with those of pieces of several sizes."""
        s, is_causal = lab.specimen, self._is_causal(lab, contents, whole)
        splits = ((1, 1), (2,), (1,) * (s.tokens - 1)) if is_causal else ((1, 1),)
        for sizes in splits:
            try:
                rows = pieces(contents, sizes)
            except NotTried:
                if sizes == splits[0]:
                    raise
                continue  # much code takes one new token at a time
            count = sum(sizes) if is_causal else 1
            rows, right = rows[:, -count:], whole[:, -count:]
            if rows.shape == right.shape and not differs(rows, right).any():
                continue
            if sizes == (2,) and self._takes_one_token(lab, contents, rows, pieces):
                lab.notes.append("With a cache it takes one new token at a time.")
                continue
            if not is_causal and s.causal is False:
                raise NotTried(
                    "Its tokens see later ones: pieces of a text need not give what all of it "
                    "gives."
                )
            return self._breach(lab, contents, sizes, rows, right, pieces)
        return None

    @staticmethod
    def _breach(
        lab: Lab,
        contents: Contents,
        sizes: Sequence[int],
        rows: Tensor,
        right: Tensor,
        pieces: "_Pieces",
    ) -> Breach:
        """Return the breach of pieces, with the first row that differs."""
        if rows.shape != right.shape:
            return Breach(f"With a cache it gives {tuple(rows.shape)}: {tuple(right.shape)}.")
        tokens = lab.specimen.tokens
        first = int(differs(rows, right).any(-1).any(0).nonzero()[0]) + tokens - right.shape[1] + 1
        most = float((rows - right).abs().max())
        words = "two tokens together" if sizes == (2,) else "tokens one by one"
        is_top_left = sizes == (1, 1) and Cache._sees_oldest_alone(lab, contents, pieces)
        place = None if is_top_left else pieces.place(contents, sizes)
        where = "" if place is None else " The line is the first one that uses the cache."
        return Breach(
            f"After {tokens - sum(sizes)} tokens in a cache, and then {words}, token {first} of "
            f"{tokens} differs by up to {most:.3g} from a call with all tokens at once.{where}",
            place,
            kind="causal-top-left" if is_top_left else "",
        )

    @staticmethod
    def _takes_one_token(lab: Lab, contents: Contents, rows: Tensor, pieces: "_Pieces") -> bool:
        """Return True if two new tokens see all tokens, or are taken for the first two."""
        s = lab.specimen
        others = [pieces(s.changed(contents, token=j), (2,)) for j in range(s.tokens)]
        seen = torch.stack([differs(other, rows).any(-1)[0] for other in others])  # (tokens, 2)
        places = torch.arange(s.tokens)[:, None]
        newest = torch.arange(2)
        own = places == s.tokens - 2 + newest  # by its query a token moves its own row
        return bool(seen.all()) or (seen | own).equal((places <= newest) | own)

    @staticmethod
    def _sees_oldest_alone(lab: Lab, contents: Contents, pieces: "_Pieces") -> bool:
        """Return True if the newest token sees the oldest of a cache, and not the second."""
        base = pieces(contents)[:, -1]
        moved = [pieces(lab.specimen.changed(contents, token=j))[:, -1] for j in (0, 1)]
        return [bool(differs(rows, base).any()) for rows in moved] == [True, False]

    @staticmethod
    def _continued(lab: Lab) -> Breach | None:
        """Compare the last queries, with the keys of all tokens, with the last rows."""
        s = lab.specimen
        contents = s.contents(s.batch, s.tokens, seed=8)
        whole = lab.run(contents).rows
        if not Cache._is_causal(lab, contents, whole):
            raise NotTried(
                "Its tokens see later ones, so that no cache can be of use.", applies=False
            )
        try:
            rows = lab.run({**contents, "query": contents["query"][:, -2:]}).rows
        except Exception as error:
            raise NotTried(
                f"With fewer queries than keys it raises {type(error).__name__}.", applies=False
            ) from error
        if rows.shape != whole[:, -2:].shape or not differs(rows, whole[:, -2:]).any():
            return None
        if s.causal is None:
            raise NotTried(
                "With fewer queries than keys its first query sees the first key only: pass "
                "causal=True if the last query is the newest token, as with a cache."
            )
        most = float((rows - whole[:, -2:]).abs().max())
        return Breach(
            f"The last two queries, with the keys of all {s.tokens} tokens, differ by up to "
            f"{most:.3g} from a call with all queries.",
            kind="causal-top-left",
        )

    @staticmethod
    def _is_causal(lab: Lab, contents: Contents, whole: Tensor) -> bool:
        other = lab.run(lab.specimen.changed(contents, token=-1)).rows
        return not bool(differs(other[:, :-1], whole[:, :-1]).any())


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Calls with a cache, piece by piece.

    Attributes:
        lab: runs the code.
        caches: names of its arguments that take a cache.
        flags: names of those that ask for one.
        starts: names of those that take the number of tokens before a piece.
    """

    lab: Lab
    caches: Sequence[str]
    flags: Sequence[str]
    starts: Sequence[str]

    def __call__(self, contents: Contents, sizes: Sequence[int] = (1, 1)) -> Tensor:
        """Return the rows of pieces of these sizes after a first one of all other tokens."""
        return torch.cat([run.rows for run in self._runs(contents, sizes)[1:]], 1)

    def place(self, contents: Contents, sizes: Sequence[int]) -> Place | None:
        """Return the line of the last piece that first uses the cache; None if none is the user's.

        It reads what it is passed, or writes into what the module keeps.
        """
        last = self._runs(contents, sizes, keeps=True)[-1]
        arguments = self.lab.specimen.by_name(last.arguments)
        passed = {at for n in self.caches for at in addresses(_tensors_of(arguments.get(n)))}
        kept = {*addresses([tensor for _, tensor in _kept(last.call)])}
        return first_place(
            last.steps,
            lambda step: (
                not passed.isdisjoint(step.reads)
                or (step.name.endswith("_") and not kept.isdisjoint(step.writes))
            ),
        )

    def _runs(self, contents: Contents, sizes: Sequence[int], *, keeps: bool = False) -> list[Run]:
        refusals: list[NotTried] = []
        sizes = (self.lab.specimen.tokens - sum(sizes), *sizes)
        for empty in _empty_caches(self.lab, self.caches):
            try:
                return self._fed(contents, sizes, empty, keeps=keeps)
            except NotTried as error:
                refusals.append(error)
        raise refusals[0]

    def _fed(
        self, contents: Contents, sizes: Sequence[int], held: Mapping[str, Any], *, keeps: bool
    ) -> list[Run]:
        call = self.lab.fresh()
        runs: list[Run] = []
        done = 0
        for size in sizes:
            piece = {name: t[:, done : done + size] for name, t in contents.items()}
            extra = {**dict.fromkeys(self.flags, True), **dict.fromkeys(self.starts, done)}
            extra |= {**_tables(self.lab, done, size), **held}
            try:
                run = self.lab.run(piece, call=call, extra=extra, keeps=keeps)
            except Exception as error:
                raise NotTried(
                    f"With a cache as check makes it, it raises {in_words(error)}."
                ) from error
            done += size
            held = self._held(run, contents, done)
            runs.append(run)
        return runs

    def _held(self, run: Run, contents: Contents, done: int) -> dict[str, Any]:
        """Return what the next call gets as its cache."""
        caches, s = self.caches, self.lab.specimen
        if not caches:
            return {}  # in its buffers
        result = run.result
        if isinstance(result, Mapping):
            result = cast("Mapping[str, Any]", result)
            rest: list[Any] = [v for k, v in result.items() if _CACHE.search(k)]
        else:
            rest = list(cast("Sequence[Any]", result)[1:]) if isinstance(result, tuple) else []
        # Weights have a row for each query, and a column for each key.
        of_weights = (run.rows.shape[1], done)
        rest = [p for p in rest if p is not None and getattr(p, "shape", ())[-2:] != of_weights]
        if not rest and {"key", "value"} <= set(contents):
            rest = [s.sources[n].lay_out(contents[n][:, :done]) for n in ("key", "value")]
        arguments = s.by_name(run.arguments)
        if not rest and set(caches) <= set(arguments):
            rest = [arguments[name] for name in caches]  # it writes into them
            rest = rest if all(map(_tensors_of, rest)) else []
        if not rest:
            raise NotTried("It gives back no cache: pass an example that shows one.")
        if len(caches) == 1:
            return {caches[0]: rest[0] if len(rest) == 1 else tuple(rest)}
        tensors = tensors_in(rest)
        if len(tensors) != len(caches):
            raise NotTried("It gives back another number of caches than it takes.")
        return dict(zip(caches, tensors, strict=True))


def _empty_caches(lab: Lab, caches: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what the first call may get as its cache: nothing, or an object that it writes into."""
    yield {}
    if len(caches) != 1:
        return
    [name] = caches
    call = lab.specimen.call
    with suppress(Exception):  # annotations may name what is not there
        hint = get_type_hints(call.forward if isinstance(call, nn.Module) else call)[name]
        for own in get_args(hint) or (hint,):
            if isinstance(own, type) and own.__module__ not in ("builtins", "torch"):
                yield {name: own()}
    yield from ({name: {}}, {name: []})


def _tensors_of(cache: object) -> list[Tensor]:
    """Return the tensors in a cache of any kind."""
    return tensors_in(cache) or tensors_in(getattr(cache, "__dict__", {}))


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


def _has_room(lab: Lab, contents: Contents, starts: Sequence[str]) -> bool:
    """Return True if a module has tensors named as a cache, or that a call writes."""
    call = lab.fresh()
    if any(_CACHE.search(name) and not _ANGLES.search(name) for name, _ in _kept(call)):
        return True
    before = {name: tensor.clone() for name, tensor in _kept(call)}
    extra = {} if lab.specimen.is_example else dict.fromkeys(starts, 0)
    try:
        lab.run(contents, call=call, extra=extra)
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return True  # what it raises is told later
    after = dict(_kept(call))
    return before.keys() != after.keys() or any(not after[n].equal(t) for n, t in before.items())


def _is_empty(lab: Lab, slot: Slot) -> bool:
    """Return True if a cache of the example holds nothing, or zeros beside positions from 0."""
    if slot.kind == "fixed":
        return not _tensors_of(slot.value)
    values = [s.value for s in lab.specimen.slots if s.kind == "given" and s.axes == ("t",)]
    begins = any(v.equal(torch.arange(len(v)).to(v.dtype)) for v in values)
    return begins and not any(bool(part.value.any()) for part in slot.parts)


def has_filled_cache(specimen: Specimen) -> bool:
    """Return True if an example continues a text: its cache holds keys, or it begins behind 0."""
    for slot in specimen.slots:
        is_start = _START.match(slot.name) and type(slot.value) is int and slot.value > 0
        tensors = [part.value for part in slot.parts] or _tensors_of(slot.value)
        is_filled = is_cache(slot.name) and not slot.source and any(bool(t.any()) for t in tensors)
        if is_start or is_filled:
            return True
    return False


def _tables(lab: Lab, done: int, size: int) -> dict[str, Any]:
    """Return the rows of tables in the example, such as positions, for some of the tokens."""
    s = lab.specimen
    return {
        slot.name: slot.constant(s.batch, size, done)
        for slot in s.slots
        if any("t" in part.axes for part in slot.parts) and not slot.meaning
    }


def _is_flag(name: str, parameter: inspect.Parameter) -> bool:
    is_bool = isinstance(parameter.default, bool) or parameter.annotation is bool
    return _CACHE.search(name) is not None and (is_bool or _FLAG.match(name) is not None)
