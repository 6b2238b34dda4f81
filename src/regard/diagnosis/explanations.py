"""Laws and mistakes as text."""

from regard.diagnosis.catalogue import FAULTS, NOTES
from regard.diagnosis.laws.judge import LAWS

__all__ = ["explanation"]


def explanation(name: str) -> str:
    """Return what a law or a mistake is, in lines of text.

    Raises:
        ValueError: neither a law nor a mistake has this name.

    Example:
        >>> print(explanation("samples"))
        samples (law)
          Each sample of a batch gives what it gives alone.
          Formula:  f([a, b])[0] = f([a])[0]
          Broken by:  weights = scores.softmax(dim=0)  # over the batch
    """
    for law in LAWS:
        if law.name == name:
            return (
                f"{law.name} (law)\n  {law.statement}\n  Formula:  {law.formula}\n"
                f"  Broken by:  {law.example}"
            )
    for fault in (*FAULTS, *NOTES):
        if fault.name == name:
            label = f"mistake {fault.number}" if fault.severity == "fault" else "note"
            seen = f"\n  Others did the same: {', '.join(fault.sources)}" if fault.sources else ""
            return f"{name} ({label})\n  {fault.sentence}\n  Write:  {fault.mending}{seen}"
    names = ", ".join([*(law.name for law in LAWS), *(fault.name for fault in FAULTS)])
    raise ValueError(f"{name!r} is no law and no mistake; it must be one of {names}.")
