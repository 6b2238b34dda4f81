"""A table is read as it stands, and arrives whole in every other tool."""

import json
import re
import sys
from math import inf, nan
from typing import Any

import pandas
import pytest

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


def test_a_table_has_columns_by_name_and_rows_as_plain_dicts() -> None:
    assert table()["layer"] == (0, 5, 11)
    assert table().names == ("head", "layer", "score", "strong")
    assert len(table()) == 3
    assert table().records() == list(table())
    assert table().records()[1] == {"head": "L5H3", "layer": 5, "score": 0.96875, "strong": True}


def test_two_tables_of_the_same_columns_in_the_same_order_are_equal() -> None:
    assert table() == table()
    assert table() != regard.Table({"head": ["L0H1"]})
    assert table() != COLUMNS
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


SHOWN = {
    "every kind": (
        COLUMNS,
        [
            "head  layer   score  strong",
            "L0H1      0  0.2500   False",
            "L5H3      5  0.9688    True",
            "-        11       -       -",
        ],
    ),
    "a small number": ({"x": [0.00123]}, ["        x", "1.230e-03"]),
    "a large number": ({"x": [123456789.0]}, ["        x", "1.235e+08"]),
    "bounds": ({"x": [0.0, nan, inf]}, ["     x", "0.0000", "   nan", "   inf"]),
    "control characters": ({"\x1b[31m": ["a\nb\u202e"]}, ["␛[31m", "a↵b‹U+202E›"]),
    "long text": ({"text": ["x" * 50]}, ["text", "x" * 39 + "…"]),
    "no rows": ({"a": [], "b": []}, ["a  b"]),
}


@pytest.mark.parametrize(("columns", "lines"), SHOWN.values(), ids=SHOWN)
def test_it_shows_aligned_columns(columns: dict[str, list[Any]], lines: list[str]) -> None:
    assert repr(regard.Table(columns)).split("\n") == lines


def test_a_long_table_shows_its_beginning_and_its_end() -> None:
    lines = repr(regard.Table({"n": list(range(100))})).splitlines()
    assert lines[:2] == [" n", " 0"]
    assert lines[8:11] == [" 7", "... 84 more rows ...", "92"]
    assert lines[-1] == "99"
    assert len(lines) == 18
    assert len(repr(regard.Table({"n": list(range(20))})).splitlines()) == 21


# In other tools


def test_json_has_the_rows_and_null_for_what_is_no_number() -> None:
    assert json.loads(table().to_json()) == table().records()
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


def test_pandas_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    message = "to_pandas() needs pandas, which is not installed.\n    Run: pip install pandas"
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        table().to_pandas()


# What is no table


LENGTHS = (
    "all columns must have one length, and there must be one.\n"
    "    Put None where a value is missing."
)
KINDS = (
    "a column has one kind of values: str, int, float or bool, and None.\n"
    "    Use tensor.tolist() for a tensor of one axis."
)


NO_TABLES = {
    "two lengths": ({"a": [1], "b": [1, 2]}, ValueError, f"columns has 'a': 1, 'b': 2; {LENGTHS}"),
    "no columns": ({}, ValueError, f"columns has no columns; {LENGTHS}"),
    "another kind": ({"a": [None, b"x"]}, TypeError, f"column 'a' has bytes; {KINDS}"),
    "two kinds": ({"a": [True, 1]}, TypeError, f"column 'a' has bool and int; {KINDS}"),
}


@pytest.mark.parametrize(("columns", "kind", "message"), NO_TABLES.values(), ids=NO_TABLES)
def test_what_is_no_table_is_an_error(columns: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        regard.Table(columns)


def test_a_column_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(KeyError) as caught:
        table()["kind"]
    assert caught.value.args == ("name is 'kind'; this table has head, layer, score, strong",)
