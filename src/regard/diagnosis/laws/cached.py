"""The law of caches: piece by piece gives what all at once gives."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.diagnosis.laws.lab import Lab, NotTried, Run, differs
from regard.diagnosis.laws.law import Breach, Law
from regard.diagnosis.laws.specimen import Contents
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
            raise NotTried("It takes no cache.", applies=False)
        if any(slot.name in caches and slot.source for slot in s.slots):
            raise NotTried("Its keys are those of a cache, which its caller fills.", applies=False)
        if is_installed(s.call):
            raise NotTried("Its cache is an object of its package.", applies=False)
        if any(slot.name in caches for slot in s.slots):
            raise NotTried("The example fills its cache, so that no run is without one.")
        if not s.has_tokens or not lab.sees_rows or s.is_fixed:
            raise NotTried("Its tokens cannot be cut into pieces.")
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
