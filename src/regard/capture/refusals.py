"""Attention that is missing from a recording, reported when the block has ended.

``Problems`` has the attention that was refused. ``Absence`` has operations that might have been
attention: compiled code, and products without a softmax.
"""

import re
import warnings
from collections.abc import Collection

from torch import nn

from regard.errors import RegardError
from regard.tracing.tracer import Operation, module_names

_MOST = 5


class Problems:
    """The first problem of each kind for each layer; layers with equal problems share one line."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], str] = {}  # (problem, layer) -> reason
        self._alone: list[str] = []
        self._cause: Exception | None = None

    def __bool__(self) -> bool:
        """Return True if there are problems."""
        return bool(self._reasons or self._alone)

    @property
    def are_fatal(self) -> bool:
        """Return True if a problem concerns the whole recording and not a single layer."""
        return bool(self._alone)

    def add(self, what: str, name: str, reason: str, cause: Exception | None = None) -> None:
        """Add a problem of a layer; only its first problem of each kind is reported.

        ``what`` has {} for the layer's name: ``"the attention of {} cannot be kept"``.
        """
        self._reasons.setdefault((what, name), reason)
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
        for (what, name), reason in self._reasons.items():
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


class Absence:
    """Possible attention that was not recorded, reported when the block has ended.

    ``is_compiled`` is True if compiled code ran in place of the model's modules. The module of an
    attention is then unknown. With ``uncompiled``, no compiled code runs in the block.
    """

    def __init__(self, model: nn.Module, *, uncompiled: bool = False) -> None:
        self.is_compiled = False
        self._uncompiled = uncompiled
        self._model = model
        self._innermost: set[str | None] = set()
        self._running: set[str] = set()
        self._missing: dict[str, tuple[str, bool]] = {}  # what is not recorded; certainly or not
        self._with_nan: dict[str, None] = {}
        self._present: set[str] = set()
        self._ran = False

    def note_product(self, operation: Operation) -> None:
        """Record that a product of two tensors ran, and whether compiled code ran the first one."""
        if not self._ran:
            self.note_compiled(operation)
            self._ran = self.is_compiled or operation.module() is not None

    def note_compiled(self, operation: Operation) -> None:
        """Record whether compiled code ran an operation in place of the model's modules."""
        self.is_compiled |= not self._uncompiled and operation.is_compiled()

    def note_running(self, operation: Operation) -> None:
        """Record the modules that run an operation, once for each innermost one."""
        innermost = operation.module()
        if innermost not in self._innermost:
            self._innermost.add(innermost)
            self._running.update(operation.running())

    def note_attention(self, name: str) -> None:
        """Record that a module ran an attention, whether it is recorded or not."""
        self._present.add(name)

    def note_missing(self, name: str, how: str, *, is_certain: bool = True) -> None:
        """Record that a module has attention that is not recorded, and where.

        Unless it ``is_certain``, it counts only in a module without any other attention: scores
        that meet a value without a softmax may be a step of it.
        """
        if name not in self._missing or (is_certain and not self._missing[name][1]):
            self._missing[name] = how, is_certain

    def note_nan(self, name: str) -> None:
        """Record that a module made NaN of rows without keys, which are 0 in the recording."""
        self._with_nan[name] = None

    def unseen(self, refused: Collection[str]) -> list[str]:
        """Return the attention modules that ran, and in which no attention was seen.

        A module is an attention module if the name of its class ends so.
        """
        named = {*self._present, *self._missing, *refused}
        return [
            name
            for name, module in module_names(self._model).items()
            if name in self._running
            and _ATTENTION_CLASS.search(type(module).__name__)
            and not any(f"{each}.".startswith(f"{name}.") for each in named)
            and not any(name.startswith(f"{each}.") for each in refused)
        ]

    def warn(self, refused: Collection[str]) -> None:
        """Warn of modules that multiplied scores by a value and are not in the recording.

        Also warn of rows that are NaN in the model. Refused modules have their own warning.
        """
        if self._with_nan:
            warnings.warn(
                f"{_listed(list(self._with_nan))}: rows without a key are NaN in the model, and 0 "
                "in the recording.\n    Give each query a key to attend to.",
                stacklevel=4,
            )
        kinds: dict[str, list[tuple[str, str]]] = {}
        for name, (how, is_certain) in self._missing.items():
            if name not in refused and (is_certain or name not in self._present):
                kinds.setdefault(how.partition(": ")[0], []).append((name, how))
        if kinds:
            texts: list[str] = []
            for (name, how), *others in kinds.values():
                more = f", and {len(others)} more modules likewise" if others else ""
                texts.append(f"{name!r} has attention that is not recorded: {how}{more}.")
            warnings.warn(f"{' '.join(texts)} {_SOFTMAX_ALONE}", stacklevel=4)

    def error(self) -> RegardError:
        """Return the error for a block without any attention, with the likely reason."""
        why, remedy = self._why()
        return RegardError(
            f"no attention was seen in {type(self._model).__name__}; {why}.\n    {remedy}"
        )

    def _why(self) -> tuple[str, str]:
        for name, (how, _) in self._missing.items():
            return f"in {name!r}, {how}", _SOFTMAX_ALONE
        if not self._ran:
            return (
                "none of its modules ran a product of matrices in the block, on this thread",
                "Run the model inside the block, without torch.compile, on the thread that opened "
                "it.",
            )
        return (
            "its modules ran, and ran no attention that observe recognises",
            "observe sees softmax attention that PyTorch or flash-attn runs on this thread, and "
            "no other kernels or compiled functions.",
        )


def compiled_error(what: str) -> RegardError:
    """Return the error for compiled code; ``what`` is like ``"model is compiled"``."""
    return RegardError(f"{what}; observe cannot look into compiled code.\n    {_UNCOMPILED}")


def is_compiled(value: object) -> bool:
    """Return True if a function comes from torch.compile, and not from torch.compiler.disable."""
    attributes = getattr(value, "__dict__", {}) if callable(value) else {}
    return "_torchdynamo_orig_callable" in attributes and not attributes.get(
        "_torchdynamo_disable", False
    )


UNSEEN = (
    "it ran, and observe saw no attention in it; its kernel may be no operation of PyTorch.\n"
    "    Let it call scaled_dot_product_attention. For transformers, call "
    'model.set_attn_implementation("sdpa").'
)
_ATTENTION_CLASS = re.compile(r"(Attention|Attn|MHA|MLA)\d*$")
_UNCOMPILED = 'Observe it with compiled="eager", which runs compiled parts uncompiled.'
_SOFTMAX_ALONE = "observe keeps attention whose weights are a softmax of query times key."
