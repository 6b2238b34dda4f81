"""The mask of an attention, named: a rule that says for any length which keys a query may see."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """Keys at most ``left`` before and at most ``right`` after the query; None: any number.

    A negative number leaves out the query's own key. Query and key are counted from the first.
    """

    left: int | None = None
    right: int | None = None

    def dense(self, q_len: int, kv_len: int) -> Tensor:
        """Return which keys are visible, bool, (q_len, kv_len)."""
        away = torch.arange(kv_len) - torch.arange(q_len)[:, None]
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        if self.left is not None:
            seen &= away >= -self.left
        if self.right is not None:
            seen &= away <= self.right
        return seen

    @property
    def is_causal(self) -> bool:
        """True if no query sees a later key, and the band has no end before it."""
        return self.right == 0

    def __str__(self) -> str:
        """Return it as words of a formula."""
        if self.left is None and self.right is None:
            return "every key"
        if self.right == 0:
            if self.left is None:
                return "causal"
            return f"causal, a window of {_keys(self.left + 1)}"
        if self.left is None and self.right is not None:
            if self.right > 0:
                return f"causal but for {_keys(self.right)} after the query"
            return f"keys that stand at least {-self.right} before the query"
        if self.right is None and self.left is not None:
            if self.left < 0:
                return f"keys that stand at least {-self.left} after the query"
            own = "the query's own and later keys" if self.left == 0 else None
            return own or f"keys from {self.left} before the query on"
        return f"a window of {self.left} keys before and {self.right} after the query's own"


@dataclass(frozen=True)
class Chunks:
    """Keys of the query's own chunk of ``size`` tokens; ``causal``: not after it."""

    size: int
    causal: bool

    def dense(self, q_len: int, kv_len: int) -> Tensor:
        """Return which keys are visible, bool, (q_len, kv_len)."""
        rows, columns = torch.arange(q_len)[:, None], torch.arange(kv_len)
        seen = rows // self.size == columns // self.size
        return seen & (columns <= rows) if self.causal else seen

    @property
    def is_causal(self) -> bool:
        """True if no query sees a later key."""
        return self.causal

    def __str__(self) -> str:
        """Return it as words of a formula."""
        return f"{'causal, ' if self.causal else ''}chunks of {_keys(self.size)}"


@dataclass(frozen=True)
class Prefix:
    """The first ``length`` keys, and all keys up to the query."""

    length: int

    def dense(self, q_len: int, kv_len: int) -> Tensor:
        """Return which keys are visible, bool, (q_len, kv_len)."""
        rows, columns = torch.arange(q_len)[:, None], torch.arange(kv_len)
        return (columns <= rows) | (columns < self.length)

    is_causal = False

    def __str__(self) -> str:
        """Return it as words of a formula."""
        return f"causal, but the first {self.length} tokens see each other"


@dataclass(frozen=True)
class Streaming:
    """Keys up to the query, of which only the first ``length`` and the last ``window`` are seen."""

    length: int
    window: int

    def dense(self, q_len: int, kv_len: int) -> Tensor:
        """Return which keys are visible, bool, (q_len, kv_len)."""
        away = torch.arange(kv_len) - torch.arange(q_len)[:, None]
        return (away <= 0) & ((away > -self.window) | (torch.arange(kv_len) < self.length))

    is_causal = True

    def __str__(self) -> str:
        """Return it as words of a formula."""
        return f"causal, a window of {_keys(self.window)} and the first {_keys(self.length)}"


@dataclass(frozen=True, eq=False)
class Table:
    """The keys of each query, bool, (q_len, kv_len), for code that takes one length alone."""

    visible: Tensor

    def dense(self, q_len: int, kv_len: int) -> Tensor:
        """Return which keys are visible; none for other lengths."""
        shape = (q_len, kv_len)
        return self.visible if self.visible.shape == shape else torch.zeros(shape).bool()

    @property
    def is_causal(self) -> bool:
        """True if no query sees a later key."""
        return not bool(self.visible.triu(1).any())

    def __str__(self) -> str:
        """Return it as words of a formula."""
        counts = self.visible.sum(-1)
        few, most = int(counts.min()), int(counts.max())
        return (
            f"{_keys(few) if few == most else f'{few} to {_keys(most)}'} of each query, by position"
        )


Pattern = Band | Chunks | Prefix | Streaming | Table


def _keys(count: int) -> str:
    return "one key" if count == 1 else f"{count} keys"


def named(visible: Tensor) -> Pattern | None:
    """Return the rule of visible keys, bool, (q_len, kv_len); None if no rule gives them.

    The rule is that of the longest text: a window that is longer shows as none.
    """
    q_len, kv_len = visible.shape
    away = torch.arange(kv_len) - torch.arange(q_len)[:, None]
    if not bool(visible.any()):
        return None
    near, far = int(away[visible].min()), int(away[visible].max())
    left = None if near <= 1 - q_len else -near
    right = None if far >= kv_len - 1 else far
    for rule in (Band(left, right), *_others(visible)):
        seen = rule.dense(q_len, kv_len)
        rows = seen.any(-1)  # a row that sees no key may have any weights
        if 2 * int(rows.sum()) > q_len and torch.equal(seen[rows], visible[rows]):
            return rule
    return None


def _others(visible: Tensor) -> list[Pattern]:
    """Return the patterns with the sizes that the first and the last row tell."""
    size = int(visible[:, 0].sum())
    first = int(visible[0].sum())
    others: list[Pattern] = [Prefix(first)]
    if size:
        others += [Chunks(size, causal=False), Chunks(size, causal=True)]
    hidden = (~visible[-1]).nonzero()
    # The first row may see its own key alone where others do not see theirs; or so the last row.
    first_keys, last_keys = visible[0].nonzero().flatten(), visible[-1].nonzero().flatten()
    if visible.shape[0] == visible.shape[1] and len(last_keys) and not bool(visible[-1, -1]):
        others.append(Band(None, int(last_keys[-1]) + 1 - visible.shape[1]))
    if len(first_keys) and not bool(visible[0, 0]):
        others.append(Band(-int(first_keys[0]), None))
    if len(hidden):
        length, window = int(hidden[0]), visible.shape[1] - 1 - int(hidden[-1])
        others += [Streaming(length, window)] if length and window else []
    return others
