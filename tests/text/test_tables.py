"""A table is read as it stands, and arrives whole in every other tool."""

import json
import re
import sys
from math import inf, nan
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

import regard

COLUMNS: dict[str, list[Any]] = {
    "head": ["L0H1", "L5H3", None],
    "layer": [0, 5, 11],
    "score": [0.25, 0.96875, None],
    "strong": [False, True, None],
}


def table() -> regard.Table:
    return regard.Table(COLUMNS)


# What it holds


def test_a_column_is_found_by_its_name() -> None:
    assert table()["layer"] == (0, 5, 11)
    assert table().names == ("head", "layer", "score", "strong")


def test_its_rows_are_plain_dicts() -> None:
    assert len(table()) == 3
    assert table().records() == list(table())
    assert table().records()[1] == {"head": "L5H3", "layer": 5, "score": 0.96875, "strong": True}


def test_two_tables_of_the_same_columns_are_equal() -> None:
    assert table() == table()
    assert table() != regard.Table({"head": ["L0H1"]})
    assert table() != COLUMNS


def test_the_order_of_the_columns_counts() -> None:
    assert regard.Table({"a": [1], "b": [2]}) != regard.Table({"b": [2], "a": [1]})


def test_whole_numbers_among_numbers_become_numbers() -> None:
    values = regard.Table({"a": [1, 0.5, None]})["a"]
    assert values == (1.0, 0.5, None)
    assert [type(value) for value in values] == [float, float, type(None)]


def test_what_is_done_to_the_given_columns_does_not_reach_it() -> None:
    columns = {"a": [1, 2]}
    made = regard.Table(columns)
    columns["a"].append(3)
    assert made["a"] == (1, 2)


# As text


def test_it_shows_aligned_columns() -> None:
    assert repr(table()).splitlines() == [
        "head  layer   score  strong",
        "L0H1      0  0.2500   False",
        "L5H3      5  0.9688    True",
        "-        11       -       -",
    ]


def test_a_long_table_shows_its_beginning_and_its_end() -> None:
    lines = repr(regard.Table({"n": list(range(100))})).splitlines()
    assert lines[:2] == [" n", " 0"]
    assert lines[8:11] == [" 7", "... 84 more rows ...", "92"]
    assert lines[-1] == "99"
    assert len(lines) == 18


def test_a_table_of_twenty_rows_is_shown_whole() -> None:
    assert len(repr(regard.Table({"n": list(range(20))})).splitlines()) == 21


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(0.00123, "1.230e-03", id="small"),
        pytest.param(123456789.0, "1.235e+08", id="large"),
        pytest.param(0.0, "0.0000", id="zero"),
        pytest.param(nan, "nan", id="not a number"),
        pytest.param(inf, "inf", id="infinite"),
    ],
)
def test_a_number_is_shown_with_the_digits_that_tell_it(value: float, text: str) -> None:
    assert repr(regard.Table({"x": [value]})).split() == ["x", text]


def test_text_that_steers_a_terminal_is_shown_and_not_obeyed() -> None:
    assert repr(regard.Table({"\x1b[31m": ["a\nb\u202e"]})).splitlines() == [
        "␛[31m",
        "a↵b‹U+202E›",
    ]


def test_long_text_is_cut() -> None:
    assert repr(regard.Table({"text": ["x" * 50]})).splitlines()[1] == "x" * 39 + "…"


def test_an_empty_table_shows_its_names() -> None:
    assert repr(regard.Table({"a": [], "b": []})) == "a  b"


# In other tools


def test_json_has_the_rows() -> None:
    assert json.loads(table().to_json()) == table().records()


def test_json_has_null_for_what_is_no_number() -> None:
    assert regard.Table({"x": [nan, inf, -inf, 1.0]}).to_json() == (
        '[{"x": null}, {"x": null}, {"x": null}, {"x": 1.0}]'
    )


def test_pandas_has_the_columns() -> None:
    frame = table().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(table().names)
    assert frame["layer"].tolist() == [0, 5, 11]
    assert frame["score"].tolist()[:2] == [0.25, 0.96875]
    assert frame["head"].isna().tolist() == [False, False, True]


def test_polars_has_the_rows() -> None:
    frame = table().to_polars()
    assert isinstance(frame, polars.DataFrame)
    assert frame.to_dicts() == table().records()


def test_arrow_has_the_rows() -> None:
    arrow = table().to_arrow()
    assert isinstance(arrow, pyarrow.Table)
    assert arrow.to_pylist() == table().records()


def test_parquet_has_the_rows(tmp_path: Path) -> None:
    path = table().to_parquet(tmp_path / "heads.parquet")
    assert pyarrow.parquet.read_table(path).to_pylist() == table().records()
    assert list(tmp_path.iterdir()) == [path]


def test_a_parquet_file_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table().to_parquet(tmp_path / "heads.parquet")
    before = path.read_bytes()

    def full(arrow: object, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(OSError, match="No space left on device"):
        regard.Table({"a": [1]}).to_parquet(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


CELLS = [
    st.none() | st.text(),
    st.none() | st.integers(-(2**53), 2**53),
    st.none() | st.booleans(),
    st.none() | st.floats(allow_nan=False),
]


@given(st.data())
def test_polars_and_arrow_give_back_what_they_got(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    columns = {
        f"{place}": data.draw(st.lists(cells, min_size=rows, max_size=rows))
        for place, cells in enumerate(CELLS)
    }
    made = regard.Table(columns)
    assert made.to_polars().to_dicts() == made.records()
    assert made.to_arrow().to_pylist() == made.records()


@pytest.mark.parametrize(
    ("ask", "call", "package"),
    [
        pytest.param(lambda t: t.to_pandas(), "to_pandas()", "pandas", id="pandas"),
        pytest.param(lambda t: t.to_polars(), "to_polars()", "polars", id="polars"),
        pytest.param(lambda t: t.to_arrow(), "to_arrow()", "pyarrow", id="arrow"),
        pytest.param(lambda t: t.to_parquet("x"), "to_parquet()", "pyarrow", id="parquet"),
    ],
)
def test_a_package_that_is_not_installed_is_named(
    ask: Any, call: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.parquet", None)
    message = f"{call} needs {package}, which is not installed.\n    Run: pip install {package}"
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        ask(table())


# What is no table


@pytest.mark.parametrize(
    ("columns", "kind", "message"),
    [
        pytest.param(
            {"a": [1], "b": [1, 2]},
            ValueError,
            "columns has 'a': 1, 'b': 2; all columns must have one length, and there must be one.\n"
            "    Put None where a value is missing.",
            id="two lengths",
        ),
        pytest.param(
            {},
            ValueError,
            "columns has no columns; all columns must have one length, and there must be one.\n"
            "    Put None where a value is missing.",
            id="no columns",
        ),
        pytest.param(
            {3: [1]},
            TypeError,
            "columns has the name 3; each name must be text.\n    Use str(...).",
            id="a name that is no text",
        ),
        pytest.param(
            {"a": [None, b"x"]},
            TypeError,
            "column 'a' has a bytes; a cell is text, a number, a truth value or None.\n"
            "    Use tensor.tolist() for a tensor of one axis.",
            id="another kind of value",
        ),
        pytest.param(
            {"a": [True, 1]},
            TypeError,
            "column 'a' has bool and int; a column must have one kind of values.\n"
            "    Make two columns of it.",
            id="two kinds of values",
        ),
    ],
)
def test_what_is_no_table_is_an_error(columns: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        regard.Table(columns)


def test_a_column_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(KeyError) as caught:
        table()["kind"]
    assert caught.value.args == ("name is 'kind'; this table has head, layer, score, strong",)
