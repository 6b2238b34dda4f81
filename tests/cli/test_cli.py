"""The command: what it prints and writes, and what it says when it cannot."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

import regard
import tiny_models
from commands import REGARD, Run, left_behind
from regard.cli import app as cli
from regard.cli import output_files as files
from regard.cli import progress
from regard.models.pretrained import Pretrained

SENTENCE = "Life is short, eat dessert first"


def piped(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


# The main job


@pytest.mark.full
def test_the_sentence_is_seen_in_the_terminal_and_as_a_page(working_folder: Path) -> None:
    started = time.monotonic()
    done = subprocess.run([REGARD, "see", SENTENCE], check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert all(line.startswith("regard: ") for line in done.stderr.splitlines())  # progress
    assert done.stdout.startswith("all-MiniLM-L6-v2   9 tokens · 6 layers × 12 heads\n")
    # Known of this model and sentence: the second head of layer 0 looks at the token before.
    words = " ".join(done.stdout.split())
    assert "L0H2 previous token puts 100 % of its attention on the token before" in words
    assert "attention.html   " in done.stdout.splitlines()[-2]
    assert done.stdout.splitlines()[-1] == "    every layer is exact"
    page = (working_folder / "attention.html").read_text()
    assert page.startswith("<!doctype html>")
    assert left_behind(working_folder) == ["attention.html"]
    assert time.monotonic() - started < 60  # 10 s on a quiet machine; CI shares its cores


def test_the_view_and_the_page_of_a_folder(run: Run, bert: str, working_folder: Path) -> None:
    code, out, err = run("see", SENTENCE, "--model", bert, "--output", "page.html")
    assert (code, err) == (0, "")
    assert out.startswith("bert   9 tokens · 2 layers × 4 heads\n")
    assert out.splitlines()[-2].startswith("page.html   ")
    assert out.splitlines()[-1] == "    every layer is exact"
    assert left_behind(working_folder) == ["page.html"]


def test_json_is_all_of_standard_output_and_no_page_is_written(
    run: Run, bert: str, working_folder: Path
) -> None:
    code, out, err = run("see", SENTENCE, "--model", bert, "--json", "--top", "2", "--layer", "1")
    answer = json.loads(out)
    assert (code, err, left_behind(working_folder)) == (0, "", [])
    assert "".join(t["text"] for t in answer["tokens"] if not t["special"]) == SENTENCE
    assert answer["selection"] == {"layer": 1, "head": None}
    assert answer["page"] is None
    assert len(answer["rows"]) == 9
    assert len(answer["heads"]) == 8
    matrix = Pretrained.load(bert).observe(SENTENCE)[1][0]
    best = matrix.to_dense().mean(0)[3].topk(2)
    assert [share["token"] for share in answer["rows"][3]["top"]] == best.indices.tolist()
    shares = [share["share"] for share in answer["rows"][3]["top"]]
    assert shares == pytest.approx(best.values.tolist(), rel=1e-5)


def test_json_with_an_output_writes_the_page_too(run: Run, bert: str, working_folder: Path) -> None:
    code, out, _ = run("see", SENTENCE, "-m", bert, "--json", "-o", "page.html")
    assert (code, json.loads(out)["page"]) == (0, "page.html")
    assert left_behind(working_folder) == ["page.html"]


@pytest.mark.parametrize("arguments", [("-",), ()], ids=["dash", "nothing"])
def test_the_text_may_be_piped(
    arguments: tuple[str, ...], run: Run, bert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped("café ☕\n".encode(), monkeypatch)
    _, out, _ = run("see", *arguments, "-m", bert, "--json")
    assert "".join(t["text"] for t in json.loads(out)["tokens"] if not t["special"]) == "café ☕\n"


@pytest.mark.parametrize("arguments", [("see", "-"), ("record",)], ids=["dash", "nothing"])
def test_without_standard_input_the_text_is_asked_for(
    arguments: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run(*arguments) == (
        2,
        "",
        "regard: text is missing.\n"
        '    Pass it in quotes, for example "Life is short", as a file, or through a pipe.\n',
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("see", "caf\u00e9 \u2615"),
        ("heads", "--no-trials"),
        ("record", "x", "-o", "\u2615"),
        ("learn", "1"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_output_that_lacks_a_sign_shows_another(
    arguments: tuple[str, ...], bert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    model = dict.fromkeys(("see", "heads", "record"), ("-m", bert))
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, *model.get(arguments[0], ())])
    out.flush()
    assert end.value.code == 0
    assert b"?" in out.buffer.getvalue()


def test_the_text_may_be_a_file(run: Run, bert: str, working_folder: Path) -> None:
    (working_folder / "text.txt").write_text("\ufeffeat first", encoding="utf-8")
    _, out, _ = run("see", "text.txt", "-m", bert, "--json")
    assert [token["text"] for token in json.loads(out)["tokens"]] == [
        "[CLS]",
        "eat",
        " first",
        "[SEP]",
    ]


def test_control_characters_and_html_are_shown_as_text(
    run: Run, bert: str, working_folder: Path
) -> None:
    text = "a\x1b[31mred\x07 <script>alert(1)</script> [bold]x[/bold] \u202eb"
    code, out, _ = run("see", text, "-m", bert)
    assert code == 0
    assert "a␛[31mred␇ <script>alert(1)</script> [bold]x[/bold] ‹U+202E›b" in out
    assert not set(out) & {"\x1b", "\x07", "\u202e"}
    assert "<script>alert(1)" not in (working_folder / "attention.html").read_text()


def test_no_page_is_written_where_none_is_wanted(run: Run, bert: str, working_folder: Path) -> None:
    code, out, _ = run("see", SENTENCE, "-m", bert, "--no-page")
    assert (code, left_behind(working_folder)) == (0, [])
    assert "attention.html" not in out
    code, _, err = run("see", SENTENCE, "-m", bert, "--no-page", "--open")
    assert code == 2
    assert err.startswith("regard: --no-page excludes --output and --open.\n")


def test_the_page_is_opened(
    run: Run, bert: str, working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)) or True)
    assert run("see", SENTENCE, "-m", bert, "--open")[0] == 0
    assert opened == [(working_folder / "attention.html").resolve().as_uri()]


def test_json_has_no_number_that_json_cannot_write(capsys: pytest.CaptureFixture[str]) -> None:
    files.write_json({"a": [float("nan"), 1.5], "b": (float("inf"),)})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [None]}


def test_progress_reaches_a_pipe(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.02)
    with progress.progress() as tell:
        tell("asking every head", 3, 6)
        deadline = time.monotonic() + 30
        told = ""
        while not told and time.monotonic() < deadline:
            time.sleep(0.02)
            told = capfd.readouterr().err
    assert told == "regard: asking every head: 50 %\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["serve", "x", "--port", "70000"], "must be at most 65535", id="most"),
        pytest.param(["see", "x", "--top", "0"], "must be at least 1", id="least"),
        pytest.param(["see", "x", "--top", "a"], "must be a whole number", id="no number"),
    ],
)
def test_a_usage_error_is_in_plain_words_and_names_its_own_help(
    arguments: list[str], message: str, run: Run
) -> None:
    code, _, err = run(*arguments)
    option = arguments[-2]
    assert (code, err) == (
        2,
        f"regard: Invalid value for '{option}': {message}\n"
        f"    regard {arguments[0]} --help says what there is.\n",
    )


def test_a_shell_can_complete_the_command(tmp_path: Path) -> None:
    environment = {
        "_REGARD_COMPLETE": "complete_bash",
        "COMP_WORDS": "regard ver",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [REGARD], check=False, capture_output=True, text=True, env=os.environ | environment
    )
    assert done.stdout.split() == ["verify"]


# Help, version, examples


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)], ids=["nothing", "--help", "-h"])
def test_help_is_shown(arguments: tuple[str, ...], run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "see       Show what a model attends to in a text, a picture, or both." in out


def test_the_version_is_shown(run: Run) -> None:
    assert run("--version") == (0, f"regard {metadata.version('regard')}\n", "")


def test_the_version_of_what_is_not_installed_is_unknown(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_name(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", from_name)
    assert run("--version") == (0, "regard unknown\n", "")


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--foo"], "No such option: --foo", id="no such option"),
        pytest.param(["sea", "x"], "Did you mean 'see'?", id="no such command"),
        pytest.param(["see", ""], "text is empty; attention needs", id="empty"),
        pytest.param(["see", " \n"], "text is empty; attention needs", id="blank"),
        pytest.param(["see"], "text is empty; attention needs", id="nothing piped"),
        pytest.param(["see", "f.safetensors"], "No such file or directory.", id="no such file"),
        pytest.param(["see", "notes.txt"], "notes.txt: No such file", id="no such text file"),
        pytest.param(["see", "."], ". is a folder; it must be a text", id="a folder for a file"),
        pytest.param(["see", sys.executable], "is not UTF-8: byte", id="a program"),
        pytest.param(["see", "/dev/zero"], "has more than 64 MiB", id="an endless file"),
        pytest.param(["see", "smollm2"], "Write: --model smollm2", id="a model"),
        pytest.param(["see", "x", "--top", "0"], "Invalid value for '--top'", id="top"),
        pytest.param(["see", "x", "--layer", "-1"], "Invalid value for '--layer'", id="layer"),
        pytest.param(["see", "x", "--head", "a"], "Invalid value for '--head'", id="no number"),
        pytest.param(["see", "x", "--head", "1"], "head is 1 and no layer is given", id="head"),
        pytest.param(
            ["see", "x", "-m", "./none"], "is no folder here, no packaged model", id="no such model"
        ),
        pytest.param(["see", "x", "-m", "a/b"], "couldn't connect to", id="hub"),
        pytest.param(["see", "x", "-o", "."], "it is a folder", id="to a folder"),
        pytest.param(
            ["see", "x", "-o", "no/page.html"],
            "output is 'no/page.html', which cannot be written: there is no folder no.",
            id="to nowhere",
        ),
        pytest.param(
            ["record", "x", "-o", "x" * 256],
            f"{'x' * 256}: File name too long.",
            id="to a name that is too long",
        ),
        pytest.param(["see", "x", "-o", "/dev/null"], "it is no ordinary file", id="to a device"),
        pytest.param(["see", "x", "-o", "/proc/page"], "which cannot be written", id="to /proc"),
    ],
)
def test_a_wrong_call_is_a_sentence_and_exit_code_2(
    arguments: list[str], message: str, run: Run, working_folder: Path
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("regard: ")
    assert message in err
    assert "Traceback" not in err
    assert left_behind(working_folder) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--layer", "2"], "layer is 2; bert has layers 0 to 1.", id="layer"),
        pytest.param(["--layer", "0", "--head", "4"], "has heads 0 to 3.", id="head"),
    ],
)
def test_a_layer_or_head_that_the_model_lacks_names_those_it_has(
    arguments: list[str], message: str, run: Run, bert: str, working_folder: Path
) -> None:
    code, out, err = run("see", "x", "-m", bert, *arguments)
    assert (code, out) == (2, "")
    assert err.rstrip().endswith(message)
    assert left_behind(working_folder) == []


def test_a_text_of_10_mb_is_refused_quickly(run: Run, bert: str, working_folder: Path) -> None:
    (working_folder / "big.txt").write_text("words " * 1_700_000)
    started = time.monotonic()
    code, out, err = run("see", "big.txt", "-m", bert)
    assert (code, out) == (2, "")
    assert "text has too many tokens (10,200,000 characters)" in err
    assert time.monotonic() - started < 10  # tokenising it all takes longer; told in under one


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda f: (f / "config.json").write_text("{"), id="config"),
        pytest.param(lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), id="weights"),
        pytest.param(lambda f: (f / "config.json").unlink(), id="no config"),
    ],
)
def test_a_damaged_model_leaves_the_old_page_whole(
    damage: Callable[[Path], object], run: Run, bert: str, working_folder: Path
) -> None:
    folder = Path(shutil.copytree(bert, working_folder / "model"))
    damage(folder)
    page = working_folder / "attention.html"
    page.write_text("the old page")
    code, out, err = run("see", SENTENCE, "-m", str(folder))
    assert (code, out) == (2, "")
    assert err.startswith("regard: model ")
    assert page.read_text() == "the old page"
    assert left_behind(working_folder) == ["attention.html", "model"]


@pytest.mark.full
def test_a_model_without_attention_is_refused(run: Run, working_folder: Path) -> None:
    folder = tiny_models.save(working_folder / "mamba", tiny_models.mamba())
    code, out, err = run("see", SENTENCE, "-m", str(folder))
    assert (code, out) == (2, "")
    assert err.startswith("regard: no attention was seen in MambaModel; ")


def test_the_output_is_checked_before_a_model_is_looked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pretrained, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert run("see", "x", "-o", "no/page.html")[0] == 2


@pytest.mark.full
def test_a_page_that_fails_leaves_nothing_printed_and_the_old_one_whole(
    run: Run, bert: str, working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(recording: regard.Recording, path: Path, **kwargs: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("regard.view.export.page_file.write_page", full)
    (working_folder / "attention.html").write_text("the old page")
    code, out, err = run("see", SENTENCE, "-m", bert)
    assert (code, out) == (2, "")
    assert err == "regard: attention.html: No space left on device.\n"
    assert (working_folder / "attention.html").read_text() == "the old page"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        pytest.param(KeyboardInterrupt(), 130, "", id="Ctrl-C"),
        pytest.param(
            MemoryError(), 2, "regard: there is not enough memory for this.\n", id="memory"
        ),
        pytest.param(
            regard.RegardError("bad \x1b[31m news"), 2, "regard: bad ␛[31m news\n", id="escapes"
        ),
    ],
)
def test_what_happens_inside_ends_quietly(
    error: BaseException, code: int, message: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, **_: object) -> None:
        raise error

    monkeypatch.setattr(Pretrained, "load", load)
    assert run("see", "x") == (code, "", message)


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        pytest.param(lambda: {}["a bug"], "KeyError: 'a bug'", id="KeyError"),
        pytest.param(lambda: int("x"), "ValueError: invalid literal for int()", id="ValueError"),
        pytest.param([].pop, "IndexError: pop from empty list", id="IndexError"),
    ],
)
def test_a_mistake_of_ours_is_no_mistake_of_the_user(
    bug: Callable[[], object], said: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pretrained, "load", lambda *_, **__: bug())
    code, out, err = run("see", "x")
    assert (code, out) == (70, "")
    assert err.startswith(f"regard: internal error: {said}")
    assert "Traceback" not in err
    code, _, err = run("--debug", "see", "x")
    assert code == 70
    assert err.startswith("Traceback (most recent call last):")


def test_help_and_version_import_no_pytorch() -> None:
    code = (
        "import sys, regard_command\n"
        "try: regard_command.main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    for words in (["--version"], ["--help"], ["see", "--help"], ["check", "--help"]):
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "0 False"


@pytest.mark.full
def test_the_command_leaves_the_package_whole() -> None:
    code = (
        "import sys, regard_command\n"
        "try: regard_command.main()\n"
        "except SystemExit: pass\n"
        "import regard\n"
        "print(regard.attend.__name__, regard.cli.app.__name__)"
    )
    command = [sys.executable, "-c", code, "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "attend regard.cli.app"


@pytest.mark.full
@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_said_with_the_command_to_install_it(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import regard.cli.app"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"regard: the command needs {missing}, which is not installed.\n"
        "    Run: pip install 'regard[cli]'\n"
    )


@pytest.mark.full
@pytest.mark.parametrize("arguments", [["--json"], []], ids=["json", "terminal"])
def test_a_reader_that_stops_reading_is_no_error(arguments: list[str], bert: str) -> None:
    command = f'"{REGARD}" see "{SENTENCE}" -m "{bert}" {" ".join(arguments)} | head -c 10'
    done = subprocess.run(["/bin/bash", "-c", command], check=False, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.full
def test_ctrl_c_ends_a_real_run_quietly(bert: str, working_folder: Path) -> None:
    fifo = working_folder / "text"
    os.mkfifo(fifo)
    running = subprocess.Popen(
        [REGARD, "see", fifo, "-m", bert],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with fifo.open("w"):  # opens once the command reads: it has started
        time.sleep(0.5)  # Python would see a signal between opening and reading after the read
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, "", "")
