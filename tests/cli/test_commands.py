"""regard record, segments and heads: what they write and show is what the library says."""

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
import tiny_models
from commands import Run, left_behind
from regard.analysis.head_classes import Trial
from regard.models.pretrained import Pretrained
from regard.view.terminal.share_grid import share_lines

TEXT = "Anna has a red boat. Ben has a blue house. Who has a boat? Anna"


@pytest.fixture
def recorded(run: Run, bert: str) -> str:
    run("record", TEXT, "-m", bert)
    return "run.safetensors"


def test_a_recording_has_what_the_model_attended_to_and_the_text(
    run: Run, bert: str, working_folder: Path
) -> None:
    code, out, err = run("record", TEXT, "-m", bert)
    seen, expected = regard.load("run.safetensors"), Pretrained.load(bert).observe(TEXT)
    assert (code, err, left_behind(working_folder)) == (0, "", ["run.safetensors"])
    assert out.splitlines()[0] == "bert   20 tokens · 2 layers, query and key of each"
    assert (seen.model, seen.key_tokens) == ("bert", expected.key_tokens)
    assert torch.equal(seen[1].to_dense(), expected[1].to_dense())


def test_record_tells_that_the_model_runs_and_that_the_file_is_written(
    run: Run, bert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, ...]] = []

    @contextmanager
    def progress() -> Iterator[Callable[..., None]]:
        yield lambda *what: told.append(what)

    monkeypatch.setattr("regard.cli.progress.progress", progress)
    run("record", TEXT, "-m", bert)
    assert told[1:] == [(f"running {bert}", 1, 2), ("writing run.safetensors", 2, 2)]


def test_a_recording_has_the_values_where_they_are_asked_for(run: Run, bert: str) -> None:
    _, out, _ = run("record", TEXT, "-m", bert, "--values", "--json")
    seen, expected = regard.load("run.safetensors"), Pretrained.load(bert).observe(TEXT, keep="qkv")
    assert json.loads(out)["kept"] == "qkv"
    assert all(torch.equal(seen.value(name), expected.value(name)) for name in expected)
    _, out, _ = run("record", TEXT, "-m", bert, "--values")
    assert "query, key and value of each" in out


def test_a_recording_that_cannot_be_written_is_refused_before_any_work(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pretrained, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    code, _, err = run("record", TEXT, "-o", "no/run.safetensors")
    assert code == 2
    assert err.startswith("regard: output is 'no/run.safetensors', which cannot be written")


def test_segments_are_those_of_the_library(run: Run, recorded: str) -> None:
    code, out, err = run("segments", recorded, "--by", "sentence")
    seen = regard.load(recorded)
    expected = regard.segment_shares(seen, regard.spans.by_sentence(seen.key_tokens))
    hint = ["", "Sinks draw attention from every part; --no-sinks leaves them out."]
    assert (code, out.splitlines(), err) == (0, [*share_lines(expected, 80), *hint], "")
    code, out, _ = run("segments", recorded, "--by", "sentence", "--no-sinks")
    assert "--no-sinks" not in out


def test_parts_are_ranges_of_tokens_and_patterns(run: Run, recorded: str) -> None:
    parts = ("-p", "anna=Anna .*?boat", "-p", "ben=6:11")
    options = ("--query", "question=Who.*\\?", "--no-sinks", "--per", "head", "--json")
    code, out, _ = run("segments", recorded, *parts, *options)
    told = json.loads(out)
    assert code == 0
    assert len(told["shares"]) == 2 * 4 * 1 * 2
    assert {row["query"] for row in told["shares"]} == {"question"}
    assert told["sinks_left_out"] == [0, 19]
    assert {type(row["share"]) for row in told["shares"]} == {float}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param((), "segments needs either --by or --part", id="no parts"),
        pytest.param(("--by", "word", "-p", "a=0:1"), "segments needs either", id="both"),
        pytest.param(("-p", "0:4"), "part is '0:4'; it must be NAME=START:STOP", id="no name"),
        pytest.param(
            ("-p", "a=0:400"),
            "part is 'a=0:400'; START must be below STOP, and STOP at most 20, the number of "
            "tokens.\n    For the first one alone write --part 'first=0:1'.\n",
            id="out of range",
        ),
        pytest.param(
            ("-p", "a=0:4", "-q", "b=3:3"),
            "query is 'b=3:3'; START must be below STOP, and STOP at most 20, the number of "
            "queries.\n    For the first one alone write --query 'first=0:1'.\n",
            id="an empty range",
        ),
        pytest.param(
            ("-p", "a=xyz"),
            "pattern has 'xyz' for 'a'; the text has no token that it matches.\n"
            "    Pass a regular expression that matches the text, with \\ before a character with "
            "a special meaning; or its tokens, START:STOP.\n",
            id="nothing found",
        ),
        pytest.param(
            ("-p", "a=("),
            "pattern has '('; it is no regular expression (missing ), unterminated subpattern at "
            "position 0).\n    Pass a regular expression that matches",
            id="no pattern",
        ),
        pytest.param(("--by", "line"), "Invalid value for '--by'", id="unknown cut"),
        pytest.param(
            ("-p", "a=1:5", "-p", "a=6:8"),
            "part has 'a' twice; each name must stand for one part.\n"
            "    Choose another name for the second one: --part 'a 2=6:8'.\n",
            id="a part twice",
        ),
        pytest.param(
            ("-p", "a=1:5", "-q", "b=1:3", "-q", "b=Who .*"),
            "query has 'b' twice; each name must stand for one part.\n"
            "    Choose another name for the second one: --query 'b 2=Who .*'.\n",
            id="a query twice",
        ),
    ],
)
def test_parts_that_are_wrong_are_one_clear_error(
    options: tuple[str, ...], message: str, run: Run, recorded: str
) -> None:
    code, out, err = run("segments", recorded, *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"regard: {message}")


def test_what_a_query_drew_beyond_another_is_that_of_the_library(run: Run, recorded: str) -> None:
    queries = ("-q", "before=11:12", "-q", "answer=17:18")
    options = ("--by", "sentence", *queries, "--beyond", "before")
    _, out, _ = run("segments", recorded, *options, "--json")
    seen = regard.load(recorded)
    parts = regard.spans.by_sentence(seen.key_tokens)
    asked = {"before": (11, 12), "answer": (17, 18)}
    expected = regard.segment_shares(seen, parts, queries=asked).beyond("before").total()
    shown = [row["share"] for row in json.loads(out)["shares"]]
    assert shown == pytest.approx(expected.flatten().tolist(), abs=1e-6)
    code, _, err = run("segments", recorded, "--by", "sentence", "--beyond", "nobody")
    assert code == 2
    assert err.startswith(
        "regard: beyond is 'nobody'; it must be the name of one of at least two queries"
    )


def test_many_parts_are_shown_by_the_strongest_in_the_width_of_the_terminal(
    run: Run, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    _, out, _ = run("segments", recorded, "--by", "word")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 70
    assert lines[-3] == "the strongest 2 of 15 parts; --json gives all"
    seen = regard.load(recorded)
    words = regard.spans.by_word(seen.key_tokens)
    best = regard.segment_shares(seen, words).total()[0].max()
    assert f"{100 * float(best):.1f} %" in lines[2]


def test_a_recording_of_the_last_tokens_says_how_to_ask_it(run: Run, bert: str) -> None:
    Pretrained.load(bert).observe(TEXT, queries=slice(-4, None)).save("run.safetensors")
    asked = ("segments", "run.safetensors", "--by", "sentence", "--query", "last=0:4")
    assert run(*asked)[0] == 0
    assert run("segments", "run.safetensors", "--by", "sentence")[0] == 0
    code, _, err = run("segments", "run.safetensors", "--part", "start=0:2")
    assert code == 2
    assert err == (
        "regard: query is missing; run.safetensors has 4 of the queries of its text, and none in "
        "these parts.\n"
        "    Name those that ask, counted from the first of them: --query last=0:4\n"
    )


def test_queries_of_another_text_without_tokens_are_asked_for_by_the_option(run: Run) -> None:
    across = regard.attend(torch.zeros(1, 2, 7, 4), torch.zeros(1, 2, 19, 4))
    regard.Recording({"across": across}).save("run.safetensors")
    code, _, err = run("segments", "run.safetensors", "--part", "start=0:2")
    assert code == 2
    assert "run.safetensors has 7 of the queries of its text" in err
    assert "--query last=0:4" in err


def test_a_recording_that_is_not_there_is_said_first(run: Run) -> None:
    code, out, err = run("segments", "nope.safetensors")
    assert (code, out, err) == (2, "", "regard: nope.safetensors: No such file or directory.\n")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", ["see", "record", "heads"])
def test_the_name_of_a_text_file_is_its_text(
    command: str, run: Run, bert: str, working_folder: Path
) -> None:
    (working_folder / "notes.txt").write_text(TEXT)
    code, out, _ = run(command, "notes.txt", "-m", bert, "--json")
    count = len(Pretrained.load(bert).observe(TEXT).key_tokens or ())
    told = json.loads(out)["tokens"]
    assert (code, told if isinstance(told, int) else len(told)) == (0, count)


@pytest.mark.full
def test_a_recording_is_seen_like_its_text(run: Run, bert: str, recorded: str) -> None:
    _, out, _ = run("see", recorded, "--json")
    _, expected, _ = run("see", TEXT, "-m", bert, "--json")
    assert json.loads(out) == json.loads(expected)
    assert run("record", recorded)[2] == (
        f"regard: {recorded} is a recording; it must be a text or a text file.\n"
        f"    To look at the recording write: regard see {recorded}\n"
    )


def test_see_heads_and_page_of_a_recording_give_one_head_one_name(run: Run, recorded: str) -> None:
    seen = [head["kind"] for head in json.loads(run("see", recorded, "--json")[1])["heads"]]
    told = [head["kind"] for head in json.loads(run("heads", recorded, "--json")[1])["heads"]]
    run("page", recorded)
    found = re.search(r'id="recording">(.*?)</script>', Path("attention.html").read_text())
    assert found is not None
    shown = [head["kind"] for layer in json.loads(found[1])["layers"] for head in layer["heads"]]
    assert seen == told == shown == list(regard.heads(regard.load(recorded))["kind"])
    assert "induction" in json.loads(run("see", recorded, "--json")[1])["heads"][0]["scores"]


@pytest.mark.parametrize("command", ["segments", "heads"])
def test_a_recording_that_may_not_be_read_is_one_clear_error(
    command: str, run: Run, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", locked)
    more = ("--by", "word") if command == "segments" else ()
    assert run(command, recorded, *more) == (2, "", f"regard: {recorded}: Permission denied.\n")


@pytest.mark.parametrize("command", ["segments", "heads"])
def test_a_recording_without_layers_is_one_clear_error(command: str, run: Run) -> None:
    regard.Recording({}).save("empty.safetensors")
    more = ("--part", "a=0:1") if command == "segments" else ()
    assert run(command, "empty.safetensors", *more) == (
        2,
        "",
        "regard: empty.safetensors has no layers.\n    Record a model with regard record.\n",
    )


@pytest.mark.parametrize("command", ["segments", "heads", "page"])
def test_answers_to_other_questions_are_one_clear_error(command: str, run: Run, bert: str) -> None:
    Pretrained.load(bert).observe(TEXT, keep=[regard.TopK(8)]).save("run.safetensors")
    more = ("--by", "word") if command == "segments" else ()
    code, out, err = run(command, "run.safetensors", *more)
    assert (code, out) == (2, "")
    assert re.search("has answers only, TopK|has no answer to", err)
    assert not Path("attention.html").exists()


def test_how_many_tokens_a_recording_has_is_told_where_it_is_known(run: Run) -> None:
    x = torch.zeros(1, 2, 5, 4)
    regard.Recording({"attn": regard.attend(x, x)}).save("run.safetensors")
    _, out, _ = run("heads", "run.safetensors")
    assert out.splitlines()[0] == "a model   2 heads"
    _, out, _ = run("heads", "run.safetensors", "--json")
    assert json.loads(out)["tokens"] is None


def test_the_heads_end_with_one_line_end(run: Run, recorded: str) -> None:
    _, out, _ = run("heads", recorded)
    assert out[-2] != "\n" == out[-1]


@pytest.mark.parametrize("command", ["segments", "heads"])
def test_a_file_that_is_no_recording_is_one_clear_error(
    command: str, run: Run, working_folder: Path
) -> None:
    (working_folder / "run.safetensors").write_bytes(b"not a recording")
    more = ("--by", "word") if command == "segments" else ()
    code, out, err = run(command, "run.safetensors", *more)
    assert (code, out) == (2, "")
    assert err.startswith("regard: ")
    assert "run.safetensors" in err


@pytest.mark.full
def test_the_heads_of_a_model_are_shown_by_kind(run: Run, bert: str) -> None:
    code, out, err = run("heads", "--model", bert)
    assert (code, err) == (0, "")
    assert out.startswith("bert   8 heads, seen on ")
    assert "\nlayer 1  " in out
    _, out, _ = run("heads", "-m", bert, "--json")
    told = json.loads(out)
    assert [head["name"] for head in told["heads"]][-1] == "L1H3"
    assert {"induction", "duplicate token"} <= set(told["heads"][0]["scores"])


@pytest.mark.full
def test_the_heads_of_a_model_of_few_tokens_are_shown(run: Run, working_folder: Path) -> None:
    dna = str(tiny_models.dna(working_folder / "dna"))
    code, out, err = run("heads", "ACGTTGCAAC", "-m", dna, "--json")
    assert (code, err) == (0, "")
    scores = json.loads(out)["heads"][0]["scores"]
    assert {"induction", "duplicate token", "retrieval"} <= set(scores)


def test_a_model_that_reads_too_little_for_a_trial_says_so(run: Run, working_folder: Path) -> None:
    dna = str(tiny_models.dna(working_folder / "dna", n_positions=5))
    code, out, err = run("heads", "ACGTT", "-m", dna)
    assert (code, out.splitlines()[0]) == (0, "dna   8 heads, seen on 5 tokens")
    assert err == (
        f"regard: {dna} reads at most 5 tokens: induction and duplicate token left out\n"
    )


def test_the_heads_of_a_recording_are_those_of_the_library(run: Run, recorded: str) -> None:
    _, out, _ = run("heads", recorded, "--all")
    assert out == regard.heads(regard.load(recorded)).text() + "\n"


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [("heads", "--model", "x"), ("see", "--layers", "1"), ("compare", "--max-tokens", "3")],
)
def test_a_recording_takes_no_option_of_a_model(
    command: str, option: str, value: str, run: Run, recorded: str
) -> None:
    runs = (recorded, recorded) if command == "compare" else (recorded,)
    code, _, err = run(command, *runs, option, value)
    assert code == 2
    assert err == (
        f"regard: {option} cannot be combined with the recording {recorded}.\n"
        "    Leave out one of them.\n"
    )


def test_a_model_in_the_place_of_a_text_gets_the_right_spelling(run: Run, bert: str) -> None:
    assert run("heads", "all-MiniLM-L6-v2") == (
        2,
        "",
        "regard: all-MiniLM-L6-v2 is a model.\n    Write: --model all-MiniLM-L6-v2\n",
    )
    assert run("see", bert)[2].endswith(f"    For a model write: --model {bert}\n")


# What a model reads, and how


def test_a_long_text_is_cut_with_a_warning(run: Run, bert: str) -> None:
    code, _, err = run("record", TEXT, "-m", bert, "--max-tokens", "7")
    seen = regard.load("run.safetensors")
    kept = "".join(token.text for token in seen.key_tokens or () if not token.special)
    assert (code, len(seen.key_tokens or ())) == (0, 7)
    assert TEXT.startswith(kept)
    assert err == (
        f"regard: the text is cut to its first 7 tokens: {len(kept)} of {len(TEXT)} characters\n"
    )


def test_two_texts_that_are_compared_are_cut_with_a_warning(run: Run, bert: str) -> None:
    code, _, err = run("compare", TEXT, TEXT, "-m", bert, "--max-tokens", "7")
    assert code == 0
    assert err.count("regard: the text is cut to its first 7 tokens: ") == 2


def test_a_text_that_is_short_enough_is_not_cut(run: Run, bert: str) -> None:
    code, _, err = run("record", TEXT, "-m", bert, "--max-tokens", "20")
    assert (code, err) == (0, "")
    assert len(regard.load("run.safetensors").key_tokens or ()) == 20


def test_a_text_that_is_too_long_names_the_option_that_cuts_it(run: Run, bert: str) -> None:
    code, _, err = run("record", "word " * 3000, "-m", bert)
    assert code == 2
    assert re.search(
        r"\n    Give a part of it \(--max-tokens \d+\), or choose a model that reads more", err
    )


def test_some_layers_and_heads_are_recorded(run: Run, bert: str) -> None:
    code, _, _ = run("record", TEXT, "-m", bert, "--layers", "1", "--heads", "0,2-3")
    seen = regard.load("run.safetensors")
    expected = Pretrained.load(bert).observe(TEXT)[1].to_dense()[:, [0, 2, 3]]
    assert (code, len(seen)) == (0, 1)
    assert torch.equal(seen[0].to_dense(), expected)


def test_the_dtype_of_the_weights_is_chosen(run: Run, bert: str) -> None:
    run("record", TEXT, "-m", bert, "--dtype", "bfloat16")
    assert regard.load("run.safetensors")[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--layers", "a"], "layers is 'a'; it must be positions", id="layers"),
        pytest.param(["--device", "foo"], "device is 'foo', which cannot be used: ", id="device"),
        pytest.param(["--chat"], "model '", id="no template"),
        pytest.param(["--max-tokens", "2"], "max_tokens is 2; ", id="special tokens alone"),
    ],
)
def test_options_of_the_model_that_are_wrong_are_one_clear_error(
    options: list[str], message: str, run: Run, bert: str
) -> None:
    code, out, err = run("record", TEXT, "-m", bert, *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"regard: {message}")


@pytest.fixture
def gpt(tmp_path: Path) -> str:
    """A model that writes, with a chat template."""
    folder = tiny_models.save(tmp_path / "models" / "gpt", tiny_models.llama())
    template = "{% for m in messages %}[CLS]{{ m.content }}[SEP]{% endfor %}so"
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


@pytest.mark.full
def test_what_a_model_writes_is_recorded(run: Run, gpt: str) -> None:
    code, _, err = run("record", TEXT, "-m", gpt, "--generate", "4")
    seen = regard.load("run.safetensors")
    plain = Pretrained.load(gpt).observe(TEXT)
    length = plain[0].shape[-1]
    assert (code, err) == (0, "")
    assert seen[0].shape[-2:] == (length + 3, length + 3)
    assert (seen.key_tokens or ())[:length] == plain.key_tokens
    torch.testing.assert_close(seen[0].to_dense()[..., :length, :length], plain[0].to_dense())


def test_a_text_is_given_in_the_chat_template(run: Run, gpt: str) -> None:
    code, _, err = run("record", "Who has a boat?", "-m", gpt, "--chat")
    tokens = regard.load("run.safetensors").key_tokens or ()
    assert (code, err) == (0, "")
    assert [token.text for token in tokens if token.special] == ["[CLS]", "[SEP]"]
    text = "".join(token.text for token in tokens if not token.special)
    assert text == "Who has a boat?so"


# Compare


def test_two_recordings_are_compared_head_by_head(run: Run, bert: str, recorded: str) -> None:
    run("record", TEXT.replace("boat", "house"), "-m", bert, "-o", "other.safetensors")
    code, out, err = run("compare", recorded, "other.safetensors", "--json")
    told = json.loads(out)
    one, two = regard.load(recorded), regard.load("other.safetensors")
    expected = [regard.js(one[layer], two[layer]).mean((0, 2)) / math.log(2) for layer in (0, 1)]
    assert (code, err) == (0, "")
    shown = [head["difference"] for head in told["heads"]]
    assert shown == pytest.approx(torch.cat(expected).tolist(), rel=1e-4)
    _, out, _ = run("compare", recorded, "other.safetensors", "--top", "1")
    assert out.splitlines()[-1].startswith(
        f"L{max(told['heads'], key=lambda h: h['difference'])['layer']}H"
    )


def test_recordings_of_other_shapes_are_not_compared(run: Run, bert: str, recorded: str) -> None:
    run("record", "Anna has", "-m", bert, "-o", "other.safetensors")
    code, out, err = run("compare", recorded, "other.safetensors")
    assert (code, out) == (2, "")
    assert err.endswith(
        "Compare texts with the same number of tokens; with -o page.html regard shows any two side "
        "by side.\n"
    )


@pytest.mark.full
def test_two_texts_are_compared_in_the_terminal_and_on_a_page(run: Run, bert: str) -> None:
    texts = ["Anna has a boat", "Anna has a house"]
    code, out, err = run("compare", *texts, "-m", bert, "-o", "page.html", "--json")
    one, two = (Pretrained.load(bert).observe(text) for text in texts)
    expected = [regard.js(one[layer], two[layer]).mean((0, 2)) / math.log(2) for layer in (0, 1)]
    assert (code, err) == (0, "")
    shown = [head["difference"] for head in json.loads(out)["heads"]]
    assert shown == pytest.approx(torch.cat(expected).tolist(), rel=1e-4)
    found = re.search(r'id="recording">(.*?)</script>', Path("page.html").read_text())
    assert found is not None
    told = json.loads(found[1])
    assert (told["title"], told["other"]["title"]) == tuple(texts)
    assert (len(told["layers"]), told["other"]["first"]) == (4, 2)
    place = told["opened"]["layer"], told["opened"]["head"]
    assert place == divmod(shown.index(max(shown)), len(shown) // 2)


def test_a_page_of_two_texts_names_heads_as_see_does(
    run: Run, bert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(Pretrained.load(bert).observe("Anna has a boat"))
    trial = Trial({name: {"induction": (1.0,) * 4} for name in names})
    monkeypatch.setattr("regard.models.trials.repetition", lambda *_, **__: [trial])
    run("compare", "Anna has a boat", "Anna has a house", "-m", bert, "-o", "page.html")
    found = re.search(r'id="recording">(.*?)</script>', Path("page.html").read_text())
    assert found is not None
    layers = json.loads(found[1])["layers"]
    assert {head["kind"] for layer in layers for head in layer["heads"]} == {"induction"}


@pytest.mark.full
def test_texts_of_other_lengths_stand_side_by_side_on_the_page(run: Run, bert: str) -> None:
    long = "Anna and Ben and Carl and Dora have a house and a boat"
    words = [long, f"{long} and a garden with old apple trees"]
    code, out, _ = run("compare", *words, "-m", bert, "-o", "page.html")
    one, two = (len(Pretrained.load(bert).observe(text).key_tokens or ()) for text in words)
    assert code == 0
    assert out.splitlines()[0] == (
        "…a house and a boat and …a house and a boat and a garden with old… have "
        f"{one} and {two} tokens in 2 and 2 layers: their cells have no difference"
    )


@pytest.mark.parametrize("given", [["a", "b", "c"], ["a"], ["a", "b.safetensors"]])
def test_compare_needs_two_of_one_kind(given: list[str], run: Run) -> None:
    code, _, err = run("compare", *given)
    assert code == 2
    assert err.startswith("regard: compare needs two recordings or two texts.\n")


# Verify


def test_verify_says_that_a_recording_is_as_it_was_written(run: Run, recorded: str) -> None:
    code, out, err = run("verify", recorded)
    assert (code, err) == (0, "")
    assert out.startswith("run.safetensors: 2 layers, ")
    assert out.endswith(": every number has its checksum\n")


def test_verify_names_what_is_damaged(run: Run, recorded: str) -> None:
    content = bytearray(Path(recorded).read_bytes())
    content[-1] ^= 1
    Path(recorded).write_bytes(content)
    code, out, err = run("verify", recorded)
    assert (code, out) == (2, "")
    assert err.startswith("regard: run.safetensors is damaged: the tensor '")


def test_record_replaces_nothing_but_recordings(run: Run, bert: str) -> None:
    Path("page.html").write_text("<!doctype html>")
    code, out, err = run("record", TEXT, "-m", bert, "-o", "page.html")
    assert (code, out) == (2, "")
    assert err.startswith("regard: page.html exists and is not a recording; saving would lose it.")
    assert Path("page.html").read_text() == "<!doctype html>"


# Page


def test_page_writes_a_recording_as_one_file(run: Run, recorded: str) -> None:
    code, out, err = run("page", recorded, "-o", "run.html", "--layer", "1")
    assert (code, err) == (0, "")
    line = r"run\.html   \d+ kB, one file, opens in any browser\n    every layer is exact\n"
    assert re.fullmatch(line, out)
    assert Path("run.html").read_text().startswith("<!doctype html>")


def test_page_says_what_is_exact_and_what_makes_more_of_it_exact(run: Run, recorded: str) -> None:
    _, out, _ = run("page", recorded, "--layers", "1")
    assert out.splitlines()[1:] == [
        "    exact: layer 1",
        "    weights in one byte each: layer 0",
        "    to have others exact: --layers 0, for all leave out --layers; or regard serve",
    ]
    code, _, err = run("page", recorded, "--layers", "7")
    assert (code, err) == (2, "regard: layer is 7; this recording has layers 0 to 1.\n")


@pytest.mark.full
def test_a_limit_in_which_no_layer_fits_gets_a_larger_one(run: Run) -> None:
    x = torch.randn(2, 1, 8, 600, 64, generator=torch.Generator().manual_seed(0))
    regard.Recording({"layer": regard.attend(*x)}).save("wide.safetensors")
    for more in ([], ["--layers", "0"]):
        _, out, _ = run("page", "wide.safetensors", "--limit", "1", *more)
        assert out.splitlines()[1::2] == [
            "    no layer is exact",
            "    to have layers exact: a larger --limit; or regard serve",
        ]


def test_page_says_which_layers_have_16_bits_and_what_gives_them_more(run: Run) -> None:
    x = torch.randn(2, 1, 1, 150, 1024, generator=torch.Generator().manual_seed(0))
    regard.Recording({"layer": regard.attend(*x, scale=0.05)}).save("large.safetensors")
    _, out, _ = run("page", "large.safetensors", "--limit", "1")
    lines = out.splitlines()[1:]
    assert lines[0] == "    every layer is exact"
    said = r"    in 16 bits, weights within 0\.000\d: layer 0; in 32 bits with --limit 2"
    assert re.fullmatch(said, lines[1]), lines
    assert len(lines) == 2
    _, out, _ = run("page", "large.safetensors", "--limit", "2")
    assert out.splitlines()[1:] == ["    every layer is exact"]


@pytest.mark.parametrize("place", [["--layer", "9"], ["--head", "99"]])
def test_a_page_opens_at_a_place_that_is_there(run: Run, recorded: str, place: list[str]) -> None:
    code, out, _ = run("page", recorded, *place)
    assert (code, out) == (2, "")
    assert not Path("attention.html").exists()


def test_a_page_of_a_part_opens_at_the_number_in_the_model(run: Run, bert: str) -> None:
    run("record", TEXT, "-m", bert, "-o", "part.safetensors", "--layers", "1", "--heads", "1")
    assert run("page", "part.safetensors", "--layer", "1", "--head", "1")[0] == 0
    code, _, err = run("page", "part.safetensors", "--layer", "0")
    assert (code, err) == (2, "regard: layer is 0; this recording has only layer 1.\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("see", "a", "b"), "A text is one argument: put it in quotes.", id="words"),
        pytest.param(("see", "a", "--dtype", "int8"), "'int8' is not one of 'float32'", id="dtype"),
    ],
)
def test_wrong_calls_are_said_in_plain_words(
    run: Run, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Value error" not in err
    assert "regard see --help" in err


def test_a_model_that_cannot_write_is_an_error(run: Run, bert: str) -> None:
    code, _, err = run("see", "a word", "--model", bert, "--generate", "2", "--no-page")
    assert code == 2
    assert "one of a language model" in err


def test_options_of_a_model_here_are_refused_for_a_server(run: Run) -> None:
    code, _, err = run("record", "a", "--server", "http://localhost:1", "--max-tokens", "3")
    assert code == 2
    assert "--max-tokens cannot be combined with --server" in err
