"""``check`` on attention code as people write it: each mistake by its name, no false alarm."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from attention_corpus import Case, cases
from regard import check
from regard.diagnosis.catalogue import FAULTS, fault
from regard.diagnosis.report import Finding, Report

FAULTY = cases("faulty")
RIGHT = cases("right")
BEYOND = cases("beyond")


def _params(cases: Iterable[Case], *, every: int) -> list[Any]:
    """The cases; ``make test`` has one of so many, and the first with each mistake."""
    met: set[str] = set()
    params: list[Any] = []
    for place, case in enumerate(cases):
        is_new = not met.issuperset(case.expected)
        met.update(case.expected)
        marks = [] if is_new or place % every == 0 else [pytest.mark.full]
        params.append(pytest.param(case, id=case.name, marks=marks))
    return params


def _checked(case: Case) -> Report:
    torch.manual_seed(0)  # weights of a module that is handed over built
    call = case.call()
    return check(*call.args, **call.kwargs)


def _is_there(finding: Finding, case: Case) -> bool:
    lines = case.expected[finding.name]
    return 1 in lines or (finding.file == str(case.path) and finding.line in lines)


# Wrong by the right law, and without its own name, by the reason.
UNNAMED = {
    "faulty/01_function_einsum": "einsum splits one axis in two, as a merge of heads does",
    "faulty/03_by_hand_exp_sum": "its maximum runs over the wrong axis as well as its sum",
    "faulty/03_channels_first": "scores with keys first, or weights that are turned round",
    "faulty/15_sdpa_mask_of_rows": "a number added to a whole row changes no weight",
    "faulty/notebook_001_last_cell": "it runs with as many tokens as columns alone",
    "faulty/pair_tiled_heads_and_queries_as_values": "of its two mistakes one is named",
}

# Check cannot make the cache that they take, by the reason.
UNTOLD = {
    "faulty/13_function_with_cache_by_name": "names of a dict are not guessed",
    "faulty/13_module_with_kv_cache": "it gives back no cache",
}

NAMED = [case for case in FAULTY if case.name not in {*UNNAMED, *UNTOLD}]


@pytest.mark.parametrize("case", _params(NAMED, every=6))
def test_each_mistake_has_its_name_and_its_line(case: Case) -> None:
    report = _checked(case)
    assert_named(report, case)
    assert_proved(report)


@pytest.mark.parametrize("case", [c for c in FAULTY if c.name in UNNAMED], ids=lambda c: c.name)
def test_a_mistake_without_a_name_is_wrong_all_the_same(case: Case) -> None:
    assert _checked(case).verdict == "wrong"


@pytest.mark.parametrize("case", [c for c in FAULTY if c.name in UNTOLD], ids=lambda c: c.name)
def test_a_mistake_that_cannot_be_tried_is_no_verdict(case: Case) -> None:
    report = _checked(case)
    assert report.verdict == "cannot tell"
    assert "The law 'cache' was not tried: " in report.missing


def assert_named(report: Report, case: Case) -> None:
    faults = {name for name in case.expected if fault(name).severity == "fault"}
    assert {finding.name for finding in report.faults} == faults, str(report)
    told = {finding.name: finding for finding in report.findings}
    assert case.expected.keys() <= told.keys(), str(report)
    wrong = {name: told[name].line for name in case.expected if not _is_there(told[name], case)}
    assert wrong == {}, f"expected {case.expected}\n{report}"
    assert report.ok == (not faults)


def assert_proved(report: Report) -> None:
    for finding in report.faults:
        did, attention = finding.did, finding.attention
        assert finding.detail
        if did is not None and attention is not None:
            assert did.shape == attention.shape
            assert max(did.shape) <= 4
            assert not torch.allclose(did, attention.to(did), rtol=0, atol=5e-4, equal_nan=True)


@pytest.mark.parametrize("case", _params(RIGHT, every=4))
def test_what_is_right_is_found_right(case: Case) -> None:
    report = _checked(case)
    assert report.faults == (), str(report)
    assert report.ok, str(report)


@pytest.mark.parametrize("case", _params(BEYOND, every=3))
def test_what_is_another_kind_of_attention_or_none_is_neither_right_nor_wrong(case: Case) -> None:
    report = _checked(case)
    assert (report.verdict, report.findings) == ("cannot tell", ()), str(report)


# The corpus itself


def test_each_faulty_file_says_which_entry_of_the_catalogue_is_where() -> None:
    assert [case.name for case in FAULTY if not case.expected] == []
    assert all(fault(name).name == name for case in FAULTY for name in case.expected)


def test_each_mistake_is_written_in_three_ways_or_more() -> None:
    names = {entry.number: entry.name for entry in FAULTS if entry.number in range(1, 29)}
    ways = {name: sum(name in case.expected for case in FAULTY) for name in names.values()}
    assert len(ways) == 28
    assert {name: count for name, count in ways.items() if count < 3} == {}


def test_right_files_expect_nothing() -> None:
    assert [case.name for case in [*RIGHT, *BEYOND] if case.expected] == []


def test_at_least_20_right_implementations() -> None:
    assert len(RIGHT) >= 20
