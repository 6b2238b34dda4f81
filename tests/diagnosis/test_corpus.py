"""``check`` on attention code as people write it: compared with what each author meant.

The marker of a faulty line names a known mistake, ``# <- no-scale``, or the law that the fault
breaks, ``# <- law cache``.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from attention_corpus import Case, cases
from regard import check
from regard.diagnosis.catalogue import FAULTS, fault
from regard.diagnosis.report import Report

FOLDERS = ("right", "faulty", "recent", "recent_two", "recent_three", "recent_four")
ALL = [case for folder in FOLDERS for case in cases(folder)]
FAULTY = [case for case in ALL if case.expected]
RIGHT = [case for case in ALL if not case.expected]
BEYOND = cases("beyond")

# What could not be read, or tried, by the reason.
UNREAD = {
    "chunked_by_views": "a chunk and the chunk before it",
    "context_behind_text": "one projection takes two arguments",
    "decoding_first_token": "the only weight of one token is 1",
    "decoding_step": "a cache that is filled has no run without it",
    "graph_dense": "a mask of pairs, in which each token sees itself as well",
    "hf_tuple_of_tables": "the mask of its example hides nothing",
    "longformer_global": "a mask holds three numbers",
    "masked_softmax_zero_marks": "a mask in which 0 marks what is hidden is never zero here",
    "mrope_vl": "three axes of positions",
    "null_kv": "every output has a share of a value that is no token's",
    "numpy_gpt2": "the projections of a NumPy function cannot be seen",
    "numpy_mha": "the projections of a NumPy function cannot be seen",
    "recurrent_memory": "one projection takes two arguments",
    "resampler": "learned queries are keys beside the tokens",
    "ssmax": "a scale that follows the number of keys",
    "streaming_asr": "pieces of a stream see less than all of it at once",
    "swin_bias_table": "the mask of its example is tried as it is",
    "swin_window": "windows of an image are samples",
    "txl_rel": "a key for each distance, beside the keys of tokens",
    "vit_rope_2d": "two axes of positions",
    "whisper_cache_by_hooks": "hooks outside of the module fill its cache",
}
# Right by the numbers that check sees, by the reason.
NOT_SEEN = {
    "13_tril_of_ones": "its docstring alone says that its queries are the newest tokens",
    "17_mask_laid_over_heads": "a mask of queries and keys for each sample is right",
    "bias_table_of_heads_viewed": "a table that is viewed is a table",
    "bias_table_viewed": "a table that is viewed is a table",
    "cross_exchanged": "what attends to what is a choice of the caller",
    "left_padding_positions": "positions are added to the input",
    "packed_reset_bad": "positions are added to the input",
    "position_ids_unread": "an argument may be ignored on purpose",
}
# Notes are no faults.
NOTES = ("transpose-of-batch", "no-positions", "unbatched-only")
# Wrong, or unread, and without its own name, by the reason.
UNNAMED = {
    "03_by_hand_exp_sum": "its maximum runs over the wrong axis as well as its sum",
    "03_channels_first": "scores with keys first, or weights that are turned round",
    "05_divided_last": "its sum divides the output",
    "07_beyond_the_lengths": "a text of the longest length sees no key",
    "10_float_mask_to_sdpa": "numbers of 0 and 1, of which none is low",
    "13_function_with_cache_by_name": "names of a dict are not guessed",
    "13_module_with_kv_cache": "it gives back no cache",
    "21_values_scored": "key and value are one, and no number tells which of them is meant",
    "22_causal_weights_times_input": "values that are not projected may be meant",
    "15_sdpa_mask_of_rows": "a number added to a whole row changes no weight",
    "notebook_001_last_cell": "it runs with as many tokens as columns alone",
    "27_sum_over_queries": "values that are multiplied element by element",
    "27_weights_times_columns": "values that are multiplied element by element",
    "27_weights_last_axis_summed_first": "values that are multiplied element by element",
    "pair_split_and_merged_by_view": "behind heads that are split wrongly no merge is read",
    "numpy_default_axis": "the projections of a NumPy function cannot be seen",
    "patches_dim_scale": "no output belongs to a token",
}
# The line that is named is that of another operation, which the fault leads to or comes from.
OTHER_LINES = {
    *("05_dot_product_by_sum", "10_plus_infinity", "batch_generate_gpt", "first_head_masked"),
    *("lambdas_share_slice", "mask_of_pairs_of_tokens", "nan_rows"),
    *("numpy_softmax_rows", "numpy_values_axis"),  # the lines of NumPy are not seen
    "pair_slices_filled_and_no_scale",
}


def _params(cases: Iterable[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases]


def _first_of_each_mistake(cases: Iterable[Case]) -> list[Any]:
    """The cases; ``make test`` has the first with each mistake."""
    met: set[str] = set()
    params = _params(cases)
    for number, case in enumerate(cases):
        if met.issuperset(case.expected):
            params[number] = pytest.param(case, id=case.name, marks=pytest.mark.full)
        met.update(case.expected)
    return params


def _checked(case: Case, **more: Any) -> Report:
    torch.manual_seed(0)  # weights of a module that is handed over built
    call = case.call()
    return check(*call.args, **call.kwargs, **more)


def _is_note(case: Case) -> bool:
    return set(case.expected) <= {*NOTES}


@pytest.mark.filterwarnings("ignore")  # somebody's code warns
@pytest.mark.parametrize("case", _first_of_each_mistake(FAULTY))
def test_code_that_is_not_what_its_author_meant_is_never_right(case: Case) -> None:
    report = _checked(case, expect=case.intention)
    stem = case.path.stem
    if _is_note(case):
        assert {finding.name for finding in report.findings} == {*case.expected}, report
    elif stem in NOT_SEEN:
        assert report.verdict == "right", report
    else:
        assert report.verdict in ("wrong", "cannot tell"), report
        assert report.verdict == "wrong" or report.missing
        if stem not in UNNAMED:
            assert_named(report, case)


def assert_named(report: Report, case: Case) -> None:
    """The findings have the name of each known mistake, and its line."""
    known = {name: lines for name, lines in case.expected.items() if not name.startswith("law ")}
    told = {finding.name: finding for finding in report.findings}
    assert known.keys() <= told.keys(), report
    assert all(told[name].fault.sentence and str(told[name]) for name in known)
    if case.path.stem not in OTHER_LINES:
        for name, lines in known.items():
            own = told[name]
            is_there = own.file == str(case.path) and own.line in lines
            assert 1 in lines or is_there, f"expected {case.expected}\n{report}"


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", _params(RIGHT))
def test_code_that_is_what_its_author_meant_is_right(case: Case) -> None:
    report = _checked(case, expect=case.intention)
    if case.path.stem in UNREAD:
        assert report.verdict == "cannot tell", report
        assert report.missing
    else:
        assert report.verdict == "right", report
        assert report.computes is not None
        assert report.computes.is_known


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", _params(RIGHT))
def test_right_code_is_never_wrong_if_nothing_is_expected(case: Case) -> None:
    report = _checked(case)
    assert report.verdict != "wrong", report
    if report.verdict != "cannot tell":
        assert report.computes is not None
        assert report.computes.spec is not None


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", _params(BEYOND))
def test_what_is_another_kind_of_attention_or_none_is_neither_right_nor_wrong(case: Case) -> None:
    report = _checked(case)
    assert (report.verdict, report.faults) == ("cannot tell", ()), report


# The corpus itself


def test_each_faulty_file_says_which_entry_of_the_catalogue_is_where() -> None:
    files = cases("faulty")
    assert [case.name for case in files if not case.expected] == []
    assert all(fault(name).name == name for case in files for name in case.expected)


def test_each_mistake_is_written_in_three_ways_or_more() -> None:
    names = {entry.number: entry.name for entry in FAULTS if entry.number in range(1, 29)}
    ways = {name: sum(name in case.expected for case in FAULTY) for name in names.values()}
    assert len(ways) == 28
    assert {name: count for name, count in ways.items() if count < 3} == {}


def test_right_files_expect_nothing() -> None:
    assert [case.name for case in [*cases("right"), *BEYOND] if case.expected] == []


def test_every_file_says_what_its_author_meant() -> None:
    lines = [case.path.read_text().splitlines()[1] for case in [*ALL, *BEYOND]]
    assert [line for line in lines if not line.startswith("# regard.spec(")] == []
    assert len(lines) == 604


def test_files_with_a_reason_are_files() -> None:
    stems = {case.path.stem for case in ALL}
    assert {*UNREAD, *NOT_SEEN, *UNNAMED, *OTHER_LINES} <= stems
