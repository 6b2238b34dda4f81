"""However the steps of attention are mixed, what met the value is recorded, or refused by name."""

import warnings

import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor

import regard
from handwritten_ways import (
    CHANGES,
    DROPOUTS,
    SOFTMAXES,
    STEPS,
    Answer,
    Both,
    Step,
    T,
    Way,
    meet,
    numbers,
)
from regard.scores.given_scores import GivenScores


def names(steps: dict[str, Step]) -> st.SearchStrategy[str]:
    """Draw a step that keeps the shape of its input, and is recorded rightly by itself."""
    given = numbers(2, 3, T, T).softmax(-1)
    kept = [name for name, step in steps.items() if step(given.clone()).shape == given.shape]
    return st.sampled_from(kept)


def mixed(steps: list[Step], drop: Step | None) -> Way:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        tensor = q @ k.mT
        for step in steps:
            tensor = step(tensor)
        return meet(tensor.clone(), v, tensor if drop is None else drop(tensor.clone()))

    return way


@given(
    before=st.lists(names(STEPS), max_size=2),
    softmax=names(SOFTMAXES),
    after=st.lists(names(CHANGES), max_size=2),
    drop=st.sampled_from([None, *DROPOUTS]),
)
def test_mixed_steps_are_recorded_as_they_were_or_refused_by_name(
    before: list[str], softmax: str, after: list[str], drop: str | None
) -> None:
    steps = [*map(STEPS.get, before), SOFTMAXES[softmax], *map(CHANGES.get, after)]
    model = Both(mixed(steps, DROPOUTS.get(drop)))
    x = numbers(2, 3, T, 7, seed=1)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(3)
        try:
            _, plain = model(x)
        except RuntimeError:
            reject()  # PyTorch writes to no tensor whose elements share memory
        torch.manual_seed(3)
        with regard.observe(model) as seen:
            weights, output = model(x)
    torch.testing.assert_close(output, plain, atol=0, rtol=0, equal_nan=True)
    assert "plain" in seen
    if "layer" not in seen:
        is_named = any("'layer'" in str(warning.message) for warning in caught)
        assert is_named
        return
    is_exact = isinstance(seen["layer"].source, GivenScores)
    found, wanted = seen["layer"].to_dense(), weights.expand_as(seen["layer"].to_dense())
    if not is_exact:
        assert not wanted.isnan().any() or any("NaN" in str(each.message) for each in caught)
        wanted = wanted.nan_to_num()
    rounds = any("round" in name or "half" in name for name in (*before, *after))
    # float32 rounds scores of 10 to 1e-6.
    atol = 2e-2 if rounds else 1e-4
    torch.testing.assert_close(found, wanted.to(found.dtype), atol=atol, rtol=0, equal_nan=True)
