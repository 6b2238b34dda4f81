"""One query step by step, and small matrices as tables: the numbers, the text, the HTML."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard

QUERY = torch.tensor([[1.0, 0.0, 2.0], [2.0, 2.0, 2.0], [2.0, 1.0, 3.0]])
KEY = torch.tensor([[0.0, 1.0, 1.0], [4.0, 4.0, 0.0], [2.0, 3.0, 1.0]])
VALUE = torch.tensor([[1.0, 2.0, 3.0], [2.0, 8.0, 0.0], [2.0, 6.0, 3.0]])
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32, a handful of terms in each sum


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def column(steps: regard.Steps, name: str, count: int) -> Tensor:
    return torch.tensor(steps.table[name][:count])


def test_every_step_of_a_query_is_a_column() -> None:
    A = regard.attend(QUERY, KEY, mask=regard.Causal())
    assert str(regard.steps(A, 1, value=VALUE[:, :2], tokens=["eat", "dessert", "first"])) == (
        "Query 1, dessert, and its 3 keys; scale 0.5774\n"
        "key  token    query·key  scaled   mask   score  weight  × value 0  × value 1\n"
        "0    eat              4  2.3094   True  2.3094  0.0010     0.0010     0.0020\n"
        "1    dessert         16  9.2376   True  9.2376  0.9990     1.9980     7.9922\n"
        "2    first           12  6.9282  False    -inf  0.0000     0.0000     0.0000\n"
        "all                   -       -      -       -  1.0000     1.9990     7.9941\n"
        "weight = exp(score) / 1.029e+04, the sum of exp(score)"
    )


def favour_later_keys(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + kv_idx


OPTIONS: list[Any] = [
    pytest.param({}, ["query·key", "score"], id="scale"),
    pytest.param({"scale": 1.0}, ["query·key", "score"], id="no scale"),
    pytest.param({"mask": regard.Causal()}, ["query·key", "scaled", "mask", "score"], id="mask"),
    pytest.param({"bias": torch.randn(5, 5)}, ["query·key", "scaled", "score"], id="bias"),
    pytest.param({"softcap": 2.0}, ["query·key", "scaled", "score"], id="softcap"),
    pytest.param(
        {"bias": regard.ALiBi(1), "softcap": 2.0, "mask": regard.Causal()},
        ["query·key", "scaled", "biased", "capped", "mask", "score"],
        id="position bias, softcap, mask",
    ),
    pytest.param(
        {"score_mod": favour_later_keys, "softcap": 2.0},
        ["query·key", "scaled", "modified", "score"],
        id="score_mod, softcap",
    ),
]


@pytest.mark.parametrize(("options", "names"), OPTIONS)
def test_steps_that_do_nothing_are_left_out(options: dict[str, Any], names: list[str]) -> None:
    A = regard.attend(torch.randn(5, 4), torch.randn(5, 4), **options)
    assert regard.steps(A, 3).table.names == ("key", *names, "weight")


@pytest.mark.parametrize(("options", "names"), OPTIONS)
def test_the_scores_and_weights_are_those_of_the_matrix(
    options: dict[str, Any], names: list[str]
) -> None:
    A = regard.attend(torch.randn(5, 4), torch.randn(5, 4), **options)
    value = torch.randn(5, 3)
    steps = regard.steps(A, 3, value=value)
    torch.testing.assert_close(column(steps, "score", 5), A.scores[3], **CLOSE)
    torch.testing.assert_close(column(steps, "weight", 5), A[3], **CLOSE)
    torch.testing.assert_close(column(steps, "× value 2", 5), A[3] * value[:, 2], **CLOSE)
    torch.testing.assert_close(steps.output, (A @ value)[3], **CLOSE)
    assert steps.table["× value 2"][-1] == pytest.approx(float((A @ value)[3, 2]), abs=1e-6)


def test_given_scores_have_no_steps_before_them() -> None:
    A = regard.AttentionMatrix.from_scores(torch.tensor([[13.0, 9.0, 9.0]]))
    assert str(regard.steps(A)) == (
        "Query 0 and its 3 keys\n"
        "key  score  weight\n"
        "0       13  0.9647\n"
        "1        9  0.0177\n"
        "2        9  0.0177\n"
        "all      -  1.0000\n"
        "weight = exp(score) / 4.586e+05, the sum of exp(score)"
    )


def test_a_long_row_shows_its_strongest_keys_and_adds_up() -> None:
    A = regard.attend(torch.randn(1000, 8), torch.randn(1000, 8))
    value = torch.randn(1000, 2)
    steps = regard.steps(A, -1, value=value, most=3)
    top = A[999].topk(3)
    assert steps.query == 999
    assert sorted(steps.table["key"][:3], key=str) == sorted(map(str, top.indices.tolist()))
    assert steps.table["key"][3:] == ("997 others", "all")
    assert steps.table["weight"][3] == pytest.approx(1 - float(top.values.sum()), abs=1e-5)
    torch.testing.assert_close(steps.output, (A @ value)[999], rtol=1e-4, atol=1e-6)
    assert steps.title == "Query 999 and the 3 strongest of 1,000 keys; scale 0.3536"


def test_a_sink_takes_its_part_of_a_row() -> None:
    A = regard.attend(QUERY, KEY, sink_bias=torch.tensor([2.0]))
    steps = regard.steps(A, 0)
    assert steps.table["key"] == ("0", "1", "2", "sink", "all")
    torch.testing.assert_close(column(steps, "weight", 3), A[0], **CLOSE)
    assert steps.table["weight"][3] == pytest.approx(1 - float(A[0].sum()), abs=1e-6)
    assert steps.note.endswith(", the sum of exp(score), the sink's included")


def test_a_query_with_no_key_has_weights_of_0() -> None:
    A = regard.attend(QUERY, KEY, mask=torch.zeros(3, 3, dtype=torch.bool))
    steps = regard.steps(A, 0, value=VALUE)
    assert steps.table["weight"] == (0, 0, 0, 0)
    assert steps.output is not None
    assert steps.output.tolist() == [0, 0, 0]
    assert steps.note == "there is no key that it may attend to: every weight is 0"


def test_scores_too_large_for_exp_are_shown_less_their_maximum() -> None:
    steps = regard.steps(regard.AttentionMatrix.from_scores(torch.tensor([[100.0, 90.0]])))
    assert steps.note == "weight = exp(score - 100) / 1, the sum of exp(score - 100)"
    assert steps.table["weight"][0] == pytest.approx(0.9999546)


def test_wide_values_show_their_first_numbers_and_are_summed_whole() -> None:
    steps = regard.steps(regard.attend(QUERY, KEY), value=torch.randn(3, 64))
    assert [name for name in steps.table.names if "value" in name][-1] == "× value 5"
    assert steps.note.endswith("\nof each value the first 6 of 64 numbers are shown")
    assert steps.output is not None
    assert steps.output.shape == (64,)


def test_a_batch_of_one_and_one_head_need_no_index() -> None:
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    A = regard.attend(QUERY[None, None], KEY[None, None], mask=mask)
    assert str(regard.steps(A, 1)) == str(regard.steps(A[0, 0], 1))


def test_tokens_are_shown_as_text_and_escaped_in_html() -> None:
    tokens = [regard.Token(" <b>"), regard.Token("a\x1b[31m"), regard.Token("\n")]
    steps = regard.steps(regard.attend(QUERY, KEY), 0, tokens=tokens)
    html = steps._repr_html_()
    assert "a␛[31m" in str(steps)
    assert "<td>&lt;b&gt;</td>" in html
    assert "<p>Query 0, &lt;b&gt;, and its 3 keys; scale 0.5774</p>" in html
    assert not set(str(steps) + html) & {"\x1b"}


def test_no_gradient_is_kept() -> None:
    query = QUERY.clone().requires_grad_()
    output = regard.steps(regard.attend(query, KEY), value=VALUE).output
    assert output is not None
    assert not output.requires_grad


# Tables of small matrices


def test_a_small_matrix_is_a_table_named_by_its_tokens() -> None:
    A = regard.attend(QUERY, KEY, scale=1.0)
    assert str(regard.table(A, ["the", "big", "the"])) == (
        "query  the (0)     big  the (2)\n"
        "the     0.0634  0.4683   0.4683\n"
        "big     0.0000  0.9820   0.0180\n"
        "the     0.0003  0.8805   0.1192"
    )
    assert str(regard.table(A.scores)) == (
        "query  0   1   2\n0      2   4   4\n1      4  16  12\n2      4  12  10"
    )


def test_queries_and_keys_may_have_their_own_names() -> None:
    A = regard.attend(QUERY[:1], KEY, scale=1.0)
    assert regard.table(A, ["q"], ["a", "b", "c"]).names == ("query", "a", "b", "c")
    assert regard.table(A, ["q"]).names == ("query", "0", "1", "2")
    assert regard.table(regard.attend(QUERY, KEY), ["query", "b", "c"]).names[0] == "query →"


def test_a_mask_of_one_number_is_told_for_every_key() -> None:
    A = regard.attend(QUERY, KEY, mask=torch.tensor([False]))
    assert regard.steps(A, 0).table["mask"][:3] == (False, False, False)


def test_a_table_has_html_in_which_nothing_is_obeyed() -> None:
    table = regard.Table({"<i>": ["<script>", "b"], "n": [1, None]})
    assert table._repr_html_() == (
        "<table>\n<tr><th>&lt;i&gt;</th><th>n</th></tr>\n"
        "<tr><td>&lt;script&gt;</td><td>1</td></tr>\n<tr><td>b</td><td>-</td></tr>\n</table>"
    )


def test_the_html_of_a_long_table_has_its_ends() -> None:
    html = regard.Table({"n": list(range(100)), "m": list(range(100))})._repr_html_()
    assert html.count("<tr>") == 18
    assert '<td>7</td></tr>\n<tr><td colspan="2">... 84 more rows ...</td></tr>\n<tr><td>92' in html


# What is wrong

LARGE = regard.attend(torch.zeros(33, 2), torch.zeros(33, 2))
HEADS = regard.attend(torch.zeros(2, 8, 5, 4), torch.zeros(2, 8, 5, 4))
SMALL = regard.attend(QUERY, KEY)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        pytest.param(
            lambda: regard.steps(HEADS, 0),
            ValueError,
            "matrix has shape (2, 8, 5, 5); steps() shows one head.\n"
            "    Take one of them by its leading axes, for example A[0, 3].",
            id="several heads",
        ),
        pytest.param(
            lambda: regard.steps(SMALL, 3),
            IndexError,
            "index 3 is out of range for axis 0 of length 3.\n    Use -3 to 2.",
            id="no such query",
        ),
        pytest.param(
            lambda: regard.steps(SMALL, "first"),  # pyright: ignore[reportArgumentType]
            TypeError,
            "query is a str; it must be a whole number.\n    Pass an int, for example query=1.",
            id="a word for a query",
        ),
        pytest.param(
            lambda: regard.steps(SMALL, most=0),
            ValueError,
            "most is 0; it must be at least 1.\n    Pass for example most=1.",
            id="nothing to show",
        ),
        pytest.param(
            lambda: regard.steps(SMALL, tokens=["a", "b"]),
            ValueError,
            "tokens has 2 tokens; the matrix has kv_len = 3.\n"
            "    Give a list with one token for each.",
            id="too few tokens",
        ),
        pytest.param(
            lambda: regard.table(SMALL, "abc"),
            TypeError,
            "tokens is a text; it must be tokens.\n    Pass a list of its pieces.",
            id="a text for tokens",
        ),
        pytest.param(
            lambda: regard.steps(SMALL, value=torch.zeros(4, 2)),
            ValueError,
            "value has shape (4, 2); its tokens axis must have kv_len = 3.\n"
            "    It must broadcast to (3, value_dim).",
            id="too many values",
        ),
        pytest.param(
            lambda: regard.steps(SMALL, value=torch.zeros(1, 3, 2)),
            ValueError,
            "value has shape (1, 3, 2); its leading axes must fit those of the matrix, ().\n"
            "    It must broadcast to (3, value_dim), where heads may be grouped.",
            id="values of a batch",
        ),
        pytest.param(
            lambda: regard.table(LARGE),
            ValueError,
            "table() has a matrix of shape (33, 33); it shows one head of at most 32 queries and "
            "keys.\n    Take one head, A[0, 3]; for a long one use regard.steps(A) or "
            "A.pool(32, 32).",
            id="a large table",
        ),
        pytest.param(
            lambda: regard.table(HEADS.scores),
            ValueError,
            "table() has a matrix of shape (2, 8, 5, 5); it shows one head of at most 32 "
            "queries and keys.\n    Take one head, A[0, 3]; for a long one use regard.steps(A) or "
            "A.pool(32, 32).",
            id="a table of several heads",
        ),
    ],
)
def test_what_is_wrong_is_said(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
