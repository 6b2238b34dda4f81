"""``check`` on attention code as people write it: each mistake by its name, no false alarm."""

import pytest
import torch

from attention_corpus import Case, cases
from regard import check
from regard.diagnosis.catalogue import FAULTS, fault
from regard.diagnosis.report import Finding, Report

FAULTY = cases("faulty")
RIGHT = cases("right")
BEYOND = cases("beyond")


def _checked(case: Case) -> Report:
    torch.manual_seed(0)  # weights of a module that is handed over built
    call = case.call()
    return check(*call.args, **call.kwargs)


def _is_there(finding: Finding, case: Case) -> bool:
    lines = case.expected[finding.name]
    return 1 in lines or (finding.file == str(case.path) and finding.line in lines)


# No matrix shows these, by the reason.
WITHOUT_PROOF = {
    "faulty/10_half_in_place": "it raises, and gives nothing",
    "faulty/10_half_module_under_a_mask": "so does it with a mask",
    "faulty/10_half_precision": "so does it",
    "faulty/10_half_under_a_mask": "so does it with a mask",
    "faulty/10_minus_ten": "0.0001 is not seen in three digits: a sentence says it",
    "faulty/22_causal_weights_times_input": "its values are never computed",
    "faulty/22_grouped_queries_as_values": "nor are these",
    "faulty/pair_tiled_heads_and_queries_as_values": "nor are these",
}


@pytest.mark.parametrize("case", FAULTY, ids=lambda case: case.name)
def test_each_mistake_is_named_and_proved(case: Case, subtests: pytest.Subtests) -> None:
    report = _checked(case)
    with subtests.test("it has this name and this line, and there is no other"):
        assert_named(report, case)
    with subtests.test("two small matrices that differ prove it"):
        assert_proved(report, case)


def assert_named(report: Report, case: Case) -> None:
    faults = {name for name in case.expected if fault(name).severity == "fault"}
    assert {finding.name for finding in report.faults} == faults, str(report)
    told = {finding.name: finding for finding in report.findings}
    assert case.expected.keys() <= told.keys(), str(report)
    wrong = {name: told[name].line for name in case.expected if not _is_there(told[name], case)}
    assert wrong == {}, f"expected {case.expected}\n{report}"
    assert report.ok == (not faults)
    assert report.missing == ""


def assert_proved(report: Report, case: Case) -> None:
    shown = [(f.did, f.attention) for f in report.faults]
    told = [did is not None and attention is not None for did, attention in shown]
    assert all(told) == (case.name not in WITHOUT_PROOF), str(report)
    for did, attention in shown:
        if did is not None and attention is not None:
            assert did.shape == attention.shape
            assert max(did.shape) <= 4
            assert not torch.allclose(did, attention.to(did), rtol=0, atol=5e-4, equal_nan=True)


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.name)
def test_what_is_right_is_found_right(case: Case) -> None:
    report = _checked(case)
    assert report.faults == (), str(report)
    assert report.ok, str(report)


@pytest.mark.parametrize("case", BEYOND, ids=lambda case: case.name)
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
