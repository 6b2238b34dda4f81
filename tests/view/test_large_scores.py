"""Large scores that are close together: every view shows the softmax of one and the same matrix.

In float32 the logsumexp of such a row is its largest score alone. What is computed from it gives
each of three equal keys a weight of 1, not of 1/3.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor

import models
import regard
from pages import answers_of, first_layer
from regard.view.export.complete_layer import CompleteLayer
from regard.view.export.page_file import write_page
from regard.view.server.http_server import application

EXACT = {"rtol": 1e-6, "atol": 1e-9}


def even(bias: float) -> regard.AttentionMatrix:
    x = torch.zeros(1, 3, 1)
    return regard.attend(x, x, bias=torch.full((3, 3), bias))


def left_padded(lowest: float | None) -> regard.AttentionMatrix:
    """A head of a Llama whose first 3 tokens are padding, in eager mode: masks are added numbers.

    The first 3 queries may attend to no key, so that what is added is all that their scores tell.
    """
    real = torch.ones(2, 7, dtype=torch.int64)
    real[0, :3] = 0
    mask = real
    if lowest is not None:
        hidden = ~torch.ones(7, 7, dtype=torch.bool).tril() | (real == 0)[:, None, None]
        mask = torch.zeros(2, 1, 7, 7).masked_fill(hidden, lowest)
    model = models.llama("eager").eval()
    with torch.no_grad(), regard.observe(model) as seen:
        model(input_ids=models.ids(), attention_mask=mask)
    return seen[0][0, 1:2]


def integers(largest: int) -> regard.AttentionMatrix:
    """Scores from 0 to 4 times the largest, those of one row at most 36 apart."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randint(0, 5, (1, 11, 1), generator=generator).float()
    key = largest - torch.randint(0, 10, (1, 13, 1), generator=generator).float()
    return regard.attend(query, key, scale=1.0)


def huge() -> regard.AttentionMatrix:
    """Scores of 2^100, about 1.3e30, and of -2^100 and 0."""
    key = torch.tensor([1.0, 1.0, -1.0, 0.0, 1.0])[None, :, None] * 2.0**50
    query = torch.tensor([1.0, -1.0, 0.0])[None, :, None] * 2.0**50
    return regard.attend(query, key, scale=1.0)


MATRICES: dict[str, Callable[[], regard.AttentionMatrix]] = {
    "3 x 3 at -1e9": lambda: even(-1e9),
    "left-padded, -1e9": lambda: left_padded(-1e9),
    "left-padded, lowest number": lambda: left_padded(None),
    "integers to 200": lambda: integers(50),
    "integers to 40,000": lambda: integers(10_000),
    "1e30": huge,
}
each_matrix = pytest.mark.parametrize("name", MATRICES)


def softmax(scores: Tensor) -> Tensor:
    """The definition in float64, of the scores as the matrix has them; no row is empty."""
    return scores.double().softmax(-1)


def scores_of(matrix: regard.AttentionMatrix) -> Tensor:
    return matrix.scores[..., :, :][0]


# The server


@contextmanager
def served(matrix: regard.AttentionMatrix) -> Iterator[Callable[..., Any]]:
    app = application(regard.Recording({"layer": matrix}), "secret")
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        client.get("/", params={"token": "secret"})

        def get(question: str, **asked: object) -> Any:
            parameters = {"layer": 0, "head": 0, **asked}
            response = client.get(f"/api/{question}", params=parameters)  # pyright: ignore[reportArgumentType]
            assert response.status_code == 200, response.text
            return response

        yield get


def floats(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.float32).double()


@each_matrix
@pytest.mark.parametrize("hidden", [0, 1], ids=["with sinks", "without"])
def test_rows_columns_and_tiles_of_the_server_are_one_matrix(name: str, hidden: int) -> None:
    matrix = MATRICES[name]()
    scores = scores_of(matrix)
    if hidden:
        scores = scores.index_fill(-1, torch.tensor([0]), -torch.inf)
    exact = softmax(scores).nan_to_num(0.0)
    q_len, kv_len = exact.shape
    with served(matrix) as get:
        asked = {"hidden": hidden}
        rows = [get("row", query=query, **asked).content for query in range(q_len)]
        columns = [get("column", key=key, **asked).content for key in range(kv_len)]
        tile = get("tile", level=0, row=0, column=0, **asked).content
    row = torch.stack([floats(content[: 4 * kv_len]) for content in rows])
    torch.testing.assert_close(row, exact, **EXACT)
    torch.testing.assert_close(torch.stack([floats(one) for one in columns], -1), exact, **EXACT)
    torch.testing.assert_close(floats(tile).view(q_len, kv_len), exact, **EXACT)


@each_matrix
def test_steps_of_the_server_add_up_to_1(name: str) -> None:
    matrix = MATRICES[name]()
    exact = softmax(scores_of(matrix))
    q_len, kv_len = exact.shape
    with served(matrix) as get:
        part = {"by": "position", "start": 0, "count": kv_len}
        for query in range(q_len):
            assert_steps(get("steps", query=query, **part).json(), exact[query])


def assert_steps(steps: dict[str, Any], exact: Tensor) -> None:
    """The weights are exact, and follow from the other numbers that are shown."""
    weights = torch.tensor([step["weight"] for step in steps["rows"]], dtype=torch.float64)
    torch.testing.assert_close(weights, exact, **EXACT)
    assert steps["total"] == pytest.approx(1, abs=1e-6)
    if steps["maximum"] is not None:
        told = [-torch.inf if step["score"] is None else step["score"] for step in steps["rows"]]
        shifted = torch.tensor(told, dtype=torch.float64) - steps["maximum"]
        torch.testing.assert_close((shifted - steps["log_normalizer"]).exp(), exact, **EXACT)


def rough(magnitude: float) -> regard.AttentionMatrix:
    """Scores that float32 rounds by much more than 1e-6."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 70, 64, generator=generator) * magnitude**0.5
    return regard.attend(query, key, mask=regard.Causal())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("magnitude", [30.0, 1e5, 1e36])
def test_rows_of_the_server_sum_to_1_however_rough_their_scores(magnitude: float) -> None:
    with served(rough(magnitude)) as get:
        rows = [floats(get("row", query=query).content[: 4 * 70]) for query in range(70)]
        part = {"by": "weight", "start": 0, "count": 1}
        totals = [get("steps", query=query, **part).json()["total"] for query in range(70)]
        columns = torch.stack([floats(get("column", key=key).content) for key in range(70)], -1)
    assert [float(row.sum()) for row in rows] == pytest.approx([1] * 70, abs=1e-6)
    assert totals == pytest.approx([1] * 70, abs=1e-6)
    assert bool(((columns >= 0) & (columns <= 1 + 1e-6)).all())


@pytest.mark.sampled(1)
@pytest.mark.skipif(
    not torch.backends.mkl.is_available(),
    reason="whether products of other shapes round alike depends on the BLAS",
)
@pytest.mark.parametrize("magnitude", [30.0, 1e5, 1e36])
def test_rough_scores_are_the_same_in_rows_columns_and_tiles(magnitude: float) -> None:
    with served(rough(magnitude)) as get:
        rows = [floats(get("row", query=query).content[: 4 * 70]) for query in range(70)]
        columns = [floats(get("column", key=key).content) for key in range(70)]
        tile = floats(get("tile", level=0, row=0, column=0).content).view(70, 70)
    torch.testing.assert_close(torch.stack(columns, -1), torch.stack(rows), **EXACT)
    torch.testing.assert_close(tile, torch.stack(rows), **EXACT)


# The library


@each_matrix
def test_steps_of_the_library_add_up_to_1(name: str) -> None:
    matrix = MATRICES[name]()
    exact = softmax(scores_of(matrix))
    for query, row in enumerate(exact):
        weights = regard.steps(matrix, query, most=len(row)).table["weight"]
        found = torch.tensor([float(weight) for weight in weights], dtype=torch.float64)
        torch.testing.assert_close(found[:-1], row, **EXACT)
        assert found[-1] == pytest.approx(1, abs=1e-6)


# The page that is a file


@pytest.mark.sampled(4)
@each_matrix
@pytest.mark.parametrize("hidden", [False, True], ids=["with sinks", "without"])
def test_rows_columns_and_tiles_of_the_file_are_one_matrix(
    name: str, hidden: bool, tmp_path: Path
) -> None:
    matrix = MATRICES[name]()
    page = write_page(regard.Recording({"layer": matrix}), tmp_path / "page.html")
    assert_one_matrix(page, scores_of(matrix), hidden)


@pytest.mark.parametrize("name", ["integers to 200", "1e30"])
def test_of_numbers_that_fewer_bits_hold_the_file_is_as_exact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More bits of these numbers are zeros, which take no room.
    monkeypatch.setattr(CompleteLayer, "full_size", 10**12)
    matrix = MATRICES[name]()
    page = write_page(regard.Recording({"layer": matrix}), tmp_path / "page.html")
    layer, _ = first_layer(page)
    assert (layer["dtype"], layer["deviation"]) == ("float16", 0)
    assert_one_matrix(page, scores_of(matrix), False)


@pytest.mark.parametrize("hidden", [False, True], ids=["with sinks", "without"])
def test_a_file_of_32_bits_has_the_weights_of_query_and_key_in_double_precision(
    hidden: bool, tmp_path: Path
) -> None:
    """A score of 100 in float32 is 4e-6 off, and so would be each weight."""
    query, key = torch.randn(2, 1, 11, 8, generator=torch.Generator().manual_seed(0)) * 6
    matrix = regard.attend(query, key, scale=0.5)
    page = write_page(regard.Recording({"layer": matrix}), tmp_path / "page.html")
    scores = 0.5 * query[0].double() @ key[0].double().mT
    assert 100 < float(scores.abs().max()) < 256
    assert_one_matrix(page, scores, hidden)


def assert_one_matrix(page: Path, scores: Tensor, hidden: bool) -> None:
    """Rows, columns, tiles and steps of a written page are the softmax of these scores."""
    if hidden:
        scores = scores.index_fill(-1, torch.tensor([0]), -torch.inf)
    exact = softmax(scores).nan_to_num(0.0)
    q_len, kv_len = exact.shape
    place = {"level": 0, "row": 0, "column": 0}
    part = {"by": "position", "start": 0, "count": kv_len}
    # Columns and tiles first: a row that is asked for must not be what makes them right.
    questions = [{"kind": "column", "key": key} for key in range(kv_len)]
    questions += [{"kind": "tile", **place}]
    questions += [{"kind": "row", "query": query} for query in range(q_len)]
    questions += [{"kind": "steps", "query": query, **part} for query in range(q_len)]
    found = answers_of(page, [question | {"hidden": hidden} for question in questions])
    values = [torch.tensor(answer["values"]).double() for answer in found[:-q_len]]
    columns, tile, rows = values[:kv_len], values[kv_len], values[kv_len + 1 :]
    torch.testing.assert_close(torch.stack(columns, -1), exact, **EXACT)
    torch.testing.assert_close(tile.view(q_len, kv_len), exact, **EXACT)
    torch.testing.assert_close(torch.stack(rows), exact, **EXACT)
    if not hidden:
        for answer, row in zip(found[-q_len:], exact, strict=True):
            assert_steps(answer, row)


def test_a_layer_too_large_for_its_file_has_the_means_of_large_scores(
    tmp_path: Path,
) -> None:
    generator = torch.Generator().manual_seed(0)
    key = 1e4 - torch.randint(0, 10, (1, 600, 1), generator=generator)
    # Other numbers beside those that count make query and key too large for the file.
    unseen = torch.randn(1, 600, 127, generator=generator)
    query = torch.cat([torch.full((1, 600, 1), 4.0), torch.zeros(1, 600, 127)], -1)
    matrix = regard.attend(query, torch.cat([key, unseen], -1), scale=1.0)
    exact = softmax(scores_of(matrix))
    page = write_page(regard.Recording({"layer": matrix}), tmp_path / "page.html", limit=180_000)
    layer, _ = first_layer(page)
    assert layer["kind"] == "pyramid"
    (column,) = answers_of(page, [{"kind": "column", "key": 7}])
    block = exact[6:8, 6:8].mean()  # of 2 x 2 tokens, in a byte
    assert column["values"][7] == pytest.approx(float(block), rel=0.05)


def test_some_of_these_pages_hold_query_and_key_and_some_weights(tmp_path: Path) -> None:
    kinds = {
        name: first_layer(
            write_page(regard.Recording({"layer": matrix()}), tmp_path / "page.html")
        )[0]["kind"]
        for name, matrix in MATRICES.items()
    }
    assert set(kinds.values()) == {"query-key", "weights"}
    assert kinds["integers to 200"] == kinds["1e30"] == "query-key"
