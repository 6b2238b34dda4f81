"""The law of caches: piece by piece gives what all at once gives."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.diagnosis.laws.lab import Lab, NotTried, Run, differs
from regard.diagnosis.laws.law import Breach, Law
from regard.diagnosis.laws.specimen import Contents, Specimen
from regard.diagnosis.laws.tape import tensors_in
from regard.diagnosis.subject import is_installed

__all__ = ["Cache"]

_CACHE = re.compile(r"cache|past|^mem(ory)?_kv$")
_FLAG = re.compile(r"^(use|return|output|update|with)_")
_START = re.compile(r"^(start_?pos|pos|offset|start|input_pos|cache_pos\w*|past_len\w*|cur_pos)$")


class Cache(Law):
    """A cache changes no number."""

    name = "cache"
    statement = "Tokens that come piece by piece, with a cache, give what they give at once."
    formula = "f(x[n:], cache of f(x[:n])) = f(x)[n:]"
    example = "k = torch.cat([k, past_k], dim=2)  # the new keys before the old ones"

    def breach(self, lab: Lab) -> Breach | None:
        """Run all tokens at once, and the last two one by one."""
        s = lab.specimen
        call = s.call.forward if isinstance(s.call, nn.Module) else s.call
        parameters = inspect.signature(call).parameters
        flags = [n for n, p in parameters.items() if _is_flag(n, p)]
        starts = [n for n in parameters if _START.match(n)]
        caches = [n for n in parameters if _CACHE.search(n) and n not in (*flags, *starts)]
        has_buffers = isinstance(s.call, nn.Module) and bool(list(s.call.buffers()))
        if not caches and not (starts and has_buffers):
            is_direct = {"query", "key", "value"} <= set(s.sources)
            if is_direct and (s.has_fewer_queries or _says_cache(s.call)):
                return self._continued(lab)
            raise NotTried("It takes no cache.", applies=False)
        if any(slot.name in caches and slot.source for slot in s.slots):
            return self._continued(lab)
        if is_installed(s.call):
            raise NotTried("Its cache is an object of its package.", applies=False)
        if any(slot.name in caches for slot in s.slots):
            raise NotTried("The example fills its cache, so that no run is without one.")
        if not s.has_tokens or not lab.sees_rows or s.is_fixed:
            raise NotTried("Its tokens cannot be cut into pieces.")
        if not starts and (blind := self._blind(lab, caches)) is not None:
            return blind
        contents = s.contents(s.batch, s.tokens, seed=8)
        try:
            whole = lab.run(contents).rows
        except Exception as error:
            raise NotTried(f"Without a cache it raises {type(error).__name__}.") from error
        is_causal = self._is_causal(lab, contents, whole)
        # Much code takes one new token at a time, so that larger pieces prove nothing.
        sizes = (s.tokens - 2, 1, 1)
        rows, right = self._pieces(lab, contents, sizes, caches, flags, starts), whole[:, -2:]
        rows, right = (rows, right) if is_causal else (rows[:, -1:], right[:, -1:])
        if rows.shape != right.shape:
            return Breach(f"With a cache it gives {tuple(rows.shape)}: {tuple(right.shape)}.")
        wrong = differs(rows, right)
        if not wrong.any():
            return None
        first = int(wrong.any(-1).any(0).nonzero()[0]) + s.tokens - right.shape[1] + 1
        most = float((rows - right).abs().max())
        return Breach(
            f"After {sizes[0]} tokens in a cache, token {first} of {s.tokens} differs by up to "
            f"{most:.3g} from a call with all tokens at once."
        )

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
        if s.causal is None and not _says_cache(s.call):
            raise NotTried(
                "With fewer queries than keys its first query sees the first key only: pass "
                "causal=True if the last query is the newest token, as with a cache."
            )
        most = float((rows - whole[:, -2:]).abs().max())
        return Breach(
            f"The last two queries, with the keys of all {s.tokens} tokens, differ by up to "
            f"{most:.3g} from a call with all queries.",
            kind="top-left",
        )

    @staticmethod
    def _blind(lab: Lab, caches: Sequence[str]) -> Breach | None:
        """Compare what a new token sees of a cache: a mask at the top left hides most of it."""
        s = lab.specimen
        contents = {name: t[:, :_NEW] for name, t in s.contents(s.batch, s.tokens, seed=8).items()}
        for made in _made_caches(s, caches):
            try:
                base = lab.run(contents, extra=made(None)).rows
                reach = [
                    differs(lab.run(contents, extra=made(token)).rows, base).any(-1).any(0)
                    for token in range(_PAST)
                ]
            except Exception:  # noqa: BLE001  # the code wants another form
                continue
            seen = torch.stack(reach, -1)[:_NEW].float()  # (new, past)
            if seen.equal(torch.ones_like(seen).tril()):
                return Breach(
                    f"With a cache of {_PAST} tokens the first new token sees the oldest one only.",
                    None,
                    (
                        seen[:4, :4],
                        torch.ones_like(seen)[:4, :4],
                        "which token of the cache "
                        "(across) moves which new one (down): 1 if it does",
                    ),
                    kind="top-left",
                )
            return None
        return None

    @staticmethod
    def _is_causal(lab: Lab, contents: Contents, whole: Tensor) -> bool:
        other = lab.run(lab.specimen.changed(contents, token=-1)).rows
        return not bool(differs(other[:, :-1], whole[:, :-1]).any())

    def _pieces(
        self,
        lab: Lab,
        contents: Contents,
        sizes: Sequence[int],
        caches: Sequence[str],
        flags: Sequence[str],
        starts: Sequence[str],
    ) -> Tensor:
        """Return the rows of all pieces but the first."""
        call = lab.fresh()
        found: list[Tensor] = []
        done = 0
        held: Mapping[str, Any] = {}
        for size in sizes:
            piece = {name: t[:, done : done + size] for name, t in contents.items()}
            extra = {**dict.fromkeys(flags, True), **dict.fromkeys(starts, done), **held}
            try:
                run = lab.run(piece, call=call, extra=extra)
            except Exception as error:
                said = (str(error).strip() or "no message").splitlines()[0][:120]
                raise NotTried(
                    f"With a cache as check makes it, it raises {type(error).__name__}: {said}."
                ) from error
            done += size
            held = self._held(lab, run, contents, done, caches)
            found.append(run.rows)
        return torch.cat(found[1:], 1)

    @staticmethod
    def _held(
        lab: Lab, run: Run, contents: Contents, done: int, caches: Sequence[str]
    ) -> dict[str, Any]:
        """Return what the next call gets as its cache."""
        if not caches:
            return {}  # in its buffers
        result = run.result
        if isinstance(result, Mapping):
            result = cast("Mapping[str, Any]", result)
            rest: list[Any] = [v for k, v in result.items() if _CACHE.search(k)]
        else:
            rest = list(cast("Sequence[Any]", result)[1:]) if isinstance(result, tuple) else []
        rest = [part for part in rest if part is not None]
        if not rest and {"key", "value"} <= set(contents):
            slots = lab.specimen.sources
            rest = [slots[n].lay_out(contents[n][:, :done]) for n in ("key", "value")]
        if not rest:
            raise NotTried("It gives back no cache: pass an example that shows one.")
        if len(caches) == 1:
            return {caches[0]: rest[0] if len(rest) == 1 else tuple(rest)}
        tensors = tensors_in(rest)
        if len(tensors) != len(caches):
            raise NotTried("It gives back another number of caches than it takes.")
        return dict(zip(caches, tensors, strict=True))


def _is_flag(name: str, parameter: inspect.Parameter) -> bool:
    is_bool = isinstance(parameter.default, bool) or parameter.annotation is bool
    return _CACHE.search(name) is not None and (is_bool or _FLAG.match(name) is not None)


_NEW, _PAST = 3, 11


def _says_cache(call: object) -> bool:
    """Return True if the names or the docstring of code say that its keys come from a cache."""
    target = type(call) if isinstance(call, nn.Module) else call
    forward = call.forward if isinstance(call, nn.Module) else call
    texts = [getattr(target, "__name__", ""), target.__doc__ or "", forward.__doc__ or ""]  # pyright: ignore
    names = inspect.signature(cast(Any, forward)).parameters
    return any(_CONTINUES.search(text) for text in (*texts, *names))


_CONTINUES = re.compile(r"cache|past|incremental|newest|new_tokens|decode", re.IGNORECASE)


def _made_caches(
    s: Specimen, names: Sequence[str]
) -> Iterator[Callable[[int | None], dict[str, Any]]]:
    """Yield functions that make a cache of random numbers, with other ones at a token."""
    first = next(iter(s.sources.values()))
    widths = [n for n in first.axes if isinstance(n, int)]
    heads = {1, *(v for v in _whole_numbers(s.call) if 1 < v < 64)}
    shapes: list[tuple[int, ...]] = []
    if len(widths) == 2:  # (heads, head_dim), as the arguments have them
        shapes.append((s.batch, widths[0], _PAST, widths[1]))
    shapes += [
        (s.batch, count, _PAST, widths[0] // count)
        for count in sorted(heads, reverse=True)
        if len(widths) == 1 and widths[0] % count == 0
    ]
    shapes += [(s.batch, _PAST, widths[-1])]
    for shape in shapes:
        generator = torch.Generator().manual_seed(3)
        pair = [
            torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            for _ in range(2)
        ]

        def made(token: int | None, pair: list[Tensor] = pair) -> tuple[Tensor, Tensor]:
            own = [t.clone() for t in pair]
            for t in own if token is not None else ():
                t[..., token, :] = t[..., token, :].flip(-1) + 1
            return own[0], own[1]

        if len(names) == 2:
            yield lambda token, made=made: dict(zip(names, made(token), strict=True))
            continue
        yield lambda token, made=made: {names[0]: made(token)}
        yield lambda token, made=made: {names[0]: torch.stack(made(token))}
        for entries in (("k", "v"), ("key", "value"), ("keys", "values")):
            yield lambda token, made=made, entries=entries: {
                names[0]: dict(zip(entries, made(token), strict=True))
            }


def _whole_numbers(call: object) -> list[int]:
    return (
        [v for v in vars(call).values() if isinstance(v, int)]
        if isinstance(call, nn.Module)
        else []
    )
