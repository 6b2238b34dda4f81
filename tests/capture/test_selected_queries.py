"""Selected queries of a text that several calls read, also counted from its end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import regard
from cases import in_turn
from regard.recording.spool import spool_of

pytestmark = [
    # The last call of a text in uneven parts may have read guesses.
    pytest.mark.filterwarnings("ignore:.*ended with a call that added several tokens"),
    # Beside its fused kernel, the module computes the weights for the test.
    pytest.mark.filterwarnings("ignore:.*has attention that is not recorded"),
]

LENGTH = 10
X = torch.randn(1, LENGTH, 8, generator=torch.Generator().manual_seed(0))
PARTS = {"6-4": (6, 4), "1-9": (1, 9), "6-1-3": (6, 1, 3), "1-1-8": (1, 1, 8)}
KINDS = ["by-hand", "fused", "other-weights"]
QUERIES = {
    "last": slice(-1, None),
    "last-3": slice(-3, None),
    "last-7": slice(-7, None),
    "inside": slice(2, 5),
    "from-3": slice(3, None),
    "but-the-last": slice(0, -1),
    "between": slice(-5, -1),
}


class Cached(nn.Module):
    """Causal attention with a growing cache, by hand, fused, or with other weights."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.kind = kind
        self.cache: tuple[Tensor, Tensor] | None = None
        self.rows: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.cache is not None:
            key, value = (torch.cat(both, 1) for both in zip(self.cache, (key, value), strict=True))
        self.cache = key, value
        shape = query.shape[1], key.shape[1]
        visible = torch.ones(shape, dtype=torch.bool, device=x.device).tril(shape[1] - shape[0])
        weights = (query @ key.mT * 0.5).masked_fill(~visible, -torch.inf).softmax(-1)
        if self.kind == "other-weights":
            weights = weights**2
            weights = weights / weights.sum(-1, keepdim=True)
        self.rows.append(nn.functional.pad(weights, (0, LENGTH - shape[1])))
        if self.kind == "fused":
            by_head = (each[:, None] for each in (query, key, value))
            return scaled_dot_product_attention(*by_head, attn_mask=visible, scale=0.5)
        return weights @ value


def observed(
    kind: str, parts: tuple[int, ...], queries: slice, **options: Any
) -> tuple[regard.Recording, Tensor]:
    """Return the recording of a text that is read in parts, and the selected rows."""
    model = Cached(kind)
    with torch.no_grad(), regard.observe(model, queries=queries, **options) as seen:
        for part in X.split(parts, 1):
            model(part)
    return seen, torch.cat(model.rows, 1)[:, queries]


@in_turn(queries=QUERIES, parts=PARTS, kind=KINDS)
def test_the_rows_are_those_of_the_whole_text(
    queries: slice, parts: tuple[int, ...], kind: str
) -> None:
    seen, rows = observed(kind, parts, queries)
    (found,) = seen.values()
    torch.testing.assert_close(found.to_dense().reshape(rows.shape), rows, atol=1e-6, rtol=0)
    assert seen.layers[0].positions == range(LENGTH)[queries]


@in_turn(queries=("last-3", "between"), parts=("1-9", "6-1-3"), kind=("by-hand", "other-weights"))
def test_a_file_has_the_rows_of_the_whole_text(
    queries: str, parts: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.safetensors"
    _, rows = observed(kind, PARTS[parts], QUERIES[queries], path=path)
    (found,) = regard.load(path).values()
    torch.testing.assert_close(found.to_dense().reshape(rows.shape), rows, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["by-hand", "other-weights"])
def test_what_was_finished_before_an_error_has_the_rows_so_far(kind: str, tmp_path: Path) -> None:
    model, path = Cached(kind), tmp_path / "run.safetensors"

    def interrupted() -> None:
        with torch.no_grad(), regard.observe(model, queries=slice(-3, None), path=path):
            for part in X.split((1, 5, 4), 1):
                model(part)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (found,) = regard.load(spool_of(path)).values()
    rows = torch.cat(model.rows, 1)[:, -3:]
    torch.testing.assert_close(found.to_dense().reshape(rows.shape), rows, atol=1e-6, rtol=0)


@in_turn(
    queries={name: each for name, each in QUERIES.items() if (each.stop or 0) >= 0},
    parts=PARTS,
    path=[False, True],
    kind=["by-hand", "other-weights"],
)
def test_answers_about_rows_are_those_of_the_whole_text(
    queries: slice, parts: tuple[int, ...], path: bool, kind: str, tmp_path: Path
) -> None:
    keep = [regard.Entropy(), regard.TopK(1), regard.Sum(-1)]
    options = {"path": tmp_path / "run.safetensors"} if path else {}
    seen, rows = observed(kind, parts, queries, keep=keep, **options)
    (entropy,), (top,) = seen.entropy().values(), seen.topk(1).values()
    expected = torch.special.entr(rows).sum(-1)
    torch.testing.assert_close(entropy.reshape(expected.shape), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(top.values.reshape(-1), rows.amax(-1).reshape(-1))
    assert seen.layers[0].positions == range(LENGTH)[queries]


@pytest.mark.parametrize("queries", [slice(0, -1), slice(-5, -1)], ids=str)
def test_answers_that_leave_out_the_end_are_not_those_of_each_call(queries: slice) -> None:
    with pytest.raises(regard.RegardError, match="of several calls cannot be merged"):
        observed("by-hand", (6, 4), queries, keep=[regard.Entropy()])


def test_a_total_of_the_last_queries_is_not_that_of_each_call() -> None:
    keep = [regard.Sum(-2), regard.Entropy()]
    with pytest.warns(UserWarning, match=r"Sum\(dim=-2\) of several calls cannot be merged"):
        seen, _ = observed("by-hand", (6, 4), slice(-3, None), keep=keep)
    assert [*seen.layers[0].answers] == [regard.Entropy()]
    seen, rows = observed("by-hand", (6, 4), slice(2, 5), keep=keep)
    (total,) = seen.received().values()
    torch.testing.assert_close(total.reshape(-1), rows.sum((0, 1)))
