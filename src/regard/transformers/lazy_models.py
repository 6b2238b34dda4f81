"""Models of transformers that return lazy matrices in ``outputs.attentions``."""

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.capture.selection import Selection
from regard.errors import RegardError
from regard.tracing.tracer import (
    attention_implementation,
    in_compiled,
    is_compiled_module,
    module_names,
)
from regard.transformers import kernel_wrappers
from regard.transformers.growing_keys import GrowingKeys
from regard.transformers.matrices import Call, Masks, eager_matrix, fused_matrix

_MARK = "_regard_lazy"
"""The attribute of a module with the blocks of ``lazy`` that it belongs to; copies keep it."""

_FORWARDS: ContextVar[tuple["_Forward", ...]] = ContextVar("forwards", default=())
"""The forwards that this thread runs and that return lazy attentions, the innermost last."""

_KERNELS = ("sdpa", "eager")
_CALL = nn.Module._call_impl.__code__  # pyright: ignore[reportPrivateUsage]

_COMPILED = (
    "model is compiled; lazy cannot look into compiled code.\n"
    "    Call lazy on the model without torch.compile, and ask that one for attentions."
)


def lazy(
    model: nn.Module,
    *,
    layers: Iterable[str | int] | None = None,
    output_attentions: bool = False,
) -> "Lazy":
    """Let a model of transformers return lazy matrices in ``outputs.attentions``.

    The model keeps its attention implementation, and no bit of its other outputs changes. A forward
    with ``output_attentions=True`` returns an AttentionMatrix for each attention, made of the
    arguments that the kernel got. Forwards without it cost nothing more.

    With "sdpa", a matrix holds query and key. With "eager", the model's own function runs; its
    dense weights are compared with the matrix and dropped. Weights that no query and key give stay
    dense tensors, and a warning says so once. The steps of a generation share one growing key. A
    step that continues no other holds its row of weights instead, if it is smaller than the key.

    Copies of the model, also inside PEFT and DistributedDataParallel, are lazy as long as the model
    is.

    Args:
        model: a model of transformers, or a module that contains some.
        layers: the layers that return a matrix: names of attention modules or of modules around
            them, or positions in the order in which layers run. In ``outputs.attentions`` the
            others are None. The default is all.
        output_attentions: if True, forwards and ``generate(return_dict_in_generate=True)`` return
            attentions by default. transformers itself refuses ``config.output_attentions = True``
            for any implementation but "eager".

    Returns:
        A Lazy, whose ``undo`` ends it. In a with statement, the end of the block ends it.

    Raises:
        TypeError: model is not a module, or contains no model of transformers.
        ValueError: layers selects nothing, or names something that does not exist.
        RegardError: the model is compiled, or runs another kernel than "sdpa" and "eager";
            transformers is not installed. Later, a forward raises it if it is asked for attentions
            and ran none, or none of the chosen layers.

    Example:
        >>> import torch
        >>> from regard.transformers import lazy
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8
        ... )
        >>> model = BertModel(config)
        >>> with torch.no_grad(), lazy(model):
        ...     outputs = model(torch.zeros(1, 5, dtype=torch.int64), output_attentions=True)
        >>> outputs.attentions[0]
        AttentionMatrix(batch=1, num_heads=2, q_len=5, kv_len=5, dtype=float32, device=cpu)
    """
    names = _checked(model)
    chosen = None if layers is None else Selection.of(layers=layers, modules=names)
    return Lazy(model, names, chosen, output_attentions)


class Lazy:
    """A model whose attentions are lazy, until ``undo``; made by ``lazy``."""

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[str, nn.Module],
        layers: Selection | None,
        output_attentions: bool,
    ) -> None:
        self.is_active = True
        self.returns_attentions = output_attentions
        self.keys = GrowingKeys()
        self._model: nn.Module | None = model
        self._layers = layers
        self._order: dict[str, int] = {}
        self._warned = False
        self._hooks: list[Any] = []
        self._kernels = [
            kernel_wrappers.wrap(name, _run) for name in sorted(_implementations(names))
        ]
        self._asking = [
            (config, config.output_attentions)
            for module in names.values()
            if (config := getattr(module, "generation_config", None)) is not None
            and output_attentions
            and not config.output_attentions
        ]
        for config, _ in self._asking:
            config.output_attentions = True
        for name, module in names.items():
            vars(module)[_MARK] = (*getattr(module, _MARK, ()), _Mark(self, name))
            if _is_pretrained(module):
                self._hooks += [
                    module.register_forward_pre_hook(_begin, with_kwargs=True),
                    module.register_forward_hook(_end, with_kwargs=True, always_call=True),
                ]

    def undo(self) -> None:
        """Let the model and its copies return what they returned before; again it does nothing."""
        if not self.is_active:
            return
        self.is_active = False
        _FORWARDS.set(tuple(each for each in _FORWARDS.get() if each.owner is not self))
        for wrapped in self._kernels:
            kernel_wrappers.unwrap(wrapped)
        for hook in self._hooks:
            hook.remove()
        for config, earlier in self._asking:
            config.output_attentions = earlier
        model, self._model = cast(nn.Module, self._model), None
        for module in model.modules():
            marks = tuple(mark for mark in getattr(module, _MARK, ()) if mark.owner is not self)
            if marks:
                vars(module)[_MARK] = marks
            else:
                vars(module).pop(_MARK, None)

    def __enter__(self) -> nn.Module:
        return cast(nn.Module, self._model)

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __deepcopy__(self, _: Any) -> "Lazy":
        """Return itself: a copy of the model is lazy as long as the model is."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return nothing that is lazy: a model that is loaded from a file is as it was."""
        return _nothing, ()

    def selects(self, name: str) -> bool:
        """Return True if a module that runs attention is one of the chosen layers, or in one."""
        index, chosen = self._order.setdefault(name, len(self._order)), self._layers
        if chosen is None or chosen.names is None or chosen.indices is None:
            return True
        around = (f"{name}."[: len(each) + 1] == f"{each}." for each in chosen.names)
        return index in chosen.indices or any(around)

    def check_chosen(self, forward: "_Forward") -> None:
        """Raise an error if a forward of the whole model ran none of the chosen layers."""
        if forward.module is not self._model or forward.chosen or not forward.count:
            return
        ran = list(self._order)
        raise RegardError(
            f"layers chooses none of the {len(ran)} layers that ran attention.\n"
            f"    They are 0 to {len(ran) - 1}, {', '.join(map(repr, ran[:3]))}"
            f"{', ...' * (len(ran) > 3)}."
        )

    @property
    def kernels(self) -> str:
        """The names of the wrapped kernels, for messages."""
        return " and ".join(repr(each.name) for each in self._kernels)

    def warn_of_dense(self, name: str) -> None:
        """Warn once of weights that stay dense."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{name} keeps dense attentions of its own, which take memory that grows with the "
                "square of the text: they are not the softmax of the query and key that a kernel "
                "got, as with dropout in training or without a kernel.\n"
                '    Call model.set_attn_implementation("sdpa") before lazy, if the model has it, '
                "or watch it with regard.observe(model).",
                stacklevel=2,
            )


def _nothing() -> None:
    return None


class _Mark(NamedTuple):
    """The block of ``lazy`` that a module belongs to, and the module's name in its model."""

    owner: Lazy | None
    name: str


class _Forward:
    """A running forward of a lazy model that asks for attentions, or is inside one that does.

    Attributes:
        is_asked: True if its own arguments or configuration ask for attentions.
        masks: the masks that its layers share.
        count: the number of attentions that ran.
        chosen: the number of those that are in a chosen layer.
        frame: the frame that called the module; while it is held, no other has its identity.
    """

    def __init__(self, module: nn.Module, owner: Lazy, *, is_asked: bool) -> None:
        self.module = module
        self.owner = owner
        self.is_asked = is_asked
        self.masks = Masks()
        self.count = 0
        self.chosen = 0
        self.frame = next(_calls(), None)


class _Unchosen:
    """Stands for the weights of a layer that was not chosen, until the forward returns."""


_UNCHOSEN = _Unchosen()


def _mark_of(module: nn.Module) -> _Mark | None:
    """Return the mark of the innermost block of ``lazy`` that a module belongs to."""
    marks: tuple[_Mark, ...] = getattr(module, _MARK, ())
    return next((each for each in reversed(marks) if each.owner and each.owner.is_active), None)


def _calls() -> Iterator[FrameType]:
    """Yield the frames that call modules, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame
        frame = frame.f_back


def _still_running(running: tuple["_Forward", ...]) -> tuple["_Forward", ...]:
    """Return the forwards that still run; an interrupt such as Ctrl-C calls no hook."""
    if not running:
        return running
    frames = list(_calls())
    return tuple(each for each in running if any(each.frame is frame for frame in frames))


def _begin(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Begin a forward, if it asks for attentions or is inside one that does."""
    mark = _mark_of(module)
    if mark is None or mark.owner is None:
        return None
    owner, running = mark.owner, _still_running(_FORWARDS.get())
    outer = running[-1] if running else None
    flags = [value for name, value in kwargs.items() if _asks_for_attentions(name)]
    is_asked = any(flags) or bool(getattr(module.config, "output_attentions", False))
    changed = None
    if outer is None and owner.returns_attentions and kwargs.get("output_attentions") is None:
        is_asked, changed = True, (args, {**kwargs, "output_attentions": True})
    if not is_asked and (outer is None or outer.owner is not owner):
        return None
    if torch.compiler.is_compiling() or cast(Any, torch.jit).is_tracing() or in_compiled():
        raise RegardError(_COMPILED)
    _FORWARDS.set((*running, _Forward(module, owner, is_asked=is_asked)))
    return changed


def _asks_for_attentions(name: str) -> bool:
    """Return True for output_attentions, and for arguments such as output_cross_attentions."""
    return name.startswith("output_") and name.endswith("attentions")


def _end(module: nn.Module, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> Any:
    """End a forward, and check that it returned what was asked for."""
    running = _FORWARDS.get()
    if not running or all(each.module is not module for each in running):
        return None
    while running[-1].module is not module:
        running = running[:-1]
    forward, running = running[-1], running[:-1]
    _FORWARDS.set(running)
    if running:
        running[-1].count += forward.count
        running[-1].chosen += forward.chosen
    if output is None:
        return None
    records = getattr(module, "_can_record_outputs", None) or ()
    if not running or (forward.is_asked and "attentions" in records):
        _check_returned(forward, output)
    if running:
        return None
    forward.owner.check_chosen(forward)
    return _without_unchosen(output)


def _check_returned(forward: _Forward, output: Any) -> None:
    """Raise an error if a forward returned no attentions; warn of dense ones."""
    name = type(forward.module).__name__
    has_tensors = any(_attentions(output))
    is_eager = attention_implementation(forward.module) == "eager"
    if has_tensors and (forward.count or is_eager):
        forward.owner.warn_of_dense(name)
    elif not forward.count:
        # With another implementation, the weights may be those of masks that eager never gets.
        dense = 'call model.set_attn_implementation("eager") for dense ones, or '
        raise RegardError(
            f"{name} ran no attention of the kernel {forward.owner.kernels} of transformers' "
            "AttentionInterface, so it has no lazy attentions.\n"
            "    Call lazy again if the kernel was changed since, or "
            f"{dense * has_tensors}watch the model with regard.observe(model)."
        )


def _attentions(output: Any, *, inside: bool = False) -> Iterator[bool]:
    """Yield True for each tensor in the fields of an output whose names end with "attentions"."""
    if isinstance(output, Mapping):
        for name, value in cast(Mapping[str, Any], output).items():
            yield from _attentions(value, inside=inside or name.endswith("attentions"))
    elif isinstance(output, tuple | list):
        for value in cast(Iterable[Any], output):
            yield from _attentions(value, inside=inside)
    elif inside and isinstance(output, Tensor):
        yield True


def _without_unchosen(output: Any) -> Any:
    """Return an output with None for each layer that was not chosen."""
    if output is _UNCHOSEN:
        return None
    if isinstance(output, Mapping):
        for name, value in list(cast(Mapping[str, Any], output).items()):
            if isinstance(value, tuple | Mapping):
                cast(Any, output)[name] = _without_unchosen(value)
        return cast(Any, output)
    if type(output) is tuple:
        return tuple(map(_without_unchosen, cast(tuple[Any, ...], output)))
    return output


def _run(
    kernel: kernel_wrappers.Kernel, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a kernel, and return a lazy matrix as its second output where a forward asks for it."""
    mark, running = _mark_of(module), _FORWARDS.get()
    if mark is None or not running or running[-1].owner is not mark.owner:
        return kernel(module, *args, **kwargs)
    forward = running[-1]
    owner = forward.owner
    forward.count += 1
    if not owner.selects(mark.name):
        return kernel(module, *args, **kwargs)[0], _UNCHOSEN
    forward.chosen += 1
    if kwargs.get("write_index") is not None:
        raise RegardError(
            "continuous batching keeps its keys in pages; they are no matrix.\n"
            "    Generate with model.generate()."
        )
    is_eager = attention_implementation(module) == "eager"
    make = eager_matrix if is_eager else fused_matrix
    return make(Call(kernel, module, args, kwargs), forward.masks, owner.keys)


def _checked(model: object) -> dict[str, nn.Module]:
    """Return the modules of a model by name, after all checks."""
    kernel_wrappers.interface()
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; lazy needs a model of transformers.\n"
            "    Pass what from_pretrained returned."
        )
    if any(map(is_compiled_module, model.modules())):
        raise RegardError(_COMPILED)
    names = module_names(model)
    if not any(map(_is_pretrained, names.values())):
        raise TypeError(
            f"model is a {type(model).__name__}, which contains no model of transformers; "
            "lazy changes what those return.\n"
            "    Watch other models with regard.observe(model)."
        )
    for implementation, name in _implementations(names).items():
        if implementation not in _KERNELS:
            raise RegardError(
                f"{name!r} runs the attention implementation {implementation!r}; lazy sees "
                "'sdpa' and 'eager'.\n"
                '    Call model.set_attn_implementation("sdpa") first.'
            )
    return names


def _implementations(names: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the attention implementations of a model, each with a module that runs it."""
    implementations: dict[str, str] = {}
    for name, module in names.items():
        implementation = attention_implementation(module)
        if implementation is not None:
            implementations.setdefault(implementation, name)
    return implementations


def _is_pretrained(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)
