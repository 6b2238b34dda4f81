"""Problems of a recording, reported as one error or warning when the block ends."""

from regard.errors import RegardError

__all__ = ["Problems"]

_MOST = 5


class Problems:
    """The first problem of each kind for each layer; layers with equal problems share one line."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], str] = {}  # (problem, layer) -> reason
        self._alone: list[str] = []
        self._cause: Exception | None = None

    def __bool__(self) -> bool:
        """Return True if there are problems."""
        return bool(self._told or self._alone)

    @property
    def are_fatal(self) -> bool:
        """Return True if a problem concerns the whole recording and not a single layer."""
        return bool(self._alone)

    def add(self, what: str, name: str, reason: str, cause: Exception | None = None) -> None:
        """Add a problem of a layer; only its first problem of each kind is reported.

        ``what`` has {} for the layer's name: ``"the attention of {} cannot be kept"``.
        """
        self._told.setdefault((what, name), reason)
        self._cause = self._cause or cause

    def add_text(self, text: str, cause: Exception | None = None) -> None:
        """Add a problem that concerns the whole recording."""
        self._alone.append(text)
        self._cause = self._cause or cause

    def error(self) -> RegardError | None:
        """Return one error with all problems; None without problems."""
        if not self:
            return None
        alike: dict[tuple[str, str], list[str]] = {}
        for (what, name), reason in self._told.items():
            alike.setdefault((what, reason), []).append(name)
        texts = [f"{what.format(_listed(names))}: {why}" for (what, why), names in alike.items()]
        texts += self._alone
        more = [f"... and {len(texts) - _MOST} more problems."] if len(texts) > _MOST else []
        error = RegardError("\n".join(texts[:_MOST] + more))
        error.__cause__ = self._cause
        return error


def _listed(names: list[str]) -> str:
    """Return the first names and the number of the others, as text."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(map(repr, names[:_MOST])) + more
