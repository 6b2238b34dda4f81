"""What people hand over, as one thing that runs on given inputs and leaves no trace."""

import ast
import contextlib
import copy
import inspect
import io
import random
import textwrap
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from regard.diagnosis.float32_rerun import FEW_BITS, Lifted
from regard.diagnosis.signature import (
    Argument,
    Meaning,
    arguments_of,
    axis_of_heads,
    declared_meaning,
    meaning_of,
)
from regard.diagnosis.tensor_layout import Layout, Order
from regard.errors import check_numbers

__all__ = [
    "Given",
    "Kind",
    "Outcome",
    "Subject",
    "as_given",
    "independent",
    "layouts",
    "quiet",
    "source_of",
]

Kind = Literal["embeddings", "qkv", "scores"]

# Other than each other and than the widths that people choose, so that an axis is known by its
# length.
_BATCH, _TOKENS = 2, 7
# What a module of embeddings gets the embeddings for, self-attention being one case of the other.
_FROM_X = ("x", "memory", "query", "key", "value")


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one run gave back.

    Attributes:
        output: canonical, (batch, tokens, columns).
        tensors: every tensor that came, as it came.
    """

    output: Tensor
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Given:
    """What people handed over, ready to be called.

    Attributes:
        name: what to call it.
        call: the function, or the module.
        model: the module; an empty one where it is a function.
        arguments: what a call takes, without what the caller has given.
        options: what the caller has given, by name.
        source: its text, empty where there is none.
        dtype: of the inputs.
        half: the module as it came, where some of it has fewer bits than float32.
        numbers: whole numbers that the class was given.
        vocabulary: how many tokens there are, where it takes their numbers; 0: embeddings.
        lifted: the dtype of few bits in which it computes, where float32 is put in its place.
    """

    name: str
    call: Callable[..., Any]
    model: nn.Module
    arguments: tuple[Argument, ...]
    options: Mapping[str, Any]
    source: str
    dtype: torch.dtype
    half: nn.Module | None = None
    numbers: tuple[int, ...] = ()
    vocabulary: int = 0
    lifted: torch.dtype | None = None

    @property
    def kind(self) -> Kind:
        """What it takes: embeddings, queries with keys and values, or scores."""
        roles = {argument.role for argument in self.arguments if argument.required}
        if "scores" in roles:
            return "scores"
        own = any(parameter.ndim > 1 for parameter in self.model.parameters())
        return "embeddings" if own or "query" not in roles else "qkv"

    def argument(self, role: str) -> Argument | None:
        """The first argument for something; None where there is none."""
        return next((a for a in self.arguments if a.role == role), None)

    def argument_named(self, name: str) -> Argument | None:
        """The argument of that name; None where there is none."""
        return next((a for a in self.arguments if a.name == name), None)

    @property
    def orders_with_heads(self) -> list[Order]:
        """Where an axis for the heads may stand, the likeliest first; where it says so itself."""
        if self.kind != "qkv":
            return []
        said = axis_of_heads(self.source, self.arguments)
        either: list[Order] = ["bhtd", "bthd"]
        return either if said is None else [either[said - 1]]

    @property
    def widths(self) -> list[int]:
        """How wide a token may be, the likeliest first."""
        found: list[int] = []
        for name in ("embed_dim", "d_model", "hidden_size", "n_embd", "dim", "embed_size"):
            for holder in (self.model, getattr(self.model, "config", None)):
                value = getattr(holder, name, None)
                found += [value] if isinstance(value, int) else []
        for module in self.model.modules():
            found += [module.in_features] if isinstance(module, nn.Linear) else []
        for matrix in self._matrices():
            found += [matrix.shape[0], matrix.shape[-1], matrix.shape[1]]
            found += [matrix.shape[-1] * n for n in self._counts() if n > 1]
        found += [number for number in self.numbers if number > 1]
        if not found:
            found = [24, 40, 16, 32, 64]
        return list(dict.fromkeys(found))

    def _counts(self) -> list[int]:
        """Whole numbers that the module keeps, one of which may be that of its heads."""
        values = cast("dict[str, object]", vars(self.model)).items()
        return [v for name, v in values if isinstance(v, int) and "head" in name and v < 64]

    def _matrices(self) -> list[Tensor]:
        """The matrices that the code knows: parameters, or what a function finds around it."""
        around = getattr(self.call, "__globals__", {})
        named = cast("list[str]", getattr(getattr(self.call, "__code__", None), "co_names", ()))
        found = [around[name] for name in named if isinstance(around.get(name), Tensor)]
        return [m for m in (*self.model.parameters(), *found) if m.ndim in (2, 3)]


@dataclass(frozen=True, eq=False)
class Subject:
    """A thing with the layout in which it runs.

    Attributes:
        given: what people handed over.
        layout: how its tensors lie.
        constants: values for what it takes besides, by name.
    """

    given: Given
    layout: Layout
    constants: Mapping[str, Any]

    def inputs(self, seed: int = 0, q_len: int | None = None) -> dict[str, Tensor]:
        """Random inputs by role, canonical; of one size for all but the queries."""
        layout = self.layout
        generator = torch.Generator().manual_seed(1000 + seed)

        def tensor(tokens: int, width: int) -> Tensor:
            shape = (layout.batch, tokens, width)
            return torch.randn(shape, generator=generator, device="cpu").to(self.given.dtype)

        if self.given.kind == "scores":
            found = {"scores": tensor(layout.tokens, layout.num_heads * layout.tokens)}
            valued = self.given.argument("value") is not None
            return found | ({"value": tensor(layout.tokens, layout.dim)} if valued else {})
        if self.given.kind == "embeddings":
            return {"x": tensor(layout.tokens, layout.dim)}
        narrow = layout.dim // layout.num_heads * layout.num_kv_heads
        return {
            "query": tensor(q_len or layout.tokens, layout.dim),
            "key": tensor(layout.tokens, narrow),
            "value": tensor(layout.tokens, narrow),
        }

    def run(
        self, inputs: Mapping[str, Tensor], extra: Mapping[str, Any] | None = None, seed: int = 0
    ) -> Outcome:
        """Run it once on copies of canonical inputs: the code may write into what it gets.

        Args:
            inputs: by role, (batch, tokens, columns).
            extra: more arguments, by name.
            seed: of PyTorch's random numbers while it runs.

        Raises:
            ValueError: nothing that it gave back is an output.
            Exception: whatever the code itself raises.
        """
        inputs = _apart(inputs)
        call = _apart({**self.constants, **(extra or {})})
        for argument in self.given.arguments:
            tensor = self._tensor(argument, inputs)
            if tensor is not None:
                call[argument.name] = tensor
        positional = [call.pop(a.name) for a in self._leading(call)]
        with quiet(seed), Lifted() if self.given.lifted else contextlib.nullcontext():
            result = self.given.call(*positional, **call, **_apart(self.given.options))
        tensors = tuple(_tensors(result))
        tokens = next(iter(inputs.values())).shape[1]
        for tensor in self._likeliest(tensors):
            canonical = self.layout.decode(tensor)
            if canonical is not None and canonical.shape[1] == tokens:
                return Outcome(canonical.detach().clone(), tensors)
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
        raise ValueError(
            f"{self.given.name} gave {shapes} for {self.layout.axes}; one output must have the "
            "same batch and tokens."
        )

    def _leading(self, call: Mapping[str, Any]) -> list[Argument]:
        """The arguments that go by position: those from the first on that all have values."""
        leading: list[Argument] = []
        for argument in self.given.arguments:
            if argument.name not in call or not argument.required or argument.by_name:
                break
            leading.append(argument)
        return leading if not self.given.options else []

    def leading(self) -> list[Argument]:
        """Return the arguments that go by position."""
        inputs = self.inputs()
        known = {a.name for a in self.given.arguments if self._tensor(a, inputs) is not None}
        return self._leading({**self.constants, **dict.fromkeys(known)})

    def _tensor(self, argument: Argument, inputs: Mapping[str, Tensor]) -> Tensor | None:
        if argument.role == "x" and self.given.vocabulary:
            return self.layout.encode(_token_ids(inputs["x"], self.given.vocabulary), 1)[..., 0]
        if argument.role in inputs:
            own = argument.role in ("query", "x")
            heads = self.layout.num_heads if own else self.layout.num_kv_heads
            return self.layout.encode(inputs[argument.role], heads)
        if argument.role in _FROM_X and "x" in inputs and argument.required:
            return self.layout.encode(inputs["x"], self.layout.num_heads)
        return None

    def _likeliest(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """The tensors given back, outputs before weights: those are as wide as there are keys."""
        return sorted(tensors, key=lambda t: t.shape[-1:] == (self.layout.tokens,))


def _apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with copies of the tensors; one tensor under two names stays one."""
    memo: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(copied(part) for part in cast("tuple[Any, ...]", value))
        if isinstance(value, Tensor):
            return memo.setdefault(id(value), value.clone())
        return value

    return {name: copied(value) for name, value in values.items()}


def _token_ids(x: Tensor, vocabulary: int) -> Tensor:
    """Numbers of tokens that change where the embeddings do, (batch, tokens, 1)."""
    return (x.sum(-1, keepdim=True) * 1000).long().remainder(vocabulary)


def _tensors(result: object) -> list[Tensor]:
    """Every floating tensor in what was given back, in order."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, Mapping):
        result = tuple(cast("Mapping[Any, Any]", result).values())
    if isinstance(result, list | tuple):
        return [tensor for part in cast("list[Any]", result) for tensor in _tensors(part)]
    return []


@contextlib.contextmanager
def quiet(seed: int = 0) -> Generator[None]:
    """Run somebody's code: what it prints is dropped, random states are put back."""
    state = random.getstate()
    dtype = torch.get_default_dtype()
    with (
        torch.random.fork_rng(devices=[]),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
        torch.inference_mode(False),
        torch.enable_grad(),  # without it nn.MultiheadAttention is one operation, all in one
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
            torch.set_default_dtype(dtype)


def _meaning(argument: Argument, means: Mapping[str, str], thing: object) -> Meaning:
    """Return what a mask is declared to mean, by the caller or a docstring."""
    if argument.role not in ("mask", "lengths"):
        return ""
    if argument.name in means:
        return meaning_of(means[argument.name])
    target = type(thing) if isinstance(thing, nn.Module) else thing
    texts = [target.__doc__, getattr(getattr(target, "forward", None), "__doc__", None)]
    for text in filter(None, texts):
        found = declared_meaning(argument.name, text)
        if found:
            return found
    return ""


def is_installed(thing: object) -> bool:
    """Return True if code belongs to an installed package, whose masks mean what it documents."""
    target = type(thing) if isinstance(thing, nn.Module) else thing
    module = getattr(target, "__module__", "").partition(".")[0]
    return module in ("torch", "transformers", "timm", "regard")


def as_given(
    thing: object,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    means: Mapping[str, str] | None = None,
) -> Given:
    """What people handed over, with a class made into a module.

    Args:
        thing: a module, a class with its arguments, or a function with what it takes by name.
        args: for the class.
        options: for the class or the function.
        means: what True or 1 means in masks, by name.

    Raises:
        TypeError: it cannot be called, or the class's arguments do not fit.
        ValueError: a call needs something else than the tensors that are known by their names.
    """
    name = getattr(thing, "__name__", type(thing).__name__)
    given_options = options
    built = (*args, *options.values()) if inspect.isclass(thing) else ()
    numbers = tuple(number for number in built if type(number) is int)
    options = {} if inspect.isclass(thing) else options
    thing = built_from(thing, args, given_options)
    if isinstance(thing, nn.Module):
        for parameter in thing.parameters():
            check_numbers(name, parameter.device)
    half = None
    if isinstance(thing, nn.Module):
        if any(p.dtype in FEW_BITS for p in thing.parameters()):
            half = _copied(thing, as_it_is=True)
        thing = _copied(thing)
    model = thing if isinstance(thing, nn.Module) else nn.Identity()
    call = thing.forward if isinstance(thing, nn.Module) else thing
    target = type(thing) if isinstance(thing, nn.Module) else thing
    arguments = tuple(
        replace(a, meaning=_meaning(a, means or {}, thing)) for a in arguments_of(call, options)
    )
    _refuse_unknown(name, arguments, call_to_copy(name, arguments))
    return Given(
        name=name,
        call=thing,
        model=model,
        arguments=arguments,
        options=dict(options),
        source=source_of(target),
        dtype=torch.float32,
        half=half,
        numbers=numbers,
    )


def _refuse_unknown(name: str, arguments: tuple[Argument, ...], example: str) -> None:
    """Refuse what no call could be made of."""
    unknown = [a.name for a in arguments if a.required and a.role in ("other", "weight")]
    unknown = [own for own in unknown if own != "position_embeddings"]
    if unknown:
        raise ValueError(
            f"{name} needs {', '.join(unknown)}; check knows embeddings, query, key, value, "
            "scores, masks and lengths by their names.\n"
            f"    Pass an example call: {example}."
        )


def built_from(
    thing: object, args: tuple[Any, ...], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the module that a class builds; a module or a function as it is.

    Args:
        thing: a class, a module or a function.
        args: for the class.
        options: for the class.

    Raises:
        TypeError: it cannot be called, or the class's arguments do not fit.
    """
    made = _built(thing, args, options) if inspect.isclass(thing) else thing
    if not callable(made):
        raise TypeError(
            f"thing is {type(made).__name__}; it must be a module, a function or a class.\n"
            "    Give the attention itself: regard.check(SelfAttention, 16, 4)."
        )
    return made


def call_to_copy(name: str, arguments: Iterable[Argument]) -> str:
    """Return a call of check with an example, filled in as far as the names tell.

    Args:
        name: of the code.
        arguments: that it takes.
    """
    known = ("x", "memory", "query", "key", "value")
    needed = [a for a in arguments if a.required]
    values = "".join("torch.randn(2, 7, 16), " for a in needed if a.role in known).strip()
    others = ", ".join(f"{a.name!r}: ..." for a in needed if a.role not in known)
    return f"regard.check({name}, args=({values})" + (f", kwargs={{{others}}})" if others else ")")


def _built(thing: type, args: tuple[Any, ...], options: Mapping[str, Any]) -> object:
    try:
        inspect.signature(thing).bind(*args, **options)
    except TypeError as error:
        wants = ", ".join(
            p.name for p in inspect.signature(thing).parameters.values() if p.default is p.empty
        )
        raise TypeError(
            f"{thing.__name__} has not the arguments that it needs ({error}); it takes {wants}.\n"
            f"    Give them after it: regard.check({thing.__name__}, ...)."
        ) from error
    with quiet():
        return thing(*args, **options)


def _copied(module: nn.Module, *, as_it_is: bool = False) -> nn.Module:
    """A copy in eval mode and float32, so that nothing happens to the module itself."""
    own = independent(module)
    floats = {p.dtype for p in own.parameters() if p.is_floating_point()}
    if floats and floats != {torch.float32} and not as_it_is:
        own = own.float()
    return own.eval()


def independent(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares no tensor with it.

    Tensors in a graph become constants. What cannot be copied, such as a lock or an open file,
    stays shared: it holds no numbers.

    Args:
        module: somebody's.

    Raises:
        ValueError: it cannot be copied.
    """
    try:
        return copy.deepcopy(module)
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        pass
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in list(vars(part).values()):
            _remember(value, memo)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        name = type(module).__name__
        raise ValueError(
            f"{name} cannot be copied ({type(error).__name__}: {error}); check runs copies only, "
            f"so that nothing happens to yours.\n    Give the class: regard.check({name}, ...)."
        ) from error


def _remember(value: object, memo: dict[int, Any]) -> None:
    """Note the copy of a value that cannot be copied, for ``copy.deepcopy``."""
    if isinstance(value, list | tuple):
        for part in cast("list[object]", value):
            _remember(part, memo)
    elif isinstance(value, dict):
        for part in cast("dict[object, object]", value).values():
            _remember(part, memo)
    elif isinstance(value, Tensor):
        if not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    elif not isinstance(value, nn.Module):
        try:
            copy.deepcopy(value)
        except Exception:  # noqa: BLE001  # somebody's object may raise anything
            memo[id(value)] = value


def source_of(target: object) -> str:
    """Return the text of a class or function without comments; empty where there is none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cast(Any, target))))
    except (OSError, TypeError, SyntaxError):
        return ""
    return ast.unparse(tree)  # without comments, which decide nothing


def layouts(given: Given) -> list[Layout]:
    """The layouts worth trying, in order."""
    orders: list[Order] = ["btd", *given.orders_with_heads[:1], "td"]
    found: list[Layout] = []
    for dim in given.widths:
        found += [_layout(order, _TOKENS, dim) for order in orders]
    for dim in given.widths[:3]:  # code that only works with as many tokens as columns
        lengths = [dim // heads for heads in range(1, dim) if dim % heads == 0]
        lengths += [width for width in given.widths if width not in lengths and width < 100]
        found += [_layout(order, n, dim) for n in lengths for order in orders[:2]]
    return found


def _layout(order: Order, tokens: int, dim: int) -> Layout:
    heads = 4 if order in ("bhtd", "bthd") else 1
    return Layout(order, 1 if order == "td" else _BATCH, tokens, dim, heads, heads)
