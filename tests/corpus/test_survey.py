"""regard.survey: every head on every text, in files that no interruption damages."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import regard
from regard.corpus.text_files import Corpus
from regard.corpus.text_scores import TextScores
from regard.models.pretrained import Pretrained

TEXTS = [
    "The old bridge was closed because the old bridge was weak.",
    "Life is short, eat dessert first.",
    "Rain fell for three days, and the river rose to the third step.",
    "Life is long, eat dessert last.",
    "A farmer crossed it with two goats.",
]
SHARED = {
    "previous": "previous token",
    "next": "next token",
    "self": "self",
    "first_token": "first-token sink",
    "separators": "separator sink",
}


@pytest.fixture(scope="module")
def model() -> Pretrained:
    return Pretrained.load()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def rows(model: Pretrained, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("survey")
    (folder / "corpus.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    parts = {"bridge": "old (bridge)", "goats": "goats"}
    found = regard.survey(model, folder / "corpus.txt", folder / "out", parts=parts, block=3)
    return found.to_table().to_pylist()


@pytest.mark.full
def test_there_is_one_row_for_each_text_layer_and_head(rows: list[dict[str, Any]]) -> None:
    places = [(row["text"], row["layer"], row["head"]) for row in rows]
    assert places == [
        (t, layer, head) for t in range(5) for layer in range(6) for head in range(12)
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", range(5))
def test_scores_of_a_batch_are_those_of_each_text_alone(
    text: int, rows: list[dict[str, Any]], model: Pretrained
) -> None:
    seen = model.observe(TEXTS[text])
    heads = regard.heads(seen)
    mine = [row for row in rows if row["text"] == text]
    for column, kind in SHARED.items():
        assert [row[column] for row in mine] == pytest.approx(list(heads[kind]), abs=1e-6)
    assert {row["tokens"] for row in mine} == {len(seen.key_tokens or ())}


def test_the_other_scores_follow_from_the_weights(
    rows: list[dict[str, Any]], model: Pretrained
) -> None:
    seen = model.observe(TEXTS[0])
    ids = model.encode(TEXTS[0])[1]["input_ids"][0].tolist()
    n, words = len(ids), range(1, len(ids) - 1)
    bridges = [place for place, token in enumerate(seen.key_tokens or ()) if "bridge" in token.text]
    for layer in range(6):
        weights = seen[layer].to_dense()[0].double()
        entropy = -(weights * weights.log()).sum(-1)[:, 1:-1].mean(-1)
        later = [q for q in words if ids[q] in ids[:q]]
        pairs = {
            "duplicate": [(q, k) for q in later for k in range(q) if ids[k] == ids[q]],
            "induction": [(q, k + 1) for q in later for k in range(q - 1) if ids[k] == ids[q]],
        }
        received = weights.sum(-2) / n
        for head in range(12):
            row = rows[layer * 12 + head]
            w = weights[head]
            assert row["entropy"] == pytest.approx(entropy[head].item(), abs=1e-5)
            for name, some in pairs.items():
                share = sum(w[q, k].item() for q, k in some) / len({q for q, _ in some})
                assert row[name] == pytest.approx(share, abs=1e-6)
            distance = sum(w[q, k].item() * abs(q - k) for q in words for k in range(n)) / len(
                words
            )
            assert row["distance"] == pytest.approx(distance, rel=1e-5)
            assert row["received"] == pytest.approx(received[head].max().item(), abs=1e-6)
            assert row["received_at"] == received[head].argmax().item()
            drawn = w[1:-1][:, bridges].sum(-1).mean().item()
            assert row["bridge"] == pytest.approx(drawn, abs=1e-6)


@pytest.mark.parametrize("sink", [None, 3.0, 200.0])
def test_entropies_of_rows_with_sinks_and_without_keys(sink: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, 5, 4, generator=generator) for _ in range(2))
    query[:, 0] *= 100  # rows with one weight of 1
    allowed = torch.ones(5, 5, dtype=torch.bool)
    allowed[2] = False
    sinks = None if sink is None else torch.full((3,), sink)
    matrix = regard.attend(query, key, mask=allowed, sink_bias=sinks)
    asked = TextScores(
        torch.arange(10).view(2, 5), torch.zeros(2, 5).bool(), torch.zeros(0, 2, 5).bool()
    )
    weights = matrix.to_dense().double()
    expected = torch.special.entr(weights).sum(-1)[..., 1:].mean(-1)
    torch.testing.assert_close(
        matrix.reduce(asked)[..., 0].double(), expected, rtol=1e-5, atol=1e-6
    )


def test_a_text_is_tokenised_once(model: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    tokenise = Pretrained._tokenise

    def counted(self: Pretrained, text: str, **kwargs: Any) -> Any:
        calls.append(text)
        return tokenise(self, text, **kwargs)

    monkeypatch.setattr(Pretrained, "_tokenise", counted)
    model.encode(TEXTS[0])
    assert calls == [TEXTS[0]]


def test_a_score_that_no_query_has_is_null(rows: list[dict[str, Any]]) -> None:
    assert {row["goats"] for row in rows if row["text"] != 4} == {None}
    assert None not in {row["goats"] for row in rows if row["text"] == 4}
    assert {row["induction"] for row in rows if row["text"] == 1} == {None}


@pytest.mark.full
def test_long_texts_give_the_same_as_the_definition_in_several_blocks(
    monkeypatch: pytest.MonkeyPatch, model: Pretrained, corpus: Path
) -> None:
    whole = regard.survey(model, corpus, corpus.parent / "whole").to_table()
    monkeypatch.setattr("regard.backends.sweep.BLOCK_SIZE", 64)
    monkeypatch.setattr("regard.backends.sweep.MIN_ROWS", 2)
    parts = regard.survey(model, corpus, corpus.parent / "parts").to_table()
    for name in whole.schema.names:
        expected = whole[name].to_pylist()
        assert parts[name].to_pylist() == pytest.approx(expected, abs=1e-5), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_json_lines_and_parquet_give_what_lines_give(
    kind: str, rows: list[dict[str, Any]], model: Pretrained, tmp_path: Path
) -> None:
    path = tmp_path / f"corpus.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"id": 1, "content": text}) + "\n" for text in TEXTS))
    else:
        pq.write_table(pa.table({"content": TEXTS}), path)
    found = regard.survey(model, path, tmp_path / "out", column="content", block=3).to_table()
    assert found["entropy"].to_pylist() == [row["entropy"] for row in rows]


def test_ranks_take_blocks_in_turn_without_waiting(
    monkeypatch: pytest.MonkeyPatch, model: Pretrained, corpus: Path
) -> None:
    out = corpus.parent / "out"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    found = regard.survey(model, corpus, out, block=2)
    assert [Path(path).name for path in found.files] == ["part-00000001.parquet"]
    monkeypatch.setenv("RANK", "0")
    found = regard.survey(model, corpus, out, block=2)
    assert found.to_table()["text"].unique().to_pylist() == [0, 1, 2, 3, 4]


def test_finished_parts_are_not_read_again(model: Pretrained, corpus: Path) -> None:
    out, told = corpus.parent / "out", list[tuple[int, int]]()
    regard.survey(model, corpus, out, block=2)
    (out / "part-00000001.parquet").unlink()
    regard.survey(model, corpus, out, block=2, progress=lambda *numbers: told.append(numbers))
    assert told == [(4, 5), (5, 5)] or told == [(5, 5)]


def _changed_text(corpus: Path, out: Path, model: Pretrained) -> None:
    corpus.write_text(corpus.read_text().replace("goats", "sheep"))
    regard.survey(model, corpus, out, block=3)


def _other_settings(corpus: Path, out: Path, model: Pretrained) -> None:
    regard.survey(model, corpus, out, block=3, max_tokens=8)


def _other_model(corpus: Path, out: Path, model: Pretrained) -> None:
    other = Pretrained.load()
    with torch.no_grad():
        next(other.model.parameters()).view(-1)[0] += 1
    regard.survey(other, corpus, out, block=3)


def _shorter(corpus: Path, out: Path, model: Pretrained) -> None:
    corpus.write_text("".join(corpus.read_text().splitlines(keepends=True)[:3]))
    regard.survey(model, corpus, out, block=3)


def _damaged(corpus: Path, out: Path, model: Pretrained) -> None:
    (out / "part-00000001.parquet").write_bytes(b"PAR1")
    regard.survey(model, corpus, out, block=3)


REFUSED: dict[str, tuple[Callable[[Path, Path, Pretrained], None], str]] = {
    "texts": (_changed_text, r"part-00000001.parquet is of other texts: .*corpus.txt, line 4 or"),
    "settings": (_other_settings, r"part-00000000.parquet is of another run: its max_tokens is "),
    "model": (_other_model, r"part-00000000.parquet is of another run: its weights is "),
    "shorter": (_shorter, r"part-00000001.parquet lies beyond the corpus, whose last part is part"),
    "damaged": (_damaged, r"part-00000001.parquet is no part of a survey, or a damaged one"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_part_of_another_run_is_refused_by_name(
    change: Callable[[Path, Path, Pretrained], None], message: str, model: Pretrained, corpus: Path
) -> None:
    out = corpus.parent / "out"
    regard.survey(model, corpus, out, block=3)
    before = [(path.name, path.read_bytes()) for path in sorted(out.iterdir())]
    with pytest.raises(regard.RegardError, match=message):
        change(corpus, out, model)
    if change is not _damaged:
        assert [(path.name, path.read_bytes()) for path in sorted(out.iterdir())] == before


BROKEN = {
    "blank": ("jsonl", b'{"text": " "}\n', "c.jsonl', which has no text.\n    Give at least one."),
    "encoding": (
        "txt",
        b"one\n\xff\xfe\n",
        "c.txt, line 2: byte 0 is no UTF-8.\n    Save the file",
    ),
    "json": ("jsonl", b'{"text": "a"}\n{"text": \n', "c.jsonl, line 2 is no JSON (Expecting value"),
    "no-text": ("jsonl", b'{"text": 3}\n', "c.jsonl, line 1: 'text' is missing or no string; each"),
    "list": (
        "jsonl",
        b"[]\n",
        "c.jsonl, line 1: 'text' is missing or no string; each text must be",
    ),
    "long": ("txt", b"word " * 600, "c.txt, line 1: text has 602 tokens (3,000 characters); all-"),
    "parquet": ("parquet", b"PAR1", "c.parquet is no Parquet file, or a damaged one (Parquet"),
    "nothing": ("txt", b"", "c.txt', which has no text.\n    Give at least one."),
}


@pytest.mark.parametrize(("kind", "content", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_corpus_is_one_sentence_with_file_and_line(
    kind: str, content: bytes, message: str, model: Pretrained, tmp_path: Path
) -> None:
    path = tmp_path / f"c.{kind}"
    path.write_bytes(content)
    with pytest.raises(regard.RegardError) as error:
        regard.survey(model, path, tmp_path / "out")
    assert message in str(error.value)
    assert not list((tmp_path / "out").glob("*"))


def test_a_text_that_is_too_long_can_be_cut(model: Pretrained, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("word " * 600)
    found = regard.survey(model, tmp_path / "c.txt", tmp_path / "out", max_tokens=16)
    assert found.to_table()["tokens"].unique().to_pylist() == [16]


def test_other_wrong_arguments_are_refused(model: Pretrained, corpus: Path) -> None:
    out = corpus.parent / "out"
    for parts in ({"head": "x"}, {"p": "("}):
        with pytest.raises(ValueError, match=r"^parts has "):
            regard.survey(model, corpus, out, parts=parts)
    with pytest.raises(regard.RegardError, match="which is no file; it must be a file of texts"):
        regard.survey(model, corpus.parent / "none.txt", out)
    pq.write_table(pa.table({"y": TEXTS}), corpus.parent / "corpus.parquet")
    with pytest.raises(regard.RegardError, match=r"corpus.parquet has no column 'x'; it has 'y'"):
        regard.survey(model, corpus.parent / "corpus.parquet", out, column="x")


FULL_DISK = """
import resource, sys, regard
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    regard.survey("all-MiniLM-L6-v2", *sys.argv[1:])
except regard.RegardError as error:
    print(error)
"""


@pytest.mark.full
def test_a_full_disk_leaves_no_part_of_a_file(corpus: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(corpus), str(corpus.parent / "out")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "part-00000000.parquet cannot be written: File too large." in said
    assert not list((corpus.parent / "out").iterdir())


SURVEY = """
import sys, regard
regard.survey("all-MiniLM-L6-v2", *sys.argv[1:], block=8)
"""


@pytest.mark.full
def test_killed_at_any_moment_it_goes_on_and_gives_the_same_bytes(tmp_path: Path) -> None:
    corpus, drawn, kills = tmp_path / "c.txt", random.Random(0), 5
    words = ["the", "old", "bridge", "was", "closed", "on", "monday", "because", "river"]
    texts = [" ".join(drawn.choices(words, k=drawn.randint(20, 60))) for _ in range(160)]
    corpus.write_text("".join(f"{text}\n" for text in texts))
    command = [sys.executable, "-c", SURVEY, str(corpus)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "whole")], env=environment, check=True, timeout=300)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    out = tmp_path / "out"
    for _ in range(kills):
        before = len(list(out.glob("*.parquet")))
        with subprocess.Popen([*command, str(out)], env=environment) as process:
            while process.poll() is None and len(list(out.glob("*.parquet"))) < before + 2:
                time.sleep(0.01)
            time.sleep(drawn.random() * 0.3)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        for path in out.glob("*.parquet"):
            assert path.read_bytes() == whole[path.name]
    assert len(list(out.glob("*.parquet"))) < len(whole)
    subprocess.run([*command, str(out)], env=environment, check=True, timeout=300)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole


BLANK = {
    "txt": b"one\n\n \nfour\n",
    "jsonl": b'{"text": "one"}\n\n{"text": " "}\n{"text": "four"}\n',
    "parquet": b"",
}


@pytest.mark.parametrize("kind", BLANK)
def test_blank_texts_are_skipped_with_a_count(kind: str, model: Pretrained, tmp_path: Path) -> None:
    path = tmp_path / f"corpus.{kind}"
    path.write_bytes(BLANK[kind])
    if kind == "parquet":
        pq.write_table(pa.table({"text": ["one", "", " ", "four"]}), path)
    corpus = Corpus(path, "text")
    for _ in range(2):  # each reading counts anew
        [block] = corpus.blocks(8)
        assert [(text.number, text.text) for text in block] == [(0, "one"), (1, "four")]
        assert [text.place.rpartition(" ")[2] for text in block] == ["1", "4"]
        assert corpus.blank == 2
    with pytest.warns(UserWarning, match=rf"^2 blank texts of {path} skipped\.$"):
        surveyed = regard.survey(model, path, tmp_path / "out")
    assert surveyed.to_table()["text"].unique().to_pylist() == [0, 1]


def test_one_process_of_several_counts_blank_texts(
    monkeypatch: pytest.MonkeyPatch, model: Pretrained, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("one\n\ntwo\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    regard.survey(model, tmp_path / "corpus.txt", tmp_path / "out", block=1)  # without a warning
