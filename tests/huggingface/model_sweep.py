"""A comparison of ``regard.transformers.lazy`` with eager attention for every model type.

``python tests/huggingface/model_sweep.py`` runs all types and writes docs/model_types.md. With
names of types it prints their verdicts.
"""

import multiprocessing
import re
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from regard import AttentionMatrix
from regard.errors import RegardError
from regard.transformers import lazy, lazy_models
from small_transformers import TYPES, build, inputs_of

PAGE = Path(__file__).parents[2] / "docs" / "model_types.md"
TOLERANCE = 1e-5
SECONDS = 60
"""The time after which a type counts as not built."""

MEMORY = 8 << 30
"""The address space of a worker, in bytes."""

MEANINGS = {
    "agrees": "every matrix has eager's weights within 1e-5, and no bit of another output changes",
    "dense": "some attentions stay the model's own dense tensors, and a warning says so",
    "refused": "lazy raises a RegardError, whose first line is given",
    "eager differs": "eager computes other outputs than the model's default implementation, "
    "without lazy too; the matrices give the outputs of the kernel that ran",
    "no attentions": "eager itself returns none, or raises an error when asked for them",
    "not built": "the sweep could not build or run the model at a small size",
    "differs": "a fault of lazy",
}
"""The verdicts, in the order of the page."""


class Verdict(NamedTuple):
    """The result of one model type."""

    type: str
    verdict: str
    why: str = ""


class _Differs(Exception):
    """A fault of lazy, in words."""


class _Flat(NamedTuple):
    """The tensors of an output by their path: those of attentions, and the others."""

    attentions: dict[str, Any]
    others: dict[str, Tensor]


def _flat(output: Any) -> _Flat:
    flat = _Flat({}, {})
    for path, value in _leaves(output, ""):
        is_attention = isinstance(value, AttentionMatrix) or "attentions" in path
        (flat.attentions if is_attention else flat.others)[path] = value
    return flat


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | AttentionMatrix):
        yield path, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(each, f"{path}.{name}")
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}[{index}]")


def _run(model: Any, inputs: dict[str, Any], **options: Any) -> _Flat:
    torch.manual_seed(0)
    with torch.no_grad():
        return _flat(model(**inputs, **options))


def _generate(model: Any, inputs: dict[str, Any]) -> _Flat:
    torch.manual_seed(0)
    inputs = {name: each for name, each in inputs.items() if not name.startswith("decoder_")}
    output = model.generate(
        **inputs,
        max_new_tokens=3,
        min_new_tokens=3,
        do_sample=False,
        output_attentions=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return _flat(output)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, without what differs between two runs."""
    lines = str(error.__cause__ or error).strip().splitlines()
    line = re.sub(r"0x[0-9a-f]+|\{.*", "...", lines[0] if lines else "")[:200]
    return f"{type(error).__name__}: {line}"


def verdict_of(model_type: str) -> Verdict:
    """Compare the lazy attentions of a small model with those of eager attention."""
    try:
        model = build(model_type)
        eager = build(model_type, "eager")
        eager.load_state_dict(model.state_dict())
        _run(model, inputs_of(model))
    except Exception as error:  # noqa: BLE001 - any error of transformers means the same
        return Verdict(model_type, "not built", _first_line(error))
    try:
        return _Comparison(model_type, model, eager).verdict()
    except RegardError as error:
        return Verdict(model_type, "refused", str(error).splitlines()[0])
    except _Differs as error:
        return Verdict(model_type, "differs", str(error))
    except Exception as error:  # noqa: BLE001 - one type must not stop the others
        return Verdict(model_type, "differs", f"raises {_first_line(error)}")


class _Comparison:
    """A comparison of a model that may be lazy with an eager one of the same weights."""

    def __init__(self, model_type: str, model: Any, eager: Any) -> None:
        self.type, self.model, self.eager = model_type, model, eager
        self.dense = 0
        self.count = 0
        self.eager_error = 0.0
        self.warned = False
        self.reason = ""

    def verdict(self) -> Verdict:
        for padding in (None, "right", "left"):
            inputs = inputs_of(self.model, padding)
            if padding is None or any("mask" in name for name in inputs):
                self.compare(_run, inputs, padding)
        if self.count and _can_generate(self.model):
            for padding in (None, "left"):
                inputs = inputs_of(self.model, padding)
                if padding is None or any("mask" in name for name in inputs):
                    self.compare(_generated, inputs, padding)
        if not self.count:
            return Verdict(self.type, "no attentions", self.reason)
        if self.eager_error:
            return Verdict(self.type, "eager differs", f"by {self.eager_error:.0e}")
        if self.dense:
            return Verdict(self.type, "dense", f"{self.dense} of {self.count} attentions")
        return Verdict(self.type, "agrees")

    def compare(
        self, run: Callable[..., _Flat], inputs: dict[str, Any], padding: str | None
    ) -> None:
        """Compare one run of both models."""
        where = f"{run.__name__.strip('_')}, padding {padding}"
        try:
            expected = run(self.eager, inputs, output_attentions=True)
        except Exception as error:  # noqa: BLE001 - an error of transformers
            self.reason = self.reason or _first_line(error)
            return
        weights = {path: each for path, each in expected.attentions.items() if each.ndim >= 3}
        if not weights:
            return
        plain = run(self.model, inputs)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with lazy(self.model):
                found = self.lazily(run, inputs, where)
        self.warned |= any("keeps dense attentions" in str(each.message) for each in caught)
        _check_bits(plain.others, found.others, where)
        again = run(self.model, inputs)
        _check_bits(plain.others, again.others, f"{where}, after lazy")
        real = [each.bool() for name, each in inputs.items() if name.endswith("attention_mask")]
        self.check_weights(found, weights, _distance(plain, expected, real), real, where)

    def lazily(self, run: Callable[..., _Flat], inputs: dict[str, Any], where: str) -> _Flat:
        make = lazy_models.fused_matrix

        def checked(call: Any, *shared: Any) -> Any:
            output, weights = make(call, *shared)
            _check_output(call, output, weights, where)
            return output, weights

        try:
            with patch.object(lazy_models, "fused_matrix", checked):
                return run(self.model, inputs, output_attentions=True)
        except (RegardError, _Differs):
            raise
        except Exception as error:
            raise _Differs(f"raises {_first_line(error)} ({where})") from error

    def check_weights(
        self,
        found: _Flat,
        weights: dict[str, Tensor],
        eager_error: float,
        real: list[Tensor],
        where: str,
    ) -> None:
        """Raise an error if the attentions of a lazy model are not eager's."""
        if missing := sorted(weights.keys() - found.attentions.keys()):
            raise _Differs(f"{missing[0]} is missing ({where})")
        for path, expected in weights.items():
            ours = found.attentions[path]
            self.count += 1
            if isinstance(ours, Tensor):
                self.dense += 1
                # Whisper's own generate stacks the matrices of each text.
                if not self.warned and not where.startswith("generated"):
                    raise _Differs(f"{path} is dense without a warning ({where})")
            dense = ours.to_dense() if isinstance(ours, AttentionMatrix) else ours
            if dense.shape != expected.shape:
                raise _Differs(
                    f"{path} has the shape {tuple(dense.shape)}, eager's {tuple(expected.shape)} "
                    f"({where})"
                )
            error = _error(dense.double(), expected.double())
            # The rows of padding without keys in one layer are other queries in the next.
            for tokens in real if error > TOLERANCE else ():
                if tokens.shape == (dense.shape[0], dense.shape[-2]):
                    tokens = tokens.reshape(len(tokens), *(1,) * (dense.ndim - 3), -1, 1)
                    error = _error(dense.double() * tokens, expected.double() * tokens)
            if error > TOLERANCE:
                if eager_error > 10 * TOLERANCE:
                    self.eager_error = max(self.eager_error, eager_error)
                    continue
                raise _Differs(f"{path} is off by {error:.1e} ({where})")


def _check_output(call: Any, output: Tensor, weights: Any, where: str) -> None:
    """Raise an error if a matrix times the value is not the output of its kernel.

    This holds also where eager attention has another mask than the kernel.
    """
    value = dict(zip(("query", "key", "value"), call.args, strict=False)) | call.kwargs
    values = value["value"].double()
    dense = (weights if isinstance(weights, Tensor) else weights.to_dense()).double()
    if call.module.training or values.shape[-2] < dense.shape[-1] or output.ndim != 4:
        return
    values = values.repeat_interleave(dense.shape[1] // values.shape[1], 1)
    product = dense @ values[..., : dense.shape[-1], :]
    has_keys = (dense != 0).any(-1, keepdim=True)
    error = ((product - output.transpose(1, 2).double()) * has_keys).abs().nan_to_num(0)
    if float(error.max()) > 1e-4 * (1 + float(values.abs().max())):
        raise _Differs(f"a matrix does not give its output, by {float(error.max()):.0e} ({where})")


def _generated(model: Any, inputs: dict[str, Any], **_: Any) -> _Flat:
    return _generate(model, inputs)


def _can_generate(model: Any) -> bool:
    """Return True if a model generates without lazy."""
    if not model.can_generate():
        return False
    try:
        _generate(model, inputs_of(model))
    except Exception:  # noqa: BLE001 - an error of transformers
        return False
    return True


def _check_bits(plain: dict[str, Tensor], found: dict[str, Tensor], where: str) -> None:
    for path, expected in plain.items():
        if path not in found:
            raise _Differs(f"{path} is missing ({where})")
        if not _are_same(expected, found[path]):
            raise _Differs(f"{path} has other bits ({where})")


def _are_same(a: Tensor, b: Tensor) -> bool:
    same = a.shape == b.shape and (a == b) | ((a != a) & (b != b))
    return bool(torch.as_tensor(same).all())


def _distance(plain: _Flat, eager: _Flat, real: list[Tensor]) -> float:
    """Return the largest difference of other outputs of two models, relative to those above 1.

    Args:
        plain: the outputs of a model.
        eager: the outputs of the eager one.
        real: masks, True for a token that is no padding. Outputs of padding are not compared.
    """
    largest = 0.0
    for path, expected in eager.others.items():
        ours = plain.others.get(path)
        if ours is None or ours.shape != expected.shape:
            return float("inf")
        a, b = ours.double(), expected.double()
        error = (a - b).abs() / b.abs().clamp(min=1)
        is_same = (a == b) | (a.isnan() & b.isnan())
        error = torch.where(is_same, 0, error.nan_to_num(torch.inf, torch.inf))
        for tokens in real:
            if error.shape[:2] == tokens.shape:
                mask = tokens.reshape(*tokens.shape, *(1,) * (error.ndim - 2))
                error = torch.where(mask, error, 0)
        largest = max([largest, *error.flatten().tolist()])
    return largest


def _error(ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference of weights in rows that have keys.

    A row without keys is 0 in a lazy matrix. Eager attention has 1/n there, which is not compared;
    a row that is 0 where eager's is not constant counts as an error.
    """
    ours, expected = ours.nan_to_num(-1), expected.nan_to_num(-1)
    has_keys = (ours != 0).any(-1)
    error = (ours - expected).abs().amax(-1)
    is_constant = expected.amax(-1) - expected.amin(-1) < TOLERANCE
    error = torch.where(has_keys | ~is_constant, error, 0.0)
    return float(error.max()) if error.numel() else 0.0


class _Worker:
    """A process that compares one type after another, and is replaced if it dies."""

    def __init__(self) -> None:
        self.process: Any = None

    def verdict_of(self, model_type: str) -> Verdict:
        if self.process is None:
            self.connection, theirs = multiprocessing.Pipe()
            context = multiprocessing.get_context("spawn")
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
        try:
            self.connection.send(model_type)
            if self.connection.poll(SECONDS):
                return Verdict(*self.connection.recv())
            reason = f"it takes more than {SECONDS} s"
        except (EOFError, BrokenPipeError, ConnectionResetError):
            reason = "the process died"
        self.process.kill()
        self.process.join()
        self.process = None
        return Verdict(model_type, "not built", reason)


def _serve(connection: Any) -> None:
    prepare()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while True:
        try:
            model_type = connection.recv()
        except EOFError:
            return
        connection.send(tuple(verdict_of(model_type)))


def prepare() -> None:
    """Silence transformers, and run as tests do: on one thread, unwritten memory being NaN."""
    import transformers

    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def sweep(types: Iterable[str], processes: int = 2) -> list[Verdict]:
    """Return the verdicts of types, which worker processes find."""
    rest = list(types)[::-1]

    def work(_: int) -> list[Verdict]:
        worker, verdicts = _Worker(), []
        while rest:
            verdicts.append(worker.verdict_of(rest.pop()))
        return verdicts

    with ThreadPoolExecutor(processes) as threads:
        return sorted(each for verdicts in threads.map(work, range(processes)) for each in verdicts)


def page(verdicts: list[Verdict]) -> str:
    """Return the page of all verdicts."""
    import transformers

    counts = Counter(each.verdict for each in verdicts)
    built = len(verdicts) - counts["not built"]
    lines = [
        "# Model types of transformers",
        "",
        f"transformers {transformers.__version__} has {len(verdicts)} model types. "
        f"{built} of them were built small, with random weights, and run on a CPU.",
        "Each ran with `regard.transformers.lazy` and with eager attention: with and without "
        "padding, and while it generated three tokens if it can generate.",
        "The weights of each lazy matrix were compared with eager's. Rows without keys were not: "
        "they are 0 in a lazy matrix, and 1/n in eager attention.",
        "Rows of padding count only if they agree: once such a row has no keys in one layer, its "
        "query differs in the next.",
        "All other outputs were compared bit by bit with those of the model without `lazy`.",
        "`python tests/huggingface/model_sweep.py` writes this page.",
        "",
        "| verdict | types | meaning |",
        "| --- | ---: | --- |",
        *(f"| {name} | {counts[name]} | {text} |" for name, text in MEANINGS.items()),
        "",
        "| type | verdict | why |",
        "| --- | --- | --- |",
        *(f"| {each.type} | {each.verdict} | {_cell(each.why)} |" for each in sorted(verdicts)),
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return a text that stands in one cell of a table, as code."""
    text = text.replace("|", "/").replace("`", "'").strip()
    return f"`{text}`" if text else ""


def verdicts_of_page() -> dict[str, str]:
    """Return the verdict of each type on the page."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    types = set(TYPES)
    return {row[0][2:]: row[1] for row in rows if row[0][2:] in types}


def version_of_page() -> str:
    """Return the version of transformers that the page is about."""
    words = PAGE.read_text().split()
    return words[words.index("has") - 1]


def main() -> None:
    if names := sys.argv[1:]:
        for each in sweep(names):
            print(*each, sep=" | ")
        return
    verdicts = sweep(TYPES)
    PAGE.write_text(page(verdicts))
    for name, count in Counter(each.verdict for each in verdicts).items():
        print(f"{count:4d} {name}")


if __name__ == "__main__":
    main()
