"""``check`` on code in the style of 2024 to 2026: rotary tables, caches, windows, NumPy, latents.

The marker of a faulty line names a known mistake, ``# <- no-scale``, or the law that the fault
breaks, ``# <- law cache``.
"""

import pytest
import torch

from attention_corpus import Case, cases
from regard import check
from regard.diagnosis.report import Report

FOLDERS = ("recent", "recent_two", "recent_three", "recent_four")
RECENT = [case for folder in FOLDERS for case in cases(folder)]
# Neither right nor wrong, by the reason.
UNDECIDED = {
    "context_behind_text": "one projection takes two arguments",
    "decoding_first_token": "the only weight of one token is 1",
    "decoding_step": "a cache that is filled has no run without it",
    "decoding_without_itself": "a cache that is filled has no run without it",
    "learned_query_pool": "no output belongs to a token",
    "longformer_global": "a mask holds three numbers",
    "null_kv": "every output has a share of a value that is no token's",
    "numpy_default_axis": "the projections of a NumPy function cannot be seen",
    "numpy_exp_no_max": "the projections of a NumPy function cannot be seen",
    "numpy_gpt2": "the projections of a NumPy function cannot be seen",
    "numpy_max_axis": "what moves one row of a NumPy function moves the others",
    "numpy_mha": "the projections of a NumPy function cannot be seen",
    "patches_dim_scale": "no output belongs to a token",
    "perceiver_latents": "no output belongs to a token",
    "position_ids_unread": "an argument may be ignored on purpose",
    "recurrent_memory": "one projection takes two arguments",
    "resampler": "no output belongs to a token",
    "rolled_twice": "nothing acts as queries where outputs lie with other tokens",
    "ssmax": "a scale that follows the number of keys",
    "streaming_asr": "pieces of a stream see less than all of it at once",
    "swin_mask_order": "the order of windows and images is a convention",
    "swin_shifted": "nothing acts as queries where windows are rolled",
    "txl_rel": "a key for each distance, beside the keys of tokens",
    "unet_pixels": "a norm reads several tokens at once",
    "varlen_key_start": "its queries and keys are packed with different lengths",
    "whisper_cache_by_hooks": "hooks outside of the module fill its cache",
}
# The line that is named is that of another operation, which the fault leads to.
OTHER_LINES = {
    "alibi_sign": "the scores, which the bias is added to",
    "alibi_without_abs": "the scores, which the bias is added to",
    "cross_exchanged": "the product of queries and keys",
    "first_head_masked": "the softmax of the heads that are not masked",
    "lambdas_share_slice": "the projections of which one slice is used",
    "layers_share_cache": "the attention over the keys of both layers",
    "mla_scale_nope": "where the scale is used",
    "non_local_values": "the softmax of the scores",
    "online_no_rescale": "the first exp of the softmax by hand",
    "padding_added_to_rows": "the softmax that the mask does not change",
    "ring_step": "the first exp of the softmax by hand",
    "rope_head_axis": "where the angles are used",
    "rope_query_only": "the product of queries and keys",
    "shift_not_undone": "where windows of 4 do not fit",
}
_LINE_OF_USE = ("causal-off-by-one", "nan-rows", "mask-of-another-sample")


def _params() -> list[object]:
    marks = [[] if place % 6 == 0 else [pytest.mark.full] for place in range(len(RECENT))]
    pairs = zip(RECENT, marks, strict=True)
    return [pytest.param(case, id=case.path.stem, marks=own) for case, own in pairs]


@pytest.mark.filterwarnings("ignore")  # somebody's code warns
@pytest.mark.parametrize("case", _params())
def test_recent_code_gets_its_verdict(case: Case) -> None:
    torch.manual_seed(0)
    call = case.call()
    report = check(*call.args, **call.kwargs)
    if case.path.stem in UNDECIDED:
        assert report.verdict == "cannot tell", report
        assert report.missing
    elif not case.expected:
        assert report.verdict == "right", report
    else:
        assert report.verdict == "wrong", report
        assert_explained(report, case)


def assert_explained(report: Report, case: Case) -> None:
    [(expected, lines)] = case.expected.items()
    finding = report.findings[0]
    broken = {result.law.name for result in report.laws if result.outcome == "broken"}
    is_law = expected.startswith("law ")
    named = expected.removeprefix("law ")
    assert named in ({*broken, finding.name} if is_law else {finding.name}), report
    is_use = finding.name in _LINE_OF_USE and (finding.line or 0) in range(lines[0], lines[0] + 3)
    if finding.line is not None and not is_use and case.path.stem not in OTHER_LINES:
        assert finding.line in lines, report


def test_files_without_a_verdict_are_files() -> None:
    names = {case.path.stem for case in RECENT}
    assert {*UNDECIDED, *OTHER_LINES} <= names
