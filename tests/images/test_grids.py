"""Grids of patches: their boxes, the attention to them, and how a recording keeps them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import regard
from regard.images import Grid, Picture

SIZE = Picture(60, 40)


def recording(length: int = 9, heads: int = 3) -> regard.Recording:
    torch.manual_seed(0)
    layers = {
        name: regard.attend(torch.randn(1, heads, length, 5), torch.randn(1, heads, length, 5))
        for name in ("first", "second")
    }
    return regard.Recording(layers)


def dense(seen: regard.Recording, layer: str = "first") -> Tensor:
    return seen[layer].to_dense()[0]


def test_boxes_divide_the_picture_row_by_row() -> None:
    grid = regard.grid(range(6), rows=2, columns=3)
    boxes = grid.boxes(60, 40)
    assert boxes[0].tolist() == [0, 0, 20, 20]
    assert boxes[2].tolist() == [40, 0, 60, 20]
    assert boxes[3].tolist() == [0, 20, 20, 40]


def test_boxes_divide_the_box_of_a_grid() -> None:
    grid = regard.grid(range(4), 2, 2, box=(-10, 5.5, 30, 15.5))
    assert grid.boxes(60, 40)[3].tolist() == [10, 10.5, 30, 15.5]


def test_the_boxes_of_a_recording_are_nan_without_a_part() -> None:
    seen = recording().with_pictures([SIZE], regard.grid([8, 2], 1, 2))
    assert seen.boxes[2].tolist() == [30, 0, 60, 40]
    assert seen.boxes[8].tolist() == [0, 0, 30, 40]
    assert seen.boxes.isnan().all(1).tolist() == [place not in (2, 8) for place in range(9)]


def test_image_is_the_row_of_a_query_at_the_tokens_of_the_grid() -> None:
    seen = recording().with_pictures([SIZE], regard.grid([8, 1, 2, 3, 7, 5], 2, 3))
    expected = dense(seen)[1, 4, [8, 1, 2, 3, 7, 5]].view(2, 3)
    # 1e-6: weights of at most 1 in float32
    torch.testing.assert_close(seen.image("first", 1, query=4), expected, atol=1e-6, rtol=0)


QUERIES: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "all queries": (None, lambda rows: rows.mean(-2)),
    "one from the end": (-1, lambda rows: rows[..., 8, :]),
    "several": ([1, 1, 3], lambda rows: rows[..., [1, 1, 3], :].mean(-2)),
    "a range": (range(2, 5), lambda rows: rows[..., 2:5, :].mean(-2)),
    "a word": ("dog", lambda rows: rows[..., [2, 3], :].mean(-2)),
    "its second time": ("dog#2", lambda rows: rows[..., 6, :]),
    "a special token": ("[CLS]", lambda rows: rows[..., 0, :]),
    "special tokens": ("[PATCH]", lambda rows: rows[..., [7, 8], :].mean(-2)),
}
TEXTS = ("[CLS]", "the", " do", "g", " and", " a", " dog", "[PATCH]", "[PATCH]")


def with_texts(seen: regard.Recording) -> regard.Recording:
    return seen.with_tokens([regard.Token(text, special="[" in text) for text in TEXTS])


@pytest.mark.parametrize(("query", "rows"), QUERIES.values(), ids=QUERIES)
@pytest.mark.parametrize("head", [None, 2], ids=["mean", "head"])
def test_image_averages_queries_and_heads(
    head: int | None, query: Any, rows: Callable[[Tensor], Tensor]
) -> None:
    seen = with_texts(recording()).with_pictures([SIZE], regard.grid([7, 8], 1, 2))
    weights = rows(dense(seen))
    expected = (weights.mean(0) if head is None else weights[head])[None, [7, 8]]
    answer = seen.image("first", head, query=query)
    torch.testing.assert_close(answer, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("query", [None, 4], ids=["all queries", "one"])
def test_keys_that_are_set_aside_leave_rows_of_1(query: int | None) -> None:
    seen = with_texts(recording()).with_pictures([SIZE], regard.grid([2, 7, 3, 8], 2, 2))
    weights = dense(seen)
    weights[..., [0, 5, 7, 8]] = 0
    weights = weights / weights.sum(-1, keepdim=True)
    row = weights.mean((0, 1)) if query is None else weights.mean(0)[query]
    answer = seen.image(0, query=query, without=["[CLS]", 5, "[PATCH]"])
    torch.testing.assert_close(answer, row[[2, 7, 3, 8]].view(2, 2), atol=1e-6, rtol=0)


def test_several_grids_give_one_value_for_each_box() -> None:
    grids = [regard.grid([5, 4], 1, 2), regard.grid([1], 1, 1, box=(0, 0, 9, 9))]
    seen = recording().with_pictures([SIZE], grids)
    row = dense(seen)[0, 3]
    torch.testing.assert_close(seen.image(0, 0, query=3), row[[5, 4, 1]], atol=1e-6, rtol=0)
    one = seen.image(0, 0, query=3, grid=1)
    torch.testing.assert_close(one, row[1].view(1, 1), atol=1e-6, rtol=0)


def test_queries_that_were_recorded_are_counted_among_all_that_ran() -> None:
    torch.manual_seed(0)
    model = regard.nn.SelfAttention(8, num_heads=2)
    x = torch.randn(1, 9, 8)
    with torch.no_grad(), regard.observe(model) as whole:
        model(x)
    with torch.no_grad(), regard.observe(model, queries=slice(-3, None)) as last:
        model(x)
    grid = regard.grid([1, 2], 1, 2)
    one, other = (seen.with_pictures([SIZE], grid).image(0, query=7) for seen in (whole, last))
    torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    with pytest.raises(IndexError, match=r"query is 2; layer '\w*' has queries 6 to 8\.$"):
        last.with_pictures([SIZE], grid).image(0, query=2)


def test_an_entry_has_its_own_grids() -> None:
    x = torch.randn(2, 1, 4, 3)
    grids = [regard.grid([0, 1], 1, 2), regard.grid([3, 2], 2, 1, entry=1)]
    seen = regard.Recording({"tiles": regard.attend(x, x)}).with_pictures([SIZE], grids)
    assert seen.entry(1).grids == (Grid((3, 2), 2, 1),)
    assert seen.entry(0).grids == (Grid(range(2), 1, 2),)
    expected = seen["tiles"].to_dense()[1, 0, 2, [3, 2]]
    answer = seen.entry(-1).image(0, query=2).flatten()
    torch.testing.assert_close(answer, expected, atol=1e-6, rtol=0)


def test_layers_may_have_different_grids() -> None:
    grid = regard.grid([0, 1], 1, 2)
    seen = recording().with_pictures([SIZE], {"second": [grid]})
    assert (seen.layer_grids(0), seen.layer_grids("second")) == ((), (grid,))
    assert seen.part(["second"]).grids == (grid,)
    with pytest.raises(regard.RegardError, match="different grids"):
        _ = seen.grids


def test_a_file_keeps_pictures_and_grids(tmp_path: Path) -> None:
    photo = Image.effect_noise((200, 100), 60).convert("RGB")
    photo.info["comment"] = b"where I live"
    grids = {
        "first": [regard.grid(range(4), 2, 2), regard.grid([8, 6], 1, 2, box=(0, 0, 9.25, 8))],
        "second": [Grid([5], 1, 1, 1, overlapping=True)],
    }
    seen = recording().with_pictures([photo, SIZE], grids)
    seen.save(tmp_path / "run.safetensors")
    read = regard.load(tmp_path / "run.safetensors")
    assert read.pictures == seen.pictures
    assert [read.layer_grids(at) for at in (0, 1)] == [
        tuple(grids["first"]),
        *[tuple(grids["second"])],
    ]
    assert (read.pictures[0].type, read.pictures[1].data) == ("image/webp", None)
    assert b"where I live" not in (tmp_path / "run.safetensors").read_bytes()
    read.part([1]).save(tmp_path / "part.safetensors")
    assert regard.load(tmp_path / "part.safetensors").grids == tuple(grids["second"])


def test_parts_of_a_run_are_merged_if_their_pictures_are_equal(tmp_path: Path) -> None:
    from regard.recording.shard import Shard

    weights = torch.softmax(torch.randn(1, 2, 4, 4), -1)
    grid = regard.grid([0, 1], 1, 2)

    def part(rank: int, picture: Picture) -> regard.Recording:
        half = regard.AttentionMatrix.from_weights(weights[:, rank : rank + 1])
        seen = regard.Recording({})
        seen.add("layer", half, origin=regard.recording.layers.Origin(0, (rank,)))
        seen.shard = Shard("run", rank, batch=(0, 1), heads=(rank, 2), without=())
        return seen.with_pictures([picture], grid)

    whole = regard.Recording.merge([part(0, SIZE), part(1, SIZE)])
    assert (whole.grids, whole.pictures) == ((grid,), (SIZE,))
    with pytest.raises(regard.RegardError, match=r"^rank 1 has other pictures than rank 0"):
        regard.Recording.merge([part(0, SIZE), part(1, Picture(1, 1))])


def test_rollout_and_sums_have_the_places_of_the_grid() -> None:
    seen = recording().with_pictures([SIZE], regard.grid(range(1, 9), 2, 4))
    places = list(seen.grids[0].tokens)
    expected = dense(seen).sum(-2)[:, places].mean(0) / 9
    received = seen["first"].sum(-2)[0, :, places].mean(0) / 9
    torch.testing.assert_close(received, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(seen.image(0).flatten(), expected, atol=1e-6, rtol=0)
    assert seen.rollout()[0, 0, places].shape == (8,)


# Refused


def image(**options: Any) -> Tensor:
    return recording().with_pictures([SIZE], regard.grid([1, 2], 1, 2)).image(0, **options)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "too few tokens": (
        lambda: regard.grid(range(1, 196), 14, 14),
        ValueError,
        "tokens has 195 positions; a grid of 14 rows and 14 columns has 196.",
    ),
    "a token twice": (
        lambda: regard.grid([1, 1], 1, 2),
        ValueError,
        "tokens has a position twice; each token stands for one part.",
    ),
    "a negative token": (
        lambda: regard.grid([-1], 1, 1),
        ValueError,
        "tokens has the position -1; positions are counted from 0.",
    ),
    "no positions": (
        lambda: regard.grid("ab", 1, 2),  # type: ignore[arg-type] # refused
        TypeError,
        "tokens is a str; it must be positions of tokens.",
    ),
    "one number": (
        lambda: regard.grid(4, 1, 1),  # type: ignore[arg-type] # refused
        TypeError,
        "tokens is an int; it must be positions of tokens.",
    ),
    "an empty box": (
        lambda: regard.grid([1], 1, 1, box=(3, 0, 3, 5)),
        ValueError,
        "box is (3, 0, 3, 5); it must have x0 < x1 and y0 < y1.",
    ),
    "a token beyond the layer": (
        lambda: recording().with_pictures([SIZE], regard.grid([9], 1, 1)),
        ValueError,
        "a grid has token 9 of entry 0; layer 'first' has kv_len = 9 and a batch of 1.",
    ),
    "two grids of one token": (
        lambda: recording().with_pictures([SIZE], [regard.grid([1], 1, 1)] * 2),
        ValueError,
        "grids have token 1 twice; a token stands for one part.",
    ),
    "a picture that is missing": (
        lambda: recording().with_pictures([SIZE], regard.grid([1], 1, 1, picture=1)),
        ValueError,
        "a grid has picture 1; there are 1 pictures.",
    ),
    "no picture": (
        lambda: recording().with_pictures(["photo.jpg"], []),  # type: ignore[list-item] # refused
        TypeError,
        "image is a str; it must be an image of Pillow.",
    ),
    "no grid": (
        lambda: recording().image(0),
        regard.RegardError,
        "layer 'first' has no grid: no places of its tokens are known.",
    ),
    "no boxes": (
        lambda: recording().boxes,
        regard.RegardError,
        "this recording has no grids of a picture.",
    ),
    "a batch": (
        lambda: (
            regard.Recording(
                {"layer": regard.attend(torch.zeros(2, 1, 3, 2), torch.zeros(2, 1, 3, 2))}
            )
            .with_pictures([SIZE], regard.grid([1], 1, 1))
            .image(0)
        ),
        ValueError,
        "layer 'layer' has shape (2, 1, 3, 3); image() looks at one entry of a batch.",
    ),
    "a word without tokens": (
        lambda: image(query="dog"),
        ValueError,
        "query is 'dog'; the recording has no tokens to find it in.",
    ),
    "a word that is not there": (
        lambda: (
            with_texts(recording())
            .with_pictures([SIZE], regard.grid([7], 1, 1))
            .image(0, query="cat")
        ),
        ValueError,
        "query is 'cat'; no token and no word of the recording has that text.",
    ),
    "a query beyond": (lambda: image(query=9), IndexError, "index 9 is out of range for axis 0"),
    "a head beyond": (lambda: image(head=3), IndexError, "index 3 is out of range for axis 0"),
    "a grid beyond": (lambda: image(grid=1), IndexError, "index 1 is out of range for axis 0"),
    "keys in a string": (
        lambda: image(without="[CLS]"),
        TypeError,
        "without is a string; it must be a list.",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_refused(
    call: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}"):
        call()
