"""One run of code under check: its operations with their lines."""

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from regard.tracing.tracer import apart
from regard.tracing.whole_batches import KERNEL

_NARROWER = {
    torch.float32: (torch.float16, torch.bfloat16),
    torch.float64: (torch.float16, torch.bfloat16, torch.float32),
}
_OWN = str(Path(__file__).parents[1])
_INSTALLED = sysconfig.get_paths()["purelib"]
_LIBRARIES = (
    str(Path(torch.__file__).parent),
    "<frozen ",
    "<string>",
    sysconfig.get_paths()["stdlib"],
    *(f"{_INSTALLED}/{name}/" for name in ("einops", "opt_einsum")),
)


@dataclass(frozen=True, slots=True)
class Place:
    """A line of somebody's code."""

    file: str
    line: int

    def __str__(self) -> str:
        """Return it as ``file:line``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One operation of a run.

    Attributes:
        name: such as ``bmm``.
        args: its arguments as the code passed them; their numbers may have changed since.
        kwargs: those that it passed by name.
        outputs: copies of the tensors that it gave.
        alive: those tensors themselves; while they live, no other tensor gets their storage.
        place: the line that ran it; None where no line is the user's.
        callers: the lines that called its function, the innermost first.
        scope: the numbers that have a name there, such as ``scale`` or ``self.scale``.
        depends: its outputs follow from the inputs of the run, as far as ``traced`` followed them.
        projects: it is a product with numbers that do not follow from them, or adds a parameter.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    alive: tuple[Tensor, ...]
    place: Place | None
    callers: tuple[Place, ...] = ()
    scope: Mapping[str, float] = field(default_factory=dict[str, float])
    depends: bool = False
    projects: bool = False

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that it read."""
        return tensors_in((self.args, [*self.kwargs.values()]))

    @property
    def line(self) -> str:
        """The ``file:line`` that ran it; "" where no line is the user's."""
        return "" if self.place is None else str(self.place)

    @property
    def reads(self) -> list[int]:
        """The addresses of the tensors among its arguments."""
        return addresses(self.inputs)

    @property
    def writes(self) -> set[int]:
        """The addresses of the tensors that it gave."""
        return set(addresses(self.alive))


def place_in(file_line: str) -> Place | None:
    """Return the place that ``file:line`` names; None for another text."""
    file, _, number = file_line.rpartition(":")
    return Place(file, int(number)) if number.isdigit() else None


def addresses(value: Any) -> list[int]:
    """Return where the numbers of every tensor in nested lists, tuples and dicts lie."""
    return [t.untyped_storage().data_ptr() for t in tensors_in(value)]


def first_place(steps: Iterable[Step], is_wrong: Callable[[Step], bool]) -> Place | None:
    """Return the line of the first wrong operation that has one."""
    return next((s.place for s in steps if s.place is not None and is_wrong(s)), None)


def turns_all_axes(step: Step) -> bool:
    """Return True for x.T and the like; einsum permutes axes, too, but hardly ever so."""
    if step.name != "permute":
        return step.name in ("t", "numpy_T")
    axes = [int(axis) % len(step.args[1]) for axis in step.args[1]]
    return axes == sorted(axes, reverse=True)


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class OpaqueOperator(Exception):
    """The code calls an operation that takes a function, such as flex_attention."""


class Tape(TorchDispatchMode):
    """Runs code in one dtype, and keeps its operations.

    Args:
        keeps: keep every operation in ``steps``.
        dtype: compute in it where the code asks for fewer bits.
        poisons: memory that is not initialised is NaN: it may hold the numbers of an earlier run,
            which would be read as those of this one.
    """

    def __init__(
        self,
        *,
        keeps: bool = False,
        dtype: torch.dtype = torch.float64,
        poisons: bool = False,
    ) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._keeps, self._dtype, self._poisons = keeps, dtype, poisons
        self._is_inside = False  # of flex_attention

    supports_higher_order_operators = True  # all but flex_attention are refused

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would wrap the handler, so that the first operation imports PyTorch's compiler.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self._opened(func, args, dict(kwargs or {}))
        kwargs = dict(kwargs or {})
        # Only there are matmul and linear one operation.
        if self._is_inside or torch.is_inference_mode_enabled():
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = self._computed(func, args, kwargs)
        if self._poisons and _named(func).removeprefix("new_").startswith("empty"):
            out = out.fill_(torch.nan) if out.is_floating_point() else out
        # How many detachments autograd makes depends on who holds the tensors.
        if self._keeps and func is not torch.ops.aten.detach.default:
            given = tuple(tensors_in(out))
            # A step out of every mode takes longer than the copy, and most runs have no other one.
            with apart() if _modes() else nullcontext():
                copies = tuple(t.detach().clone() for t in given)
            frames = [*_frames(inspect.currentframe())]
            line, *callers = [Place(f.f_code.co_filename, f.f_lineno) for f in frames] or [None]
            self.steps.append(
                Step(
                    _named(func),
                    args,
                    kwargs,
                    copies,
                    given,
                    line,
                    tuple(filter(None, callers)),
                    _scope(frames[0]) if frames and _has_numbers(args, kwargs) else {},
                )
            )
        return out

    def _opened(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run the definition of flex_attention in PyTorch, operation by operation."""
        plain = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        if func.name() != "flex_attention" or plain is None:
            raise OpaqueOperator(f"It calls {func.name()}, whose function check cannot look into.")
        self._is_inside = True
        try:
            with self:
                return plain(*args, **kwargs)
        finally:
            self._is_inside = False

    def _computed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        args = tuple(map(self._uncast, args))
        kwargs = {name: self._uncast(value) for name, value in kwargs.items()}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            mixed = {t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()}
            if len(mixed) < 2:
                raise
            return func(*tree_map(self._widened, args), **tree_map(self._widened, kwargs))

    def _uncast(self, value: Any) -> Any:
        is_narrower = isinstance(value, torch.dtype) and value in _NARROWER[self._dtype]
        return self._dtype if is_narrower else value

    def _widened(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if is_float else value


def _modes() -> int:
    """Return the number of modes that would see an operation."""
    return torch._C._len_torch_dispatch_stack()  # pyright: ignore[reportPrivateUsage]


def _named(func: Any) -> str:
    """Return the plain name of an operation, such as ``bmm``."""
    name = str(getattr(func, "_schema", func)).partition("(")[0]
    return name.rpartition("::")[2].partition(".")[0]


def _frames(own: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the user's code, the innermost first.

    That of an installed package comes first where the user's code called it.
    """
    frame, is_installed = (None if own is None else own.f_back), False
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code is KERNEL:
            frame = frame.f_back
            continue
        if file.startswith(_OWN) and file != __file__:
            return  # all frames further out called check
        if file.startswith(_INSTALLED) and not file.startswith(_LIBRARIES):
            if not is_installed:
                yield frame
            is_installed = True
        elif not file.startswith((*_LIBRARIES, __file__)):
            yield frame
        frame = frame.f_back


def _has_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(isinstance(value, float) for value in (*args, *kwargs.values()))


def _scope(frame: FrameType) -> dict[str, float]:
    """Return the numbers among the variables of a frame, and among the attributes of its object.

    That is its first argument, whatever its name is; ``self`` stands for it.
    """
    variables, names = frame.f_locals, frame.f_code.co_varnames[: frame.f_code.co_argcount]
    of_self = getattr(variables.get(names[0]), "__dict__", {}) if names else {}
    named = {**variables, **{f"self.{name}": value for name, value in of_self.items()}}
    return {name: value for name, value in named.items() if type(value) is float}


def is_theirs(file: str) -> bool:
    """Return True if a file belongs to nobody but the user."""
    return not file.startswith((_OWN, _INSTALLED, *_LIBRARIES))


def in_words(error: BaseException) -> str:
    """Return the class of an error with the first line of its message."""
    said = (str(error).strip() or "no message").splitlines()[0][:200]
    return f"{type(error).__name__}: {said.rstrip('.')}"


def place_of(error: BaseException) -> Place | None:
    """Return the user's innermost line in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [Place(f.filename, f.lineno or 0) for f in frames if is_theirs(f.filename)]
    return own[-1] if own else None
