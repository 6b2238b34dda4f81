"""The goals of speed, each against a peer on the same tensors, taken in turns."""

from collections.abc import Mapping
from statistics import median

import torch

import regard
from benchmarks.case import Case, Effort, Floor, Measured, half, passes, quartiles
from benchmarks.models import against_attnread
from benchmarks.patterns import CAUSAL, PADDING, WIDTH, WINDOW, Pattern
from benchmarks.questions import ALL, LONG, OUTPUT, QUESTIONS, SHORT
from benchmarks.sides import Prepare, asked, backward, compiled_flex, forward, near
from benchmarks.tensors import random_inputs
from benchmarks.turns import in_turns, ratio

__all__ = ["CASES"]

NUM_HEADS = 8
KINDS = {"randn": 1, "sharp": 30}  # what the scores are multiplied by
AS_CAUSAL = ("logsumexp", "entropy", "topk(8)", "sum(-2)", "pool(64, 64)")


def against(
    name: str,
    ours: Prepare,
    goals: Mapping[int, float],
    floor: Floor | None = None,
    *,
    peer: Prepare = forward(),  # noqa: B008 - it is immutable
    unit: str = "forwards",
    kind: str = "randn",
    dtype: torch.dtype = torch.float32,
) -> Case:
    """How many peers ours takes, at each length that has a goal."""

    def measure(effort: Effort) -> Measured:
        inputs = random_inputs(effort.tokens, NUM_HEADS, KINDS[kind], dtype)
        return ratio(ours(inputs), peer(inputs), effort.repetitions)

    return Case("speed", f"{name}, {kind}", unit, measure, tuple(goals), goals, floor)


def question(name: str, kind: str) -> Case:
    """A question against one forward."""
    ask, goals, needed = QUESTIONS[name]
    return against(name, asked(ask), goals, passes(*needed), kind=kind)


def masked(name: str, mask: str, pattern: Pattern, goals: Mapping[int, float]) -> Case:
    """A question under a mask against a forward under the same one."""
    ask, _, needed = QUESTIONS[name]
    peer = forward(pattern)
    return against(f"{name}, {mask}", asked(ask, pattern), goals, passes(*needed), peer=peer)


def causal(name: str) -> Case:
    """A reduction under a causal mask against the same one of the whole matrix."""
    ask = QUESTIONS[name].ask
    ours, peer = asked(ask, CAUSAL), asked(ask)
    goals = {SHORT: 0.58, LONG: 0.54}
    return against(f"{name}, causal", ours, goals, half, peer=peer, unit="of the full one")


def in_window(goals: Mapping[int, float], peer: Prepare, unit: str) -> Case:
    """What the output under a window costs against another way to it."""
    name = f"{OUTPUT}, window of {WIDTH}, against {unit.removeprefix('of ')}"
    return against(name, asked(QUESTIONS[OUTPUT].ask, WINDOW), goals, peer=peer, unit=unit)


def three_tokens(effort: Effort) -> Measured:
    """Microseconds over a fused forward of 3 tokens, one head; the matrix is given."""
    inputs = random_inputs(3, 1)
    matrix = regard.attend(inputs.query, inputs.key)
    works = (
        lambda: matrix @ inputs.value,
        forward()(inputs),
        lambda: regard.attend(inputs.query, inputs.key),
    )
    ours_s, peer_s, attend_s = in_turns(works, 500 * effort.repetitions)
    over = [(a - b) * 1e6 for a, b in zip(ours_s, peer_s, strict=True)]
    beside = f"the peer {median(peer_s) * 1e6:.3g} µs, attend {median(attend_s) * 1e6:.3g} µs"
    return Measured(median(over), len(over), *quartiles(over), beside=beside)


CASES = (
    *(question(name, kind) for name in QUESTIONS for kind in KINDS),
    masked(OUTPUT, "causal", CAUSAL, {SHORT: 1.02}),
    masked(OUTPUT, "padding", PADDING, {SHORT: 1.02}),
    masked(ALL, "causal", CAUSAL, {SHORT: 1.35, LONG: 1.4}),
    *(causal(name) for name in AS_CAUSAL),
    against(
        f"{ALL}, bfloat16",
        asked(QUESTIONS[ALL].ask),
        {SHORT: 1.4, LONG: 1.5},
        passes(*(f"{name}, bfloat16" for name in QUESTIONS[ALL].passes)),
        dtype=torch.bfloat16,
    ),
    in_window({LONG: 0.05}, forward(WINDOW), "of masked SDPA"),
    in_window({SHORT: 0.5, LONG: 0.5}, compiled_flex(near), "of FlexAttention"),
    against(
        "backward of entropy",
        backward(asked(QUESTIONS["entropy"].ask)),
        {SHORT: 1.8, LONG: 1.9},
        passes("scores", "exp", "product", "product"),
    ),
    Case("speed", f"{OUTPUT}, 3 tokens, one head", "µs over SDPA", three_tokens, goal=30),
    Case("speed", "weights of one head of SmolLM2", "of attnread", against_attnread, (512,)),
)
