"""What watching SmolLM2 costs: time beside the unobserved forward, memory, and the file."""

import ctypes
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import regard
from benchmarks.case import Case, Effort, LeftOut, Measured
from benchmarks.meter import added
from benchmarks.models import language_model
from benchmarks.turns import Work, ratio

__all__ = ["CASES"]

SHORT, LONG = 2048, 8192
MB = 10**6
REDUCTIONS = (regard.TopK(8), regard.Entropy(), regard.Sum(-2), regard.Pool(64, 64))
# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3), in bytes.
KEPT_HEAP = ((-1, 2**31 - 1), (-3, 2**25))
# Each round takes seconds, and a twentieth is asked about: less than what other machines on the
# same processor take from one round to the next.
ROUNDS = {SHORT: 15, LONG: 3}

# How a forward is watched, of the model.
Watch = Callable[[Any], AbstractContextManager[object]]
NOTHING: Watch = lambda _: nullcontext()  # noqa: E731
QUERY_KEY: Watch = regard.observe
ANSWERS: Watch = partial(regard.observe, keep=REDUCTIONS)


def forward(model: Any, tokens: int, watch: Watch) -> Work:
    """One forward of random tokens, up to the logits of the last one."""
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator())

    def work() -> object:
        with torch.inference_mode(), watch(model) as seen:
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
        return seen

    return work


def time(name: str, watch: Watch, goals: Mapping[int, float], dtype: torch.dtype) -> Case:
    """How many unobserved forwards an observed one takes."""

    def measure(effort: Effort) -> Measured:
        model = language_model(dtype)
        ours, peer = (forward(model, effort.tokens, how) for how in (watch, NOTHING))
        fewest = ROUNDS.get(effort.tokens, 1)
        return ratio(ours, peer, max(fewest, effort.repetitions), fewest)

    kind = str(dtype).removeprefix("torch.")
    unit = "unobserved forwards"
    return Case("observe", f"{name}, {kind}", unit, measure, tuple(goals), goals)


def with_its_heap(case: Case) -> Case:
    """The same where glibc keeps the memory that both forwards free.

    Otherwise it hands the top of its heap back after a layer, or does not, as the sizes fall: a
    forward of 2,048 tokens, watched or not, meets from 0 to 180,000 page faults, up to a tenth of
    its time.
    """

    def measure(effort: Effort) -> Measured:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is None or not all(mallopt(what, size) for what, size in KEPT_HEAP):
            raise LeftOut("it needs glibc")
        return case.measure(effort)

    return replace(case, name=f"{case.name}, heap kept", measure=measure, lengths=(SHORT,))


def file_size(effort: Effort) -> Measured:
    """MB (10^6 bytes) of the file, in the model's own dtype, written as the model runs."""
    model = language_model(torch.bfloat16)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        forward(model, effort.tokens, partial(regard.observe, path=path))()
        size = path.stat().st_size / MB
    return Measured(size, 1, size, size)


def memory(watch: Watch) -> Callable[[Effort], Measured]:
    """MiB beside the model at the peak; those of its own forward are among them."""

    def measure(effort: Effort) -> Measured:
        model = language_model(torch.bfloat16)
        forward(model, 64, watch)()
        mib = added(forward(model, effort.tokens, watch))
        return Measured(mib, 1, mib, mib)

    return measure


CASES = (
    *(
        time(name, watch, goals, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for name, watch, goals in (
            ("query and key of all heads", QUERY_KEY, {SHORT: 1.1, LONG: 1.05}),
            ("four reductions of all heads", ANSWERS, {SHORT: 1.5, LONG: 1.5}),
        )
    ),
    with_its_heap(time("query and key of all heads", QUERY_KEY, {SHORT: 1.1}, torch.bfloat16)),
    Case("observe", "file of query and key, bfloat16", "MB", file_size, (LONG,), 400),
    Case("observe", "memory, not observed, bfloat16", "MiB", memory(NOTHING), (LONG,)),
    Case("observe", "memory, four reductions, bfloat16", "MiB", memory(ANSWERS), (LONG,), 1024),
    Case("observe", "memory, query and key, bfloat16", "MiB", memory(QUERY_KEY), (LONG,)),
)
