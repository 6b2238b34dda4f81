"""What observe keeps is what was asked for: layers, heads, queries, answers, where it was asked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import regard
import regard.capture.recorder
import regard.recording.merged_calls
import regard.recording.spool
from cases import in_turn
from models import LLAMA, MODELS, ids, noise
from regard.capture.slicing import some_queries, unrepeated

CASES = [pytest.param(case, id=name) for name, case in MODELS.items()]
ASKED = [regard.TopK(2), regard.Entropy(), regard.Sum(-2), regard.Pool(3, 2)]


def seen_by(case: Any, **options: Any) -> regard.Recording:
    model = case.model()
    with torch.no_grad(), regard.observe(model, **options) as seen:
        model(**case.inputs)
    return seen


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()


def run(model: nn.Module, **options: Any) -> regard.Recording:
    with torch.no_grad(), regard.observe(model, **options) as seen:
        model(ids())
    return seen


def close(first: Tensor, second: Tensor) -> None:
    # 1e-6: weights of at most 1 in float32, of blocks that begin elsewhere
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


# A part of what ran is that part of the whole


@in_turn(
    case=MODELS,
    queries={str(part): part for part in (slice(-3, None), slice(1, 4), slice(None, -2))},
)
def test_chosen_queries_have_the_weights_that_they_have_in_the_whole(
    case: Any, queries: slice
) -> None:
    whole, part = seen_by(case), seen_by(case, queries=queries)
    for name, matrix in whole.items():
        close(part[name].to_dense(), matrix.to_dense()[..., queries, :])


@pytest.mark.sampled(7)
@in_turn(
    case=MODELS,
    heads={str(heads): heads for heads in ([1], [0, 1], slice(1, None), [1, 0], [-1])},
)
def test_chosen_heads_have_the_weights_that_they_have_in_the_whole(
    case: Any, heads: list[int] | slice
) -> None:
    whole, part = seen_by(case), seen_by(case, heads=heads)
    for name, matrix in whole.items():
        close(part[name].to_dense(), matrix.to_dense()[..., heads, :, :])


class ByHand(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.mT
        return scores.softmax(-1) @ x


@pytest.mark.parametrize("shape", [(2, 5, 4), (6, 5, 4)], ids=["no heads", "heads in the batch"])
def test_heads_are_not_chosen_from_an_axis_that_may_be_the_batch(shape: tuple[int, ...]) -> None:
    with pytest.raises(regard.RegardError) as caught, regard.observe(model := ByHand(), heads=[1]):
        model(torch.randn(shape))
    assert str(caught.value).partition(": ")[2] == (
        f"its weights have the shape ({shape[0]}, 5, 5), whose first axis may be heads, texts or "
        "both, so heads= cannot choose among them.\n"
        "    Observe it without heads=, and choose with seen[layer][index]."
    )


MASKED = {
    "causal": {"mask": regard.Causal()},
    "top left": {"mask": regard.Causal(align="top-left")},
    "window": {"mask": regard.SlidingWindow(2, 1)},
    "padding and causal": {"mask": regard.Causal() & regard.Padding([3, 7])},
    "not documents": {"mask": ~regard.Documents([0, 0, 1, 1, 1, 2, 2])},
    "prefix": {"mask": regard.PrefixLM([2, 4]) | regard.SlidingWindow(0, 1)},
    "mask_mod": {"mask": lambda _b, h, q_idx, kv_idx: (q_idx + h) % 3 >= kv_idx % 2},
    "rows": {"mask": regard.masks.RowSlice(regard.Causal(), 2, 9)},
    "alibi": {"bias": regard.ALiBi(4), "mask": regard.Causal()},
    "t5": {"bias": regard.T5Bias(noise(8, 4), bidirectional=False, max_distance=20)},
    "bias of one row": {"bias": torch.arange(7.0)},
    "score_mod": {"score_mod": lambda s, _b, h, q_idx, kv_idx: s - (q_idx - kv_idx).abs() * h},
    "sinks": {"sink_bias": torch.arange(4.0), "softcap": 3.0},
}


@pytest.mark.parametrize("rows", [range(3), range(2, 4), range(3, 5), range(5)], ids=str)
@pytest.mark.parametrize("options", MASKED.values(), ids=MASKED)
def test_rows_of_a_matrix_are_its_rows(options: dict[str, Any], rows: range) -> None:
    matrix = regard.attend(noise(2, 4, 5, 3), noise(2, 2, 7, 3), **options)
    part = some_queries(matrix, rows)
    close(part.to_dense(), matrix.to_dense()[..., rows, :])
    close(some_queries(part, range(1, 2)).to_dense(), matrix.to_dense()[..., rows[1:2], :])


@pytest.mark.parametrize("bias", [regard.ALiBi(4), regard.T5Bias(noise(8, 4))], ids=repr)
def test_chosen_queries_keep_their_position_bias_in_a_file(
    bias: regard.Bias, tmp_path: Path
) -> None:
    class Biased(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return regard.attend(x, x, bias=bias, mask=regard.Causal()) @ x

    x, model = noise(2, 4, 6, 3), Biased()
    with regard.observe(model, queries=slice(1, 4)) as seen:
        model(x)
    seen.save(tmp_path / "run.safetensors")
    whole = regard.attend(x, x, bias=bias, mask=regard.Causal()).to_dense()
    close(regard.load(tmp_path / "run.safetensors")[0].to_dense(), whole[..., 1:4, :])


@pytest.mark.parametrize(
    ("heads", "num_kv_heads"), [([0, 1], 1), ([0, 2], 2), ([0, 1, 2], 3), ([2, 3, 0, 1], 2)]
)
def test_grouped_keys_are_repeated_only_for_uneven_groups(
    heads: list[int], num_kv_heads: int
) -> None:
    assert run(llama(), heads=heads)[0].source.key.shape[1] == num_kv_heads


def test_keys_that_a_model_repeated_are_kept_once() -> None:
    key = noise(2, 2, 7, 3).repeat_interleave(3, 1)
    matrix = regard.attend(noise(2, 6, 7, 3), key, mask=regard.Causal())
    assert unrepeated(matrix).source.key.shape == (2, 2, 7, 3)
    close(unrepeated(matrix).to_dense(), matrix.to_dense())
    one_differs = key.index_fill(2, torch.tensor([3]), 0.0).clone()
    one_differs[:, 1, 3] = 1.0
    assert unrepeated(regard.attend(noise(2, 6, 7, 3), one_differs)).source.key.shape[1] == 6


@pytest.mark.parametrize(
    "layers", [["model.layers.1.self_attn"], [1], range(1, 2), [1, "model.layers.1.self_attn"]]
)
def test_chosen_layers_are_all_that_is_kept(layers: Any) -> None:
    assert list(run(llama(), layers=layers)) == ["model.layers.1.self_attn"]


def test_a_place_among_layers_that_run_again_is_that_of_the_module() -> None:
    model = llama()
    with torch.no_grad(), regard.observe(model, layers=[1]) as seen:
        model(ids())
        model(ids(5))
    assert list(seen) == ["model.layers.1.self_attn", "model.layers.1.self_attn#2"]


# Answers instead of query and key


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", CASES)
def test_answers_asked_while_the_model_runs_are_those_of_the_whole(case: Any) -> None:
    whole, asked = seen_by(case), seen_by(case, keep=ASKED)
    assert asked.shapes == whole.shapes
    for name, matrix in whole.items():
        for reduction in ASKED:
            torch.testing.assert_close(asked.kept[name][reduction], matrix.reduce(reduction))


def test_only_the_answers_are_kept() -> None:
    seen = run(llama(), keep=[regard.Entropy()])
    with pytest.raises(regard.RegardError, match="its query and key were not kept"):
        seen[0]


def test_answers_are_those_of_the_chosen_heads_and_queries() -> None:
    whole, asked = run(llama()), run(llama(), keep=ASKED, heads=[3, 1], queries=slice(-3, None))
    expected = whole[1].to_dense()[:, [3, 1], -3:].sum(-2)
    torch.testing.assert_close(asked.kept["model.layers.1.self_attn"][regard.Sum(-2)], expected)


def test_a_reduction_that_does_not_fit_stops_no_model() -> None:
    model, ran = llama(), list[object]()
    problem = r"spans.*8"
    with (
        pytest.raises(regard.RegardError, match=problem),
        regard.observe(model, keep=[regard.Segments([(0, 8)])]),
    ):
        ran.append(model(ids()))
    assert ran


def test_the_largest_of_fewer_keys_than_were_asked_for_are_padded(tmp_path: Path) -> None:
    path, model = tmp_path / "run.safetensors", llama()
    given = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with regard.observe(model, keep="qk") as whole:
        model.generate(ids(), **given)
    with regard.observe(model, keep=[regard.TopK(9), regard.TopK(8)], path=path):
        model.generate(ids(), **given)
    expected, top = whole[0].topk(9), regard.load(path).topk(9)["model.layers.0.self_attn"]
    close(top.values, expected.values)
    assert torch.equal(top.indices, expected.indices)
    assert top.indices[0, 0, 0].tolist() == [0, *[-1] * 8]


# The end of the block loses nothing


def test_a_layer_that_cannot_be_put_together_loses_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, real = llama(), regard.recording.merged_calls.Calls.layer
    given = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def fails_once(calls: Any, name: str, extent: Any, selected: range) -> Any:
        if selected == range(9) and not failed:
            failed.append(calls)
            raise AttributeError("no such thing")
        return real(calls, name, extent, selected)

    failed = list[object]()
    monkeypatch.setattr(regard.recording.merged_calls.Calls, "layer", fails_once)
    with pytest.raises(regard.RegardError) as error, regard.observe(model, strict=True) as seen:
        model.generate(ids(), **given)
    assert str(error.value) == (
        "the calls of 'model.layers.0.self_attn' cannot be put together: AttributeError: no such "
        "thing\n    Of this layer the first call alone is kept."
    )
    assert [matrix.shape[-1] for matrix in seen.values()] == [7, 9]


def test_what_cannot_be_written_stays_in_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(regard.capture.recorder, "write", fails)
    path, model = tmp_path / "run.safetensors", llama()
    with pytest.raises(regard.RegardError) as error, regard.observe(model, path=path) as seen:
        model(ids())
    assert str(error.value) == (
        f"{path} cannot be written: AttributeError: no such thing\n"
        f"    {path}.part has what was recorded; load it with regard.load."
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "run.safetensors.part"]
    for recording in (seen, regard.load(f"{path}.part")):
        assert [matrix.shape for matrix in recording.values()] == [(2, 4, 7, 7)] * 2


# Where it is kept


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda", None])
def test_what_is_kept_goes_to_the_device_asked_for(device: str | None) -> None:
    model = llama().cuda()
    given = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with regard.observe(model) as kept:
        model.generate(ids().cuda(), **given)
    with regard.observe(model, device=device) as seen:
        model.generate(ids().cuda(), **given)
    assert {tensor.device.type for tensor in seen[0].source.tensors} == {device or "cuda"}
    assert seen[0].shape == (2, 4, 12, 12)
    torch.testing.assert_close(seen[0].to_dense().cpu(), kept[0].to_dense().cpu())


@pytest.mark.parametrize("options", [{}, {"keep": ASKED}, {"queries": slice(-2, None)}], ids=str)
def test_a_file_holds_what_memory_would(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "run.safetensors"
    kept, written = run(llama(), **options), run(llama(), path=path, **options)
    loaded = regard.load(path)
    assert list(tmp_path.iterdir()) == [path]
    assert list(written) == list(loaded) == list(kept)
    for name in kept:
        for recording in (written, loaded):
            if "keep" in options:
                for reduction, answer in kept.kept[name].items():
                    torch.testing.assert_close(recording.kept[name][reduction], answer)
            else:
                assert torch.equal(recording[name].to_dense(), kept[name].to_dense())


@pytest.mark.full
def test_prompt_and_answer_are_one_matrix_in_a_file_too(tmp_path: Path) -> None:
    model, options = llama(), {"max_new_tokens": 90, "do_sample": False, "eos_token_id": None}
    model.config.max_position_embeddings = 200
    with regard.observe(model) as kept:
        model.generate(ids(), pad_token_id=0, **options)
    with regard.observe(model, path=tmp_path / "run") as written:
        model.generate(ids(), pad_token_id=0, **options)
    assert written[1].shape == (2, 4, 96, 96)
    assert torch.equal(written[1].to_dense(), kept[1].to_dense())


# Bad arguments, before any work


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "layers, a name": (
        {"layers": "model"},
        TypeError,
        "layers is 'model'; it takes names of modules and indices in the order they run.\n"
        '    Pass for example layers=["model.layers.3.self_attn"] or layers=range(4).',
    ),
    "layers, a number": (
        {"layers": 3},
        TypeError,
        "layers is an int; it takes names of modules and indices in the order they run.\n"
        '    Pass for example layers=["model.layers.3.self_attn"] or layers=range(4).',
    ),
    "layers, none": (
        {"layers": []},
        ValueError,
        "layers is empty; it takes names of modules and indices in the order they run.\n"
        '    Pass for example layers=["model.layers.3.self_attn"] or layers=range(4).',
    ),
    "layers, unknown": (
        {"layers": ["model.layers.0.self_atn"]},
        ValueError,
        "layers has 'model.layers.0.self_atn'; it must be the name of a module of the model.\n"
        "    Did you mean 'model.layers.0.self_attn'?",
    ),
    "layers, negative": (
        {"layers": [-1]},
        ValueError,
        "layers has -1; indices count from 0 in the order in which layers run, and how many will "
        "run is not known before.\n"
        "    Count from the first layer, or give the name of the module.",
    ),
    "layers, a fraction": (
        {"layers": [0.5]},
        TypeError,
        "layers is a float; it must be a whole number.\n    Pass an int, for example layers=1.",
    ),
    "layers, a dict": (
        {"layers": {0: [1]}},
        TypeError,
        "layers is a dict; it takes names of modules and indices in the order they run.\n"
        '    Pass for example layers=["model.layers.3.self_attn"] or layers=range(4).',
    ),
    "heads, a dict": (
        {"heads": {1: [0, 2]}},
        TypeError,
        "heads is a dict; it takes indices or a slice.\n"
        "    Pass for example heads=[0, 3] or heads=slice(0, 4).",
    ),
    "heads, a number": (
        {"heads": 3},
        TypeError,
        "heads is an int; it takes indices or a slice.\n"
        "    Pass for example heads=[0, 3] or heads=slice(0, 4).",
    ),
    "queries, a number": (
        {"queries": 64},
        TypeError,
        "queries is an int; it takes a slice of positions.\n"
        "    Pass for example queries=slice(-64, None) for the last 64.",
    ),
    "queries, a step": (
        {"queries": slice(0, 8, 2)},
        ValueError,
        "queries has the step 2; the queries must be neighbours.\n"
        "    Leave out the step, and choose among their answers.",
    ),
    "queries, none": (
        {"queries": slice(5, 5)},
        ValueError,
        "queries is slice(5, 5, None); it chooses no query of any text.\n"
        "    Pass for example queries=slice(-64, None) for the last 64.",
    ),
    "path, a number": (
        {"path": 3},
        TypeError,
        "path is an int; it must be the path of a file.\n"
        '    Pass for example path="run.safetensors".',
    ),
    "path, empty": (
        {"path": ""},
        ValueError,
        "path is empty; it must be the path of a file.\n"
        '    Pass for example path="run.safetensors".',
    ),
    "path, a null character": (
        {"path": "run\0"},
        ValueError,
        "path is 'run\\x00', with a null character; no file has one in its name.\n"
        '    Pass for example path="run.safetensors".',
    ),
    "progress, a number": (
        {"progress": 3},
        TypeError,
        "progress is an int; it must be a function of one number.\n"
        "    Pass for example progress=print.",
    ),
    "keep, something else": (
        {"keep": "kv"},
        TypeError,
        'keep is \'kv\'; it takes "qk", "qkv" or a list of reductions.\n'
        '    Pass keep="qk" or "qkv", or for example keep=[TopK(8), Entropy()].',
    ),
    "keep, one reduction": (
        {"keep": regard.Entropy()},
        TypeError,
        'keep is an Entropy; it takes "qk", "qkv" or a list of reductions.\n'
        '    Pass keep="qk" or "qkv", or for example keep=[TopK(8), Entropy()].',
    ),
    "keep, a class": (
        {"keep": [regard.Entropy]},
        TypeError,
        "keep= got Entropy; each argument must be an instance of a reduction.\n"
        "    Pass for example regard.Entropy(), regard.TopK(8).",
    ),
}


@pytest.mark.parametrize(("options", "kind", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_refused_before_the_block_runs(
    options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as error, regard.observe(llama(), **options):
        pytest.fail("the block must not run")
    assert str(error.value) == text


def test_a_device_that_is_not_there_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"^device is 'tpu:7', which cannot be used here: "),
        regard.observe(llama(), device="tpu:7"),
    ):
        pytest.fail("the block must not run")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(regard.RegardError, match="cannot be written: No such file or directory"),
        regard.observe(llama(), path=tmp_path / "gone" / "run.safetensors"),
    ):
        pytest.fail("the block must not run")


LATE = {
    "a module without attention": (
        {"layers": ["model.norm", 0]},
        "layers has 'model.norm'; no attention was seen in it.\n"
        "    Attention was seen in 'model.layers.0.self_attn', 'model.layers.1.self_attn'.",
    ),
    "a place that no layer had": (
        {"layers": [0, 7]},
        "layers has 7; attention was seen in 2 modules, 0 to 1.\n"
        "    They are 'model.layers.0.self_attn', 'model.layers.1.self_attn'.",
    ),
    "queries that did not run": (
        {"queries": slice(90, None)},
        "queries is slice(90, None, None); no layer ran so many queries.\n"
        "    Choose among those that the model runs, the tokens of its input.",
    ),
    "a head too many": (
        {"heads": [0, 4]},
        "the attention of 'model.layers.0.self_attn', 'model.layers.1.self_attn' cannot be kept: "
        "heads has 4; the layer has "
        "4 heads.\n    Choose among 0 to 3.",
    ),
}


@pytest.mark.parametrize(("options", "text"), LATE.values(), ids=LATE)
def test_what_only_the_run_can_tell_is_said_when_the_block_ends(
    options: dict[str, Any], text: str
) -> None:
    ran = list[object]()
    model = llama()
    with pytest.raises(regard.RegardError) as error, regard.observe(model, **options):
        ran.append(model(ids()))
    assert str(error.value) == text
    assert ran


def test_chosen_layers_and_heads_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    model = llama()
    with torch.no_grad(), regard.observe(model, layers=[1], heads=[3, 1], path=path) as seen:
        model(ids()[:1])
    for recording in (seen, regard.load(path)):
        table = regard.heads(recording)
        assert (table["layer"], table["head"]) == ((1, 1), (3, 1))
        shares = regard.segment_shares(recording, {"all": (0, 7)}).table()
        assert (shares["layer"], shares["head"]) == ((1, 1), (3, 1))
