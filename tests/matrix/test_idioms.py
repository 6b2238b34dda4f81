"""100 expressions that people write on ``outputs.attentions``: they work, or say what to write.

Each runs on a lazy matrix and on its dense tensor. Where it works, both give the same numbers.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.matrix.linear_map import LinearMap

HEADS, TOKENS = 4, 12
EYE = torch.eye(TOKENS)
TOKEN_MASK = torch.arange(TOKENS) % 3 > 0
# float32 sums in two orders
TIGHT = {"atol": 1e-6, "rtol": 1e-5}


def layer(seed: int, **options: Any) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS, TOKENS, 8, generator=generator)
    key = torch.randn(1, options.pop("num_kv_heads", HEADS), TOKENS, 8, generator=generator)
    return regard.attend(query, key, **options)


KINDS: dict[str, list[regard.AttentionMatrix]] = {
    "bidirectional": [layer(0), layer(1)],
    "causal": [layer(n, num_kv_heads=2, mask=regard.Causal()) for n in (2, 3)],
    "biased": [layer(n, num_kv_heads=1, bias=torch.eye(TOKENS)) for n in (4, 5)],
}

Idiom = Callable[[Any, Sequence[Any]], Any]

WORKS: dict[str, Idiom] = {
    "a[0][None]": lambda a, _: a[0][None],
    "a[:, None]": lambda a, _: a[:, None],
    "a.unsqueeze(0)": lambda a, _: a.unsqueeze(0),
    "a[0:1]": lambda a, _: a[0:1],
    "a[:, 1:3]": lambda a, _: a[:, 1:3],
    "a[:, [0,2]]": lambda a, _: a[:, [0, 2]],
    "a[0, :, 0, 1:]": lambda a, _: a[0, :, 0, 1:],
    "a[0,:,0,1:].reshape(4,-1)": lambda a, _: a[0, :, 0, 1:].reshape(4, -1),
    "a[:, :, 0, 1:].mean(1)": lambda a, _: a[:, :, 0, 1:].mean(1),
    "a.mean(axis=1)": lambda a, _: a.mean(axis=1),
    "a.mean(dim=1)": lambda a, _: a.mean(dim=1),
    "a.mean(1, keepdim=True)": lambda a, _: a.mean(1, keepdim=True),
    "a.mean((0,1))": lambda a, _: a.mean((0, 1)),
    "a.mean(dim=[0,1])": lambda a, _: a.mean(dim=[0, 1]),
    "a.sum(dim=1)": lambda a, _: a.sum(dim=1),
    "a.sum(1)/4": lambda a, _: a.sum(1) / 4,
    "a.mean()": lambda a, _: a.mean(),
    "a.mean(-1)": lambda a, _: a.mean(-1),
    "a.mean(-2)": lambda a, _: a.mean(-2),
    "a.sum(-1)": lambda a, _: a.sum(-1),
    "a.sum(dim=-2)": lambda a, _: a.sum(dim=-2),
    "a.sum(2)": lambda a, _: a.sum(2),
    "a.sum(-1, keepdim=True)": lambda a, _: a.sum(-1, keepdim=True),
    "a.max(-1)": lambda a, _: a.max(-1),
    "a.argmax(-1)": lambda a, _: a.argmax(-1),
    "a.topk(3)": lambda a, _: a.topk(3),
    "a.topk(3, dim=-1)": lambda a, _: a.topk(3, dim=-1),
    "a.topk(3).indices": lambda a, _: a.topk(3).indices,
    "a.float()": lambda a, _: a.float(),
    "a.to(torch.float32)": lambda a, _: a.to(torch.float32),
    "a.double()": lambda a, _: a.double(),
    "a.half()": lambda a, _: a.half(),
    "a.clone()": lambda a, _: a.clone(),
    "a.transpose(-1,-2)": lambda a, _: a.transpose(-1, -2),
    "a.reshape(4,12,12)": lambda a, _: a.reshape(4, 12, 12),
    "a.view(-1,12,12)": lambda a, _: a.view(-1, 12, 12),
    "a + eye": lambda a, _: a + EYE,
    "a * 2": lambda a, _: a * 2,
    "a / a.sum(-1,keepdim=True)": lambda a, _: a / a.sum(-1, keepdim=True),
    "a[..., 2:5].sum(-1)": lambda a, _: a[..., 2:5].sum(-1),
    "a[:, :, :, 2:5].sum(-1)": lambda a, _: a[:, :, :, 2:5].sum(-1),
    "a[:, :, -1, 2:5].mean()": lambda a, _: a[:, :, -1, 2:5].mean(),
    "a[:, :, -1]": lambda a, _: a[:, :, -1],
    "a[0][:, -1]": lambda a, _: a[0][:, -1],
    "a[0, :, -1, :].mean(dim=0)": lambda a, _: a[0, :, -1, :].mean(dim=0),
    "a[0].mean(dim=0)[-1]": lambda a, _: a[0].mean(dim=0)[-1],
    "a.squeeze()": lambda a, _: a.squeeze(),
    "a[-1]": lambda a, _: a[-1],
    "a[0][-1]": lambda a, _: a[0][-1],
    "a[0,-1,-1,-1].item()": lambda a, _: a[0, -1, -1, -1].item(),
    "a[0,0][a_mask]": lambda a, _: a[0, 0][TOKEN_MASK],
    "a[0,0,torch.tensor([1,3])]": lambda a, _: a[0, 0, torch.tensor([1, 3])],
    "a.numel()": lambda a, _: a.numel(),
    "a.nelement()": lambda a, _: a.nelement(),
    "a.dim()": lambda a, _: a.dim(),
    "a.requires_grad": lambda a, _: a.requires_grad,
    "a.size()[-1]": lambda a, _: a.size()[-1],
    "len(a)": lambda a, _: len(a),
    "a.contiguous()": lambda a, _: a.contiguous(),
    "a.cuda-like: a.to('cpu')": lambda a, _: a.to("cpu"),
    "a.diagonal(dim1=-2,dim2=-1)": lambda a, _: a.diagonal(dim1=-2, dim2=-1),
    "a.bmm-like a@a": lambda a, _: a @ a,
    "eye@a.mean(1)": lambda a, _: EYE @ a.mean(1),
    "matmul(mean, mean)": lambda _, atts: torch.matmul(atts[1].mean(1), atts[0].mean(1)),
    "torch.stack([x.mean(1) ...])": lambda _, atts: torch.stack([x.mean(1) for x in atts]),
    "torch.stack(a).mean(0)": lambda _, atts: torch.stack(atts).mean(0),
    "torch.mean(a, dim=1)": lambda a, _: torch.mean(a, dim=1),
    "sum(attn)/2": lambda _, atts: sum(atts) / 2,
    "mean(1)+eye": lambda a, _: a.mean(1) + EYE,
    "mean(1).squeeze(0)": lambda a, _: a.mean(1).squeeze(0),
    "mean(1).squeeze()": lambda a, _: a.mean(1).squeeze(),
    "mean(1)[0].float()": lambda a, _: a.mean(1)[0].float(),
    "mean(1)[:, -1, 3:6]": lambda a, _: a.mean(1)[:, -1, 3:6],
    "mean(1).sum(-2)": lambda a, _: a.mean(1).sum(-2),
    "mean(1).topk(2)": lambda a, _: a.mean(1).topk(2),
    "mean(1).max(-1)": lambda a, _: a.mean(1).max(-1),
    "mean(1).mean(0)": lambda a, _: a.mean(1).mean(0),
    "mean(1).argmax(-1)": lambda a, _: a.mean(1).argmax(-1),
}

# Rows of a causal matrix with fewer keys have -1 in place of a key; PyTorch names any masked key.
OF_ROWS_WITH_KEYS = {"a.topk(3)", "a.topk(3, dim=-1)", "a.topk(3).indices", "mean(1).topk(2)"}

SAYS: dict[str, tuple[Idiom, str]] = {
    "a.max(dim=1)[0]": (lambda a, _: a.max(dim=1)[0], "A.mean(1)"),
    "a.max(axis=1)[0]": (lambda a, _: a.max(axis=1)[0], "A.mean(1)"),
    "a.min(dim=1)[0]": (lambda a, _: a.min(dim=1)[0], "A.mean(1)"),
    "a.detach().cpu().numpy()": (lambda a, _: a.detach().cpu().numpy(), "to_dense().numpy()"),
    "np.array(a)": (lambda a, _: np.array(a), "to_dense().numpy()"),
    "np.asarray(a[0,0])": (lambda a, _: np.asarray(a[0, 0]), "to_dense().numpy()"),
    "a.tolist()": (lambda a, _: a.tolist(), "to_dense().numpy()"),
    "a[0,0].tolist()": (lambda a, _: a[0, 0].tolist(), "to_dense().numpy()"),
    "a.permute(0,2,3,1)": (lambda a, _: a.permute(0, 2, 3, 1), "permute a part"),
    "a > .1": (lambda a, _: a > 0.1, "A[0, 3, :10] > 0.1"),
    "a.isnan().any()": (lambda a, _: a.isnan().any(), "A.sum(-1).isnan()"),
    "torch.isnan(a)": (lambda a, _: torch.isnan(a), "A.sum(-1).isnan()"),
    "a.std()": (lambda a, _: a.std(), "A.entropy()"),
    "a.masked_fill": (lambda a, _: a.masked_fill, "A * keep[:, None]"),
    "torch.cat((a,a),0)": (lambda a, _: torch.cat((a, a), 0), "torch.stack"),
    "torch.cat([x.mean(1)..])": (
        lambda _, atts: torch.cat([x.mean(1) for x in atts]),
        "torch.stack",
    ),
    "einsum": (lambda a, _: torch.einsum("bhij,bhjd->bhid", a, a), "A @ value"),
    "torch.max(a,1)": (lambda a, _: torch.max(a, 1), "A.mean(1)"),
    "F.interpolate": (lambda a, _: F.interpolate(a, size=(6, 6)), "A.pool(64, 64)"),
    "mean(1).numpy()": (lambda a, _: a.mean(1).numpy(), "to_dense().numpy()"),
    "mean(1).detach().cpu().numpy()": (
        lambda a, _: a.mean(1).detach().cpu().numpy(),
        "to_dense().numpy()",
    ),
}

# regard's own meaning, which older scripts use.
DIFFERS: dict[str, tuple[Idiom, Idiom]] = {
    "a.max()": (lambda a, _: a.max(), lambda a, _: a.max(-1)),
}


def numbers(answer: Any) -> Any:
    """The answer as tensors, which can be compared."""
    if isinstance(answer, LinearMap):
        return answer.to_dense()
    if isinstance(answer, tuple):
        return [numbers(each) for each in answer]
    return answer


def compare(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected, **TIGHT, check_dtype=False)


def test_the_table_has_100_expressions_and_most_of_them_work() -> None:
    assert len(WORKS) + len(SAYS) + len(DIFFERS) == 100
    assert len(WORKS) >= 70


@pytest.mark.sampled(78)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in WORKS
        for kind in KINDS
        if kind != "causal" or name not in OF_ROWS_WITH_KEYS
    ],
)
def test_an_expression_gives_what_it_gives_for_the_tensor(name: str, kind: str) -> None:
    layers = KINDS[kind]
    dense = [matrix.to_dense() for matrix in layers]
    found, expected = WORKS[name](layers[0], layers), WORKS[name](dense[0], dense)
    if name == "a.half()":
        torch.testing.assert_close(numbers(found), expected, atol=2e-3, rtol=0)  # of its inputs
    else:
        compare(numbers(found), numbers(expected))


@pytest.mark.parametrize("name", SAYS)
def test_an_expression_says_what_to_write(name: str) -> None:
    idiom, remedy = SAYS[name]
    layers = KINDS["bidirectional"]
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        idiom(layers[0], layers)
    says = str(caught.value)
    assert re.search(r"\n    [A-Z].*\.$", says), says
    assert remedy in says.partition("\n    ")[2]


@pytest.mark.parametrize("name", DIFFERS)
def test_an_expression_of_ours_keeps_its_meaning(name: str) -> None:
    idiom, meaning = DIFFERS[name]
    layers = KINDS["bidirectional"]
    dense = [matrix.to_dense() for matrix in layers]
    compare(numbers(idiom(layers[0], layers)), numbers(meaning(dense[0], dense)))


# Expressions of the same kinds, on batches, grouped heads, and one matrix.


def batch(seed: int = 0, **options: Any) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 6, 7, 4, generator=generator)
    key = torch.randn(2, options.pop("num_kv_heads", 2), 7, 4, generator=generator)
    return regard.attend(query, key, mask=regard.Causal() & regard.Padding([7, 4]), **options)


def by_head_and_distance(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
    return score * (1 + b) - h * (q_idx - kv_idx) / 10


MATRICES: dict[str, regard.AttentionMatrix] = {
    "grouped": batch(),
    "one key head": batch(num_kv_heads=1),
    "bias": batch(bias=torch.linspace(0, 1, 49).view(7, 7)),
    "score_mod": batch(score_mod=by_head_and_distance),
    "alibi": batch(bias=regard.ALiBi(6)),
    "sinks": batch(sink_bias=torch.linspace(0, 1, 6), softcap=2.0),
    "weights": regard.AttentionMatrix.from_weights(batch().to_dense()),
}

PARTS: dict[str, Callable[[Any], Any]] = {
    "list of heads": lambda m: m[:, [4, 1, 1]],
    "list of texts": lambda m: m[[1, 0, 1]],
    "tuple": lambda m: m[:, (0, 5)],
    "bools": lambda m: m[:, [True, False, True, False, False, True]],
    "bool tensor": lambda m: m[torch.tensor([False, True])],
    "array": lambda m: m[:, np.array([3, 5])],
    "negative": lambda m: m[:, [-1, -6]],
    "new axis before": lambda m: m[None],
    "new axis between": lambda m: m[:, None],
    "new axis after the heads": lambda m: m[:, :, None],
    "new axis and head": lambda m: m[1, None, 2:4],
    "new axes of one head": lambda m: m[1, 3][None, None],
    "a list and a new axis": lambda m: m[None, :, [0, 3], None],
    "one head of a list": lambda m: m[:, [5, 2]][0, 1],
    "unsqueeze": lambda m: m.unsqueeze(1).unsqueeze(-3).squeeze(1),
    "select": lambda m: m.select(1, 2).index_select(0, torch.tensor([1])),
    "narrow": lambda m: m.narrow(-3, 1, 3).unbind()[1],
    "reshape": lambda m: m[:1].reshape(6, 1, 7, 7),
}
WINDOWS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda m: m[0, 0, [5, 2, 2]],
    "rows of all": lambda m: m[..., torch.tensor([0, 6]), :],
    "rows of bools": lambda m: m[1, 2][torch.arange(7) > 3],
    "columns": lambda m: m[..., [6, 0, 3]],
    "columns of a row": lambda m: m[:, :, -1, [6, 0, 3]],
    "rows of a column": lambda m: m[:, 1, [1, 3], 2],
    "heads of a column": lambda m: m[:, [0, 2], :, 2],
    "heads of a window": lambda m: m[1, [0, 2], 2:5, 1:],
    "a new axis and rows": lambda m: m[:, None, 2, 3:5],
    "no rows": lambda m: m[..., [], :],
    "no rows of bools": lambda m: m[..., torch.zeros(7, dtype=torch.bool), :],
}


@pytest.mark.sampled(42)
@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_leading_index_gives_the_matrix_of_that_part(
    part: Callable[[Any], Any], matrix: regard.AttentionMatrix
) -> None:
    chosen, expected = part(matrix), part(matrix.to_dense())
    assert isinstance(chosen, regard.AttentionMatrix)
    assert chosen.shape == expected.shape
    torch.testing.assert_close(chosen.to_dense(), expected, **TIGHT)
    torch.testing.assert_close(chosen.sum(-2), expected.sum(-2), check_dtype=False, **TIGHT)
    torch.testing.assert_close(chosen.scores[...], part(matrix.scores[...]), **TIGHT)


@pytest.mark.parametrize("part", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("matrix", [MATRICES["grouped"], MATRICES["score_mod"]])
def test_chosen_rows_and_columns_are_a_tensor(
    matrix: regard.AttentionMatrix, part: Callable[[Any], Any]
) -> None:
    chosen = part(matrix)
    assert isinstance(chosen, Tensor)
    torch.testing.assert_close(chosen, part(matrix.to_dense()), **TIGHT)
    torch.testing.assert_close(part(matrix.scores), part(matrix.scores[...]), **TIGHT)


@pytest.mark.parametrize("name", ["columns", "rows"])
def test_places_far_apart_are_read_without_the_rest(name: str) -> None:
    query, key = (torch.randn(3000, 4, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    matrix, places = regard.attend(query, key), [2999, 0, 40, 41, 700, 40]
    index = (slice(None), places) if name == "columns" else (places, slice(None))
    expected = matrix.to_dense()[index]
    torch.testing.assert_close(matrix[index], expected, **TIGHT)
